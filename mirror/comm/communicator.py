"""Communicator: the contract of every communication backend, and the checks of arguments.

The checks compare dtypes and layouts, and find tensors that share memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, pairwise
from operator import itemgetter, sub
from typing import ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

from mirror.base.process_bound import NoCopy
from mirror.comm.collective_lock import hold_lock
from mirror.comm.packing import copy_back, flatten, plan_packs, view_in_memory_order
from mirror.devices import resolve
from mirror.errors import BackendError, DeviceError, ShapeError, short_repr
from mirror.values import is_int, is_real

__all__ = [
    "DEFAULT_TIMEOUT_SECONDS",
    "DTYPES",
    "HALF_DTYPES",
    "OPS",
    "Communicator",
    "writing_in_place",
]

# The default of torch.distributed: a device may have a lot of work in front of the collective in
# which the other devices wait for it.
DEFAULT_TIMEOUT_SECONDS = 600.0

# Methods of a subclass that ``CollectiveLock`` serializes.
_COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_reduce_checked",
    "all_reduce_lists",
    "broadcast",
    "close",
    "reduce_scatter",
)


class Communicator(NoCopy, ABC):
    """Collectives over ``N`` replicas; derive from this class to add a backend.

    In every collective ``tensors[i]`` belongs to replica ``i`` and is on ``devices[i]``. All
    tensors have the same shape and dtype, are contiguous, and no two share memory. Collectives
    work in place and are not differentiable. They are enqueued on each device's current stream,
    and return before the devices are done.

    "Chunk ``i``" is part ``i`` of ``N`` of a flat tensor, as ``torch.tensor_split`` cuts it.

    Dtypes are float32, float64, float16, bfloat16, int32, int64 and uint8. Half types are
    accumulated in float32 and rounded once. Integers wrap around. If ``min`` or ``max`` reduces
    zeros of both signs, the sign of the result is not specified, but it is the same everywhere.

    A subclass implements the four collectives, calls ``check_tensors`` in each, and overrides
    ``unavailable_reason`` and ``close`` if necessary.

    Any thread may call a collective, on any stream. The collectives of a subclass, and its
    ``close``, are serialized on the host and on every device, unless the class is ``concurrent``.
    So a subclass may keep memory that its collectives share, but a collective must not wait for
    another collective of this communicator in another thread. See
    ``mirror/comm/collective_lock.py``.

    Attributes:
        name: the argument of ``mirror.comm.register``, or else the name of the class.
        devices: one per replica.
        deterministic: whether sums are in replica order. Then they do not depend on which tensors
            are reduced together.
        waits: whether replicas wait for each other inside a collective; then the constructor takes
            ``timeout_seconds``.
        needs_trial: whether a self-test on the same GPUs must pass before the first use.
        risky: whether that self-test may hang the process, or end its use of CUDA, if the driver
            reports wrong peer access. Then another process runs the self-test first: see
            ``mirror/comm/subprocess_probe.py``. The constructor takes ``timeout_seconds``.
        concurrent: whether several collectives may run at once, from several threads or on several
            streams. Subclasses do not inherit it.
        packs: whether lists of tensors are reduced in flat buffers instead of in place.
    """

    name: ClassVar[str]
    deterministic: ClassVar[bool] = False
    waits: ClassVar[bool] = False
    needs_trial: ClassVar[bool] = False
    risky: ClassVar[bool] = False
    concurrent: ClassVar[bool] = False
    packs: ClassVar[bool] = True
    _closed = False
    _instead = "make another one over the same devices, for instance with mirror.comm.create"

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__
        cls.concurrent = cls.__dict__.get("concurrent", False)
        if cls.concurrent:
            return
        for name in _COLLECTIVES:
            method = getattr(cls, name)
            # The methods of this class only call those of the subclass.
            if method is not getattr(Communicator, name):
                setattr(cls, name, hold_lock(method))

    def __init__(self, devices: Sequence[torch.device | str]) -> None:
        """Serves one replica per entry of ``devices``.

        Raises:
            DeviceError: a device does not exist.
        """
        self.devices = resolve(devices)

    @classmethod
    def unavailable_reason(cls, devices: Sequence[torch.device | str]) -> str | None:
        """Returns why this backend cannot serve these devices; ``None`` if it may.

        It uses no device; see ``needs_trial`` for a test that does.
        """
        return None

    @abstractmethod
    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum", scale: float = 1.0) -> None:
        """Reduces the tensors in place; afterwards all have the same bits.

        Args:
            tensors: one per replica; afterwards each holds ``scale * op(tensors)``.
            op: "sum", "min", "max" or "prod".
            scale: a factor for the result, for floating dtypes only.

        Raises:
            ShapeError: the tensors differ in number, shape or dtype, share memory, or are not
                contiguous.
            DeviceError: a tensor is not on its replica's device.
            TypeError: the dtype is not supported (bool), or ``scale`` is not a number, or is given
                for integers.
            ValueError: the op is unknown.
            BackendError: the communicator is closed.
        """

    @abstractmethod
    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        """Copies the tensor of replica ``root`` into all other tensors.

        Raises:
            TypeError: ``root`` is not an integer.
            ValueError: ``root`` is not a replica. The rest as for ``all_reduce``.
        """

    @abstractmethod
    def reduce_scatter(self, tensors: Sequence[Tensor], op: str = "sum") -> None:
        """Leaves chunk ``i`` of the reduction in chunk ``i`` of ``tensors[i]``.

        The values of the other chunks of ``tensors[i]`` are not specified afterwards. Raises as
        ``all_reduce``.
        """

    @abstractmethod
    def all_gather(self, tensors: Sequence[Tensor]) -> None:
        """Copies chunk ``i`` of ``tensors[i]`` into chunk ``i`` of all other tensors.

        Raises as ``all_reduce``.
        """

    def all_reduce_lists(
        self,
        lists: Sequence[Sequence[Tensor]],
        op: str = "sum",
        scale: float = 1.0,
        bytes_per_pack: int = 25 * 2**20,
    ) -> None:
        """Reduces many tensors per replica in place, in packs.

        Args:
            lists: ``lists[i]`` has the tensors of replica ``i``, with any strides and dtypes. At
                each position, all replicas have the same shape and dtype. No two elements share
                memory.
            op, scale: as for ``all_reduce``.
            bytes_per_pack: the bytes of each replica in one ``all_reduce``, see ``plan_packs``;
                0 reduces tensor by tensor.

        Raises:
            ShapeError: the lists differ in length, or their tensors in shape or dtype, or two
                tensors share memory.
            TypeError: ``bytes_per_pack`` is not an integer.
            ValueError: ``bytes_per_pack`` is negative. The rest as for ``all_reduce``.
        """
        if not is_int(bytes_per_pack):
            raise TypeError(
                f"bytes_per_pack must be a number of bytes, an int; got "
                f"{short_repr(bytes_per_pack)}; pass 0 to reduce tensor by tensor"
            )
        if bytes_per_pack < 0:
            raise ValueError(
                f"bytes_per_pack must be at least 0; got {bytes_per_pack}; pass 0 to reduce "
                "tensor by tensor"
            )
        self.all_reduce_checked(self.check_lists(lists, op, scale), op, scale, bytes_per_pack)

    def all_reduce_checked(
        self,
        columns: Sequence[Sequence[Tensor]],
        op: str,
        scale: float,
        bytes_per_pack: int,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        """Reduces lists as ``all_reduce_lists``, without checks, as for gradients of one model.

        Checking a tensor takes as long as reducing a small one.

        Args:
            wire_dtype: the dtype in which float32 and float64 are sent. They are cast when they
                are packed; the result, rounded once, is cast back.
        """
        first = columns[0]
        packs: tuple[tuple[int, ...], ...] = tuple(zip(range(len(first)), strict=True))
        if bytes_per_pack:
            sizes, dtypes = [t.nbytes for t in first], [t.dtype for t in first]
            packs = plan_packs(sizes, dtypes, bytes_per_pack)
        with writing_in_place(chain(*columns)):
            columns = view_in_memory_order(columns)
            for pack in packs:
                sent = wire_dtype if first[pack[0]].dtype in WIDE_DTYPES else None
                if sent is None and len(pack) == 1:
                    tensors = list(map(itemgetter(pack[0]), columns))
                    if all(map(Tensor.is_contiguous, tensors)):
                        self.all_reduce(tensors, op, scale)
                        continue
                parts = [[column[i] for i in pack] for column in columns]
                buffers = [flatten(part, sent) for part in parts]
                self.all_reduce(buffers, op, scale)
                for buffer, part in zip(buffers, parts, strict=True):
                    copy_back(buffer, part)

    def prepare(self, reductions: Iterable[tuple[str, torch.dtype]]) -> None:
        """Prepares reductions with these operations and dtypes, and all copies.

        It compiles kernels if the backend has some. The call is optional. Without it, the first
        collective of each operation and dtype takes a second or two longer.
        """

    @contextmanager
    def setting_timeout(self, seconds: float) -> Iterator[None]:
        """Sets the timeout of collectives inside ``with``, if replicas wait for each other."""
        yield

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self.devices))
        return f"{type(self).__name__}([{devices}]){' (closed)' if self._closed else ''}"

    def abort(self) -> None:
        """Ends the waits of collectives in flight; any thread may call it.

        Their results are garbage, and the next collective raises ``BackendError``. Does nothing if
        replicas do not wait for each other.
        """

    def close(self) -> None:
        """Frees the resources; afterwards collectives raise ``BackendError``. Idempotent.

        It waits for enqueued collectives. While an exception propagates it waits only some
        seconds, and then aborts them.
        """
        self._closed = True

    def check_tensors(
        self, tensors: Sequence[Tensor], op: str = "sum", scale: float = 1.0, root: int = 0
    ) -> None:
        """Raises the errors that the collectives document, before any device is used."""
        self._check_call(tensors, op, root)
        have_layout = have_same_layout(tensors, self.devices)
        if not have_layout or not all(map(Tensor.is_contiguous, tensors)):
            raise_for_tensors(tensors, self.devices)
        check_dtype(tensors[0], scale)
        check_disjoint(tensors)

    def check_lists(
        self, lists: Sequence[Sequence[Tensor]], op: str = "sum", scale: float = 1.0
    ) -> list[list[Tensor]]:
        """Raises the errors that ``all_reduce_lists`` documents.

        Returns:
            The argument as lists.
        """
        self._check_call(lists, op)
        columns = [list(column) for column in lists]
        first = columns[0]
        for replica_id, column in enumerate(columns):
            if len(column) != len(first):
                raise ShapeError(
                    "all replicas need lists of equal length; replica 0 has "
                    f"{len(first)} tensors and replica {replica_id} has {len(column)}; pass the "
                    "same tensors of every replica in the same order"
                )
        for i, row in enumerate(zip(*columns, strict=True)):
            if not have_same_layout(row, self.devices):
                raise_for_mismatch(row, self.devices, i)
            if not (all(map(Tensor.is_contiguous, row)) or all(map(has_own_elements, row))):
                raise ShapeError(
                    "no two elements of a collective may share memory; those of one of the "
                    f"tensors at {i} do, as torch.expand leaves them; pass a clone of it"
                )
        for tensor in {tensor.dtype: tensor for tensor in first}.values():
            check_dtype(tensor, scale)
        if self._share_memory(columns):
            raise ShapeError(
                "no two tensors of a collective may share memory; two of these do; pass a clone "
                "of one of them"
            )
        return columns

    def _share_memory(self, columns: Sequence[Sequence[Tensor]]) -> bool:
        return share_memory(chain(*columns))

    def _check_call(self, tensors: Sequence[object] | Tensor, op: str, root: int = 0) -> None:
        if self._closed:
            raise BackendError(
                f"a closed communicator cannot be used; this one ({self.name}) was closed; make "
                "another one with mirror.comm.create(name, devices)"
            )
        if not isinstance(op, str) or op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}; got {short_repr(op)}")
        num_replicas = len(self.devices)
        if isinstance(tensors, Tensor):
            raise TypeError("a collective needs a sequence of tensors, one per replica; got one")
        if len(tensors) != num_replicas:
            raise ShapeError(
                f"a collective over {num_replicas} replicas needs one entry per replica; got "
                f"{len(tensors)}; pass the entry of replica i at position i"
            )
        if type(root) is not int and not is_int(root):
            raise TypeError(
                f"root must be the id of a replica, an int from 0 to {num_replicas - 1}; got "
                f"{short_repr(root)}; pass the id of the replica that sends its tensor"
            )
        if not 0 <= root < num_replicas:
            raise ValueError(
                f"root must be a replica, 0 to {num_replicas - 1}; got {root}; pass the id of "
                "the replica that sends its tensor"
            )


def writing_in_place(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Returns a context in which the tensors may be written without autograd.

    Inference tensors can be written only in inference mode, which the caller may have left.
    """
    return torch.inference_mode() if any(map(Tensor.is_inference, tensors)) else torch.no_grad()


