"""PackedGrads: gradients that a program writes where they are reduced, the same memory every pass.

A compiled module's backward program on a GPU writes the gradients of its parameters into flat
buffers, which are those that a reduction would move them into. So nothing is packed or copied
back, and no gradient passes through a slot. The memory is in one of four states:

    free       the next pass may write it
    unreduced  it has the gradients of a pass on all replicas
    lent       it has reduced gradients, which are the targets' ``.grad``
    copied     a pass that is not packed has written it; copies are in the slots

The program never sees this memory. Before it reads a gradient, before a run does, and before the
next pass, what is lent becomes copies (``own``). So a gradient that the program keeps is never
written again. Unreduced gradients become copies in the slots (``unpack``) where the reduction is
not the usual one: before a second pass, and under ``no_sync``.

A pass is packed if it is one outside ``run`` whose graph reaches one call of the program on each
replica, and those parameters in no other way: ``find_packed``. It ends at these calls, and not
at the parameters. So neither of them may have hooks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from mirror.base.torch_private import ACCUMULATES, HIDES_ANOTHER, NODE_HOOK, wrap_once
from mirror.comm.packing import move_into_flats
from mirror.device.streams import ReplicaStreams
from mirror.replica.gradients.ready_grads import MovedTensors, ReadyGrads, set_local_grad
from mirror.replica.params.mirrored_tensor import GRAD, MirroredTensor
from mirror.replica.params.replicated_param import ReplicaParameter, ReplicatedParam

_MAX_NODES = 256  # between the loss and the calls of a program
STAYS = "mirror_stays"  # an attribute of a gradient that is the same tensor in every step

_grad_of, _hooks_of = attrgetter("grad"), attrgetter("hooks")


class PackedGrads:
    """The gradients of one program on all replicas.

    Args:
        passes: those of the strategy.
        variables: whose gradients, in the order of the reduction.
        ends: the ends of the buckets in this order.
        bytes_per_pack: of a flat buffer; ``None``: each gradient has memory of its own.

    Attributes:
        arrivals: the copies and targets of the variables.
        moved: by bucket, the gradients of all replicas for the reduction; once all have memory.
        under_way: the pass that is packed now.
        arrived: the replicas whose gradients it has left here.
    """

    def __init__(
        self,
        passes: PackedPasses,
        variables: Sequence[ReplicatedParam],
        ends: Sequence[int],
        bytes_per_pack: int | None,
    ) -> None:
        self.passes = passes
        copies = [[v.copies[r] for v in variables] for r in range(passes.num_replicas)]
        self.arrivals = ReadyGrads(copies)
        self.variables = self.arrivals.variables
        self._buckets = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        self._bytes_per_pack = bytes_per_pack
        self._of_replica: dict[int, list[MovedTensors]] = {}
        self.columns: list[list[Tensor]] = []
        self.moved: list[MovedTensors] = []
        self.under_way: Any = None
        self.arrived: set[int] = set()
        self._cleared: object = None

    def make(self, replica_id: int) -> list[Tensor]:
        """Makes a replica's memory, for its current stream; returns it as ``variables`` are."""
        targets, found = self.arrivals.targets[replica_id], list[MovedTensors]()
        with torch.no_grad(), torch.inference_mode(False):
            # The layouts that autograd gives gradients: the parameters', if they have no gaps.
            made = [torch.zeros_like(target.data) for target in targets]
            for bucket in self._buckets:
                found.append(self._move(made[bucket]))
        memory = [t for one in found for t in one.columns[0]]
        for tensor in memory:
            setattr(tensor, STAYS, True)
        self._of_replica[replica_id] = found
        if len(self._of_replica) == len(self.arrivals.targets):
            of_all = [self._of_replica[r] for r in range(len(self._of_replica))]
            self.moved = [
                MovedTensors(
                    [one.columns[0] for one in bucket],
                    [one.buffers[0] for one in bucket] if bucket[0].buffers[0] else [],
                    bucket[0].staying,
                )
                for bucket in zip(*of_all, strict=True)
            ]
            self.columns = [[t for one in mine for t in one.columns[0]] for mine in of_all]
        return memory

    def _move(self, tensors: list[Tensor]) -> MovedTensors:
        """Moves the tensors of a bucket and a replica into new flat buffers."""
        if self._bytes_per_pack is None:
            return MovedTensors([tensors], [[]], range(len(tensors)))
        buffers, staying = move_into_flats([tensors], self._bytes_per_pack)
        return MovedTensors([tensors], buffers, staying)

    def _copy(self, replica_id: int) -> list[Tensor]:
        """Returns copies of a replica's gradients, in flat buffers of their own."""
        with torch.no_grad(), torch.inference_mode(False):
            copies: list[Tensor] = []
            for one in self._of_replica[replica_id]:
                mine = list(one.columns[0])
                moved = self._move(mine)
                for i in moved.staying:
                    mine[i] = mine[i].clone()
                copies += mine
            return copies

    # A packed pass

    @property
    def is_under_way(self) -> bool:
        """Whether the running pass is packed."""
        return self.under_way is not None and not self.under_way.is_over

    def unpack(self, pending: Sequence[list[ReplicaParameter]]) -> None:
        """Puts copies of the gradients that have arrived into the slots.

        Args:
            pending: by replica, the copies that have a gradient.
        """
        for r in self.arrived:
            copies = self.arrivals.copies[r]
            deque(map(set_local_grad, copies, self._copy(r)), maxlen=0)
            pending[r].extend(copies)
        self.arrived.clear()

    # Reduced gradients

    def own(self, replica_id: int) -> None:
        """Makes the targets' gradients copies, if they still lie in this memory."""
        targets, mine = self.arrivals.targets[replica_id], self.columns[replica_id]
        are_lent = [*map(is_, map(_grad_of, targets), mine)]
        if True in are_lent:
            copies = compress(self._copy(replica_id), are_lent)
            deque(map(GRAD.__set__, compress(targets, are_lent), copies), maxlen=0)

    def is_cleared_with(self, variables: Sequence[ReplicatedParam]) -> bool:
        """Whether all its variables are among these; fast if asked for the same list again."""
        if self._cleared is variables:
            return True
        if not set(variables).issuperset(self.variables):
            return False
        self._cleared = variables
        return True


