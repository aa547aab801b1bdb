"""Bindings: the tensors of a trace's inputs on each replica, found before every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirror.compiler.capture.traced_numbers import evaluate, values_of
from mirror.compiler.lowering.step_plan import StepPlan
from mirror.compiler.lowering.step_trace import StepTrace
from mirror.compiler.runtime.step_arguments import StepArguments
from mirror.compiler.step_inputs import InputKind, StateTensor, StepInput
from mirror.execution.replicas import Replicas
from mirror.values import ABSENT, are_identical


class Bindings:
    """Finds the tensors of a trace's inputs, with few Python operations in each call.

    Parameters and optimizer state are those of the first replica on each device. The other
    replicas of the device read them, too.

    Attributes:
        leaders: the first replica of each device.
        leader_of: by replica, the first one of its device.
    """

    def __init__(self, replicas: Replicas, trace: StepTrace, plan: StepPlan) -> None:
        self._replicas, self._trace = replicas, trace
        inputs = trace.inputs
        self._written_own = [i for i in plan.written if inputs[i].kind.is_own]
        self._written_shared = [i for i in plan.written if not inputs[i].kind.is_own]
        devices = list(replicas.devices)
        self.leaders = tuple(devices.index(device) for device in dict.fromkeys(devices))
        self.leader_of = [devices.index(device) for device in devices]
        slots = {
            kind: [i for i, one in enumerate(inputs) if one.kind is kind] for kind in InputKind
        }
        self._arguments = [
            i
            for i, one in enumerate(inputs)
            if one.kind is InputKind.PART or (one.kind is InputKind.SHARED and one.value is None)
        ]
        self._buffers = [(i, inputs[i].of) for i in slots[InputKind.BUFFER]]
        self._records = [place.record for _, place in self._buffers]
        self._left = [(i, inputs[i].of) for i in slots[InputKind.GRADIENT]]
        self._rates = [
            (i, trace.swaps[inputs[i].of].optimizer, inputs[i].key[0])
            for i in slots[InputKind.RATE]
        ]
        self._numbers = [
            (i, one.of, one.kind.is_own)
            for i, one in enumerate(inputs)
            if one.kind in (InputKind.NUMBER, InputKind.OWN_NUMBER)
        ]
        self._last_numbers: list[list[Any]] | None = None  # of replicas that take part
        self._filled: list[list[Any]] | None = None
        self._state_slots: list[tuple[list[int], list[HeldStates]]] = []
        for number, swap in enumerate(trace.swaps):
            of_it = [i for i in slots[InputKind.STATE] if inputs[i].of == number]
            wanted = [inputs[i].key for i in of_it]
            held = [HeldStates(swap.optimizer, wanted, leader) for leader in self.leaders]
            self._state_slots.append((of_it, held))
        workers = replicas.workers
        one = torch.ones((), dtype=torch.float64, device="cpu")
        self._own = [
            {
                InputKind.REPLICA_INDEX: torch.arange(workers.num_replicas, device=device)
                == workers.replica_offset + r,
                InputKind.COUNT: one.to(device, copy=True),
                InputKind.WEIGHT: one.to(device, copy=True),
                InputKind.SEED: torch.zeros((), dtype=torch.int64, device=device),
            }
            for r, device in enumerate(replicas.devices)
        ]
        self._spare = [ABSENT] * (plan.num_slots - len(inputs))
        self._counted: tuple[Any, ...] = ()
        self._bind()

    def _bind(self) -> None:
        """Finds the tensors that are the same in each call."""
        inputs = self._trace.inputs
        self._bound = [held.tensors for _, states in self._state_slots for held in states]
        self._last_rates: list[Any] = [None] * len(self._rates)
        self._filled = None
        templates: list[list[Any]] = []
        for r, leader in enumerate(self.leader_of):
            if leader == r:
                template = [self._find(one, r) for one in inputs]
                for slots, states in self._state_slots:
                    held = states[self.leaders.index(r)]
                    for slot, tensor in zip(slots, held.tensors, strict=True):
                        template[slot] = tensor
            else:
                shared = templates[leader]
                template = [
                    self._find(one, r) if one.kind.is_own else shared[i]
                    for i, one in enumerate(inputs)
                ]
            templates.append(template)
        self._templates = [[*template, *self._spare] for template in templates]
        devices = self._replicas.devices
        self._copied: list[tuple[Tensor, Tensor | None, list[Tensor]]] = []
        for i, one in enumerate(inputs):
            if (found := one.value) is not None:
                apart = [leader for leader in self.leaders if devices[leader] != found.device]
                # A value of the host is compared there, unless a program changes the copies.
                is_compared = found.device.type == "cpu" and i not in self._written_shared
                known = found.detach().clone() if is_compared and apart else None
                copies = [templates[leader][i] for leader in apart]
                self._copied += [(found, known, copies)] if copies else []

    def _find(self, one: StepInput, r: int) -> Any:
        kind, device = one.kind, self._replicas.devices[r]
        if kind in (InputKind.PARAMETER, InputKind.BUFFER):
            return one.of.tensor_of(r)
        if kind in (InputKind.RATE, InputKind.NUMBER, InputKind.OWN_NUMBER):
            return torch.zeros((), dtype=one.fake.dtype, device=device)
        if kind is InputKind.SHARED and one.value is not None:
            return one.value.detach().to(device)
        return self._own[r].get(kind)

    def hold(self) -> bool:
        """Whether gradients and state are as in the trace; binds tensors that were replaced."""
        for place, was_there in self._trace.entering.items():
            if (_grad(place, 0) is not None) is not was_there:
                return False
        for slot, place in self._left:
            grad, fake = _grad(place, 0), self._trace.inputs[slot].fake
            if grad is None or grad.stride() != fake.stride():
                return False
        for _, states in self._state_slots:
            for held in states:
                if not held.are_as_before():
                    return False
        now = [held.tensors for _, states in self._state_slots for held in states]
        if not all(a is b for a, b in zip(now, self._bound, strict=True)):
            self._bind()
        return True

    def find_change(self) -> str | None:
        """Returns which gradient or state is not as the trace found it, in words."""
        for place, was_there in self._trace.entering.items():
            is_there = _grad(place, 0) is not None
            if is_there is not was_there:
                then, now = [("None", "a tensor")[there] for there in (was_there, is_there)]
                return f"the gradient of {place.name!r} was {then} and is {now}"
        for slot, place in self._left:
            grad, fake = _grad(place, 0), self._trace.inputs[slot].fake
            if grad is not None and grad.stride() != fake.stride():
                return (
                    f"the gradient of {place.name!r} had strides {fake.stride()} and has "
                    f"{grad.stride()}"
                )
        for swap, (_, states) in zip(self._trace.swaps, self._state_slots, strict=True):
            if not all(held.are_as_before() for held in states):
                return f"the state of {type(swap.optimizer).__name__} has other tensors"
        return None

    def find_number_change(self, arguments: StepArguments) -> str | None:
        """Returns which comparison of numbers has another outcome, in words."""
        numbers, names = self._trace.numbers, arguments.names()
        found = [values_of(numbers.sources, leaves) for leaves in arguments.plain_leaves()]
        return next(filter(None, (numbers.find_change(values, names) for values in found)), None)

    def take_numbers(self, arguments: StepArguments) -> bool:
        """Finds the numbers that are inputs; returns whether comparisons have the same outcome."""
        numbers = self._trace.numbers
        if not numbers.sources:
            return True
        found = [values_of(numbers.sources, leaves) for leaves in arguments.plain_leaves()]
        if found != self._last_numbers:
            if not all(map(numbers.hold, found)):
                return False
            self._last_numbers = found
        return True

    def _fill_numbers(self, active: tuple[int, ...]) -> None:
        """Computes the numbers that are inputs, if their sources have changed."""
        now = [[r, *values] for r, values in zip(active, self._last_numbers or (), strict=False)]
        if not self._numbers or now == self._filled:
            return
        self._filled = now
        by_replica = [(r, values) for r, *values in now]
        for slot, expression, is_own in self._numbers:
            if is_own:
                for r, values in by_replica:
                    self._templates[r][slot].fill_(evaluate(expression, values))
            else:
                number = evaluate(expression, by_replica[0][1])
                for leader in self.leaders:
                    self._templates[leader][slot].fill_(number)

    def values(
        self, parts: dict[int, list[Any]], weights: Sequence[float] | None, count: int
    ) -> dict[int, list[Any]]:
        """Returns the values at the start of a call, of each replica that takes part.

        Args:
            count: the number of replicas that take part, on all workers.
        """
        self._fill(tuple(parts), weights, count)
        self._fill_numbers(tuple(parts))
        for found, known, copies in self._copied:
            if known is None or not torch.equal(found, known):  # a copy from the host waits
                for copy in [*copies, *([] if known is None else [known])]:
                    copy.copy_(found)
        if self._trace.draws:
            seeds = torch.empty(len(parts), dtype=torch.int64, device="cpu").random_(0, 2**62)
            for r, seed in zip(parts, seeds.tolist(), strict=True):
                self._own[r][InputKind.SEED].fill_(seed)
        records, values = self._records, {}
        for r, tensors in parts.items():
            mine = self._templates[r].copy()
            for slot, tensor in zip(self._arguments, tensors, strict=True):
                mine[slot] = tensor
            if records and records[0] is not None:
                copies = [record.copies[r] for record in records]
                for (slot, _), copy in zip(self._buffers, copies, strict=True):
                    mine[slot] = copy
            for slot, place in self._left:
                mine[slot] = _grad(place, self.leader_of[r])
            values[r] = mine
        return values

    def _fill(self, active: tuple[int, ...], weights: Sequence[float] | None, count: int) -> None:
        """Writes rates, weights and the number of replicas into their tensors."""
        for i, (slot, optimizer, group) in enumerate(self._rates):
            rate = optimizer.param_groups[group]["lr"]
            if isinstance(rate, Tensor) or rate != self._last_rates[i]:
                self._last_rates[i] = rate
                for leader in self.leaders:
                    own = self._templates[leader][slot]
                    if isinstance(rate, Tensor):
                        own.copy_(rate)  # which may come from another GPU; fill_ would wait
                    else:
                        own.fill_(rate)
        counted = (active, weights, count)
        if counted != self._counted:
            self._counted = counted
            for r in active:
                self._own[r][InputKind.COUNT].fill_(count)
                self._own[r][InputKind.WEIGHT].fill_(1.0 if weights is None else weights[r])

    def idle(self, leader: int) -> list[Any]:
        """Returns the values of a device's first replica if it is idle."""
        mine = self._templates[leader].copy()
        for slot, place in self._left:
            mine[slot] = _grad(place, leader)
        return mine

    def share_outputs(
        self, leader: int, values: list[Any], own: dict[int, list[Any]], slots: Sequence[int]
    ) -> None:
        """Gives the outputs of a shared program to the other replicas of the device."""
        if slots:
            for r, mine in own.items():
                if self.leader_of[r] == leader and r != leader:
                    for slot in slots:
                        mine[slot] = values[slot]

    def collect_written(
        self, shared: dict[int, list[Any]], own: dict[int, list[Any]]
    ) -> list[Tensor]:
        """Returns the tensors that a call has changed, of devices and of replicas."""
        found = [values[slot] for values in shared.values() for slot in self._written_shared]
        return found + [values[slot] for values in own.values() for slot in self._written_own]


