"""The models and batch sizes of the measured training steps, the same for every framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LEARNING_RATE, MOMENTUM = 0.01, 0.9
"""Of every contestant's SGD."""


@dataclass(frozen=True)
class Case:
    """One model, one batch.

    Attributes:
        model: which one, in ``models.py`` and ``tensorflow_worker.py``.
        batch: examples in a step of all replicas together.
        sizes: what makes the model, by keyword.
        unit: what throughput counts, ``per_example`` of them in an example.
        batch_statistics: whether the loss depends on how the batch is split.
    """

    name: str
    model: str
    batch: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    unit: str = "samples"
    per_example: int = 1
    batch_statistics: bool = False


CASES = {
    case.name: case
    for case in (
        Case("small-mlp", "mlp", 64, {"depth": 8, "width": 64}),
        # The network of TensorFlow's guide to tf.distribute.
        Case("cnn", "cnn", 128, {"size": 28, "channels": 32, "hidden": 64, "classes": 10}),
        Case("wide-mlp", "mlp", 256, {"depth": 6, "width": 1024}),
        Case(
            "transformer",
            "transformer",
            64,
            {"layers": 4, "width": 128, "heads": 4, "tokens": 32, "vocabulary": 256},
            unit="tokens",
            per_example=32,
        ),
        # Half as wide as ResNet-50 and on images of 32x32, so that two cores can train it.
        Case(
            "resnet50",
            "resnet50",
            32,
            {"size": 32, "width": 32, "classes": 100},
            batch_statistics=True,
        ),
        Case(
            "resnet18",
            "resnet18",
            64,
            {"size": 32, "width": 64, "classes": 10},
            batch_statistics=True,
        ),
        Case(
            "lstm-lm",
            "lstm_lm",
            64,
            {"width": 128, "tokens": 32, "vocabulary": 256},
            unit="tokens",
            per_example=32,
        ),
        Case(
            "resnet50-224",
            "resnet50",
            256,
            {"size": 224, "width": 64, "classes": 1000},
            batch_statistics=True,
        ),
    )
}
OF_PARALLEL_REPLICAS = {
    case.name: case
    for case in (
        Case("mlp-48-tensors", "mlp", 64, {"depth": 24, "width": 64}),
        Case("lstm", "lstm", 32, {"width": 64, "tokens": 16, "classes": 10}),
    )
}
"""Measured by ``parallel_replicas.py``, with some of those above."""
FOR_GPUS = ("resnet50-224",)
"""Too large for a CPU; measured only if named."""
OF_PYTORCH = ("resnet18", "lstm-lm")
"""Not in TensorFlow's worker; measured only if named."""
