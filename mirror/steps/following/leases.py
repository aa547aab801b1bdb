"""Leases: optimizers that a traced step has stepped, over what stands for their parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirror.errors import CompileError
from mirror.steps.following.stand_ins import StandIns
from mirror.steps.inputs import Kind

_PLAIN = (bool, int, float, str, type(None))


class Lease:
    """One optimizer, and what it is while a trace follows its step.

    Attributes:
        groups, state: its own.
        lent, lent_state: what it has of both in the trace.
    """

    def __init__(self, optimizer: Optimizer, number: int) -> None:
        self.optimizer, self.number = optimizer, number
        self.groups: list[dict[str, Any]] = optimizer.param_groups
        self.state: Any = optimizer.state
        self.lent: list[dict[str, Any]] = []
        self.lent_state: Any = None
        self.is_lent = False


class Leases:
    """Lends optimizers to a trace. Their state is made before: the first call is not compiled.

    Args:
        refusal: makes the error for what cannot be followed.

    Attributes:
        all: by ``id`` of the optimizer.
    """

    def __init__(self, stand_ins: StandIns, refusal: Callable[..., CompileError]) -> None:
        self._stand_ins, self._refusal = stand_ins, refusal
        self.all: dict[int, Lease] = {}

    def begin(self, optimizer: Optimizer) -> None:
        """Puts stand-ins into an optimizer's groups and state, before its step."""
        lease = self.all.get(id(optimizer))
        if lease is not None and lease.is_lent:
            return  # a subclass's step has called its base's
        first = lease is None
        if lease is None:
            lease = self.all[id(optimizer)] = Lease(optimizer, len(self.all))
        if first:
            lease.lent = [self._group(lease, i, group) for i, group in enumerate(lease.groups)]
            lease_state: Any = defaultdict(dict)
            for key, entry in raw_state(lease.state).items():
                place = self._stand_ins.place_of(key) if isinstance(key, Tensor) else None
                if place is None:
                    lease_state[key] = entry
                    continue
                leaf = self._stand_ins.standing_for(place)
                lease_state[leaf] = {
                    name: self._stand_ins.add(Kind.STATE, value, lease.number, (place, name))
                    if isinstance(value, Tensor)
                    else value
                    for name, value in entry.items()
                }
            lease.lent_state = lease_state
        lease.is_lent = True
        optimizer.param_groups = lease.lent
        optimizer.state = lease.lent_state

    def _group(self, lease: Lease, i: int, group: dict[str, Any]) -> dict[str, Any]:
        lent = dict(group)
        lent["params"] = params = []
        for parameter in group["params"]:
            place = self._stand_ins.place_of(parameter)
            if place is None:
                raise self._refusal(
                    f"a parameter of {type(lease.optimizer).__name__} of shape "
                    f"{tuple(parameter.shape)}",
                    "is not mirrored",
                    "make its module in strategy.scope()",
                )
            params.append(self._stand_ins.standing_for(place))
        rate = group.get("lr")
        if isinstance(rate, (float, int)) and not isinstance(rate, bool):
            value = torch.tensor(float(rate), dtype=torch.float32)
            lent["lr"] = self._stand_ins.add(Kind.RATE, value, lease.number, (i, "lr"))
        elif isinstance(rate, Tensor):
            lent["lr"] = self._stand_ins.add(Kind.RATE, rate, lease.number, (i, "lr"))
        # The same arithmetic on tensors, without looking at the counts of steps.
        if "capturable" in lent:
            lent["capturable"] = True
        if lent.get("fused"):
            lent["fused"] = False
        if "foreach" in lent and lent.get("foreach") is None:
            lent["foreach"] = True
        return lent

    def give_back(self, optimizer: Optimizer) -> None:
        """Takes the stand-ins out after a step."""
        lease = self.all.get(id(optimizer))
        if lease is None or not lease.is_lent:
            return
        lease.is_lent = False
        optimizer.param_groups = lease.groups
        optimizer.state = lease.state

    def end(self) -> None:
        """Gives all back, after an error too."""
        for lease in self.all.values():
            self.give_back(lease.optimizer)


def raw_state(state: Any) -> dict[Any, Any]:
    """Returns an optimizer's state by what it is kept under, without asking whose turn it is."""
    raw = getattr(state, "raw_items", None)
    return dict(state.items() if raw is None else raw())