class NodeHooks:
    """Hooks of autograd's nodes. No node tells of them, and those of a parameter run in a pass.

    Attributes:
        may_exist: whether the program has ever registered one, or this torch does not show it.
    """

    may_exist = not hasattr(Function, NODE_HOOK)

    def watch(self) -> None:
        """Watches their registration, from now on."""
        if not self.may_exist:
            wrap_once(Function, NODE_HOOK, _note_node_hook)


node_hooks = NodeHooks()


def _note_node_hook(register: Callable[..., Any]) -> Callable[..., Any]:
    def register_hook(*args: Any) -> Any:
        node_hooks.may_exist = True
        return register(*args)

    return register_hook


class PackedPasses:
    """The packed passes of one strategy.

    Args:
        pending: by replica, the copies that have a gradient in their slot.
        streams: on GPUs, the streams on which passes have brought unreduced gradients.

    Attributes:
        unreduced: the gradients of a packed pass, until they are reduced; at most one.
        lent: reduced gradients that are the targets' ``.grad``.
        may_be: whether a pass may be packed.
        num_replicas: their number.
    """

    def __init__(
        self, pending: Sequence[list[ReplicaParameter]], streams: ReplicaStreams | None
    ) -> None:
        self._pending, self._streams = pending, streams
        self.num_replicas = len(pending)
        self.unreduced: list[PackedGrads] = []
        self.lent: list[PackedGrads] = []
        self.may_be = False
        self._under_way: PackedGrads | None = None

    def make_room(self) -> None:
        """Moves all gradients out of memory that the next pass may write."""
        if self._under_way is not None:  # the next pass runs in that one
            self._stop(self._under_way)
        self.unpack()
        self.own()

    def begin(self, this: Any, outputs: Sequence[Any]) -> tuple[GradientEdge, ...]:
        """Has a pass from ``outputs`` packed, if it can be; returns where it then ends."""
        packed, ends = find_packed(outputs, self)
        if packed is not None:
            self._under_way, packed.under_way = packed, this
        return ends

    def arrive(self, packed: PackedGrads, replica_id: int, device: torch.device) -> None:
        """Records that a replica's gradients are there, made on its current stream."""
        if self._streams is not None:
            self._streams.record_use(replica_id, device)
        packed.arrived.add(replica_id)

    def leave_in_slots(
        self,
        packed: PackedGrads,
        replica_id: int,
        device: torch.device,
        numbers: Sequence[int],
        grads: Sequence[Tensor | None],
    ) -> None:
        """Puts gradients into slots, as a pass does that gives some parameters none.

        The pass is none that leaves all packed then: ``end`` moves those of other replicas, too.

        Args:
            numbers: whose they are, of the variables.
        """
        if self._streams is not None:
            self._streams.record_use(replica_id, device)
        copies = packed.arrivals.copies[replica_id]  # their slots are empty
        for number, grad in zip(numbers, grads, strict=True):
            if grad is not None:
                set_local_grad(copies[number], grad)
                self._pending[replica_id].append(copies[number])

    def end(self, this: Any) -> bool:
        """Ends a pass; returns whether it has left all gradients packed."""
        packed = self._under_way
        if packed is None or packed.under_way is not this:
            return False
        if len(packed.arrived) < self.num_replicas:
            self._stop(packed)
            return False
        self._close(packed)
        self.unreduced[:] = (packed,)
        return True

    def _close(self, packed: PackedGrads) -> None:
        self._under_way = packed.under_way = None
        if self._streams is not None:
            self._streams.wait_for_used()

    def _stop(self, packed: PackedGrads) -> None:
        """Moves what the running pass has left packed into the slots."""
        self._close(packed)
        packed.unpack(self._pending)

    def unpack(self) -> None:
        """Moves unreduced gradients into the slots."""
        while self.unreduced:
            self.unreduced.pop().unpack(self._pending)

    def discard(self) -> None:
        """Drops unreduced gradients."""
        while self.unreduced:
            self.unreduced.pop().arrived.clear()

    def own(self) -> None:
        """Makes the targets' gradients copies, which no pass writes."""
        while self.lent:
            packed = self.lent.pop()
            for r in range(self.num_replicas):
                packed.own(r)


