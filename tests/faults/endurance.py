"""What takes too long for a test: python tests/faults/endurance.py kills|restarts|signals [--times N] [--seed N]

kills     all of two processes are killed (-9) N times at random moments, three in ten of them within a save, with two
          micro-batches per step: afterwards the run must be the run that was not killed, to the bit
restarts  one process is killed N times with a single step of progress between, then four times without any
signals   every signal, to every process, at every place of a run: it saves, leaves no process, and goes on as if
          nothing had been. Not yet right: torch's launcher starts its processes in sessions of their own, so the group
          is the launcher alone, and processes that outlive it are not seen

Each prints one line of a table: fault, tries, outcome, nothing lost. Exit code 1 if anything was lost.
"""

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conftest import Kit, furnish

from mpp.checkpoint import newest

ACCUMULATED = "--train.micro_batch_size=6"  # of 24 images: two micro-batches on each of two processes
EVERY = 5  # steps between checkpoints, as the recipe of conftest.py says
SAVE = ("save", "manifest", "renamed")


def wait(process: subprocess.Popen, condition: Callable[..., bool], *arguments: Any, seconds: float = 120) -> bool:
    """Until a condition holds; False if the process ended before."""
    until = time.monotonic() + seconds
    while not condition(*arguments):
        if process.poll() is not None:
            return False
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.002)
    return True


def has_begun(log: Path) -> bool:
    """Whether a fault has been reached."""
    return "FAULT" in log.read_text()


def saved_step(kit: Kit, out: str) -> int:
    """Step of the newest checkpoint, 0 where there is none. All that were ever whole must be so still."""
    found, skipped = newest(kit.folder / out)
    assert not skipped, skipped
    return found.step if found else 0


def kills(kit: Kit, times: int, chance: random.Random) -> str:
    words = (ACCUMULATED, f"--train.steps={8 * times}", "--train.eval_every=100")
    kit.finish("twin", *words, processes=2, timeout=1200)
    within = starting = most = 0
    for number in range(times):
        kind, before = chance.random(), saved_step(kit, "killed")
        faults, log = [], kit.folder / "stderr.txt"
        if kind < 0.3:
            step = before + EVERY * chance.randint(1, 2)
            faults = [{"place": chance.choice(SAVE), "step": step, "action": "hang"}]
        with log.open("w") as errors:
            process = kit.start("killed", *words, processes=2, faults=faults, stderr=errors)
        if kind < 0.3:
            ended = not wait(process, has_begun, log)
            within += 1
        elif kind < 0.4:
            time.sleep(chance.uniform(0, 8))
            ended = process.poll() is not None
            starting += 1
        else:
            wanted = max(before, kit.trained("killed")) + chance.randint(1, 8)
            ended = not wait(process, lambda step: kit.trained("killed") >= step, wanted)
            time.sleep(chance.random() * 0.05)
        assert not ended, f"kill {number} came too late: {log.read_text()[-2000:]}"
        reached = kit.trained("killed")
        kit.kill(process)
        most = max(most, reached - saved_step(kit, "killed"))
        print(f"  kill {number + 1}: at step {reached}, saved {saved_step(kit, 'killed')}", file=sys.stderr, flush=True)
    assert most <= EVERY, f"{most} steps were lost at once"
    kit.finish("killed", *words, processes=2, timeout=1200)
    kit.assert_twins("killed", "twin")
    return f"{times} kills ({within} within a save, {starting} while starting); at most {most} steps to do again; equal"


def restarts(kit: Kit, times: int, chance: random.Random) -> str:
    words = (
        "--optim.warmup_steps=0",
        f"--train.steps={times + 1}",
        "--train.checkpoint_every=1",
        "--train.eval_every=1000",
    )
    kit.finish("steady", *words)
    for step in range(times):
        ended = kit.run("restarted", *words, faults=[{"place": "update", "step": step + 2, "action": "kill"}])
        assert ended.code == -signal.SIGKILL, ended.text[-2000:]
        assert saved_step(kit, "restarted") == step + 1
    for _ in range(4):
        ended = kit.run("restarted", *words, faults=[{"place": "update", "step": times + 1, "action": "kill"}])
        assert ended.code == -signal.SIGKILL
    assert f"start number 4 from step {times}" in ended.out, ended.out
    kit.finish("restarted", *words)
    kit.assert_twins("restarted", "steady")
    return f"{times} kills, a step of progress between, and 4 without any (reported); equal"


