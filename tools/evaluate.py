"""Evaluates frozen features of any weights: few-shot, kNN, linear and attentive probes.

    python tools/evaluate.py runs/quickstart recipes/evaluate/knn.yaml                          a run, on its own data
    python tools/evaluate.py runs/quickstart recipes/evaluate/fewshot.yaml --baseline random    beside untrained weights
    python tools/evaluate.py timm:vit_small_patch16_224 recipes/evaluate/knn.yaml --data.kind class_folders ...
    accelerate launch tools/evaluate.py ...                                                     on many devices

The first word names the weights: a run, a checkpoint, a timm folder, or timm:NAME. Rows are added to results.jsonl in
the run's folder. --help prints every field. Exit codes: 0 done, 1 an evaluation gave no score, 2 a mistake in weights,
recipe or data, 75 stopped by a signal.
"""

import sys

if __name__ == "__main__":
    from mpp.command import evaluate_command

    sys.exit(evaluate_command(__doc__ or ""))