OPS = ("sum", "min", "max", "prod")
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
WIDE_DTYPES = frozenset({torch.float32, torch.float64})  # may be sent in another dtype


def raise_for_tensors(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> NoReturn:
    """Raises the error for tensors that are not contiguous, or do not match."""
    if have_same_layout(tensors, devices):
        replica_id, tensor = next(
            (i, tensor) for i, tensor in enumerate(tensors) if not tensor.is_contiguous()
        )
        raise ShapeError(
            f"a collective needs contiguous tensors; {_name(replica_id)} has shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()}; call .contiguous() on "
            "it first, or use all_reduce_lists, which takes any strides"
        )
    raise_for_mismatch(tensors, devices)


def raise_for_mismatch(
    tensors: Sequence[Tensor], devices: Sequence[torch.device], index: int | None = None
) -> NoReturn:
    """Raises the error for tensors, at ``index`` of their lists, that do not match."""
    first = tensors[0]
    for replica_id, tensor in enumerate(tensors):
        _check_tensor(tensor, devices[replica_id], replica_id, index)
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise ShapeError(
                "a collective needs tensors of equal shape and dtype on all replicas; "
                f"{_name(replica_id, index)} has {tuple(tensor.shape)} {tensor.dtype}, that "
                f"of replica 0 {tuple(first.shape)} {first.dtype}; make them equal on every "
                "replica first"
            )
    raise TypeError(
        "a collective reads the memory of tensors, which must hold their values; "
        f"{_name(0, index)}, or a tensor that corresponds to it, is negated lazily; call "
        ".resolve_neg() on it first"
    )


def _check_tensor(
    tensor: Tensor, device: torch.device, replica_id: int, index: int | None = None
) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(
            f"a collective needs dense tensors; {_name(replica_id, index)} is of kind "
            f"{kind}; pass its values as a dense tensor"
        )
    if tensor.device != device:
        raise DeviceError(
            f"the tensors of replica i must be on device i; {_name(replica_id, index)} is "
            f"on '{tensor.device}' instead of '{device}'; move it there"
        )


def _name(replica_id: int, index: int | None = None) -> str:
    return f"the tensor of replica {replica_id}" + ("" if index is None else f" at {index}")


def check_dtype(tensor: Tensor, scale: float) -> None:
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(
            f"a collective takes the dtypes {names}; got {tensor.dtype}; convert it, bool to "
            "uint8 for instance"
        )
    if type(scale) is not float and not is_real(scale):
        raise TypeError(
            f"scale must be a number, got {short_repr(scale)}; pass 1 / N to leave the mean of N "
            "replicas"
        )
    if scale != 1 and not tensor.is_floating_point():
        raise TypeError(
            f"scale is for floating dtypes only; got scale={scale} with {tensor.dtype}; reduce "
            "without a scale, and divide afterwards"
        )


def check_disjoint(tensors: Sequence[Tensor]) -> None:
    num_bytes = tensors[0].nbytes
    begins = sorted(map(Tensor.data_ptr, tensors))
    if num_bytes <= min(map(sub, begins[1:], begins), default=num_bytes):
        return
    owners = sorted((tensor.data_ptr(), i) for i, tensor in enumerate(tensors))
    for (begin, one), (end, other) in pairwise(owners):
        if end - begin < num_bytes:
            raise ShapeError(
                "no two tensors of a collective may share memory; those of replicas "
                f"{min(one, other)} and {max(one, other)} do; pass a clone of one of them"
            )


def have_same_layout(tensors: Sequence[object], devices: Sequence[torch.device]) -> bool:
    """Returns whether all are dense tensors of one shape and dtype, each on its device.

    This runs for every tensor of every collective and takes some 0.4 us for each. So it does not
    find out what is wrong; ``raise_for_mismatch`` does that.
    """
    first = tensors[0]
    if not isinstance(first, Tensor):
        return False
    shape, dtype = first.shape, first.dtype
    # A conjugate's imaginary part is contiguous only if it is a single element.
    may_be_negated = shape.numel() == 1
    for tensor, device in zip(tensors, devices, strict=True):
        if (
            not isinstance(tensor, Tensor)
            or tensor.dtype is not dtype
            or tensor.shape != shape
            or tensor.layout is not torch.strided
            or tensor.device != device
            or (may_be_negated and tensor.is_neg())
        ):
            return False
    return True


def has_own_elements(tensor: Tensor) -> bool:
    """Returns whether no two elements of a tensor share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride == 0:
                return tensor.numel() == 0
            if stride <= reach:
                return not _elements_overlap([tensor])
            reach += stride * (size - 1)
    return True


def share_memory(tensors: Iterable[Tensor]) -> bool:
    """Returns whether two of the tensors share memory; gaps between elements do not count."""
    nonempty = [tensor for tensor in tensors if tensor.nbytes]
    if all(map(Tensor.is_contiguous, nonempty)):
        spans = sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in nonempty])
        return any(begin + size > after for (begin, size), (after, _) in pairwise(spans))
    extents = sorted((t.data_ptr(), extent_bytes(t), i) for i, t in enumerate(nonempty))
    near: list[Tensor] = []
    end = 0
    for begin, num_bytes, i in extents:
        if begin >= end:
            if len(near) > 1 and _elements_overlap(near):
                return True
            near = []
        near.append(nonempty[i])
        end = max(end, begin + num_bytes)
    return len(near) > 1 and _elements_overlap(near)


def extent_bytes(tensor: Tensor) -> int:
    """Returns the number of bytes from the start of a tensor's first element to its end."""
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return tensor.element_size() * (1 + sum(stride * (size - 1) for stride, size in steps))


def _elements_overlap(tensors: Sequence[Tensor]) -> bool:
    """Returns whether two elements share memory, by comparing all addresses."""
    begins, ends = [], []
    for tensor in tensors:
        offsets = np.zeros((1,), np.int64)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
            offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
        begins.append(tensor.data_ptr() + offsets * tensor.element_size())
        ends.append(begins[-1] + tensor.element_size())
    begin, end = np.concatenate(begins), np.concatenate(ends)
    order = np.argsort(begin)
    return bool(np.any(end[order][:-1] > begin[order][1:]))
