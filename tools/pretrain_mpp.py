"""Pretrains a vision transformer on unlabelled images by masked patch prediction.

    accelerate launch tools/pretrain_mpp.py                                     the quickstart: 5 minutes on a laptop
    accelerate launch tools/pretrain_mpp.py RECIPE.yaml --section.field VALUE   any recipe, with overrides
    accelerate launch tools/pretrain_mpp.py --help                              every field, as a recipe to copy

The same command again goes on with the run. Exit codes: 0 done, 2 a mistake in recipe, data or folder, 75 stopped by a
signal and saved.
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

QUICKSTART = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"


def main(argv: list[str]) -> int:
    from mpp.config import load_recipe, recipe_path
    from mpp.pretrain import PretrainConfig, begin

    try:
        config = load_recipe(PretrainConfig, argv, __doc__ or "", default=QUICKSTART)
        if config.out is None:
            config = replace(config, out=Path("runs") / recipe_path(argv, QUICKSTART).stem)
        job = begin(config)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"pretrain_mpp: {error}", file=sys.stderr)
        return 2
    return job.go()


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --help | head
    sys.exit(main(sys.argv[1:]))
