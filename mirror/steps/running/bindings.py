"""Bindings: the tensors that the inputs of a traced step are, on each replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.execution.replicas import Replicas
from mirror.steps.following.leases import Lease, raw_state
from mirror.steps.inputs import Input, Kind
from mirror.values import are_identical


class Bindings:
    """Finds the tensors of a trace's inputs.

    Parameters and optimizer state are those of the first replica on each device: the others of a
    device read them, too.

    Args:
        inputs: those of the trace, in order.
        written: those that it changes.
        leases: the optimizers that it steps.

    Attributes:
        homes: of each device, the first replica.
    """

    def __init__(
        self,
        replicas: Replicas,
        inputs: Sequence[Input],
        written: Sequence[Input],
        leases: Sequence[Lease],
        draws: int,
    ) -> None:
        self._replicas, self._inputs = replicas, list(inputs)
        self._written = list(written)
        self._leases, self._draws = list(leases), draws
        devices = list(replicas.devices)
        self.homes = tuple(devices.index(device) for device in dict.fromkeys(devices))
        self._home_of = [devices.index(device) for device in devices]
        self._slots = {id(one): i for i, one in enumerate(inputs)}
        of_kind = {kind: [i for i, one in enumerate(inputs) if one.kind is kind] for kind in Kind}
        self._parts = [
            i
            for i, one in enumerate(inputs)
            if one.of is not None and (one.kind is Kind.PART or (one.kind is Kind.SHARED))
        ]
        self._buffers = of_kind[Kind.BUFFER]
        (self._count,), (self._weight,) = of_kind[Kind.COUNT], of_kind[Kind.WEIGHT]
        (self._place,), (self._seed,) = of_kind[Kind.PLACE], of_kind[Kind.SEED]
        n = replicas.num_replicas
        self._places = [
            torch.arange(n, device=device) == r for r, device in enumerate(replicas.devices)
        ]
        self._rates = [
            (i, leases[inputs[i].of].optimizer, inputs[i].key[0]) for i in of_kind[Kind.RATE]
        ]
        self._counts = [torch.ones((), dtype=torch.float64, device=d) for d in replicas.devices]
        self._weights = [torch.ones((), dtype=torch.float64, device=d) for d in replicas.devices]
        self._templates: dict[int, list[Any]] = {}
        self._states = of_kind[Kind.STATE]
        self._known_states = self._all_states()
        self.bind()

    def bind(self) -> None:
        """Finds all that stays from call to call."""
        self._last_rates: list[Any] = [None] * len(self._rates)
        for r in range(self._replicas.num_replicas):
            home = self._home_of[r]
            self._templates[r] = [self._found(one, r, home) for one in self._inputs]

    def _found(self, one: Input, r: int, home: int) -> Any:
        kind = one.kind
        if kind is Kind.PARAMETER:
            return one.of.of(home)
        if kind is Kind.BUFFER:
            return one.of.of(r)
        if kind is Kind.STATE:
            return self.state(one, home)
        if kind is Kind.RATE:
            device = self._replicas.devices[home]
            return torch.zeros((), dtype=one.fake.dtype, device=device)
        if kind is Kind.PLACE:
            return self._places[r]
        if kind is Kind.COUNT:
            return self._counts[r]
        if kind is Kind.WEIGHT:
            return self._weights[r]
        if kind is Kind.SHARED and one.value is not None:
            return one.value.detach().to(self._replicas.devices[r])
        return None

    def hold(self) -> bool:
        """Whether there is all that the trace found; finds anew what has been replaced."""
        try:
            states = self._all_states()
        except (KeyError, AttributeError):
            return False
        if not are_identical(states, self._known_states):
            alike = len(states) == len(self._known_states) and all(
                isinstance(now, Tensor) and now.shape == then.shape and now.dtype == then.dtype
                for now, then in zip(states, self._known_states, strict=True)
            )
            if not alike:
                return False
            self._known_states = states
            self.bind()
        return True

    def _all_states(self) -> list[Tensor]:
        return [self.state(self._inputs[i], home) for i in self._states for home in self.homes]

    def state(self, one: Input, home: int) -> Tensor:
        """Returns an optimizer's state on the first replica of a device."""
        lease, (place, name) = self._leases[one.of], one.key
        mirror: Any = vars(lease.optimizer).get("_mirror")
        if place.record is None or mirror is None or home == 0:
            found: Tensor = raw_state(lease.optimizer.state)[place.owner][name]
        else:
            found = mirror.states.of(home)[place.record.targets[home]][name]
        return found

    def values(
        self, parts: dict[int, list[Any]], weights: Sequence[float] | None, spare: list[Any]
    ) -> dict[int, list[Any]]:
        """Returns the values that a call begins with, of each replica that takes part."""
        for i, (slot, optimizer, group) in enumerate(self._rates):
            rate = optimizer.param_groups[group]["lr"]
            if isinstance(rate, Tensor) or rate != self._last_rates[i]:
                self._last_rates[i] = rate
                for home in self.homes:
                    self._templates[home][slot].fill_(rate)
                for r, home in enumerate(self._home_of):
                    self._templates[r][slot] = self._templates[home][slot]
        seeds = None
        if self._draws:
            seeds = torch.empty(len(parts), dtype=torch.int64).random_(0, 2**62).unbind()
        values = {}
        for number, (r, tensors) in enumerate(parts.items()):
            mine = self._templates[r] + spare
            for slot, tensor in zip(self._parts, tensors, strict=True):
                mine[slot] = tensor
            for slot in self._buffers:
                mine[slot] = self._inputs[slot].of.of(r)
            if seeds is not None:
                mine[self._seed] = seeds[number].to(self._replicas.devices[r])
            mine[self._weight] = self._weights[r]
            if weights is not None:
                self._weights[r].fill_(weights[r])
            self._counts[r].fill_(len(parts))
            values[r] = mine
        return values

    def idle(self, home: int, spare: list[Any]) -> list[Any]:
        """Returns the values of a device's first replica that takes no part itself."""
        return self._templates[home] + spare

    def hand_on(
        self, home: int, values: list[Any], own: dict[int, list[Any]], slots: Sequence[int]
    ) -> None:
        """Gives what a shared program has left to the device's other replicas."""
        if slots:
            for r, mine in own.items():
                if self._home_of[r] == home and r != home:
                    for slot in slots:
                        mine[slot] = values[slot]

    def written(self, active: Sequence[int]) -> list[Tensor]:
        """Returns the tensors that a call has changed."""
        found = []
        for one in self._written:
            slot = self._slots[id(one)]
            for r in active if one.kind.is_own else self.homes:
                found.append(one.of.of(r) if one.kind is Kind.BUFFER else self._templates[r][slot])
        return found