def find_packed(
    outputs: Sequence[Any], passes: PackedPasses
) -> tuple[PackedGrads | None, tuple[GradientEdge, ...]]:
    """Returns what a pass from ``outputs`` leaves packed; ``None`` if it is not such a pass.

    A node of a program's call says so itself: by ``mirror_packs``, a function that returns the
    replica and the PackedGrads.

    Returns:
        That, and the ends of the pass: the calls, and the nodes with no others behind them. So
        autograd does not go on to the parameters.
    """
    nothing = None, ()
    if node_hooks.may_exist:
        return nothing
    found: dict[int, PackedGrads] = {}
    ends: list[GradientEdge] = []
    waiting: list[Any] = [getattr(output, "grad_fn", None) for output in outputs]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        packs = getattr(node, "mirror_packs", None)
        if node is None or type(node).__name__ in HIDES_ANOTHER:
            return nothing
        following = [one for one, _ in node.next_functions if one is not None]
        if packs is not None:
            replica_id, packed = packs()
            if packed is None or replica_id in found:
                return nothing
            found[replica_id] = packed
            following.pop()  # the node of the parameters
            ends.append(GradientEdge(node, 0))
        elif type(node).__name__ == ACCUMULATES:
            if isinstance(node.variable, (ReplicaParameter, MirroredTensor)):
                return nothing
        if packs is None and not following:
            ends.append(GradientEdge(node, 0))
        waiting += [one for one in following if one not in seen]
        seen.update(following)
        if len(seen) > _MAX_NODES:
            return nothing
    first = found.get(0)
    if first is None or first.passes is not passes or not first.moved:
        return nothing
    if any(map(_hooks_of, first.variables)):  # they are called when the pass ends
        return nothing
    if len(found) < passes.num_replicas or not all(map(is_, found.values(), repeat(first))):
        return nothing
    return first, tuple(ends)
