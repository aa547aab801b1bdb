"""ShardedStates: the state of one optimizer, of which every replica holds a part.

[Note: Sharded state]
With ``optimizer_state="sharded"`` a replica has the state of its slices only: ``_shards[r]`` maps
the parameters that replica r of this worker steps to their entries. ``optimizer.state`` is that of
one device all the same, so it is gathered when it is read, by all workers together::

    scattered    _shards[r] has entries, ``optimizer.state`` none
    gathered     ``optimizer.state`` has entries of whole parameters, _shards[r] none

    any access to optimizer.state        -> gathered: a tensor as large as its parameter is put
    (state_dict, a checkpoint, logging)     together on each worker's first device, anything else
                                            (a count of steps) is the first slice's
    the next step of sharded parameters  -> scattered: what the program has changed counts

So what is read is a copy of that moment: it does not change with later steps, and changes to it
count at the next step. A write after that step, into an entry that was read before it, would be
lost: the next step or read raises ``StrategyError``. While the state is gathered, the first
replica's device holds all of it. Entries are gathered in the order in which they were made: those
of one step in the order of the groups.
Inside ``run`` every replica gets a gathered copy of its own, as with replicated state, and each
replica's changes count for the slices that it holds.

The state of an optimizer without slices (a wrapper of others) is gathered at all times: on the
first replica's device, and on no other one.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirror.base.mutex import Mutex
from mirror.errors import CheckpointError, MirrorError, ReplicaMismatchError, StrategyError
from mirror.execution.replicas import Replicas
from mirror.replica.exactness.replica_checks import ComparePair, VisitValue
from mirror.replica.gradients.slice_exchange import flat_like, view_flat
from mirror.replica.gradients.slice_plan import find_uncovered
from mirror.replica.optimizers.optimizer_state import (
    ReplicaStates,
    SharedState,
    num_bytes,
    state_name,
)
from mirror.replica.optimizers.sliced_params import SlicedParams
from mirror.replica.params.mirrored_tensor import path_of
from mirror.replica.params.replicated_param import ReplicatedParam
from mirror.replica.params.replicated_params import param_of
from mirror.threads.user_frames import add_note
from mirror.values import leaves_of, map_structure

Entry = dict[Any, Any]
_IN_PARTS = (
    "the workers hold this optimizer's state in parts, so all of them must read it, at the same "
    "place of the program, while their strategy is in use"
)


class _ReadEntry(NamedTuple):
    """An entry, or a tensor of it, that the program may have read before the state was scattered.

    Attributes:
        mark: the version of a tensor; the keys and values of an entry, by their ids.
        name: the key of a tensor; ``None`` for an entry.
    """

    held: weakref.ref[Any]
    mark: Any
    name: Any
    variable: ReplicatedParam


def _mark_of(held: Any) -> Any:
    return held._version if isinstance(held, Tensor) else {n: id(v) for n, v in held.items()}


class GatheredState(SharedState):
    """``optimizer.state`` between steps; any access gathers the replicas' parts first."""

    def raw_items(self) -> Iterable[tuple[Any, Any]]:
        keeper = self._keeper()
        if isinstance(keeper, ShardedStates):
            keeper.gather_for_trace()
        return super().raw_items()


def _wrap_method(name: str) -> Callable[..., Any]:
    original = getattr(SharedState, name)

    def method(self: GatheredState, *args: Any, **kwargs: Any) -> Any:
        keeper = self._keeper()
        if isinstance(keeper, ShardedStates):
            keeper.gather()
        return original(self, *args, **kwargs)

    method.__name__ = name
    return method


for _name in (
    "__getitem__ __setitem__ __delitem__ __contains__ __iter__ __reversed__ __len__ __eq__ __ne__ "
    "__or__ __ror__ __ior__ __repr__ __reduce_ex__ __deepcopy__ keys values items get setdefault "
    "copy pop popitem update clear"
).split():
    setattr(GatheredState, _name, _wrap_method(_name))


