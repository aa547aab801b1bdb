"""UpdatePlan: one replica's parameters with gradients, by the stand-ins of its optimizer.

A plan is valid as long as groups, kinds, and tensors of state are the same objects, the same
parameters have gradients, and the parameters of one stand-in have the same counts. That is
compared in each step, by a few calls for all parameters. See [Note: Stand-ins].
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, pairwise, repeat
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from mirror.comm.communicator import extent_bytes
from mirror.compiler.capture.recorded_update import (
    NumberRecorder,
    OtherOperations,
    RecordedUpdate,
    Unrecordable,
    UpdateRecorder,
)
from mirror.compiler.lowering.programs import CallableProgram, slot_getter
from mirror.compiler.lowering.step_plan import ProgramPiece
from mirror.compiler.runtime.cuda_graphs import CapturedPieces
from mirror.device.cuda_graph import CudaGraph, has_graphs
from mirror.replica.gradients.packed_grads import STAYS
from mirror.values import are_identical

CHUNK_BYTES = 16 * 2**20  # of parameters that a step parameter by parameter takes together
_COUNTS = ("step", "mu_product", "eta", "mu")  # 0-d state that torch's optimizers read
_NO_STATE: dict[str, Any] = {}

_grad_of, _dtype_of, _layout_of = attrgetter("grad"), attrgetter("dtype"), attrgetter("layout")
_params_of = itemgetter("params")


class MakesState(RuntimeError):
    """The step makes state, as the first one does."""


class UpdatePlan:
    """The tensors of one replica's update.

    Args:
        get_moves: returns a value that changes whenever they may have got other memory.

    Raises:
        Unrecordable: the update of these parameters cannot be captured.

    Attributes:
        device: the replica's.
        signature: the kinds of its stand-ins, which are those of other replicas, too.
    """

    def __init__(
        self, optimizer: Optimizer, device: torch.device, get_moves: Callable[[], object] = object
    ) -> None:
        self.device, self._get_moves = device, get_moves
        groups = optimizer.param_groups
        if any(options.get("differentiable") for options in (optimizer.defaults, *groups)):
            raise Unrecordable("it is differentiable")
        # 1. What makes the plan valid.
        self._sizes = [*map(len, map(_params_of, groups))]
        self._params = [*chain.from_iterable(map(_params_of, groups))]
        grads = [*map(_grad_of, self._params)]
        self._missing = [*map(operator.is_, grads, repeat(None))]
        given = [grad for grad in grads if grad is not None]
        self._used = [p for p, grad in zip(self._params, grads, strict=True) if grad is not None]
        self._kinds = self._read_kinds(given)
        self._keys, self._entries, self._values, self._names = _state_of(optimizer)
        if any(grad.layout is not torch.strided for grad in given):
            raise Unrecordable("a gradient is sparse")
        if _overlap([*self._used, *self._values]):
            raise Unrecordable("parameters or state lie in the same memory")
        # 2. The stand-ins.
        group_of = chain.from_iterable(repeat(i, size) for i, size in enumerate(self._sizes))
        groups_used = [i for i, gone in zip(group_of, self._missing, strict=True) if not gone]
        state: Any = optimizer.state
        entries = [*map(dict.get, repeat(state), self._used, repeat(_NO_STATE))]
        by_kind: dict[Any, list[int]] = {}
        for i, (parameter, grad) in enumerate(zip(self._used, given, strict=True)):
            kind = groups_used[i], *_kind_of(parameter, grad, entries[i])
            by_kind.setdefault(kind, []).append(i)
        self.signature = [kind[:-1] for kind in by_kind]
        self._groups_of = [kind[0] for kind in by_kind]
        self._stand_ins = [
            _StandIn(self._used, entries, given[members[0]], members)
            for members in by_kind.values()
        ]
        self._chunks = [one.chunks for one in self._stand_ins]
        self._options = device_options(groups)
        self._known: RecordedUpdate | None = None
        self._launched: RecordedUpdate | None = None
        self._graph: _UpdateGraph | None = None

    def _read_kinds(self, grads: list[Any]) -> list[Any]:
        kinds = map(_dtype_of, self._used), map(_dtype_of, grads), map(_layout_of, grads)
        return [*chain.from_iterable(kinds)]

    def take(
        self, optimizer: Optimizer, options: list[tuple[int, str]]
    ) -> tuple[list[Any], list[float]] | None:
        """Returns gradients and counts of now; ``None`` if the plan is not valid any more."""
        groups = optimizer.param_groups
        if options != self._options or [*map(len, map(_params_of, groups))] != self._sizes:
            return None
        if not are_identical([*chain.from_iterable(map(_params_of, groups))], self._params):
            return None
        grads = [*map(_grad_of, self._params)]
        if [*map(operator.is_, grads, repeat(None))] != self._missing:
            return None
        grads = [grad for grad in grads if grad is not None]
        if self._read_kinds(grads) != self._kinds:
            return None
        keys, entries, values, names = _state_of(optimizer)
        if not (are_identical(keys, self._keys) and are_identical(entries, self._entries)):
            return None
        if names != self._names or not are_identical(values, self._values):
            return None
        counts: list[float] = []
        for one in self._stand_ins:
            for column in one.count_columns:
                read = torch.stack(column).tolist()
                if read.count(read[0]) != len(read):
                    return None
                counts.append(read[0])
        return grads, counts

    # The optimizer's code

    def record(
        self, optimizer: Optimizer, step: Callable[..., Any], counts: Sequence[float]
    ) -> RecordedUpdate:
        """Runs the optimizer's code over the stand-ins; returns its operations.

        Raises:
            Unrecordable: it does what no recording repeats.
            MakesState: it makes state.
        """
        if self._known is not None:
            clone, stand_ins = self._prepare(optimizer, counts)
            numbers = NumberRecorder(self._known, [tensor for tensor, _, _ in stand_ins])
            try:
                with numbers:
                    step(clone)
                self._check(clone, optimizer)
                return self._known.with_numbers(numbers)
            except OtherOperations:
                self._known = None
        clone, stand_ins = self._prepare(optimizer, counts)
        recorder = UpdateRecorder()
        for tensor, owner, is_count in stand_ins:
            recorder.add(tensor, owner, is_readable=is_count)
        try:
            with recorder:
                step(clone)
        finally:
            self._check(clone, optimizer)
        self._known = RecordedUpdate(recorder, len(stand_ins))
        return self._known

    def _prepare(
        self, optimizer: Optimizer, counts: Sequence[float]
    ) -> tuple[Any, list[tuple[Tensor, int | None, bool]]]:
        """Returns an optimizer over the stand-ins, and these with their numbers."""
        clone: Any = object.__new__(type(optimizer))
        vars(clone).update(vars(optimizer))
        clone.state = defaultdict(dict)
        clone.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
        found: list[tuple[Tensor, int | None, bool]] = []
        remaining = iter(counts)
        for number, (group, one) in enumerate(zip(self._groups_of, self._stand_ins, strict=True)):
            clone.param_groups[group]["params"].append(one.parameter)
            if one.state:
                clone.state[one.parameter] = dict(one.state)
            for count in one.counts:
                count.fill_(next(remaining))
            found += [(tensor, number, is_count) for tensor, is_count in one.tensors]
        for i, name in self._options:
            found.append((clone.param_groups[i][name], None, False))
        return clone, found

    def _check(self, clone: Any, optimizer: Optimizer) -> None:
        """Raises if the step has changed more than tensors."""
        for one in self._stand_ins:
            entry = clone.state.get(one.parameter, _NO_STATE)
            is_as_before = are_identical([*entry.values()], [*one.state.values()])
            if [*entry] != [*one.state] or not is_as_before:
                raise MakesState("each step makes state")
        for before, after in zip(optimizer.param_groups, clone.param_groups, strict=True):
            for name, value in after.items():
                if name != "params" and value is not before.get(name, self):
                    raise Unrecordable(f"it changes its option {name!r}")

    # The update

    def launch(
        self, recorded: RecordedUpdate, grads: list[Any], groups: Sequence[dict[str, Any]]
    ) -> None:
        """Makes the operations on the replica's parameters, with these gradients."""
        given: list[Any] = []
        for one in self._stand_ins:
            parameters, *state = one.columns
            given += [parameters, one.get_grads(grads), *state]
        given += [[groups[i][name]] for i, name in self._options]
        is_again, self._launched = recorded is self._launched, recorded
        stay = bool(grads) and hasattr(grads[0], STAYS)
        if not is_again or (self._graph is not None and stay and not self._graph.grads_stay):
            self._graph = None
        elif self._graph is None and has_graphs(self.device):
            are_static = [stays for one in self._stand_ins for stays in one.are_static]
            are_static += [False] * len(self._options)
            copied = {column for column, stays in enumerate(are_static) if not stays}
            # What a graph writes to copies of gradients would be lost.
            if copied.isdisjoint(recorded.written):
                self._graph = _UpdateGraph(recorded, given, are_static, self._chunks, self.device)
                self._graph.grads_stay, self._graph.get_moves = stay, self._get_moves
        if self._graph is None:
            recorded.run(given, self._chunks)
        else:
            self._graph.run(given)


