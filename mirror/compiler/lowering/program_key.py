"""Key: what a step's programs were made for; another one of anything, and they are made anew.

[Note: Kept programs]
A second process follows the step as the first one did, because only that tells what its Python
code does. What comes then takes longer, and depends on nothing but the graph that was followed and
on what is compiled how: it is looked up by a digest of all that. In the key are

    the graph      every operation, with its arguments; sizes, strides, types and devices of inputs
    the sizes      what is open in them, what was asked of them, and by which numbers
    the meetings   how the replicas reduce, and how many they are
    settings       of torch and inductor, and the variables of the environment that set them
    who compiles   mirror's own code, torch, Python, the compiler by its name, the processor

Operations of others may change behind their names: steps that have any are not kept.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx

from mirror.compiler.capture.tracer import CollectivePoint
from mirror.compiler.step_inputs import StepInput
from mirror.compiler.torch_internals import compiler_settings, is_operation, known_of_sizes

_OURS_AND_TORCHS = ("aten", "prims", "mirror", "profiler")
_ENVIRONMENT = ("TORCHINDUCTOR_", "TORCH_", "ATEN_")
_COMPILERS = ("CXX", "CC", "CXXFLAGS", "CPPFLAGS", "CFLAGS", "LDFLAGS", "CPATH", "LIBRARY_PATH")
_NO_SETTINGS = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS", "TORCH_HOME")
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (bool, int, float, str, complex, bytes, type(None), *_NAMED)


class _UnknownError(Exception):
    """Something has no description that tells it from what it may become."""


def program_key(
    graph: fx.GraphModule,
    inputs: Sequence[StepInput],
    mode: Any,
    meetings: Sequence[CollectivePoint],
    num_replicas: int,
    device: torch.device,
) -> str | None:
    """Returns a digest of all that a step's programs depend on; ``None``: they cannot be told."""
    try:
        described = [
            *_graph(graph),
            *[_input(one) for one in inputs],
            known_of_sizes(mode),
            *[_meeting(meeting, inputs) for meeting in meetings],
            f"{num_replicas} replicas, traced on {device}",
            *settings(),
            *makers(),
        ]
    except _UnknownError:
        return None
    return hashlib.sha256("\n".join(described).encode()).hexdigest()


def _graph(graph: fx.GraphModule) -> list[str]:
    numbers: dict[fx.Node, int] = {}
    lines = []
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise _UnknownError(node.op)
        target = _target(node.target) if node.op == "call_function" else ""
        arguments = "" if node.op == "placeholder" else _value([node.args, node.kwargs], numbers)
        numbers[node] = len(numbers)
        lines.append(f"{node.op} {target} {arguments}")
    return lines


def _target(target: Any) -> str:
    if is_operation(target):
        if target.namespace not in _OURS_AND_TORCHS:
            raise _UnknownError(target)
        return str(target)
    module = getattr(target, "__module__", None) or ""
    is_pythons = isinstance(target, BuiltinFunctionType) or module in ("_operator", "math")
    if is_pythons or module.partition(".")[0] == "torch":
        return f"{module}.{target.__qualname__}"
    raise _UnknownError(target)


def _value(value: Any, numbers: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(entry, numbers) for entry in value)}]"
    if isinstance(value, dict):
        return _value([entry for item in value.items() for entry in item], numbers)
    if isinstance(value, slice):
        return _value(["slice", value.start, value.stop, value.step], numbers)
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    raise _UnknownError(value)


def _input(one: StepInput) -> str:
    fake: Tensor = one.fake
    layout = [fake.dtype, fake.device, fake.layout, fake.requires_grad, fake.is_conj()]
    return f"{one.kind.value} {tuple(fake.shape)} {fake.stride()} {fake.storage_offset()} {layout}"


def _meeting(meeting: CollectivePoint, inputs: Sequence[StepInput]) -> str:
    slots = {id(one.of): i for i, one in enumerate(inputs)}
    return f"meeting {meeting.op} {[slots.get(id(place)) for place in meeting.places]}"


def settings() -> list[str]:
    """Returns what is set in torch and around it, and may make other programs.

    Raises:
        _UnknownError: something is set to what has no description of its own.
    """
    deterministic = torch.utils.deterministic
    found = [
        ("default dtype", torch.get_default_dtype()),
        ("default device", torch.get_default_device()),
        ("deterministic", torch.are_deterministic_algorithms_enabled()),
        ("warn only", torch.is_deterministic_algorithms_warn_only_enabled()),
        ("filled", deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
        ("matmul precision", torch.get_float32_matmul_precision()),
        ("mkldnn", torch.backends.mkldnn.enabled),
        ("openmp", torch.backends.openmp.is_available()),
    ]
    of_environment = [
        (name, value)
        for name, value in sorted(os.environ.items())
        if (name.startswith(_ENVIRONMENT) or name in _COMPILERS) and name not in _NO_SETTINGS
    ]
    of_inductor = compiler_settings()
    if " at 0x" in of_inductor:
        raise _UnknownError(of_inductor)
    return [*[f"{name}={value}" for name, value in (*found, *of_environment)], of_inductor]


@functools.cache
def makers() -> list[str]:
    """Returns who makes programs, and for which processor."""
    return [
        f"mirror {_digest(Path(__file__).parents[2])}",
        f"torch {torch.__version__} {torch.version.git_version}",
        f"python {sys.version} {sys.implementation.cache_tag}",
        f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        _processor(),
    ]


def _digest(folder: Path) -> str:
    """Returns a digest of the source code in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """Returns what the processor can do: programs are made for what is found at once."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part", "isa")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
