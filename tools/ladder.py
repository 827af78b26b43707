"""What was pretraining worth? Frozen features and fine-tuning at several label budgets, against training from scratch.

    python tools/ladder.py runs/quickstart recipes/ladder/quickstart.yaml
    python tools/ladder.py runs/cifar10 recipes/ladder/cifar10_small.yaml
    python tools/ladder.py --help                                              every field

Every fine-tuning is a run of its own below `out`; the same command again goes on where it was stopped, and started
several times at once (on a device each) it shares the work. Exit codes: 0 done, 1 failed once it had begun (a row
diverged, a full disk), 2 a mistake in run, recipe or data, 75 stopped by a signal.
"""

import sys

if __name__ == "__main__":
    from mpp.command import ladder_command

    sys.exit(ladder_command(__doc__ or ""))