class _StandIn:
    """A parameter of one element for those that the optimizer treats alike.

    Attributes:
        parameter, state: of the kinds of the first member's.
        tensors: these, with whether each is a count: a value that the optimizer's code reads.
        counts: the counts among them.
        count_columns: the members' counts.
        columns: the members, and their state by name.
        are_static: of columns and gradients, whether each has the same tensors in every step.
        get_grads: returns the members' gradients, of all.
        chunks: the members that are updated together where each is updated by itself.
    """

    def __init__(
        self, params: Sequence[Any], entries: Sequence[Any], grad: Tensor, members: list[int]
    ) -> None:
        mine, self.get_grads = [params[i] for i in members], slot_getter(members)
        entry: dict[str, Any] = entries[members[0]]
        names = [name for name, value in entry.items() if isinstance(value, Tensor)]
        self.columns = [mine, *[[entries[i][name] for i in members] for name in names]]
        self.are_static = [True, False, *[True] * len(names)]
        self.parameter = nn.Parameter(_one_like(mine[0], mine[0].dim()), requires_grad=False)
        self.parameter.grad = _one_like(grad, mine[0].dim())
        self.state = {
            name: _one_like(value, value.dim()) if isinstance(value, Tensor) else value
            for name, value in entry.items()
        }
        are_counts = [_is_count(name, entry[name]) for name in names]
        state = [self.state[name] for name in names]
        self.tensors = [
            (self.parameter, False),
            (self.parameter.grad, False),
            *zip(state, are_counts, strict=True),
        ]
        self.counts = [tensor for tensor, is_count in self.tensors if is_count]
        pairs = zip(self.columns[1:], are_counts, strict=True)
        self.count_columns = [column for column, is_count in pairs if is_count]
        self.chunks: list[slice] = []
        total = start = 0
        most = max(CHUNK_BYTES, *[p.nbytes for p in mine])
        for stop, one in enumerate(mine):
            if stop > start and total + one.nbytes > most:
                self.chunks.append(slice(start, stop))
                total, start = 0, stop
            total += one.nbytes
        self.chunks.append(slice(start, len(mine)))


