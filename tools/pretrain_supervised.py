"""Pretrains a vision transformer on labelled images: the supervised baseline of masked patch prediction.

    accelerate launch tools/pretrain_supervised.py recipes/supervised/imagenet1k_vit_b16.yaml
    accelerate launch tools/pretrain_supervised.py --help                                         every field

The same command again goes on with the run. Exit codes: 0 done, 1 failed on the way, 2 a mistake in recipe, data or
folder, 75 stopped by a signal and saved.
"""

import sys

if __name__ == "__main__":
    from mpp.command import classify_command

    sys.exit(classify_command("pretrain_supervised", __doc__ or ""))
