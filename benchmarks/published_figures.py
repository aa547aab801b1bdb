"""Published steps of one and of several devices, and the errors of ``mirror.plan`` for them.

    mirror plan --check                  prints the errors of the predictions
    mirror plan --case resnet50-v100     plans for the published step of one device

The model gets the step of one device, the sizes of the gradients, and the links by their names,
never a figure of several devices. None of its numbers is fitted to these figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf, prod
from statistics import median
from typing import Any

from mirror.tools.planning.prediction import (
    PROCESS_PER_DEVICE,
    Cluster,
    Predictor,
    link_between_devices,
    link_between_machines,
)
from mirror.tools.planning.workload import Workload, check_plan_choice, make_workload

_MEGABYTE = 1e6
_MEBIBYTE = 2**20
_FLOAT = 4.0


def _split_evenly(parameters: float, tensors: int) -> tuple[float, ...]:
    return (parameters / tensors * _FLOAT,) * tensors


def _layers(*shapes: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(prod(shape) * _FLOAT for shape in shapes)


# torchvision: 25,557,032 parameters in 161 tensors; BERT-base: 110 million (arXiv:1810.04805), in
# 199; Inception v3: 23.9 million (Keras Applications), 94 convolutions and one matrix; VGG-16 and
# AlexNet by their layers, without biases (arXiv:1409.1556, 1404.5997).
_RESNET_50 = _split_evenly(25_557_032, 161)
_BERT_BASE = _split_evenly(110e6, 199)
_INCEPTION_V3 = _split_evenly(23.9e6, 95)
# fmt: off
_VGG_16 = _layers(
    (64, 3, 3, 3), (64, 64, 3, 3), (128, 64, 3, 3), (128, 128, 3, 3), (256, 128, 3, 3),
    *([(256, 256, 3, 3)] * 2), (512, 256, 3, 3), *([(512, 512, 3, 3)] * 5),
    (4096, 512 * 7 * 7), (4096, 4096), (1000, 4096),
)
_ALEXNET = _layers(
    (64, 3, 11, 11), (192, 64, 5, 5), (384, 192, 3, 3), (256, 384, 3, 3), (256, 256, 3, 3),
    (4096, 256 * 6 * 6), (4096, 4096), (1000, 4096),
)
# fmt: on

_DLPERF = (
    "DLPerf test report v1.0 (Oneflow-Inc/DLPerf, 2020): 8 x V100-SXM2-16GB a machine, one "
    "InfiniBand adapter of 100 Gbit/s"
)
_TENSORFLOW = "TensorFlow benchmarks (tensorflow/docs, May 2017): DGX-1, 8 x P100, synthetic data"
_HOROVOD = (
    "Horovod benchmarks (horovod/horovod, docs/benchmarks.rst): 128 servers of 4 Pascal GPUs, "
    "RoCE of 25 Gbit/s; one GPU alone: TensorFlow benchmarks (May 2017), P100"
)
_NVIDIA = (
    "NVIDIA/DeepLearningExamples (2021), PyTorch/Classification/ConvNets/resnet50v1.5/README.md"
)
_H200 = (
    "stas00/ml-engineering (2026), network/benchmarks/results/all-reduce-8xH200.md: NCCL 2.27.7, "
    "8 x H200"
)


@dataclass(frozen=True)
class Case:
    """A step that was published for one device and for several.

    Attributes:
        title: the model, the library and the batch size.
        source: the publication, and the machines.
        machine: the link, the network, and the number of devices of a machine.
        alone: examples per second of one device.
        batch_size: the examples of one device.
        sizes_bytes: the bytes of each gradient, in order of registration.
        bucket_bytes: the bytes of one reduction; infinite where nothing is reduced before the end
            of the backward pass.
        published: examples per second, by the number of devices.
        algorithm: "ring" for NCCL before 2.4, which had no trees.
    """

    title: str
    source: str
    machine: tuple[str, str, int]
    alone: float
    batch_size: int
    sizes_bytes: tuple[float, ...]
    bucket_bytes: float
    published: Mapping[int, float]
    algorithm: str = "auto"

    def workload(self) -> Workload:
        """Returns the step of one device; its launches are assumed to cost nothing."""
        return make_workload(
            step_seconds=self.batch_size / self.alone,
            batch_size=self.batch_size,
            sizes_bytes=self.sizes_bytes,
            host_seconds=0.0,
        )

    def cluster(self) -> Cluster:
        """Returns the machines."""
        link, network, devices = self.machine
        links = link_between_devices(link), link_between_machines(network)
        return Cluster(*links, devices, self.algorithm)


_V100 = ("nvlink2", "100g", 8)
_A100 = ("nvlink3", "100g", 8)
_DGX_P100 = ("nvlink1", "100g", 8)
_PASCAL = ("pcie3", "25g", 4)
_FUSION = 64 * _MEGABYTE  # docs/tensor-fusion.rst of Horovod

# fmt: off
CASES = {
    "resnet50-v100": Case(
        "ResNet-50 FP32, PyTorch with apex, batch 128", _DLPERF, _V100, 367.29, 128, _RESNET_50,
        40 * _MEGABYTE,  # apex's message_size: 10 million elements
        {8: 2887.65, 16: 5716.79, 32: 10917.09},
    ),
    "bert-base-v100": Case(
        "BERT-base FP32, PyTorch with apex, batch 32", _DLPERF, _V100, 119.60, 32, _BERT_BASE,
        inf,  # run_pretraining.py sets message_size to 250 million elements
        {8: 921.32, 16: 1499.40, 32: 2885.81},
    ),
    "mirrored-v100": Case(
        "ResNet-50 FP32, TensorFlow 2.3 MirroredStrategy, batch 128", _DLPERF, _V100, 321.80, 128,
        _RESNET_50,
        inf,  # num_packs=1: one reduction of everything
        {8: 2458.74, 16: 4849.68, 32: 9418.44},
    ),
    "mirrored-fp16-v100": Case(
        "ResNet-50 FP16, TensorFlow 2.3 MirroredStrategy, batch 128", _DLPERF, _V100, 938.09, 128,
        _RESNET_50, inf, {8: 5734.83, 16: 8418.20, 32: 16250.19},
    ),
    "resnet50-a100": Case(
        "ResNet-50, PyTorch, TF32, 8 x A100", _NVIDIA, _A100, 938, 256, _RESNET_50,
        25 * _MEBIBYTE, {8: 7248},
    ),
    "resnet50-amp-a100": Case(
        "ResNet-50, PyTorch, AMP, 8 x A100", _NVIDIA, _A100, 2470, 256, _RESNET_50,
        25 * _MEBIBYTE, {8: 16621},
    ),
    "vgg16-p100": Case(
        "VGG-16, TensorFlow 1 with NCCL, batch 64", _TENSORFLOW, _DGX_P100, 154, 64, _VGG_16,
        1,  # every gradient by itself
        {8: 1081}, "ring",
    ),
    "alexnet-p100": Case(
        "AlexNet, TensorFlow 1 with NCCL, batch 512", _TENSORFLOW, _DGX_P100, 2987, 512, _ALEXNET,
        1, {8: 17822}, "ring",
    ),
    "inception3-p100": Case(
        "Inception v3, Horovod", _HOROVOD, _PASCAL, 142, 64, _INCEPTION_V3, _FUSION,
        {512: 512 * 0.90 * 142}, "ring",
    ),
    "vgg16-horovod": Case(
        "VGG-16, Horovod", _HOROVOD, _PASCAL, 154, 64, _VGG_16, _FUSION,
        {512: 512 * 0.68 * 154}, "ring",
    ),
}
# fmt: on

_ALL_REDUCES = {1: 22.82, 16: 125.65, 64: 198.01, 1024: 264.90}  # MiB: GB/s, bytes by time


@dataclass(frozen=True)
class Check:
    """A published figure, and the prediction of it.

    Attributes:
        what: the measured step or collective, and the number of devices.
        predicted, published: the two figures, in ``unit``.
        source: the publication.
    """

    what: str
    predicted: float
    published: float
    unit: str
    source: str

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.published - 1


def arguments_of_case(name: str) -> dict[str, Any]:
    """Returns the arguments of ``mirror.plan`` for a published step.

    Raises:
        PlanError: there is no such case.
    """
    case = CASES[check_plan_choice("case", name, tuple(CASES))]
    return {
        "step_seconds": case.batch_size / case.alone,
        "batch_size": case.batch_size,
        "parameters": [size / 4 for size in case.sizes_bytes],
        "link": case.machine[0],
        "network": case.machine[1],
        "devices_per_machine": case.machine[2],
        "algorithm": case.algorithm,
        "bucket_bytes": min(case.bucket_bytes, sum(case.sizes_bytes)),
    }


@cache
def checks() -> tuple[Check, ...]:
    """Returns all checks."""
    steps = [
        Check(f"{case.title}, N = {n}", _rate(case, n), rate, "examples/s", case.source)
        for case in CASES.values()
        for n, rate in case.published.items()
    ]
    h200 = Cluster(link_between_devices("nvlink4"), link_between_machines("8x400g"), 8)
    reduced = [
        Check(
            f"all-reduce of {size:,} MiB, N = 8",
            size * _MEBIBYTE / h200.all_reduce_seconds(size * _MEBIBYTE, 8) / 1e9,
            rate,
            "GB/s",
            _H200,
        )
        for size, rate in _ALL_REDUCES.items()
    ]
    return (*steps, *reduced)


def table_of_checks() -> str:
    """Returns the checks as a table, with their errors and the median error."""
    rows = [("figure", "predicted", "published", "error")]
    errors = []
    for check in checks():
        numbers = (f"{check.predicted:,.1f}", f"{check.published:,.1f} {check.unit}")
        rows.append((check.what, *numbers, f"{check.error:+.1%}"))
        errors.append(abs(check.error))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        row[0].ljust(widths[0])
        + "".join(f"  {cell.rjust(w)}" for cell, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    sources = sorted({check.source.split(";")[0] for check in checks()})
    return "\n".join(
        [*lines, "", f"median error {median(errors):.1%}, largest {max(errors):.1%}", "", *sources]
    )


def _rate(case: Case, devices: int) -> float:
    row = Predictor(case.workload(), case.cluster(), "weak", case.bucket_bytes).row(devices)
    return devices * case.batch_size / row.seconds_by_way[PROCESS_PER_DEVICE]