class ShardedStates(ReplicaStates):
    """The state of one optimizer, sharded over the replicas. See [Note: Sharded state]."""

    shared_kind = GatheredState

    def __init__(self, replicas: Replicas) -> None:
        self.sliced: SlicedParams | None = None  # while the state is scattered
        self._shards: list[dict[Any, Any]] = [defaultdict(dict) for _ in replicas.devices]
        # When the keys of optimizer.state were made: the number of the step since the state was
        # scattered, from 1, and the position in it. One device has them in this order.
        self._order: dict[Any, tuple[int, int]] = {}
        self._num_steps = 0
        self._num_ordered = 0  # entries of shards, when their keys were last recorded
        self._reads: list[_ReadEntry] = []  # tensors that the program may still have
        super().__init__(replicas)

    def after_fork(self) -> None:
        """Creates the locks, also in a forked process: the threads that held them are gone."""
        super().after_fork()
        self._gathering = Mutex()

    def is_scattered(self, optimizer: Optimizer) -> bool:
        """Whether the replicas hold the optimizer's state in parts now."""
        return self.sliced is not None and optimizer.state is self.shared

    def shard_of(self, replica_id: int) -> dict[Any, Any]:
        """Returns the state of the slices that a replica steps."""
        return self._shards[replica_id]

    # Between the two forms

    @torch.no_grad()
    def scatter(self, optimizer: Optimizer, sliced: SlicedParams) -> None:
        """Gives every replica the state of its slices, and drops all other state.

        Raises:
            StrategyError: the program has written into state that it read before the last step.
        """
        self._refuse_late_writes()
        if self.sliced is sliced and optimizer.state is self.shared:
            self._record_order(sliced)
            self._num_steps += 1
            return
        self.gather()
        self.read(optimizer)
        self._order = {key: (0, i) for i, key in enumerate(dict.keys(self.shared))}
        self._num_steps = 1
        entries = [self._by_replica[0] if self._are_behind else own for own in self._by_replica]
        for variable, positions in sliced.of_variable.items():
            for i in positions:
                r = sliced.holders[i]
                source = 0 if self._are_behind or r is None else r
                key = variable.home if self._are_behind else variable.targets[source]
                entry = entries[source].get(key)
                if entry is not None:
                    self._record_read(entry, variable)
                if entry is not None and r is not None:
                    self._shards[r][sliced.stepped[i]] = self._part(entry, sliced, i, source)
            owner = variable.owner()
            if dict.__contains__(self.shared, owner):
                dict.__delitem__(self.shared, owner)
        self._by_replica = [defaultdict(dict) for _ in self._by_replica]
        self._are_behind, self.shared.seen = True, False
        self.sliced, self._num_ordered = sliced, sum(map(len, self._shards))

    def _record_order(self, sliced: SlicedParams) -> None:
        """Records the parameters for which the last step has made the first entries."""
        if self._num_ordered == (num_entries := sum(map(len, self._shards))):
            return
        self._num_ordered = num_entries
        for place, (variable, positions) in enumerate(sliced.of_variable.items()):
            slices = [(sliced.holders[i], sliced.stepped[i]) for i in positions]
            if any(r is not None and stepped in self._shards[r] for r, stepped in slices):
                self._order.setdefault(variable.owner(), (self._num_steps, place))

    @torch.no_grad()
    def gather(self) -> None:
        """Puts the state of whole parameters together, on the first replica's device.

        All workers call it together, as their programs read the state at the same place.
        """
        if self.sliced is None:
            return
        self._refuse_late_writes()
        try:
            self._gathering.call(self._gather)
        except MirrorError as error:
            if self._replicas.workers.is_multi_process:
                add_note(error, _IN_PARTS)
            raise

    def gather_for_trace(self) -> None:
        """Gathers the state, so that a trace of a step sees changes in it.

        Workers trace at different times, so the state of several stays in parts.
        """
        if not self._replicas.workers.is_multi_process:
            self.gather()

    def _gather(self) -> None:
        sliced = self.sliced
        if sliced is None:  # another replica has gathered it
            return
        self._record_order(sliced)
        whole = dict(dict.items(self.shared))
        with torch.inference_mode(False):
            for variable in sliced.of_variable:
                entry = self._gather_entry(variable, sliced)
                if entry is not None:
                    # Of a plain dict there are no weak references: see ``_record_read``.
                    whole[variable.owner()] = OrderedDict(entry)
        dict.clear(self.shared)
        for key in sorted(self._order, key=self._order.__getitem__):
            if key is not None and key in whole:  # else its parameter was freed, or has no state
                self.shared.put(key, whole[key])
        self._by_replica[0] = defaultdict(dict)
        for key, value in dict.items(self.shared):
            of_key = param_of(key)
            self._by_replica[0][key if of_key is None else of_key.home] = value
        self._shards = [defaultdict(dict) for _ in self._shards]
        self._are_behind, self.shared.seen = True, False
        self.sliced = None

    def _record_read(self, entry: Entry, variable: ReplicatedParam) -> None:
        """Records a dropped entry and its tensors, to find later writes into them."""
        held: list[tuple[Any, Any]] = [
            (name, leaf)
            for name, value in entry.items()
            for leaf in leaves_of(value)
            if isinstance(leaf, Tensor) and not leaf.is_inference()
        ]
        if isinstance(entry, OrderedDict):
            held.append((None, entry))
        self._reads += [
            _ReadEntry(weakref.ref(h), _mark_of(h), name, variable) for name, h in held
        ]

    def _refuse_late_writes(self) -> None:
        reads, self._reads = self._reads, []
        for one in reads:
            held = one.held()
            if held is None:
                continue
            if _mark_of(held) != one.mark:
                key = one.name
                if key is None:
                    names = [*one.mark, *held]
                    key = next(n for n in names if one.mark.get(n) != id(held.get(n)))
                raise StrategyError(
                    f"{state_name(key, one.variable)} was read before a step and changed "
                    'after it; with optimizer_state="sharded" what is read is a copy of '
                    "that moment, so this change would be lost; read optimizer.state again after "
                    "a step, and change that"
                )
            self._reads.append(one)

    def _part(self, entry: Entry, sliced: SlicedParams, position: int, source: int) -> Entry:
        """Returns a copy of one slice's part of an entry, on the replica that holds it."""
        one = sliced.slices[position]
        target, r = sliced.parameters.targets[source][one.param_index], sliced.holders[position]
        assert r is not None
        is_cut = one.stop - one.start < target.numel()
        home, device = self._replicas.devices[source], self._replicas.devices[r]

        def part(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return self._copy_value(leaf, source, r)
            if is_cut and leaf.shape == target.shape and leaf.layout is torch.strided:
                leaf = flat_like(leaf, target)[one.start : one.stop]
            return leaf.detach().to(device if leaf.device == home else leaf.device, copy=True)

        return {name: map_structure(part, value) for name, value in entry.items()}

    def _gather_entry(self, variable: ReplicatedParam, sliced: SlicedParams) -> Entry | None:
        """Returns the entry of a whole parameter, on the first replica's device."""
        positions, entries = sliced.of_variable[variable], self._entries_of(variable, sliced)
        if not entries or any(entry is None for entry in entries):
            return None
        target, home = variable.targets[0], self._replicas.devices[0]
        device = self._replicas.devices[sliced.holders[positions[0]] or 0]

        def whole(*leaves: Any) -> Any:
            leaf = leaves[0]
            if not isinstance(leaf, Tensor):
                return leaf
            is_part = len(leaves) > 1 and leaf.shape == sliced.stepped[positions[0]].shape
            if not is_part or leaf.layout is not torch.strided:
                return leaf.to(home if leaf.device == device else leaf.device)
            full = torch.empty_like(target, dtype=leaf.dtype, requires_grad=False)
            elements = view_flat(full)
            for i, part in zip(positions, leaves, strict=True):
                elements[sliced.slices[i].start : sliced.slices[i].stop].copy_(part)
            return full

        return map_structure(whole, *entries)  # type: ignore[no-any-return]

    def _entries_of(self, variable: ReplicatedParam, sliced: SlicedParams) -> list[Entry | None]:
        """Returns the entries of a parameter's slices; those of other workers are copies.

        Also learns from the other workers when they were made.
        """
        held = {
            i: self._shards[r].get(sliced.stepped[i])
            for i in sliced.of_variable[variable]
            if (r := sliced.holders[i]) is not None
        }
        workers, owner, home = self._replicas.workers, variable.owner(), self._replicas.devices[0]
        if not workers.is_multi_process:
            return [*held.values()]
        name = f"optimizer state of parameter {path_of(owner, variable.name)!r}"
        try:
            every = workers.exchange_values(
                name,
                (self._order.get(owner), held),
                lambda tensor, device: tensor if device == "cpu" else tensor.to(home),
            )
        except CheckpointError as error:
            raise StrategyError(
                f"the {name} is in parts on several workers, and a part cannot be sent: {error}; "
                'use optimizer_state="replicated"'
            ) from error
        made = [one for one, _ in every if one is not None]
        if made:
            self._order[owner] = min(made)
        parts = {i: entry for _, theirs in every for i, entry in theirs.items()} | held
        return [parts[i] for i in sliced.of_variable[variable]]

    # What the parts of replicated state do; scattered state has no other copies

    def catch_up(self) -> None:
        """Gathers the state, and copies the first replica's to the others."""
        self.gather()
        super().catch_up()

    def read(self, optimizer: Optimizer, *, is_whole: bool = False) -> None:
        """Reads the state that the cross-replica context may have changed."""
        if "state" in vars(optimizer) and optimizer.state is self.shared:
            self.gather()
        else:  # another one replaces it
            self.sliced = None
            self._shards = [defaultdict(dict) for _ in self._shards]
        super().read(optimizer, is_whole=is_whole)

    def check(self, variables: Sequence[ReplicatedParam], compare: ComparePair) -> None:
        """Checks that slices cover all elements once, and that their counts of steps are equal."""
        sliced, names = self.sliced, self._replicas.names
        if sliced is None:
            super().check(variables, compare)
            return
        known = sliced.parameters.variables
        uncovered = find_uncovered(sliced.slices, [v.targets[0].numel() for v in known])
        if uncovered is not None:
            index, element = uncovered
            path = path_of(known[index].owner(), known[index].name)
            raise ReplicaMismatchError(
                f"element {element} of parameter {path!r} is in no slice, or in two: the "
                "optimizer state is sharded wrongly; this is a fault of mirror, please report it"
            )
        for variable, positions in sliced.of_variable.items():
            held = [(r, i) for i in positions if (r := sliced.holders[i]) is not None]
            values = [self._shared_values(sliced, i, r) for r, i in held]
            for (replica_id, _), other in zip(held[1:], values[1:], strict=True):
                first, first_id = values[0], held[0][0]
                for key in first.keys() | other.keys():

                    def describe(
                        key: Any = key,
                        variable: ReplicatedParam = variable,
                        r: int = replica_id,
                        s: int = first_id,
                    ) -> str:
                        return f"{state_name(key, variable)} differs on {names[r]} from {names[s]}"

                    compare(first.get(key), other.get(key), describe)

    def _shared_values(
        self, sliced: SlicedParams, position: int, replica_id: int
    ) -> Mapping[Any, Any]:
        """Returns the values of a slice's entry that are equal for all slices of its parameter."""
        entry = self._shards[replica_id].get(sliced.stepped[position], {})
        size = sliced.stepped[position].shape

        def mask_part(leaf: Any) -> Any:
            return "a part" if isinstance(leaf, Tensor) and leaf.shape == size else leaf

        kept_entry: Mapping[Any, Any] = map_structure(mask_part, entry)
        return kept_entry

    def visit_first(self, variables: Sequence[ReplicatedParam], visit: VisitValue) -> None:
        """Calls ``visit`` with the state of whole parameters, gathered one after the other.

        Of state that several workers hold in parts there are no other copies to compare: visited
        are the slices, which all workers know.
        """
        sliced = self.sliced
        if sliced is None:
            super().visit_first(variables, visit)
            return
        if self._replicas.workers.is_multi_process:
            for variable, positions in sliced.of_variable.items():
                slices = [sliced.slices[i] for i in positions]
                visit(slices, partial(state_name, "slices", variable))
            return
        for variable in variables:
            entry = (
                self._gather_entry(variable, sliced) if variable in sliced.of_variable else None
            )
            for key, value in ({} if entry is None else entry).items():
                visit(value, partial(state_name, key, variable))

    def bytes_of_replicas(self) -> list[int]:
        """Returns the bytes of state that each replica holds."""
        if self.sliced is None:
            return super().bytes_of_replicas()
        return [num_bytes(shard.values()) for shard in self._shards]
