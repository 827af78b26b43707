"""A command line: a recipe, a job, its mistakes in one line, its exit code."""

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpp.exit_codes import EXIT_FAILED, EXIT_MISTAKE

LOST = re.compile("gloo|NCCL|Connection (closed|reset)|[Tt]imed out", re.IGNORECASE)
PATIENCE = 5.0  # seconds that other processes than 0 keep a mistake to themselves


def run(name: str, read: Callable[[list[str]], Any]) -> int:
    """Runs the job that `read` makes of the command line; the exit code. What went wrong is told in one line."""
    argv = sys.argv[1:]
    if {"-h", "--help"} & set(argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --help | head
    try:
        job = read(argv)
    except ValueError as error:
        return told(name, error, EXIT_MISTAKE)
    try:
        code = job.go()
        part()
        return code
    except (ValueError, FloatingPointError, OSError) as error:  # OSError: a full disk, a folder that went away
        return told(name, error, EXIT_FAILED)
    except RuntimeError as error:
        if not is_of_another_process(error):
            raise
        traceback.print_exc()  # where this one waited
        return told_lost(name, error)


def part() -> None:
    """Processes take leave of each other: one that just exits may abort in the threads of its open connections."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def told(name: str, error: Exception, code: int) -> int:
    """The message on stderr, once for all processes."""
    text = f"{name}: {error}"
    report(text)
    if (rank := rank_of()) != "0":
        # Where process 0 has told it too, the launcher ends this one meanwhile.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PATIENCE)
        text = f"{name}, process {rank}: {error}"
    print(text, file=sys.stderr)
    return code


def report(text: str) -> None:
    """For the launcher, whose own summary is the last thing on the screen."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))


def told_lost(name: str, error: Exception) -> int:
    """A process that is gone, or does not answer. Of one that is gone the launcher says what ended it."""
    ending = "what was saved stays, and the same command goes on"
    if "timed out" in str(error).lower():
        waited = "did not answer within train.timeout"
        text = f"{name}: process {rank_of()} gave up: another process {waited}, or is not there; {ending}"
        report(text)
    else:
        text = f"{name}: process {rank_of()} lost another process, told of below; {ending}"
    print(text, file=sys.stderr)
    return EXIT_FAILED


def rank_of() -> str:
    """This process among those of a launcher."""
    return os.environ.get("RANK", "0")


def is_of_another_process(error: RuntimeError) -> bool:
    """Whether torch says so of processes that wait for each other: one of them is gone, or too late."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    import torch.distributed

    return isinstance(error, torch.distributed.DistError) or bool(LOST.search(str(error)))


def pretrain_command(doc: str, default: Path) -> int:
    """tools/pretrain_mpp.py."""

    def read(argv: list[str]) -> Any:
        from mpp.pretrain import PretrainConfig, begin

        return begin(training_recipe(PretrainConfig, argv, doc, default))

    return run("pretrain_mpp", read)


def classify_command(name: str, doc: str) -> int:
    """tools/finetune.py and tools/pretrain_supervised.py: one job, told apart by their recipes."""

    def read(argv: list[str]) -> Any:
        from mpp.classify import ClassifyConfig, begin

        return begin(training_recipe(ClassifyConfig, argv, doc))

    return run(name, read)


def evaluate_command(doc: str) -> int:
    """tools/evaluate.py."""

    def read(argv: list[str]) -> Any:
        from mpp.evaluate import EvaluateConfig, begin

        return begin(*named(EvaluateConfig, argv, doc, "weights: a run, a checkpoint, a timm folder, or timm:NAME"))

    return run("evaluate", read)


def predict_command(doc: str) -> int:
    """tools/predict.py."""

    def read(argv: list[str]) -> Any:
        from mpp.predict import PredictConfig, begin

        if (
            len(argv) > 1
            and not argv[0].startswith("-")
            and Path(argv[1]).is_dir()
            and not (Path(argv[1]) / "recipe.yaml").exists()
        ):
            raise ValueError(f"{argv[1]} is a folder; new images are named by --images {argv[1]}")
        return begin(*named(PredictConfig, argv, doc, "fine-tuned run, or one of its checkpoints"))

    return run("predict", read)


def ladder_command(doc: str) -> int:
    """tools/ladder.py."""

    def read(argv: list[str]) -> Any:
        from mpp.ladder import begin
        from mpp.ladder_recipe import LadderConfig

        return begin(*named(LadderConfig, argv, doc, "pretraining run"))

    return run("ladder", read)


def training_recipe(kind: type, argv: list[str], doc: str, default: Path | None = None) -> Any:
    """The checked recipe of a training job, with a run folder."""
    from mpp.config import load_recipe, recipe_path

    config = load_recipe(kind, argv, doc, default=default)
    return config if config.out is not None else replace(config, out=Path("runs") / recipe_path(argv, default).stem)


def named(kind: type, argv: list[str], doc: str, what: str) -> tuple[str, Any]:
    """The first word of a command line, and the recipe that the rest names."""
    from mpp.config import load_recipe

    helps = {"-h", "--help"}
    if not helps & set(argv) and (not argv or argv[0].startswith("-")):
        raise ValueError(f"the first word names the {what}; got {argv[0] if argv else 'nothing'}")
    return argv[0] if argv else "", load_recipe(kind, argv if argv[0] in helps else argv[1:], doc, announce=False)
