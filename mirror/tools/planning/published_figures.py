"""Published figures, which the model's predictions are checked against.

The model is given what one device does alone, the sizes of the gradients, and the links by their
names; never what several devices did. Nothing in it was fitted to these figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf, prod
from statistics import median

from mirror.tools.planning.all_reduce_cost import Cluster
from mirror.tools.planning.bandwidths import link_between_devices, link_between_machines
from mirror.tools.planning.prediction import PROCESS_PER_DEVICE, Predictor
from mirror.tools.planning.workload import Workload, make_workload

_MEGABYTE = 1e6
_MEBIBYTE = 2**20
_FLOAT = 4.0


def _even(parameters: float, tensors: int) -> tuple[float, ...]:
    return (parameters / tensors * _FLOAT,) * tensors


def _layers(*shapes: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(prod(shape) * _FLOAT for shape in shapes)


# torchvision: 25,557,032 parameters in 161 tensors; BERT-base: 110 million (arXiv:1810.04805), in
# 199; Inception v3: 23.9 million (Keras Applications), 94 convolutions and one matrix; VGG-16 and
# AlexNet by their layers, without biases (arXiv:1409.1556, 1404.5997).
_RESNET_50 = _even(25_557_032, 161)
_BERT_BASE = _even(110e6, 199)
_INCEPTION_V3 = _even(23.9e6, 95)
_VGG_16 = _layers(
    (64, 3, 3, 3),
    (64, 64, 3, 3),
    (128, 64, 3, 3),
    (128, 128, 3, 3),
    (256, 128, 3, 3),
    *([(256, 256, 3, 3)] * 2),
    (512, 256, 3, 3),
    *([(512, 512, 3, 3)] * 5),
    (4096, 512 * 7 * 7),
    (4096, 4096),
    (1000, 4096),
)
_ALEXNET = _layers(
    (64, 3, 11, 11),
    (192, 64, 5, 5),
    (384, 192, 3, 3),
    (256, 384, 3, 3),
    (256, 256, 3, 3),
    (4096, 256 * 6 * 6),
    (4096, 4096),
    (1000, 4096),
)

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
        name: how ``mirror plan --case`` calls it.
        title: what was trained with what.
        source: where it was published.
        alone: examples per second of one device.
        batch_size: its examples.
        sizes_bytes: of the gradients, in order of registration.
        link: inside a machine; ``network``: between machines.
        devices_per_machine: of the cluster.
        bucket_bytes: what was reduced at once; infinite where nothing began before the end of the
            backward pass.
        algorithm: "ring" for NCCL before 2.4, which had no trees.
        published: examples per second, by the number of devices.
    """

    name: str
    title: str
    source: str
    alone: float
    batch_size: int
    sizes_bytes: tuple[float, ...]
    link: str
    network: str
    devices_per_machine: int
    bucket_bytes: float
    published: dict[int, float]
    algorithm: str = "auto"

    def workload(self) -> Workload:
        """Returns the step of one device; its launches are taken to cost nothing."""
        return make_workload(
            step_seconds=self.batch_size / self.alone,
            batch_size=self.batch_size,
            sizes_bytes=self.sizes_bytes,
            host_seconds=0.0,
        )

    def cluster(self) -> Cluster:
        """Returns the machines."""
        return Cluster(
            link_between_devices(self.link),
            link_between_machines(self.network),
            self.devices_per_machine,
            self.algorithm,
        )


def _dlperf(
    name: str,
    title: str,
    rates: tuple[float, float, float, float],
    batch_size: int,
    sizes_bytes: tuple[float, ...],
    bucket_bytes: float,
) -> Case:
    alone, *others = rates
    return Case(
        name=name,
        title=title,
        source=f"{_DLPERF}; {title}",
        alone=alone,
        batch_size=batch_size,
        sizes_bytes=sizes_bytes,
        link="nvlink2",
        network="100g",
        devices_per_machine=8,
        bucket_bytes=bucket_bytes,
        published=dict(zip((8, 16, 32), others, strict=True)),
    )