def _grad(place: Any, leader: int) -> Tensor | None:
    holder = place.owner if place.record is None else place.record.targets[leader]
    grad: Tensor | None = holder.grad
    return grad


class HeldStates:
    """An optimizer's state tensors on one replica, in the order of a trace's inputs.

    Args:
        wanted: for each input, the parameter, and the name in its entry.
        replica_id: the first replica on its device.

    Raises:
        KeyError: there is no such state.
    """

    def __init__(
        self, optimizer: Optimizer, wanted: Sequence[tuple[StateTensor, Any]], replica_id: int
    ) -> None:
        self._optimizer, self._replica_id = optimizer, replica_id
        self._wanted = list(wanted)
        self._mirror: Any = vars(optimizer).get("_mirror") if replica_id else None
        self._state: Any = None
        self._entries: list[Any] = []
        self._places: list[tuple[dict[Any, Any], Any]] = []
        self.tensors = self.read()

    def read(self) -> list[Tensor]:
        """Returns the tensors of now.

        Raises:
            KeyError: one is missing.
        """
        state: Any = self._optimizer.state
        if self._mirror is not None:
            states = self._mirror.states
            if state is not states.shared or states.shared.seen:  # the program may have changed it
                states.read(self._optimizer)
            state = states.state_of(self._replica_id)
        # Past what the state of mirrored parameters does when it is looked into.
        entries = [*dict.values(state)]
        if state is not self._state or not are_identical(entries, self._entries):
            self._places = self._find(state)
            self._state, self._entries = state, entries
        return [entry[name] for entry, name in self._places]

    def _find(self, state: Any) -> list[tuple[dict[Any, Any], Any]]:
        by_id = {id(key): entry for key, entry in dict.items(state)}
        places = []
        for place, name in self._wanted:
            key = place.owner if self._mirror is None else place.tensor_of(self._replica_id)
            entry, device = by_id[id(key)], place.tensor_of(self._replica_id).device
            # Programs of GPUs count there: what the host counts, a CUDA graph would not see.
            if not entry[name].dim() and entry[name].device != device:
                entry[name] = entry[name].to(device)
            places.append((entry, name))
        return places

    def are_as_before(self) -> bool:
        """Whether the tensors are the same, or have the same layout; keeps the new ones."""
        try:
            tensors = self.read()
        except KeyError:
            return False
        if are_identical(tensors, self.tensors):
            return True
        alike = all(
            isinstance(now, Tensor)
            and now.shape == then.shape
            and now.dtype == then.dtype
            and now.stride() == then.stride()
            for now, then in zip(tensors, self.tensors, strict=True)
        )
        if alike:
            self.tensors = tensors
        return alike
