"""The classifier of a fine-tuned checkpoint, on its backbone."""

from pathlib import Path

from torch import Tensor, nn

from mpp.backbones import Backbone
from mpp.data.views import View
from mpp.heads import Classifier, Head
from mpp.weight_files import checkpoint_at
from mpp.weights import load_strictly


def stored_classifier(spec: str, backbone: Backbone) -> Classifier | None:
    """The classifier of one of our fine-tuned checkpoints, on its backbone; None for other weights."""
    try:
        checkpoint = checkpoint_at(Path(spec))
    except ValueError:
        return None
    stored = checkpoint.document("objective.json") if "objective.json" in checkpoint.files else {}
    if "classes" not in stored:
        return None
    head = head_of(checkpoint.tensors("objective.safetensors"))
    classes, pool = tuple(stored["classes"]), stored["pool"]

    def logits(images: Tensor) -> Tensor:
        return head.to(images.device)(backbone.features(images, (pool,))[pool, -1])

    view = View(**stored["view"]) if "view" in stored else View()
    black_and_white = tuple(stored["range"]) if stored.get("range") else None
    return Classifier(classes, logits, view, stored.get("loss", {}).get("kind") == "sigmoid", black_and_white)


def head_of(tensors: dict[str, Tensor]) -> Head:
    """A classification head from its tensors, head.last.weight (classes, D) and, with a hidden layer, head.hidden."""
    layers = {}
    for name in ("hidden", "last"):
        weight = tensors.get(f"head.{name}.weight")
        layers[name] = None if weight is None else nn.Linear(weight.shape[1], weight.shape[0])
    assert layers["last"] is not None, "every head ends in a linear layer"
    head = Head(layers["hidden"], layers["last"])
    load_strictly(head, {name.removeprefix("head."): t for name, t in tensors.items()}, "objective.safetensors")
    return head
