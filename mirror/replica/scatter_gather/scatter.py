"""Scatters the arguments of a split call: each replica gets its own part.

[Note: Arguments that forward changes]
A forward may change its arguments: it fills a cache, a list or a dict. Each replica therefore
gets its own part of everything that can be changed. Its changes are joined into the caller's
object by the rules for outputs, so the object ends as on one device.

    an argument                                 a replica gets
    tensor or array, batched                    its rows: a view if they are on its device; a copy
                                                if forward is known to write to its arguments
    tensor, not batched                         a copy, if it is small and needs no gradient
    list, dict, set, deque, dataclass           a copy with the replica's parts inside
    object that is data (a key-value cache)     a copy with the replica's parts inside
    PerReplica                                  its part
    num_items_in_batch                          its share, see ``ReplicaArgs._share``
    anything else: a module, a function         the object itself

After the call each copy is compared with what the replica got: contents by identity, tensors by
version. ``mutations.py`` joins the differences. A change that cannot be joined, or of an object
that all replicas share, raises ``StrategyError`` and leaves the caller's objects unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from mirror.base.containers import (
    IMMUTABLE,
    assign,
    contents_of,
    empty_like,
    is_consumed,
    is_leaf,
    is_shared,
    leaves_in,
    snapshot,
)
from mirror.data.split_batch import split_evenly
from mirror.device.device_mesh import DeviceMesh
from mirror.device.streams import CopyStreams
from mirror.errors import BatchError, StrategyError
from mirror.execution.run import current
from mirror.replica.params.mirrored_tensor import MirroredTensor
from mirror.values import ABSENT, PerReplica, are_identical, is_number, rebuild_node

# Larger tensors that are not batched are shared by replicas: a change of one is refused.
_MOST_COPIED_BYTES = 2**20
_COUNT = "num_items_in_batch"
_NO_KWARGS: dict[str, Any] = {}
_MOST_DESCRIBED = 12


class SplitPlan:
    """The plan by which one call is split.

    Attributes:
        active: the replicas that take part.
        devices: each replica's device, at position 0 of the mesh.
        num_examples: of the whole batch; ``None`` if one replica makes the whole call.
        copies_parts: whether parts on the device of the whole are copies of rows: views have one
            version, and autograd would take one part's change in place for one of the others.
        sizes: each replica's number of examples.
        starts: each replica's first example.

    Args:
        mesh: the devices of all replicas.
        copies: the copy streams that bring host tensors to GPUs.
    """

    __slots__ = (
        "_copies",
        "_mesh",
        "_pinned",
        "_reads_pinned_args",
        "active",
        "copies_parts",
        "devices",
        "num_examples",
        "sizes",
        "starts",
    )

    def __init__(
        self,
        sizes: Sequence[int],
        mesh: DeviceMesh,
        num_examples: int | None,
        copies: CopyStreams | None = None,
        copies_parts: bool = False,
    ) -> None:
        self._copies, self.copies_parts = copies, copies_parts
        self._pinned: dict[int, tuple[Tensor, Tensor]] = {}
        self._reads_pinned_args = False  # a copy reads memory that the caller has pinned
        self.sizes = sizes
        self.starts = list(accumulate(sizes, initial=0))
        self.devices = mesh.positions[0]
        self._mesh = mesh if mesh.is_model_parallel else None
        self.num_examples = num_examples
        self.active = list(range(len(sizes)))
        if not all(sizes):
            self.active = [r for r in self.active if sizes[r]] or [0]

    def is_batched(self, value: Any) -> bool:
        """Returns whether a tensor or array is split: its first dimension is the examples."""
        shape = value.shape
        return len(shape) > 0 and bool(shape[0] == self.num_examples)

    def rows(self, tensor: Tensor, replica_id: int) -> Tensor:
        """Returns a replica's view of a batched tensor."""
        # narrow, not split: a single view may be changed in place under autograd.
        return tensor.narrow(0, self.starts[replica_id], self.sizes[replica_id])

    def pin(self, leaves: Iterable[Any]) -> None:
        """Pins the host tensors among the arguments' leaves, once for all replicas' parts."""
        if self._copies is not None:
            for value in leaves:
                if _is_pinnable(value):
                    whole = self._copies.pin(value)
                    self._pinned[id(value)] = value, whole
                    self._reads_pinned_args |= whole is value

    def finish(self) -> None:
        """Waits until no copy reads the caller's memory, so that the caller may write to it."""
        if self._copies is not None and self._reads_pinned_args:
            self._copies.synchronize()

    def device_for(self, tensor: Tensor, replica_id: int) -> torch.device:
        """Returns the device for a replica's part of a tensor."""
        devices = self.devices if self._mesh is None else self._mesh.peers_of(tensor.device)
        return devices[replica_id]

    def to_replica(self, tensor: Tensor, replica_id: int) -> Tensor:
        """Returns a replica's rows of a tensor, or all of it, on the replica's device.

        The result aliases ``tensor`` if nothing has to be copied. Copies are asynchronous: a
        host that waited for one would wait for the GPU's earlier work too, and the other
        replicas with it.
        """
        devices = self.devices if self._mesh is None else self._mesh.peers_of(tensor.device)
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
        if is_ready or (_is_pinnable(part) and not part.is_pinned()):
            return self._copies.deliver(part, device)
        replica = current.replica
        if part.device.type != "cpu" or replica is None:
            return part.to(device)
        is_away = replica.run.lockstep.let_next_begin(replica_id)
        part = part.to(device)
        if is_away:
            replica.run.wait_for_turn(replica_id)
        return part