class _UpdateGraph:
    """A recorded update of one replica as a CUDA graph.

    Attributes:
        grads_stay: whether it reads gradients where a packed pass leaves them; others are copied
            there.
        get_moves: see UpdatePlan.
    """

    grads_stay = False
    get_moves: Callable[[], object] = object

    def __init__(
        self,
        recorded: RecordedUpdate,
        given: Sequence[Sequence[Tensor]],
        are_static: Sequence[bool],
        chunks: Sequence[Sequence[slice]],
        device: torch.device,
    ) -> None:
        sizes = [*map(len, given)]
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + size)
        columns = [slice(start, stop) for start, stop in pairwise(ends)]
        stay = [i for c, stays in zip(columns, are_static, strict=True) if stays for i in _all(c)]
        self._written = [i for column in sorted(recorded.written) for i in _all(columns[column])]
        self._get_written = slot_getter(self._written)

        def call(inputs: list[Tensor]) -> Sequence[Any]:
            recorded.run([inputs[column] for column in columns], chunks)
            return ()

        piece = ProgramPiece(True, None, [*range(ends[-1])], [], self._written)
        self._program = CallableProgram(piece, {device: call}, is_raw=False)
        self._pieces = CapturedPieces(
            [device], stay, CudaGraph, has_fixed_sizes=True, sees_first=False
        )

    def run(self, given: Sequence[Sequence[Tensor]]) -> None:
        """Makes the update."""
        values = [*chain.from_iterable(given)]
        self._pieces.moves = self.get_moves()
        self._pieces.run(self._program, {0: values})
        increment_version(self._get_written(values))


def _all(column: slice) -> range:
    return range(column.start, column.stop)


def device_options(groups: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """Returns the groups and names of options that are tensors on a GPU."""
    return [
        (i, name)
        for i, group in enumerate(groups)
        for name, value in group.items()
        if isinstance(value, Tensor) and value.device.type != "cpu"
    ]


def _state_of(optimizer: Optimizer) -> tuple[list[Any], list[Any], list[Any], list[str]]:
    """Returns the keys and entries of an optimizer's state, and values and names in these."""
    state: Any = optimizer.state  # one replica's, a plain dict
    entries = [*dict.values(state)]
    values = [*chain.from_iterable(map(dict.values, entries))]
    return [*dict.keys(state)], entries, values, [*chain.from_iterable(entries)]


def _kind_of(parameter: Tensor, grad: Tensor, entry: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what the optimizer's code may look at, and as the last entry the counts."""
    state = [
        (name, v.dtype, v.device.type, not v.dim()) if isinstance(v, Tensor) else (name, v)
        for name, v in entry.items()
    ]
    counts = [float(v) for name, v in entry.items() if _is_count(name, v)]
    of_grad = grad.dtype, grad.device.type
    own = type(parameter), parameter.dtype, parameter.device.type, not parameter.dim()
    return *own, of_grad, tuple(state), tuple(counts)


def _is_count(name: str, value: Any) -> bool:
    is_number = isinstance(value, Tensor) and not value.dim() and value.device.type == "cpu"
    return is_number and name in _COUNTS


def _one_like(tensor: Tensor, dim: int) -> Tensor:
    """Returns a tensor of one element, without a dimension if ``dim`` is 0."""
    return torch.ones((1,) if dim else (), dtype=tensor.dtype, device=tensor.device)


def _overlap(values: Sequence[Any]) -> bool:
    """Whether tensors share elements: one by one they would be updated in another order."""
    tensors = [v for v in values if isinstance(v, Tensor) and v.numel()]
    spans = sorted((v.data_ptr(), v.data_ptr() + extent_bytes(v)) for v in tensors)
    return any(stop > start for (_, stop), (start, _) in pairwise(spans))
