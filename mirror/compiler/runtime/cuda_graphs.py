"""Captures: the pieces of a compiled step as CUDA graphs, launched by one thread.

[Note: Captured pieces]
A piece of a step calls the same kernels with the same sizes in every step: on GPUs they are
captured, one graph per GPU and piece, and N replicas cost 2 N + 1 calls of the host, whatever the
model's size is:

    own of cuda:0 .. N - 1      N launches, none of which waits for anything
    reduction                   one grouped collective, as everywhere else: not captured
    shared of cuda:0 .. N - 1   N launches

beside a copy of the batch into the graph's memory, and one of the results out of it, per GPU. What
a graph reads lies where it lay at the capture:

    fixed   parameters, state, buffers, rates, counts, seeds: the tensors themselves; where one is
            another tensor, or its memory another, the piece is captured anew
    fed     parts of the batch, what other pieces give: copied into tensors of the graph's own,
            unless they are results of a graph, which stay where they are

What a graph has made, its next launch overwrites: what leaves the step is copied. A graph is of
one size of the batch, and a few are kept. The first call with a size runs as it is, which loads
what kernels need, and is all there is to sizes that come once.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mirror.compiler.lowering.programs import CallableProgram
from mirror.compiler.step_errors import first_line
from mirror.compiler.torch_internals import DispatchMode
from mirror.device.streams import DeviceGraph
from mirror.values import are_identical

logger = logging.getLogger(__name__)

MAX_CAPTURES = 4  # of a piece on a GPU: each keeps memory of its own

_pointer = operator.methodcaller("data_ptr")


class _Captured:
    """One graph, and the memory it works in.

    Attributes:
        fixed: what it reads where it is.
        fed: its own tensors, for what is copied in.
        given: by replica, what it gives.
    """

    def __init__(self, graph: DeviceGraph, fixed: list[Tensor], fed: list[Tensor]) -> None:
        self.graph, self.fixed, self.fed = graph, fixed, fed
        self.given: list[Sequence[Any]] = []
        self._pointers = [*map(_pointer, fixed)]

    def holds(self, fixed: list[Tensor]) -> bool:
        """Whether what it reads where it is still is there."""
        return are_identical(fixed, self.fixed) and [*map(_pointer, fixed)] == self._pointers

    def launch(self, fed: Sequence[Tensor]) -> None:
        """Does the work for what is fed."""
        into, of = [], []
        for mine, tensor in zip(self.fed, fed, strict=True):
            if mine is not tensor:
                into.append(mine)
                of.append(tensor)
        if into:
            torch._foreach_copy_(into, of, non_blocking=True)
        self.graph.launch()


class CapturedPieces:
    """Runs pieces on GPUs, as graphs where they can be captured. See [Note: Captured pieces].

    Args:
        devices: one per replica.
        fixed: the slots of what stays where it is from call to call.
        make_graph: makes a graph of a device.

    Attributes:
        is_raw: whether it writes, whatever it runs, without a new version of what it writes.
    """

    is_raw = True

    def __init__(
        self,
        devices: Sequence[torch.device],
        fixed: Sequence[int],
        make_graph: Callable[[torch.device], DeviceGraph],
    ) -> None:
        self._devices, self._fixed = devices, set(fixed)
        self._make_graph = make_graph
        # By piece and device: by who takes part and the sizes, None while they came once.
        self._captured: dict[
            tuple[CallableProgram, torch.device], dict[Any, _Captured | None]
        ] = {}
        self._refused: set[CallableProgram] = set()
        self._owned: set[int] = set()

    def run(self, program: CallableProgram, values: dict[int, list[Any]]) -> None:
        """Runs a piece on replicas' values, and keeps there what it gives."""
        by_device: dict[torch.device, list[int]] = {}
        for r in values:
            by_device.setdefault(self._devices[r], []).append(r)
        for device, replicas in by_device.items():
            if program in self._refused or not self._launch(program, device, replicas, values):
                for r in replicas:
                    program.run(values[r], device)

    def remaining(
        self, results: dict[int, Sequence[Tensor]], grads: dict[Any, Tensor | None]
    ) -> tuple[dict[int, Sequence[Tensor]], dict[Any, Tensor | None]]:
        """Returns what a step gives and leaves, as tensors that no later launch changes."""
        there = [(place, grad) for place, grad in grads.items() if grad is not None]
        kept = iter(self._keep([*chain.from_iterable(results.values()), *[g for _, g in there]]))
        results = {r: [next(kept) for _ in tensors] for r, tensors in results.items()}
        return results, {**grads, **{place: next(kept) for place, _ in there}}

    def _keep(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        kept = list(tensors)
        mine = [i for i, tensor in enumerate(kept) if _storage(tensor) in self._owned]
        by_device: dict[Any, list[int]] = {}
        for i in mine:
            by_device.setdefault((kept[i].device, kept[i].dtype), []).append(i)
        for (_, dtype), places in by_device.items():
            # One call for all; a product with 1 has the same bits.
            if dtype.is_floating_point:
                copies = torch._foreach_mul([kept[i] for i in places], 1.0)
            else:
                copies = tuple(kept[i].clone() for i in places)
            for i, copy in zip(places, copies, strict=True):
                kept[i] = copy
        return kept

    def _launch(
        self,
        program: CallableProgram,
        device: torch.device,
        replicas: list[int],
        values: dict[int, list[Any]],
    ) -> bool:
        """Runs a piece on one device as a graph; returns whether there is one."""
        fixed: list[Tensor] = []
        fed: list[Tensor] = []
        for r in replicas:
            mine = values[r]
            for slot in program.reads:
                (fixed if slot in self._fixed else fed).append(mine[slot])
        sizes = (*replicas, *[(tensor.shape, tensor.dtype) for tensor in fed])
        known = self._captured.setdefault((program, device), {})
        captured = known.pop(sizes, None) if sizes in known else self._first(known, sizes)
        if captured is _FIRST:
            return False
        if captured is None or not captured.holds(fixed):
            captured = self._capture(program, device, replicas, fixed, fed)
            if captured is None:
                return False
            known[sizes] = captured
            self._note_owned()
        known[sizes] = captured  # the last one used is the last in order
        captured.launch(fed)
        for r, given in zip(replicas, captured.given, strict=True):
            mine = values[r]
            for slot, value in zip(program.gives, given, strict=True):
                mine[slot] = value
        return True

    def _first(self, known: dict[Any, _Captured | None], sizes: Any) -> Any:
        """Notes that a size came for the first time; the one used longest ago is dropped."""
        if len(known) >= MAX_CAPTURES:
            del known[next(iter(known))]
            self._note_owned()
        known[sizes] = None
        return _FIRST

    def _capture(
        self,
        program: CallableProgram,
        device: torch.device,
        replicas: list[int],
        fixed: list[Tensor],
        fed: list[Tensor],
    ) -> _Captured | None:
        """Captures a piece; returns ``None``, and says why, if that cannot be."""
        own = [tensor if _storage(tensor) in self._owned else tensor.clone() for tensor in fed]
        captured = _Captured(self._make_graph(device), fixed, own)
        call, last = program.programs[device], _Last()

        def work() -> list[Sequence[Any]]:
            next_fixed, next_fed = iter(fixed), iter(own)
            with last:
                return [
                    call(
                        [
                            next(next_fixed if slot in self._fixed else next_fed)
                            for slot in program.reads
                        ]
                    )
                    for _ in replicas
                ]

        try:
            self._check(program, device, [*fixed, *own])
            captured.given = captured.graph.capture(work)
        except Exception as error:
            self._refused.add(program)
            logger.warning(
                "a compiled step launches the kernels of a piece one by one, because %s cannot be "
                "captured in a CUDA graph: %s: %s",
                last.name,
                type(error).__name__,
                first_line(error),
            )
            return None
        return captured

    def _check(
        self, program: CallableProgram, device: torch.device, tensors: Sequence[Tensor]
    ) -> None:
        for tensor in tensors:
            if tensor.device != device:
                raise ValueError(
                    f"it reads a tensor of shape {tuple(tensor.shape)} on {tensor.device}, whose "
                    "value a graph would keep"
                )
        if not self._fixed.issuperset(program.writes):
            raise ValueError("it writes to an argument of the step")

    def _note_owned(self) -> None:
        """Notes the memory that launches write: what is given, and what that may be views of."""
        graphs = [c for known in self._captured.values() for c in known.values() if c is not None]
        written = [t for one in graphs for given in (one.fed, *one.given) for t in given]
        self._owned = {_storage(t) for t in written if isinstance(t, Tensor)} - {0}


class _Last(DispatchMode):
    """Knows the last operation of torch that was called.

    Attributes:
        name: its name.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = "what it reads or writes"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


_FIRST: Any = object()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