class ReplicaArgs:
    """One replica's arguments, and the records by which its changes are found.

    Args:
        args, kwargs: the caller's.
        names: the names of the positional parameters.

    Attributes:
        args, kwargs: the replica's.
        own: by ``id`` of a caller's value: that value, and the replica's value for it.
        given: the caller's objects, the replica's copies, and the copies' first contents.
        tensors: the caller's tensors, the replica's, and the replica's first versions and nodes.
        shared: the objects that all replicas share, and their first contents.
        unsplit: the caller's lists that may have an entry for each example.
        has_share: whether the arguments have a ``num_items_in_batch``.
    """

    __slots__ = (
        *("args", "given", "has_share", "kwargs", "own", "replica_id", "shared", "split"),
        *("tensors", "unsplit"),
    )

    def __init__(
        self,
        split: SplitPlan,
        replica_id: int,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] = _NO_KWARGS,
        names: Sequence[str] = (),
    ) -> None:
        self.split = split
        self.replica_id = replica_id
        self.own: dict[int, tuple[Any, Any]] = {}
        self.given: list[tuple[Any, Any, dict[Any, Any]]] = []
        self.tensors: list[tuple[Tensor, Tensor, int, Any]] = []
        self.shared: list[tuple[Any, dict[Any, Any]]] = []
        self.unsplit: list[Any] = []
        self.has_share = False
        self.args, self.kwargs = tuple(map(self.part_of, args)), kwargs
        if _COUNT in names and names.index(_COUNT) < len(args):
            own = list(self.args)
            own[names.index(_COUNT)] = self._share(args[names.index(_COUNT)])
            self.args = tuple(own)
        if kwargs:
            self.kwargs = {key: self._part_of_entry(key, value) for key, value in kwargs.items()}

    def has_ignored(self) -> bool:
        """Returns whether an integer tensor has values below zero, which losses ignore.

        Waits for the device.
        """
        tensors = [
            part for _, part in self.own.values() if isinstance(part, Tensor) and part.numel()
        ]
        return any(bool((t < 0).any()) for t in tensors if t.dtype in (torch.int32, torch.int64))

    def part_of(self, value: Any) -> Any:
        """Returns the replica's part of a value; the same part for the same object.

        Raises:
            BatchError: the value is a PackedSequence, a sparse tensor that would be split, or a
                PerReplica without a part for this replica.
            StrategyError: the value is an iterator, which every replica would consume.
        """
        kind = type(value)
        if kind in IMMUTABLE:
            return value
        key = id(value)
        if key in self.own:
            return self.own[key][1]
        if isinstance(value, Tensor):
            part: Any = self._part_of_tensor(value)
        elif is_leaf(value):
            part = self._part_of_leaf(value)
        else:
            return self._part_of_contents(value)
        self.own[key] = value, part
        return part

    def _part_of_contents(self, value: Any) -> Any:
        if isinstance(value, PackedSequence):
            raise BatchError(
                "a PackedSequence cannot be split over the replicas, its examples are "
                "interleaved; pass the padded tensor and its lengths, and pack inside forward"
            )
        if is_consumed(value):
            raise StrategyError(
                f"an iterator ({type(value).__name__}) cannot be an argument of a split call: "
                "each replica would consume items that the other replicas then miss; pass a list "
                "or a tensor, or call the module inside strategy.run"
            )
        key = id(value)
        if isinstance(value, (list, tuple)) and self._may_be_examples(value):
            self.unsplit.append(value)
        if isinstance(value, tuple):
            parts = [self.part_of(child) for child in value]
            is_same = are_identical(parts, value)
            part = value if is_same else rebuild_node(value, dict(enumerate(parts)))
            self.own[key] = value, part
        elif is_shared(value):
            self.own[key] = value, value
            self.shared.append((value, snapshot(value)))
            part = value
        else:
            part = empty_like(value)
            self.own[key] = value, part  # before its contents, since it may hold itself
            contents = {
                k: self._part_of_entry(k, child) for k, child in contents_of(value).items()
            }
            assign(part, contents)
            self.given.append((value, part, contents))
        return part

    def _may_be_examples(self, value: list[Any] | tuple[Any, ...]) -> bool:
        """Returns whether a list that goes to every replica may have an entry for each example.

        Its entries are of one type. A list of batched tensors (layers, views, modalities) has
        none, and a tuple of numbers or of tensors is a size, or a state.
        """
        if len(value) < 2 or len(value) != self.split.num_examples:
            return False
        first = value[0]
        if any(type(entry) is not type(first) for entry in value):
            return False
        if isinstance(value, tuple) and not isinstance(first, (str, dict)):
            return False
        leaves = list(leaves_in(value))
        if any(isinstance(leaf, PerReplica) for leaf in leaves):
            return False
        sized = [leaf for leaf in leaves if isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim]
        return not sized or not all(map(self.split.is_batched, sized))

    def _part_of_entry(self, key: Any, value: Any) -> Any:
        return self._share(value) if key == _COUNT else self.part_of(value)

    def _share(self, items: Any) -> Any:
        """Returns the replica's share of ``num_items_in_batch``, by its number of examples.

        transformers calls by this name the target tokens of the whole batch; a model divides a
        sum by them. Outputs are averaged by examples, so with ``items * size / num_examples``
        each replica's summand is exact, wherever the tokens are. A mean that is added to it (an
        auxiliary loss) stays a mean.
        """
        split = self.split
        is_count = is_number(items) or (isinstance(items, Tensor) and items.dim() == 0)
        if not is_count or not split.num_examples or len(split.active) == 1:
            return self.part_of(items)
        self.has_share = True
        return self.part_of(items) * (split.sizes[self.replica_id] / split.num_examples)

    def _part_of_leaf(self, value: Any) -> Any:
        if isinstance(value, PerReplica):
            part = value.values[self.replica_id] if self.replica_id < len(value.values) else ABSENT
            if part is ABSENT:
                raise BatchError(
                    f"a PerReplica among the arguments has no part for replica {self.replica_id},"
                    f" which has {self.split.sizes[self.replica_id]} of the examples; it was "
                    "computed from a smaller batch: compute it again for each batch size"
                )
            if isinstance(part, Tensor) and not part.is_meta:
                return part.to(self.split.device_for(part, self.replica_id))
            return part
        if isinstance(value, np.ndarray) and self.split.is_batched(value):
            start = self.split.starts[self.replica_id]
            return value[start : start + self.split.sizes[self.replica_id]]
        return value

    def _part_of_tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, MirroredTensor) or tensor.is_meta:
            return tensor
        split, shape = self.split, tensor.shape
        if len(shape) > 0 and shape[0] == split.num_examples:
            if tensor.layout is not torch.strided:
                raise BatchError(
                    f"a {str(tensor.layout).removeprefix('torch.')} tensor of shape "
                    f"{tuple(shape)} cannot be split over the replicas by its first dimension; "
                    "pass a dense tensor, and convert it in forward; or, if it has no examples "
                    "(a graph's adjacency), call the module inside strategy.run"
                )
            part = split.to_replica(tensor, self.replica_id)
            if part.device == tensor.device:  # a view
                if not split.copies_parts:
                    if tensor.__dict__:
                        self._copy_attributes(tensor, part)
                    return part
                part = part.clone()
        elif len(split.active) > 1 and _is_copied(tensor):
            # Outside the caller's inference mode, so that the copy has a version.
            with torch.inference_mode(False), torch.no_grad():
                part = split.to_replica(tensor, self.replica_id)
                part = part.clone() if part is tensor else part
        else:
            part = split.to_replica(tensor, self.replica_id)
        if not part.is_inference():
            self.tensors.append((tensor, part, part._version, part.grad_fn))
        if tensor.__dict__ and part is not tensor:
            self._copy_attributes(tensor, part)
        return part

    def _copy_attributes(self, tensor: Tensor, part: Tensor) -> None:
        """Gives a part the attributes that the program has set on the tensor.

        Those that are tensors are split as arguments; others are the program's own objects.
        """
        self.own[id(tensor)] = tensor, part  # an attribute may be the tensor itself
        contents = {
            name: self.part_of(value) if isinstance(value, Tensor) else value
            for name, value in tensor.__dict__.items()
        }
        part.__dict__.update(contents)
        self.given.append((tensor.__dict__, part.__dict__, contents))