def _tensorflow(
    name: str,
    model: str,
    rates: tuple[float, float],
    batch_size: int,
    sizes_bytes: tuple[float, ...],
) -> Case:
    title = f"{model}, TensorFlow 1 with NCCL, batch {batch_size}"
    return Case(
        name=name,
        title=title,
        source=f"{_TENSORFLOW}; {title}",
        alone=rates[0],
        batch_size=batch_size,
        sizes_bytes=sizes_bytes,
        link="nvlink1",
        network="100g",
        devices_per_machine=8,
        bucket_bytes=1,  # every gradient by itself
        published={8: rates[1]},
        algorithm="ring",
    )


def _horovod(
    name: str, model: str, alone: float, efficiency: float, sizes_bytes: tuple[float, ...]
) -> Case:
    return Case(
        name=name,
        title=f"{model}, Horovod",
        source=_HOROVOD,
        alone=alone,
        batch_size=64,
        sizes_bytes=sizes_bytes,
        link="pcie3",
        network="25g",
        devices_per_machine=4,
        bucket_bytes=64 * _MEGABYTE,  # docs/tensor-fusion.rst
        published={512: 512 * efficiency * alone},
        algorithm="ring",
    )


def _nvidia(name: str, machine: str, rates: tuple[float, float]) -> Case:
    return Case(
        name=name,
        title=f"ResNet-50, PyTorch, {machine}",
        source=f"{_NVIDIA}; {machine}",
        alone=rates[0],
        batch_size=256,
        sizes_bytes=_RESNET_50,
        link="nvlink3",
        network="100g",
        devices_per_machine=8,
        bucket_bytes=25 * _MEBIBYTE,
        published={8: rates[1]},
    )


CASES = {
    case.name: case
    for case in (
        _dlperf(
            "resnet50-v100",
            "ResNet-50 FP32, PyTorch with apex, batch 128",
            (367.29, 2887.65, 5716.79, 10917.09),
            128,
            _RESNET_50,
            40 * _MEGABYTE,  # apex's message_size: 10 million elements
        ),
        _dlperf(
            "bert-base-v100",
            "BERT-base FP32, PyTorch with apex, batch 32",
            (119.60, 921.32, 1499.40, 2885.81),
            32,
            _BERT_BASE,
            inf,  # run_pretraining.py sets message_size to 250 million elements
        ),
        _dlperf(
            "mirrored-v100",
            "ResNet-50 FP32, TensorFlow 2.3 MirroredStrategy, batch 128",
            (321.80, 2458.74, 4849.68, 9418.44),
            128,
            _RESNET_50,
            inf,  # num_packs=1: one reduction of everything
        ),
        _dlperf(
            "mirrored-fp16-v100",
            "ResNet-50 FP16, TensorFlow 2.3 MirroredStrategy, batch 128",
            (938.09, 5734.83, 8418.20, 16250.19),
            128,
            _RESNET_50,
            inf,
        ),
        _nvidia("resnet50-a100", "TF32, 8 x A100", (938, 7248)),
        _nvidia("resnet50-amp-a100", "AMP, 8 x A100", (2470, 16621)),
        _tensorflow("vgg16-p100", "VGG-16", (154, 1081), 64, _VGG_16),
        _tensorflow("alexnet-p100", "AlexNet", (2987, 17822), 512, _ALEXNET),
        _horovod("inception3-p100", "Inception v3", 142, 0.90, _INCEPTION_V3),
        _horovod("vgg16-horovod", "VGG-16", 154, 0.68, _VGG_16),
    )
}
"""By name."""

_ALL_REDUCES = {1: 22.82, 16: 125.65, 64: 198.01, 1024: 264.90}  # MiB: GB/s, bytes by time


@dataclass(frozen=True)
class Check:
    """A published figure and what the model says.

    Attributes:
        what: what was measured, and on how many devices.
        predicted: in ``unit``.
        published: in ``unit``.
        unit: of both.
        source: where it was published.
    """

    what: str
    predicted: float
    published: float
    unit: str
    source: str

    @property
    def error(self) -> float:
        """How much the prediction is above the published figure, as a share of that."""
        return self.predicted / self.published - 1


@cache
def checks() -> tuple[Check, ...]:
    """Returns all of them."""
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
    """Returns the checks as text, with their errors and the median of these."""
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
