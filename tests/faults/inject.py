"""Runs a tool with faults put into it: python inject.py FAULTS TOOL ...

FAULTS: JSON, [{"rank": 1, "step": 3, "place": "update", "action": "kill"}, ...]
place: where in the run, each in the given step (counted from 1, as metrics.jsonl does):
  start      before anything is opened (step is not asked)
  argument   action is one more word of the command line (step is not asked)
  read       before the picture `name` is decoded, by whichever process or worker (step is not asked)
  update     before the forward pass
  gradient   while gradients are made, before processes average them; in the steps from `step` to `last`
  evaluate   before an evaluation
  save       before a checkpoint is written
  manifest   when its files are written, before its manifest
  renamed    when it has its place, before old ones go
action: kill (-9), segv, stop (SIGSTOP), hang, pause (2 s), raise, exit, term, int, usr1, twice
  (TERM, and INT 50 ms later), fill (the disk at `path`), drain (it again); of a gradient: nan, spike
"""

import json
import os
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("RANK", "0"))


def act(fault: dict[str, Any]) -> None:
    action = fault["action"]
    numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "int": signal.SIGINT}
    numbers |= {"usr1": signal.SIGUSR1, "segv": signal.SIGSEGV}
    print(f"FAULT {fault['place']} {action} process {RANK}", file=sys.stderr, flush=True)
    if action in numbers:
        os.kill(os.getpid(), numbers[action])
    elif action == "hang":
        time.sleep(3600)
    elif action == "pause":
        time.sleep(2)
    elif action == "raise":
        raise RuntimeError("a fault that was put in")
    elif action == "exit":
        os._exit(3)
    elif action == "fill":
        fill(Path(fault["path"]))
    elif action == "drain":
        (Path(fault["path"]) / "ballast").unlink()
    elif action == "twice":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
    else:
        raise ValueError(f"no such action: {action}")


def fill(disk: Path, left: int = 100_000) -> None:
    """Nothing more than a few records fits on this disk."""
    free = shutil.disk_usage(disk).free - left
    (disk / "ballast").write_bytes(bytes(max(free, 0)))


def before(owner: Any, name: str, at: Any, fault: dict[str, Any]) -> None:
    """`fault` comes before `owner.name`, where `at(*arguments)` is its step; once."""
    call = getattr(owner, name)

    def faulty(*arguments: Any, **options: Any) -> Any:
        if not fault.get("done") and at(*arguments, **options) == fault["step"]:
            fault["done"] = True
            act(fault)
        return call(*arguments, **options)

    setattr(owner, name, faulty)


def spoil_gradients(fault: dict[str, Any]) -> None:
    """NaN, or a million times too much, in this process's gradients."""
    from mpp.trainer import Trainer

    update, factor = Trainer._update, {"nan": float("nan"), "spike": 1e6}[fault["action"]]
    last = fault.get("last", fault["step"])

    def faulty(self: Any, batches: Any) -> None:
        hooks = []
        if fault["step"] <= self.step + 1 <= last:
            hooks = [p.register_hook(lambda gradient: gradient * factor) for p in self.parameters]
        update(self, batches)
        for hook in hooks:
            hook.remove()

    Trainer._update = faulty


def prepare(fault: dict[str, Any]) -> None:
    from mpp import checkpoint, job, manifest
    from mpp.trainer import Trainer

    place = fault["place"]
    if place == "gradient":
        spoil_gradients(fault)
    elif place == "read":
        from mpp.data.loader import Pictures

        decoded = Pictures._decoded

        def faulty(self: Any, id: int, raw: Any) -> Any:
            self._note(int(id))
            if self.subset.dataset.name(int(id)) == fault["name"]:
                act(fault)
            return decoded(self, id, raw)

        Pictures._decoded = faulty
    elif place == "update":
        before(Trainer, "_update", lambda self, batches: self.step + 1, fault)
    elif place == "evaluate":
        for kind in job.Job.__subclasses__():
            before(kind, "_evaluate", lambda self, step: step, fault)
    elif place == "save":
        before(job.Job, "_save", lambda self, step: step, fault)
    elif place == "manifest":
        before(manifest, "write", lambda folder, step, names, facts: step, fault)
    elif place == "renamed":
        before(checkpoint, "prune", lambda run, *kept: checkpoint.step_of(checkpoint.places(run)[0]), fault)
    else:
        raise ValueError(f"no such place: {place}")


def main() -> None:
    faults = [fault for fault in json.loads(sys.argv[1]) if fault.get("rank", 0) == RANK]
    sys.argv = sys.argv[2:]
    for fault in faults:
        if fault["place"] == "argument":
            sys.argv.append(fault["action"])
        elif fault["place"] == "start":
            act(fault)
        else:
            import mpp.classify
            import mpp.pretrain  # noqa: F401  (the jobs, as subclasses)

            prepare(fault)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
