"""Leases: optimizers that a traced step has stepped, over what stands for their parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirror.compiler.capture.option_guards import is_as_before, options_changed
from mirror.compiler.capture.placeholders import Placeholders
from mirror.compiler.capture.traced_numbers import TracedNumbers
from mirror.compiler.comparable import StateMissing
from mirror.compiler.step_inputs import InputKind
from mirror.errors import CompileError


class TracedSwap:
    """One optimizer, and what it is while a trace follows its step.

    Attributes:
        groups, state: its own.
        options_then: what the groups were in the trace.
        lent, lent_state: what it has of both in the trace.
        were_lent, were_state: what it had of both before the step.
        widened: counts of steps that are lent in double precision, with what stands for them.
    """

    def __init__(self, optimizer: Optimizer, number: int) -> None:
        self.optimizer, self.number = optimizer, number
        self.groups: list[dict[str, Any]] = optimizer.param_groups
        self.state: Any = optimizer.state
        self.options_then = [dict(group) for group in self.groups]
        self.lent: list[dict[str, Any]] = []
        self.lent_state: Any = None
        self.were_lent: list[dict[str, Any]] = []
        self.were_state: dict[Any, dict[str, Any]] = {}
        self.widened: list[tuple[Tensor, Tensor]] = []
        self.is_lent = False


class TracedSwaps:
    """Lends optimizers to a trace. Their state is made before: the first call is not compiled.

    Args:
        refusal: makes the error for what cannot be followed.
        numbers: the numbers of Python that are inputs.
        rates: what learning rates are: "tensors"; "numbers", for steps that ask for their values,
            see [Note: Traced numbers]; "constants", which are those of the trace.

    Attributes:
        all: by ``id`` of the optimizer.
    """

    def __init__(
        self,
        stand_ins: Placeholders,
        refusal: Callable[..., CompileError],
        numbers: TracedNumbers,
        *,
        rates: str,
    ) -> None:
        self._stand_ins, self._refusal, self._numbers = stand_ins, refusal, numbers
        self.rates = rates
        self.all: dict[int, TracedSwap] = {}

    @property
    def is_stepping(self) -> bool:
        """Whether an optimizer is making its step."""
        return any(lease.is_lent for lease in self.all.values())

    def begin(self, optimizer: Optimizer) -> bool:
        """Puts stand-ins into an optimizer's groups and state, before its step.

        Returns:
            Whether the step begins here: not if a subclass's step has called its base's.
        """
        lease = self.all.get(id(optimizer))
        if lease is not None and lease.is_lent:
            return False
        first = lease is None
        if lease is None:
            lease = self.all[id(optimizer)] = TracedSwap(optimizer, len(self.all))
        if first:
            lease.lent = [self._group(lease, i, group) for i, group in enumerate(lease.groups)]
            lease_state: Any = defaultdict(dict)
            for key, entry in raw_state(lease.state).items():
                place = self._stand_ins.place_of(key) if isinstance(key, Tensor) else None
                if place is None:
                    lease_state[key] = entry
                    continue
                leaf = self._stand_ins.placeholder_of(place)
                lease_state[leaf] = {
                    name: self._swapped(lease, place, name, value)
                    if isinstance(value, Tensor)
                    else value
                    for name, value in entry.items()
                }
            lease.lent_state = lease_state
            lease.were_lent = [dict(group) for group in lease.lent]
            lease.were_state = {key: dict(entry) for key, entry in lease_state.items()}
        lease.is_lent = True
        optimizer.param_groups = lease.lent
        optimizer.state = lease.lent_state
        return True

    def rewritten(self, optimizer: Optimizer) -> list[Tensor]:
        """Returns the parameters that are stepped by lists here, and one by one in ``run``.

        Steps by lists may write into the gradients (SGD's with ``nesterov``, Rprop's); those
        parameter by parameter do not. By default torch steps by lists on accelerators alone.
        """
        if self.rates != "tensors":
            return []
        return [
            parameter
            for group in self.all[id(optimizer)].groups
            for parameter in group["params"]
            if "foreach" in group
            and not group["foreach"]
            and (group["foreach"] is False or parameter.device.type == "cpu")
        ]

    def _swapped(self, lease: TracedSwap, place: Any, name: str, value: Tensor) -> Tensor:
        """Returns what stands for a tensor of the state.

        Of a count, of which powers are taken, in double precision where the parameter has it: an
        uncompiled step takes them of a number of Python.
        """
        stands = self._stand_ins.add(InputKind.STATE, value, lease.number, (place, name))
        is_double = place.owner.dtype in (torch.float64, torch.complex128)
        if name != "step" or not is_double or value.dim() or value.dtype != torch.float32:
            return stands
        wide = stands.to(torch.float64)
        lease.widened.append((stands, wide))
        return wide

    def _group(self, lease: TracedSwap, i: int, group: dict[str, Any]) -> dict[str, Any]:
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
            params.append(self._stand_ins.placeholder_of(place))
        rate = lent.get("lr")
        for name, value in lent.items():
            if name not in ("params", "lr"):
                lent[name] = self._numbers.option(lease.optimizer, i, name, value)
        if self.rates == "numbers":
            lent["lr"] = self._numbers.option(lease.optimizer, i, "lr", rate, always=True)
        elif self.rates == "constants":
            pass
        elif isinstance(rate, (float, int)) and not isinstance(rate, bool):
            # A number of Python is as exact as the parameters that it meets.
            is_double = any(p.dtype in (torch.float64, torch.complex128) for p in params)
            dtype = torch.float64 if is_double else torch.float32
            value = torch.tensor(float(rate), dtype=dtype)
            lent["lr"] = self._stand_ins.add(InputKind.RATE, value, lease.number, (i, "lr"))
        elif isinstance(rate, Tensor):
            lent["lr"] = self._stand_ins.add(InputKind.RATE, rate, lease.number, (i, "lr"))
        # The same arithmetic on tensors, without looking at the counts of steps.
        if "capturable" in lent:
            lent["capturable"] = True
        if lent.get("fused"):
            lent["fused"] = False
        if "foreach" in lent and not lent.get("differentiable"):
            lent["foreach"] = self.rates == "tensors"
        return lent

    def snapshot(self, optimizer: Optimizer) -> list[Any]:
        """Returns copies of the parameters and the state of an optimizer that is lent."""
        lease = self.all[id(optimizer)]
        with torch.no_grad():
            params = [(p, p.clone()) for group in lease.lent for p in group["params"]]
            entries = [
                (entry, name, value.clone())
                for entry in lease.lent_state.values()
                if isinstance(entry, dict)
                for name, value in entry.items()
                if isinstance(value, Tensor)
            ]
        return [params, entries]

    def keep_where(self, optimizer: Optimizer, kept: Tensor, before: list[Any]) -> None:
        """Puts back what an optimizer has changed where ``kept`` is true."""
        params, entries = before
        with torch.no_grad():
            for tensor, old in params:
                tensor.copy_(torch.where(kept, old, tensor))
            for entry, name, old in entries:
                entry[name].copy_(torch.where(kept, old, entry[name]))

    def swap_out(self, optimizer: Optimizer) -> None:
        """Takes the stand-ins out after a step."""
        lease = self.all.get(id(optimizer))
        if lease is None or not lease.is_lent:
            return
        lease.is_lent = False
        optimizer.param_groups = lease.groups
        optimizer.state = lease.state

    def check(self) -> None:
        """Looks at what the steps have left of state and options.

        Raises:
            StateMissing: they have made state.
            CompileError: they have changed what is no tensor.
        """
        for lease in self.all.values():
            kind = type(lease.optimizer).__name__
            for before, after in zip(lease.were_lent, lease.lent, strict=True):
                for name, value in after.items():
                    if name != "params" and not is_as_before(before.get(name, lease), value):
                        raise options_changed(kind, f"option {name!r}")
            for key, entry in lease.lent_state.items():
                known = lease.were_state.get(key, {})
                if isinstance(entry, dict):
                    _check_entry(kind, known, entry)
            with torch.no_grad():
                for stands, wide in lease.widened:
                    stands.copy_(wide)

    def end(self) -> None:
        """Gives all back, after an error too."""
        for lease in self.all.values():
            self.swap_out(lease.optimizer)


def _check_entry(kind: str, known: dict[str, Any], entry: dict[str, Any]) -> None:
    for name, value in entry.items():
        before = known.get(name)
        if value is before:
            continue
        if isinstance(value, Tensor) and isinstance(before, Tensor):
            if value.shape != before.shape or value.dtype != before.dtype:
                raise StateMissing
            with torch.no_grad():
                before.copy_(value)  # state that is made anew in every step
        elif name not in known or isinstance(value, Tensor) or before is None:
            raise StateMissing
        elif not is_as_before(before, value):
            raise CompileError(
                f"the step cannot be compiled: {kind} keeps {name!r} of its state as a number of "
                "Python, which would be the same in every call; keep it in a tensor, or pass "
                "fallback='eager'"
            )


def raw_state(state: Any) -> dict[Any, Any]:
    """Returns an optimizer's state by what it is kept under, without asking whose turn it is."""
    raw = getattr(state, "raw_items", None)
    return dict(state.items() if raw is None else raw())
