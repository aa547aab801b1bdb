"""The arguments of a split call: a part for each replica, of all that can be changed its own.

[Note: Arguments that forward changes]
Every replica is handed a part of its own of all that can be changed, and what it has done to that
is joined into the caller's object, as outputs are joined. So a cache, a list or a dict that is
passed, filled and passed again is what one device would have made of it:

    an argument                                 a replica gets
    tensor or array, batched                    its rows: a view where it is on the device
    tensor, not batched                         a copy, if it is small and needs no gradient
    list, dict, set, deque, dataclass           a copy, with its part of what is inside
    object that is data (a key-value cache)     a copy, with its part of what is inside
    PerReplica                                  its part
    num_items_in_batch                          its share, see below
    anything else: a module, a function         the object itself

When all have returned, each copy is compared with what was handed out: the contents by identity,
tensors by version. How changes are joined: ``joiner.py``. What cannot be joined is an error that
names the argument, and then the caller's objects are as they were; so is a change of an object
that all share. Iterators, which every replica would consume, are refused.

``num_items_in_batch`` is what transformers calls the number of target tokens of the whole batch,
by which a model divides a sum. Outputs of replicas are averaged by examples; with its share by
examples, ``items * size / num_examples``, each replica's summand comes out exactly, however the
tokens are spread, and a mean that is added to it (an auxiliary loss) stays a mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from mirror.device.device_mesh import DeviceMesh
from mirror.device.side_streams import CopyStreams
from mirror.errors import BatchError, StrategyError
from mirror.execution.current_replica import current
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.replica.scatter_gather.containers import (
    IMMUTABLE,
    assign,
    contents_of,
    empty_like,
    is_consumed,
    is_leaf,
    is_shared,
    leaves_in,
    mapped,
    snapshot,
)
from mirror.values import ABSENT, PerReplica, is_number

# Larger tensors that are not batched are shared by replicas: a change of one is refused.
_MOST_COPIED_BYTES = 2**20
_COUNT = "num_items_in_batch"
_MOST_DESCRIBED = 12


class SplitPlan:
    """How one call is split.

    Attributes:
        active: the replicas that take part.
        num_examples: of the whole batch; ``None`` for a call that one replica makes whole.

    Args:
        places: where the replicas are. See [Note: Places].
        copies: what tensors of the host travel by to GPUs.
    """

    __slots__ = (
        "_copies",
        "_pinned",
        "_places",
        "_reads_callers",
        "active",
        "devices",
        "num_examples",
        "sizes",
        "starts",
    )

    def __init__(
        self,
        sizes: Sequence[int],
        places: DeviceMesh,
        num_examples: int | None,
        copies: CopyStreams | None = None,
    ) -> None:
        self._copies = copies
        self._pinned: dict[int, tuple[Tensor, Tensor]] = {}
        self._reads_callers = False  # memory that the caller has pinned
        self.sizes = sizes
        self.starts = list(accumulate(sizes, initial=0))
        self.devices = places.positions[0]
        self._places = places if places.is_model_parallel else None
        self.num_examples = num_examples
        self.active = list(range(len(sizes)))
        if not all(sizes):
            self.active = [r for r in self.active if sizes[r]] or [0]

    def is_batched(self, value: Any) -> bool:
        """Whether a tensor or array is split: it has the examples as its first dimension."""
        shape = value.shape
        return len(shape) > 0 and bool(shape[0] == self.num_examples)

    def rows(self, tensor: Tensor, replica_id: int) -> Tensor:
        """Returns a replica's view of a batched tensor."""
        # narrow, not split: a single view may be changed in place under autograd.
        return tensor.narrow(0, self.starts[replica_id], self.sizes[replica_id])

    def pin(self, arguments: Any) -> None:
        """Makes the tensors of the host in the arguments ready to travel, once for all parts."""
        if self._copies is not None:
            for value in leaves_in(arguments):
                if _travels(value):
                    whole = self._copies.pinned(value)
                    self._pinned[id(value)] = value, whole
                    self._reads_callers |= whole is value

    def finish(self) -> None:
        """Waits until nothing reads the caller's own memory any more: it may be written to."""
        if self._copies is not None and self._reads_callers:
            self._copies.synchronize()

    def device_for(self, tensor: Tensor, replica_id: int) -> torch.device:
        """Returns where a replica is to have its part of what comes apart."""
        devices = self.devices if self._places is None else self._places.replica_at(tensor.device)
        return devices[replica_id]

    def to_replica(self, tensor: Tensor, replica_id: int) -> Tensor:
        """Returns a replica's rows of a tensor, or all of it, on its device; maybe itself.

        A host that waited for a copy would wait for the GPU's earlier work, too, and hold up the
        other replicas: see [Note: Turns].
        """
        devices = self.devices if self._places is None else self._places.replica_at(tensor.device)
        device, is_ready = devices[replica_id], False
        if self._copies is not None:
            is_ready = id(tensor) in self._pinned
            _, tensor = self._pinned.get(id(tensor), (tensor, tensor))
        shape = tensor.shape
        part = tensor
        if len(shape) > 0 and shape[0] == self.num_examples:
            part = tensor.narrow(0, self.starts[replica_id], self.sizes[replica_id])
        if self._copies is None or part.device == device:
            return part.to(device)
        if is_ready or (_travels(part) and not part.is_pinned()):
            return self._copies.deliver(part, device)
        if part.device.type == "cpu" and current.replica is not None:
            current.replica.run.lockstep.let_next_begin(replica_id)
        return part.to(device)


class ReplicaArgs:
    """What one replica is handed of the arguments.

    Attributes:
        own: by ``id`` of what the caller passed, that and what the replica has in its place.
        given: objects of the caller's, their copies, and what those held when handed out.
        tensors: tensors of the caller's, the replica's, and the versions of those.
        shared: objects that all replicas have, and what they held.
        has_share: whether a ``num_items_in_batch`` was among them.
    """

    __slots__ = ("given", "has_share", "own", "replica_id", "shared", "split", "tensors")

    def __init__(self, split: SplitPlan, replica_id: int) -> None:
        self.split = split
        self.replica_id = replica_id
        self.own: dict[int, tuple[Any, Any]] = {}
        self.given: list[tuple[Any, Any, dict[Any, Any]]] = []
        self.tensors: list[tuple[Tensor, Tensor, int]] = []
        self.shared: list[tuple[Any, dict[Any, Any]]] = []
        self.has_share = False

    def has_ignored(self) -> bool:
        """Whether integers below zero came, as those that losses ignore; waits for the device."""
        whole = [
            part for _, part in self.own.values() if isinstance(part, Tensor) and part.numel()
        ]
        return any(bool((t < 0).any()) for t in whole if t.dtype in (torch.int32, torch.int64))

    def from_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ()
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the replica's arguments; ``names`` are those of the positional parameters."""
        own = list(map(self.of, args))
        if _COUNT in names and names.index(_COUNT) < len(own):
            own[names.index(_COUNT)] = self._share(args[names.index(_COUNT)])
        if not kwargs:
            return tuple(own), kwargs
        return tuple(own), {key: self._of_entry(key, value) for key, value in kwargs.items()}

    def of(self, value: Any) -> Any:
        """Returns the replica's part of a value, the same one for the same object.

        Raises:
            BatchError: a PackedSequence, or a PerReplica without a part for this replica.
            StrategyError: an iterator.
        """
        kind = type(value)
        if kind in IMMUTABLE:
            return value
        key = id(value)
        if key in self.own:
            return self.own[key][1]
        if isinstance(value, Tensor):
            part: Any = self._of_tensor(value)
        elif is_leaf(value):
            part = self._of_leaf(value)
        else:
            return self._of_contents(value)
        self.own[key] = value, part
        return part

    def _of_contents(self, value: Any) -> Any:
        if isinstance(value, PackedSequence):
            raise BatchError(
                "a PackedSequence cannot be split over the replicas, its examples are "
                "interleaved; pass the padded tensor and its lengths, and pack inside forward"
            )
        if is_consumed(value):
            raise StrategyError(
                f"an iterator ({type(value).__name__}) cannot be an argument of a split call: "
                "every replica would take from it what the others then miss; pass a list or a "
                "tensor, or call the module inside strategy.run"
            )
        key = id(value)
        if isinstance(value, tuple):
            part = mapped(value, self.of)
            self.own[key] = value, part
        elif is_shared(value):
            self.own[key] = value, value
            self.shared.append((value, snapshot(value)))
            part = value
        else:
            part = empty_like(value)
            self.own[key] = value, part  # first: it may hold itself
            contents = {k: self._of_entry(k, child) for k, child in contents_of(value).items()}
            assign(part, contents)
            self.given.append((value, part, contents))
        return part

    def _of_entry(self, key: Any, value: Any) -> Any:
        return self._share(value) if key == _COUNT else self.of(value)

    def _share(self, items: Any) -> Any:
        split = self.split
        is_count = is_number(items) or (isinstance(items, Tensor) and items.dim() == 0)
        if not is_count or not split.num_examples or len(split.active) == 1:
            return self.of(items)
        self.has_share = True
        return self.of(items) * (split.sizes[self.replica_id] / split.num_examples)

    def _of_leaf(self, value: Any) -> Any:
        if isinstance(value, PerReplica):
            part = value.values[self.replica_id] if self.replica_id < len(value.values) else ABSENT
            if part is ABSENT:
                raise BatchError(
                    f"a PerReplica among the arguments has no part for replica {self.replica_id},"
                    f" which has {self.split.sizes[self.replica_id]} of the examples; it came out "
                    "of a smaller batch: begin anew with every batch of another size"
                )
            if isinstance(part, Tensor) and not part.is_meta:
                return part.to(self.split.device_for(part, self.replica_id))
            return part
        if isinstance(value, np.ndarray) and self.split.is_batched(value):
            start = self.split.starts[self.replica_id]
            return value[start : start + self.split.sizes[self.replica_id]]
        return value

    def _of_tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, MirroredTensor) or tensor.is_meta:
            return tensor
        split, shape = self.split, tensor.shape
        if len(shape) > 0 and shape[0] == split.num_examples:
            part = split.to_replica(tensor, self.replica_id)
            if part.device == tensor.device:
                return part  # a view
        elif len(split.active) > 1 and _is_copied(tensor):
            # Not in the caller's inference mode, so that it has a version.
            with torch.inference_mode(False), torch.no_grad():
                part = split.to_replica(tensor, self.replica_id)
                part = part.clone() if part is tensor else part
        else:
            part = split.to_replica(tensor, self.replica_id)
        if not part.is_inference():
            self.tensors.append((tensor, part, part._version))
        return part


def _travels(value: Any) -> bool:
    """Whether a value goes to GPUs by way of pinned memory: its copies are in no graph."""
    is_plain = type(value) is Tensor and value.layout is torch.strided
    return is_plain and value.device.type == "cpu" and not value.requires_grad


def must_move(value: Any, devices: Sequence[torch.device]) -> bool:
    """Whether a call on these devices needs copies of what it is given, to bring tensors there."""
    found, seen = [value], set[int]()
    while found:
        value = found.pop()
        if isinstance(value, Tensor):
            is_elsewhere = value.device not in devices and not value.is_meta
            if is_elsewhere and not isinstance(value, MirroredTensor):
                return True
        elif not is_leaf(value) and id(value) not in seen and not is_consumed(value):
            seen.add(id(value))
            if not is_shared(value):
                found += contents_of(value).values()
    return False


def describe_split(split: SplitPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns which argument went as which parts, for errors."""
    went, whole = [], []
    named = [(f"argument {key!r}", value) for key, value in (*enumerate(args), *kwargs.items())]
    for path, tensor in _tensors_of(named):
        shape = tuple(tensor.shape)
        if split.is_batched(tensor):
            parts = ", ".join(str((split.sizes[r], *shape[1:])) for r in split.active)
            went.append(f"{path} of shape {shape} went as {parts}")
        elif shape:
            whole.append(f"{path} of shape {shape}")
    text = "; ".join(went[:_MOST_DESCRIBED])
    if whole:
        text += f"; whole, to every replica, went {', '.join(whole[:_MOST_DESCRIBED])}"
    return text


def _tensors_of(named: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, value in named:
        if isinstance(value, (Tensor, np.ndarray)):
            yield name, value
        elif not is_leaf(value) and id(value) not in seen and not is_consumed(value):
            seen.add(id(value))
            if not is_shared(value):
                children = contents_of(value).items()
                yield from _tensors_of([(f"{name}[{key!r}]", child) for key, child in children])


def _is_copied(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.layout is not torch.strided:
        return False
    return tensor.numel() * tensor.element_size() <= _MOST_COPIED_BYTES
