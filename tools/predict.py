"""Classifies new images with a fine-tuned run: a CSV file with the classes of every image of a folder.

    python tools/predict.py runs/cifar10_small --images DIR
    python tools/predict.py runs/cifar10_small/checkpoints/00001000 --images DIR --out classes.csv
    accelerate launch tools/predict.py ...                                                on many devices

The first word names a run or one of its checkpoints. --help prints every field. Exit codes: 0 done, 1 no
image could be read, 2 a mistake in weights or folder, 75 stopped by a signal.
"""

import sys

if __name__ == "__main__":
    from mpp.command import predict_command

    sys.exit(predict_command(__doc__ or ""))