def sizes_of_parts(num_replicas: int, leaves: Iterable[Any]) -> Sequence[int] | None:
    """Returns the sizes of the parts; ``None`` without any tensor that could be split.

    Args:
        leaves: those of the arguments, in their order.
    """
    num_examples, distributed = None, None
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.is_nested and (num_examples is None or leaf.layout is torch.strided):
                raise BatchError(
                    "a nested tensor cannot be split over the replicas; pass the padded tensor "
                    "and its lengths, and make the nested one in forward; or call the module "
                    "inside strategy.run"
                )
            if num_examples is None and (shape := leaf.shape):
                num_examples = shape[0]
                if leaf.is_meta:
                    return None  # a tensor without values has no parts
        elif isinstance(leaf, PerReplica) and distributed is None:
            distributed = _sizes_of(leaf, num_replicas)
    if num_examples is None or (distributed is not None and sum(distributed) == num_examples):
        return distributed
    return split_evenly(num_examples, num_replicas)


def _sizes_of(value: PerReplica[Any], num_replicas: int) -> list[int] | None:
    """Returns the number of examples of each part, of a value that a call or a loader split."""
    if len(value.values) != num_replicas:
        return None
    if value.weights is not None and all(float(w).is_integer() for w in value.weights):
        return [int(weight) for weight in value.weights]
    sizes = [0] * num_replicas
    for replica_id, part in value.parts():
        shapes = [leaf.shape for leaf in leaves_in(part) if isinstance(leaf, Tensor)]
        if not shapes or not shapes[0]:
            return None
        sizes[replica_id] = shapes[0][0]
    return sizes


def _is_pinnable(value: Any) -> bool:
    """Returns whether a value goes to GPUs through pinned memory: no graph has its copies."""
    is_plain = type(value) is Tensor and value.layout is torch.strided
    return is_plain and value.device.type == "cpu" and not value.requires_grad


def must_move(value: Any, devices: Sequence[torch.device]) -> bool:
    """Returns whether a value has a tensor that a call on these devices must copy there."""
    for leaf in leaves_in(value, with_objects=True):
        if isinstance(leaf, Tensor) and leaf.device not in devices and not leaf.is_meta:
            if not isinstance(leaf, MirroredTensor):
                return True
    return False


def describe_split(split: SplitPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns the shapes of the parts of each argument, for errors."""
    split_args, whole = [], []
    named = [(f"argument {key!r}", value) for key, value in (*enumerate(args), *kwargs.items())]
    for path, tensor in _tensors_of(named):
        shape = tuple(tensor.shape)
        if split.is_batched(tensor):
            parts = ", ".join(str((split.sizes[r], *shape[1:])) for r in split.active)
            split_args.append(f"{path} of shape {shape} went as {parts}")
        elif shape:
            whole.append(f"{path} of shape {shape}")
    text = "; ".join(split_args[:_MOST_DESCRIBED])
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
