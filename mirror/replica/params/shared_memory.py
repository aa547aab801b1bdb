"""Where the mirrored parameters of a strategy lie in memory, and which of them share it.

[Note: Shared memory]
On one device two parameters may lie in one memory: ``b.weight.data = a.weight.data``, a transpose
of it, ``nn.Parameter(a.weight)``. A step that writes one of them writes the other.
Problem: every other replica has memory of its own, where nothing is shared by itself.
Rule: what lies in the memory of a mirrored parameter on the first replica is a view of that
parameter's copy on every other one. That needs equal strides on all replicas. If the memory is
shared in part, or as another dtype, it raises StrategyError. The same holds for buffers in the
memory of a parameter, or of another buffer; of those, which may be constants, no error is raised.
Consequence: it is looked up where a tensor gets its memory: when it is mirrored, and by
``p.data = ...``. Nothing is looked up in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from mirror.comm.communicator import extent_bytes
from mirror.errors import StrategyError

address_of: Any = Tensor.data_ptr


class Placed(Protocol):
    """A mirrored parameter or buffer, as far as its memory is concerned."""

    name: str

    @property
    def home(self) -> Tensor: ...

    @property
    def shown(self) -> Tensor: ...

    @property
    def targets(self) -> Sequence[Tensor]: ...

    @property
    def handles(self) -> Sequence[object]: ...


PlacedT = TypeVar("PlacedT", bound=Placed)


class PlacedRows(NamedTuple, Generic[PlacedT]):
    """All parameters of a strategy, for comparisons in C.

    Attributes:
        variables: the parameters.
        shown, handles: of each.
        no_handles: an empty list for each.
        placed, homes: ``shown`` and ``home`` of those that have a storage.
    """

    variables: tuple[PlacedT, ...]
    shown: list[Tensor]
    handles: list[Sequence[object]]
    no_handles: list[Sequence[object]]
    placed: list[Tensor]
    homes: list[Tensor]


class StorageIndex(Generic[PlacedT]):
    """The parameters, or the buffers, of a strategy by the storage in which ``home`` lies.

    Attributes:
        rows: what ``make_rows`` has returned, until a parameter comes, moves or goes.
        num_moves: how often a replica's copy of any parameter has got other memory.
    """

    rows: PlacedRows[PlacedT] | None = None

    def __init__(self) -> None:
        self.num_moves = 0
        # Tuples: a garbage collection may remove a parameter at any time.
        self._by_storage: dict[int, tuple[PlacedT, ...]] = {}
        self._storages: dict[PlacedT, int] = {}

    def enter(self, variable: PlacedT) -> None:
        """Enters a parameter that is new, or has other memory."""
        self.remove(variable)
        storage = self._storages[variable] = storage_of(variable.home)
        if storage:
            self._by_storage[storage] = (*self._by_storage.get(storage, ()), variable)

    def remove(self, variable: PlacedT) -> None:
        """Removes a parameter; takes no lock."""
        self.rows = None
        storage = self._storages.pop(variable, 0)
        left = tuple(v for v in self._by_storage.pop(storage, ()) if v is not variable)
        if left:
            self._by_storage[storage] = left

    def make_rows(self) -> PlacedRows[PlacedT]:
        """Returns all parameters."""
        known = tuple(self._storages)  # at once: a garbage collection may remove some
        placed = [variable for variable in known if self._storages.get(variable)]
        rows = PlacedRows(
            known,
            [v.shown for v in known],
            [v.handles for v in known],
            [[] for _ in known],
            [v.shown for v in placed],
            [v.home for v in placed],
        )
        if len(known) == len(self._storages):  # a garbage collection has removed none meanwhile
            self.rows = rows
        return rows

    def find(self, value: Tensor, name: str, but: PlacedT | None = None) -> PlacedT | None:
        """Returns the parameter in whose memory a tensor lies; ``None`` if there is none.

        Args:
            name: the tensor's, for messages.
            but: a parameter that does not count.

        Raises:
            StrategyError: they share memory in part, or with another dtype.
        """
        storage = storage_of(value)
        apart = None
        for variable in self._by_storage.get(storage, ()) if storage else ():
            home = variable.home
            if variable is but or storage_of(home) != storage or not _overlap(value, home):
                continue
            if _is_view(value, variable):
                return variable
            apart = apart or variable
        if apart is not None:
            raise StrategyError(
                f"{name!r} shares memory with parameter {apart.name!r} in part, or with another "
                "dtype or other strides; replicas have memory of their own, in which that cannot "
                "be repeated: make them one parameter (b.weight = a.weight), or take views of one "
                "in forward"
            )
        return None


def storage_of(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage; 0 if it has none, or no elements."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0
    return tensor.untyped_storage().data_ptr()


def view_in(variable: Placed, value: Tensor, target: Tensor) -> Tensor:
    """Returns the view of ``target`` that ``value`` is of ``variable.home``."""
    copy, home = target.detach(), variable.home
    if lie_alike(value, home):
        return copy
    offset = value.storage_offset() - home.storage_offset()
    return copy.as_strided(value.shape, value.stride(), copy.storage_offset() + offset)


def find_shared(variables: Iterable[PlacedT]) -> tuple[PlacedT, PlacedT] | None:
    """Returns the first two parameters that share elements; ``None`` if there are none."""
    by_storage: dict[int, list[PlacedT]] = {}
    for variable in variables:
        storage = storage_of(variable.home)
        known = by_storage.setdefault(storage, [])
        for other in known if storage else ():
            if _overlap(variable.home, other.home):
                return other, variable
        known.append(variable)
    return None


def _is_view(value: Tensor, variable: Placed) -> bool:
    """Whether all replicas can have a view of the parameter that is ``value`` on the first."""
    home = variable.home
    if value.dtype != home.dtype or value.is_conj() or value.is_neg():
        return False
    if lie_alike(value, home):
        return True
    (begin, end), (first, last) = _extent(value), _extent(home)
    if begin < first or last < end or not is_dense(home):
        return False
    return all(target.stride() == home.stride() for target in variable.targets)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns where a tensor begins and ends in its storage, in elements."""
    begin = int(tensor.storage_offset())
    return begin, begin + extent_bytes(tensor) // tensor.element_size()


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has no gaps in memory."""
    begin, end = _extent(tensor)
    return end - begin == tensor.numel()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage share elements; two columns of a matrix share none."""
    (begin, end), (first, last) = _extent(a), _extent(b)
    size, other = a.element_size(), b.element_size()
    if end * size <= first * other or last * other <= begin * size:
        return False
    if size != other or (is_dense(a) and is_dense(b)):
        return True
    origin = min(begin, first)
    marks = torch.zeros(max(end, last) - origin, dtype=torch.bool, device="cpu")
    in_a, in_b = (
        marks.as_strided(t.shape, t.stride(), t.storage_offset() - origin) for t in (a, b)
    )
    in_b.fill_(True)
    return bool(in_a.any())


# The invariant: what forward reads and what a step writes is one memory


def lie_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same memory, read in the same way; sparse ones always are."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return a.layout is b.layout
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )
