"""Runs the pieces of a compiled step as CUDA graphs: one graph per piece and GPU.

A piece launches the same kernels with the same sizes in every step. So it is captured once and
replayed. With N replicas on N GPUs the host makes 2 N + 1 calls per step, for any model:

    own piece, cuda:0 .. N - 1      N launches; the host waits for none of them
    reduction                       one grouped collective, which is not captured
    shared piece, cuda:0 .. N - 1   N launches

Each GPU also copies its part of the batch into graph memory, and the results out of it. A graph
reads its inputs at the addresses of the capture:

    static inputs   parameters, state, buffers, rates, counts, seeds: read in place; if one is
                    another tensor or has other memory, the piece is captured again
    copied inputs   parts of the batch and outputs of other pieces: copied into tensors of the
                    graph, except outputs of graphs, which keep their addresses, and gradients
                    that a packed pass leaves where they are reduced: ``PackedGrads``

A replay overwrites the outputs of the replay before, so results are copied before they leave the
step. Gradients are copied when something reads them: see ``GradAccess.set_common``. With one
replica a read of ``p.grad`` is not seen, so each step copies them: see ``KeptGradients``.

A graph is valid for one batch size; a piece keeps the graphs of a few sizes. The first call with
a size runs without a graph: it loads the kernels, and the size may not recur.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from mirror.comm.communicator import extent_bytes
from mirror.compiler.lowering.programs import CallableProgram, SlotGetter, slot_getter
from mirror.compiler.runtime.kept_gradients import KeptGradients
from mirror.compiler.step_errors import Uncapturable
from mirror.compiler.torch_internals import DispatchMode
from mirror.device.cuda_graph import DeviceGraph
from mirror.errors import first_line
from mirror.replica.gradients.packed_grads import STAYS
from mirror.values import are_identical

logger = logging.getLogger(__name__)

MAX_CAPTURES = 4  # per piece and GPU; each graph has memory of its own
_ALIGNMENT = 256  # in bytes: more makes no difference to cuBLAS

_storage_address = torch.UntypedStorage.data_ptr
_address = Tensor.data_ptr  # three times as fast as methodcaller


class CapturedGraph:
    """A graph with the tensors that it reads and writes.

    Args:
        num_seen: how many of the first static inputs are the first replica's.
        moves: the ``moves`` of CapturedPieces.

    Attributes:
        static_inputs: the tensors that it reads in place.
        copied_inputs: tensors in graph memory, filled before each replay.
        outputs: by replica, the tensors that a replay overwrites.
    """

    def __init__(
        self,
        graph: DeviceGraph,
        static_inputs: list[Tensor],
        num_seen: int | None = None,
        moves: object = None,
    ) -> None:
        self.graph = graph
        self.static_inputs = static_inputs
        self.copied_inputs: list[Tensor] = []
        self.outputs: list[Sequence[Any]] = []
        self._addresses = [*map(_address, static_inputs)]
        self._num_seen = len(static_inputs) if num_seen is None else num_seen
        self._seen = self._addresses[: self._num_seen]
        self._moves = moves

    def capture(
        self,
        program: CallableProgram,
        device: torch.device,
        copied: Sequence[Tensor],
        are_in_place: Sequence[bool],
        is_static: Callable[[int], bool],
        num_replicas: int = 1,
        finish: Callable[[Sequence[Any]], Sequence[Any]] = list,
    ) -> None:
        """Captures a piece.

        Args:
            copied: the inputs that are not static, of all replicas.
            are_in_place: for each of them, whether it is read where it is.
            is_static: whether the input in a slot is static.
            finish: what the capture does with the outputs of a replica; returns those to keep.

        Raises:
            Exception: the piece cannot be captured.
        """
        call, last, width = program.programs[device], _LastOperation(), len(program.reads)

        def in_order(copies: Sequence[Tensor]) -> list[Tensor]:
            next_static, next_copied = iter(self.static_inputs), iter(copies)
            return [
                next(next_static if is_static(slot) else next_copied)
                for slot in program.reads * num_replicas
            ]

        def work() -> None:
            # In graph memory, which no other stream gets while a launch may still use it.
            self.copied_inputs = [
                t if stays else _empty_as(t) for t, stays in zip(copied, are_in_place, strict=True)
            ]
            inputs = in_order(self.copied_inputs)
            with last:
                found = [call(inputs[i * width : (i + 1) * width]) for i in range(num_replicas)]
            # A view of a parameter would be one of autograd's, which checks it after each write.
            self.outputs = [[*map(_detached, finish(own))] for own in found]

        try:
            _check(program, device, in_order(copied), is_static)
            self.graph.capture(work)
        except Exception as error:
            line = getattr(error, "line", "") or program.line_of(error)
            raise Uncapturable(
                f"{last.name} cannot be captured in a CUDA graph: {type(error).__name__}: "
                f"{first_line(error)}",
                line,
            ) from error

    def is_valid(self, static_inputs: list[Tensor], moves: object) -> bool:
        """Whether these are the tensors of the capture, at the same addresses."""
        if not are_identical(static_inputs, self.static_inputs):
            return False
        if moves == self._moves:
            return [*map(_address, static_inputs[: self._num_seen])] == self._seen
        self._moves = moves
        return [*map(_address, static_inputs)] == self._addresses

    def is_in_place(self) -> bool:
        """Whether the static inputs of the capture are at the same addresses."""
        return [*map(_address, self.static_inputs)] == self._addresses

    def launch(self, inputs: Sequence[Tensor]) -> None:
        """Copies inputs into graph memory, and replays the graph on the current stream."""
        are_others = [*map(operator.is_not, self.copied_inputs, inputs)]
        if True in are_others:
            into = [*compress(self.copied_inputs, are_others)]
            self.graph.launch(into, [*compress(inputs, are_others)])
        else:
            self.graph.launch()


class CapturedPieces:
    """Runs pieces on GPUs, as graphs where they can be captured. See the head of this file.

    Args:
        devices: the device of each replica.
        static_slots: the slots of inputs that are the same tensors in every call.
        make_graph: creates an empty graph on a device.
        has_fixed_sizes: whether the sizes of all inputs are the same in every call.
        sees_first: whether the program sees the tensors of replica 0.

    Attributes:
        is_raw: True: writes do not increment the version of a tensor.
        moves: a value that changes whenever replicas' tensors may have got other memory. Those of
            the first replica, which the program sees, may at any time.
    """

    is_raw = True
    moves: object = (0, 0)

    def __init__(
        self,
        devices: Sequence[torch.device],
        static_slots: Sequence[int],
        make_graph: Callable[[torch.device], DeviceGraph],
        *,
        has_fixed_sizes: bool = False,
        sees_first: bool = True,
    ) -> None:
        self._devices, self._static_slots = devices, set(static_slots)
        self._has_fixed_sizes, self._sees_first = has_fixed_sizes, sees_first
        self._make_graph = make_graph
        self._has_warned = False
        # By piece and device, then by replicas and sizes; None: seen once, not captured yet.
        self._captured: dict[
            tuple[CallableProgram, torch.device], dict[Any, CapturedGraph | None]
        ] = {}
        self._uncapturable: set[CallableProgram] = set()
        self._kept: KeptGradients | None = None
        # By piece, functions that pick static inputs and those to copy out of the slots.
        self._getters: dict[CallableProgram, tuple[SlotGetter, SlotGetter]] = {}
        self._graph_storages: set[int] = set()

    def run(self, program: CallableProgram, values: dict[int, list[Any]]) -> None:
        """Runs a piece on the values of some replicas, and stores its outputs there."""
        by_device: dict[torch.device, list[int]] = {}
        for r in values:
            by_device.setdefault(self._devices[r], []).append(r)
        for device, replicas in by_device.items():
            if program in self._uncapturable or not self._replay(
                program, device, replicas, values
            ):
                for r in replicas:
                    program.run(values[r], device)

    def keep(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors, with copies of those that the next replay would overwrite."""
        kept = list(tensors)
        storages = map(_storage_address, map(Tensor.untyped_storage, kept))
        are_of_graphs = map(self._graph_storages.__contains__, storages)
        positions = [*compress(range(len(kept)), are_of_graphs)]
        for i, copy in zip(positions, copies_of([*map(kept.__getitem__, positions)]), strict=True):
            kept[i] = copy
        return kept

    def keep_gradients(
        self, tensors: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> list[Tensor]:
        """Does the same with gradients of unmirrored parameters: without new memory, if possible.

        Args:
            parameters: whose ``.grad`` they become.
        """
        kept = self._kept
        if kept is None or not are_identical(tensors, kept.sources):
            self._kept = kept = None
            if not tensors or not self._graph_storages.issuperset(_storages_of(tensors)):
                return self.keep(tensors)
        if kept is None or not kept.are_free():
            kept = self._kept = KeptGradients(tensors, parameters)
        return kept.take()

    def _replay(
        self,
        program: CallableProgram,
        device: torch.device,
        replicas: list[int],
        values: dict[int, list[Any]],
    ) -> bool:
        """Runs a piece on one device as a graph; returns whether there is one."""
        getters = self._getters.get(program)
        if getters is None:
            kinds = [slot in self._static_slots for slot in program.reads]
            stay = [slot for slot, stays in zip(program.reads, kinds, strict=True) if stays]
            move = [slot for slot, stays in zip(program.reads, kinds, strict=True) if not stays]
            getters = self._getters[program] = slot_getter(stay), slot_getter(move)
        get_static, get_copied = getters
        rows = [*map(values.__getitem__, replicas)]
        static = [*chain.from_iterable(map(get_static, rows))]
        copied = [*chain.from_iterable(map(get_copied, rows))]
        try:
            sizes: tuple[Any, ...] = tuple(replicas)
            if not self._has_fixed_sizes:
                sizes += tuple([(tensor.shape, tensor.dtype) for tensor in copied])
        except AttributeError:  # a size, which an earlier piece has read, would be a constant
            self._uncapturable.add(program)
            return False
        known = self._captured.setdefault((program, device), {})
        if sizes not in known:
            self._note_first(known, sizes)
            return False
        captured = known.pop(sizes)
        if captured is None or not captured.is_valid(static, self.moves):
            captured = self._capture(program, device, replicas, static, copied)
            if captured is None:
                return False
            known[sizes] = captured
            self._note_storages()
        known[sizes] = captured  # insertion order is the order of last use
        captured.launch(copied)
        for r, outputs in zip(replicas, captured.outputs, strict=True):
            for slot, value in zip(program.gives, outputs, strict=True):
                values[r][slot] = value
        return True

    def _note_first(self, known: dict[Any, CapturedGraph | None], sizes: Any) -> None:
        """Records the first call with some sizes; drops the sizes used longest ago."""
        if len(known) >= MAX_CAPTURES:
            del known[next(iter(known))]
            self._note_storages()
        known[sizes] = None

    def _capture(
        self,
        program: CallableProgram,
        device: torch.device,
        replicas: list[int],
        static: list[Tensor],
        copied: list[Tensor],
    ) -> CapturedGraph | None:
        """Captures a piece; if that fails, logs a warning and returns ``None``."""
        are_of_graphs = map(self._graph_storages.__contains__, _storages_of(copied))
        are_in_place = [
            stays or hasattr(tensor, STAYS)
            for tensor, stays in zip(copied, are_of_graphs, strict=True)
        ]
        sees_first = self._sees_first and replicas[0] == 0
        num_seen = len(static) // len(replicas) if sees_first else 0
        captured = CapturedGraph(self._make_graph(device), static, num_seen, self.moves)
        is_static = self._static_slots.__contains__
        try:
            captured.capture(program, device, copied, are_in_place, is_static, len(replicas))
        except Uncapturable as error:
            self._uncapturable.add(program)
            if not self._has_warned:  # once a step
                self._has_warned = True
                logger.warning(
                    "a compiled step launches kernels one by one, as an uncompiled step does: "
                    "%s%s",
                    error.line and f"{error.line}: ",
                    error,
                )
            return None
        return captured

    def _note_storages(self) -> None:
        """Collects the storages that replays write: inputs in graph memory, and outputs."""
        graphs = [c for known in self._captured.values() for c in known.values() if c is not None]
        written = [t for one in graphs for ts in (one.copied_inputs, *one.outputs) for t in ts]
        self._graph_storages = {*_storages_of(t for t in written if isinstance(t, Tensor))} - {0}


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies of tensors of one GPU, with the same bits."""
    copies = list(tensors)
    by_kind: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(i)
    for (_, dtype), positions in by_kind.items():
        # One call for all; a product with 1 has the same bits.
        if dtype.is_floating_point:
            found = torch._foreach_mul([*map(tensors.__getitem__, positions)], 1.0)
        else:
            found = tuple(tensors[i].clone() for i in positions)
        for i, copy in zip(positions, found, strict=True):
            copies[i] = copy
    return copies


def _check(
    program: CallableProgram,
    device: torch.device,
    inputs: Sequence[Tensor],
    is_static: Callable[[int], bool],
) -> None:
    """Raises Uncapturable if a replay would read or write other values than a call."""
    for position, tensor in enumerate(inputs):
        if tensor.device != device:
            raise Uncapturable(
                f"it reads a tensor of shape {tuple(tensor.shape)} on {tensor.device}; a "
                "graph would keep the value that it has now",
                program.line_of_input(position % len(program.reads)),
            )
    for slot in program.writes:
        if not is_static(slot):
            raise Uncapturable(
                "it writes to an argument of the step",
                program.line_of_input(program.reads.index(slot)),
            )


def alignment_of(tensor: Tensor) -> int:
    """Returns where a tensor lies between two addresses of the best alignment, in bytes."""
    return _address(tensor) % _ALIGNMENT


def _empty_as(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same sizes, strides and alignment: cuBLAS chooses kernels by them.

    If elements share memory, as after ``expand``, it has the usual strides.
    """
    if not tensor.numel() or (0 in tensor.stride() and tensor.numel() > 1):
        return torch.empty_like(tensor)
    size = tensor.element_size()
    start = alignment_of(tensor) // size
    memory = torch.empty(
        start + extent_bytes(tensor) // size, dtype=tensor.dtype, device=tensor.device
    )
    return memory.as_strided(tensor.shape, tensor.stride(), start)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


class _LastOperation(DispatchMode):
    """Records the last operation of torch that was called.

    Attributes:
        name: its name, for the warning.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = "what it reads or writes"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


def _storages_of(tensors: Iterable[Tensor]) -> Iterable[int]:
    """Returns the address of each tensor's storage."""
    return map(_storage_address, map(Tensor.untyped_storage, tensors))
