"""Trains a classifier from pretrained weights, or from scratch with the same recipe.

    accelerate launch tools/finetune.py recipes/finetune/cifar10_small.yaml --init runs/cifar10  from a pretraining run
    accelerate launch tools/finetune.py recipes/finetune/cifar10_small.yaml --init scratch       the same from scratch
    accelerate launch tools/finetune.py runs/mine/recipe.yaml --predict DIR                      classes of new images
    accelerate launch tools/finetune.py --help                                                   every field

The same command again goes on with the run. Exit codes: 0 done, 1 failed on the way, 2 a mistake in recipe, data or
folder, 75 stopped by a signal and saved.
"""

import sys

if __name__ == "__main__":
    from mpp.command import classify_command

    sys.exit(classify_command("finetune", __doc__ or ""))
