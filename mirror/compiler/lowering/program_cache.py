"""Finished programs on disk, for later processes, by a key of all that they depend on.

A second process traces the step as the first one did, because only the trace tells what its Python
code does. The rest takes longer, and depends on the graph and on how it is compiled. So programs
are looked up by a digest of:

    the graph      every operation, with its arguments; sizes, strides, types, devices of inputs
    the sizes      the dynamic ones, the guards on them, and their values in the trace
    collectives    the reductions at collective points, and the number of replicas
    settings       of torch and inductor, and the environment variables that set them
    toolchain      mirror's own code, torch, Python, the compiler by its name, the processor

Operations of other libraries may change under the same name: steps with any are not kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, fx

from mirror.base.safe_files import private_folder, read_private
from mirror.compiler.capture.tracer import CollectivePoint
from mirror.compiler.lowering.programs import CallableProgram
from mirror.compiler.lowering.step_plan import PlanLevel, ProgramPiece, StepPlan
from mirror.compiler.step_inputs import StepInput
from mirror.compiler.torch_internals import (
    LibraryProgram,
    Sizes,
    cache_folder,
    compiler_settings,
    describe_sizes,
    is_operation,
    program_of_library,
)

logger = logging.getLogger(__name__)

Ready = tuple["CallableProgram | None", "CallableProgram | None"]
_CPU = torch.device("cpu")
_INDEX = "step.pickle"
_OURS_AND_TORCHS = ("aten", "prims", "mirror", "profiler")
_ENVIRONMENT = ("TORCHINDUCTOR_", "TORCH_", "ATEN_")
_COMPILERS = ("CXX", "CC", "CXXFLAGS", "CPPFLAGS", "CFLAGS", "LDFLAGS", "CPATH", "LIBRARY_PATH")
_NO_SETTINGS = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS", "TORCH_HOME")
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (bool, int, float, str, complex, bytes, type(None), *_NAMED)


class _UnknownError(Exception):
    """A value has no description that changes when the value does."""


def program_key(
    graph: fx.GraphModule,
    inputs: Sequence[StepInput],
    mode: Any,
    collectives: Sequence[CollectivePoint],
    num_replicas: int,
    device: torch.device,
) -> str | None:
    """Returns a digest of all that a step's programs depend on; ``None`` if it is not known."""
    try:
        described = [
            *_graph(graph),
            *[_input(one) for one in inputs],
            describe_sizes(mode),
            *[_collective(collective, inputs) for collective in collectives],
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


def _collective(collective: CollectivePoint, inputs: Sequence[StepInput]) -> str:
    slots = {id(one.of): i for i, one in enumerate(inputs)}
    return f"collective {collective.op} {[slots.get(id(place)) for place in collective.places]}"


def settings() -> list[str]:
    """Returns the settings of torch and of the environment that programs depend on.

    Raises:
        _UnknownError: a setting has no description of its own.
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
    """Returns the versions of all that makes programs, and the processor."""
    return [
        f"mirror {_digest_of_sources(Path(__file__).parents[2])}",
        f"torch {torch.__version__} {torch.version.git_version}",
        f"python {sys.version} {sys.implementation.cache_tag}",
        f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        _processor(),
    ]


def _digest_of_sources(folder: Path) -> str:
    """Returns a digest of the source code in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """Returns the features of the processor, for which programs are compiled."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part", "isa")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def store_program(key: str, plan: StepPlan, levels: Sequence[Ready], sizes: Sizes) -> bool:
    """Stores programs that inductor has compiled for the CPU; returns whether that was possible.

    A process that is killed while it writes leaves nothing that another one would load.
    """
    root = _root()
    if root is None:
        return False
    libraries: list[Path] = []
    numbers: list[list[int | None]] = []
    for level in levels:
        numbers.append([])
        for called in level:
            if called is None:
                numbers[-1].append(None)
                continue
            program = called.programs[_CPU]
            if not isinstance(program, LibraryProgram) or len(called.programs) > 1:
                return False
            numbers[-1].append(len(libraries))
            libraries.append(program.path)
    try:
        _write(root / key, libraries, numbers, plan, sizes)
    except (OSError, pickle.PicklingError, TypeError, AttributeError) as error:
        logger.info("programs of a compiled step are not kept: %s", error)
        return False
    return True


def _write(
    folder: Path,
    libraries: Sequence[Path],
    numbers: Sequence[Sequence[int | None]],
    plan: StepPlan,
    sizes: Sizes,
) -> None:
    private_folder(folder.parent, create=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        digests = []
        for i, library in enumerate(libraries):
            shutil.copyfile(library, made / f"{i}.so")
            (made / f"{i}.so").chmod(0o600)
            digests.append(_digest(made / f"{i}.so"))
        levels = [
            PlanLevel(_drop_graph(level.shared), _drop_graph(level.own), level.collectives)
            for level in plan.levels
        ]
        index = (replace(plan, levels=levels), [*map(tuple, numbers)], digests, sizes)
        (made / _INDEX).write_bytes(pickle.dumps(index))
        (made / _INDEX).chmod(0o600)
        made.rename(folder)
    except OSError:
        if not (folder / _INDEX).exists():  # else another process was first
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _drop_graph(piece: ProgramPiece | None) -> ProgramPiece | None:
    return None if piece is None else replace(piece, graph=None)


def load_program(key: str) -> tuple[StepPlan, list[Ready], Sizes] | None:
    """Returns the programs of a key, ready to be called; ``None`` if there are none."""
    root = _root()
    if root is None or not (root / key / _INDEX).exists():
        return None
    try:
        folder = private_folder(root / key)
    except OSError as error:  # another user can change it, and its code is run
        logger.info("programs of a compiled step are not loaded: %s", error)
        return None
    try:
        plan, numbers, digests, sizes = pickle.loads(read_private(folder / _INDEX))
        if digests != [_digest(folder / f"{i}.so") for i in range(len(digests))]:
            raise OSError(f"{folder} has been damaged")
        levels = [
            (
                _load_callable(level.shared, of_shared, folder),
                _load_callable(level.own, of_own, folder),
            )
            for level, (of_shared, of_own) in zip(plan.levels, numbers, strict=True)
        ]
    except Exception as error:  # a damaged file: the step is compiled again
        logger.info("programs of a compiled step are compiled again: %s", error)
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        return None
    return plan, levels, sizes


def _load_callable(
    piece: ProgramPiece | None, number: int | None, folder: Path
) -> CallableProgram | None:
    if piece is None or number is None:
        return None
    program = program_of_library(folder / f"{number}.so", folder.name)
    return CallableProgram(piece, {_CPU: program}, is_raw=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(read_private(path)).hexdigest()


def _root() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "mirror_steps"