def moments() -> Iterator[tuple[str, str, signal.Signals]]:
    """(place, to whom, signal). USR1 is for the processes of a run: to the launcher it is death."""
    for place, whom, number in itertools.product(
        ("starting", "opening", "update", "manifest", "evaluate"),
        ("launcher", "rank0", "rank1", "group"),
        (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
    ):
        if (whom, number) != ("launcher", signal.SIGUSR1):
            yield place, whom, number


def signals(kit: Kit, times: int, chance: random.Random) -> str:
    kit.finish("twin", "--train.workers=1", processes=2)
    wrong, tried = [], list(moments())[:times]
    for place, whom, number in tried:
        out = f"{place}_{whom}_{number.name}"
        try:
            signalled(kit, out, place, whom, number, chance)
        except Exception as error:
            wrong.append(out)
            print(f"  {out}: {type(error).__name__}: {str(error)[-3000:]}", file=sys.stderr, flush=True)
        else:
            print(f"  {out}: good", file=sys.stderr, flush=True)
    assert not wrong, f"{len(wrong)} of {len(tried)} signals: {', '.join(wrong)}"
    return f"{len(tried)} of place x process x signal; step in progress saved, no process left, equal"


def signalled(kit: Kit, out: str, place: str, whom: str, number: signal.Signals, chance: random.Random) -> None:
    step = {"update": 7, "manifest": 10, "evaluate": 10}.get(place)
    faults = [] if step is None else [{"place": place, "step": step, "action": "pause"}]
    log = kit.folder / f"{out}.txt"
    with log.open("w") as file:
        process = kit.start(
            out, "--train.workers=1", processes=2, faults=faults, stdout=file, stderr=file, start_new_session=True
        )
    ranks = lambda: [int(p.name) for p in Path("/proc").glob("[0-9]*") if is_rank(p, kit.folder / out, process.pid)]  # noqa: E731
    if place == "starting":
        assert wait(process, lambda: len(ranks()) == 2)
        time.sleep(chance.uniform(0, 3))
    elif place == "opening":
        assert wait(process, (kit.folder / out / "recipe.yaml").exists)
    else:
        assert wait(process, has_begun, log)
        time.sleep(0.3)
    if whom == "launcher":
        process.send_signal(number)
    elif whom == "group":
        os.killpg(process.pid, number)
    else:
        os.kill(sorted(ranks())[int(whom[-1])], number)
    process.wait(timeout=90)
    until = time.monotonic() + 30  # of USR1 the launcher dies at once, and its processes save
    while group_lives(process.pid):
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.05)
    assert process.returncode != 0, log.read_text()
    if step is None:
        assert saved_step(kit, out) == kit.trained(out), log.read_text()
    else:
        assert kit.saved(out)[-1] == step, (kit.saved(out), log.read_text())
    kit.finish(out, "--train.workers=1", processes=2)
    kit.assert_twins(out, "twin")


def is_rank(place: Path, out: Path, launcher: int) -> bool:
    """Whether /proc/PID is one of the processes that a launcher started for the run in `out`."""
    try:
        status = dict(line.split(":\t", 1) for line in (place / "status").read_text().splitlines() if ":\t" in line)
        return int(status["PPid"]) == launcher and f"--out={out}" in (place / "cmdline").read_text()
    except OSError:
        return False


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "restarts", "signals"])
    parser.add_argument("--times", type=int, default=60, help="kills, restarts; signals: at most so many")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    work = {"kills": kills, "restarts": restarts, "signals": signals}[asked.what]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome, lost = work(Kit(furnish(Path(folder))), asked.times, random.Random(asked.seed)), "yes"
        except AssertionError as error:
            outcome, lost = str(error), "NO"
    fault = {"kills": "F1, F2", "restarts": "F31", "signals": "F3, F30"}[asked.what]
    print(f"| {fault} | {asked.times} | {outcome}; {time.monotonic() - began:.0f} s | {lost} |")
    return 0 if lost == "yes" else 1


if __name__ == "__main__":
    sys.exit(main())
