"""Pretrains a vision transformer on unlabelled images by masked patch prediction.

    accelerate launch tools/pretrain_mpp.py                                     the quickstart: 5 minutes on a laptop
    accelerate launch tools/pretrain_mpp.py RECIPE.yaml --section.field VALUE   any recipe, with overrides
    accelerate launch tools/pretrain_mpp.py --help                              every field, as a recipe to copy

The same command again goes on with the run. Exit codes: 0 done, 1 failed on the way, 2 a mistake in recipe, data or
folder, 75 stopped by a signal and saved.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    from mpp.command import pretrain_command

    sys.exit(pretrain_command(__doc__ or "", default=Path(__file__).parent.parent / "recipes" / "quickstart.yaml"))
