"""Optimizers in a trace: they step over placeholders, and their options are guarded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mirror.compiler.capture.placeholders import Placeholders
from mirror.compiler.capture.traced_numbers import TracedNumbers
from mirror.compiler.step_errors import StateMissing
from mirror.compiler.step_inputs import InputKind, StateTensor
from mirror.errors import CompileError


class TracedSwap:
    """One optimizer, with the groups and the state that it has during the trace.

    Attributes:
        groups, state: its own.
        options_then: copies of the groups at the time of the trace.
        traced_groups, traced_state: the groups and the state during the trace.
        groups_before, state_before: copies of both before the step.
        widened: placeholders of counts of steps, with their copies in double precision.
    """

    def __init__(self, optimizer: Optimizer, number: int) -> None:
        self.optimizer, self.number = optimizer, number
        self.groups: list[dict[str, Any]] = optimizer.param_groups
        self.state: Any = optimizer.state
        self.options_then = [dict(group) for group in self.groups]
        self.traced_groups: list[dict[str, Any]] = []
        self.traced_state: Any = None
        self.groups_before: list[dict[str, Any]] = []
        self.state_before: dict[Any, dict[str, Any]] = {}
        self.widened: list[tuple[Tensor, Tensor]] = []
        self.is_swapped_in = False


class TracedSwaps:
    """Swaps placeholders into optimizers. Their state exists: the first call is not compiled.

    Args:
        refusal: creates the error for code that cannot be traced.
        numbers: the numbers of Python that are inputs.
        rates: the form of learning rates: "tensors"; "numbers", for steps that use their values,
            see [Note: Traced numbers]; "constants", the rates of the trace.

    Attributes:
        all: by ``id`` of the optimizer.
    """

    def __init__(
        self,
        placeholders: Placeholders,
        refusal: Callable[..., CompileError],
        numbers: TracedNumbers,
        *,
        rates: str,
    ) -> None:
        self._placeholders, self._refusal, self._numbers = placeholders, refusal, numbers
        self.rates = rates
        self.all: dict[int, TracedSwap] = {}

    @property
    def is_stepping(self) -> bool:
        """Whether an optimizer is making its step."""
        return any(swap.is_swapped_in for swap in self.all.values())

    def swap_in(self, optimizer: Optimizer) -> bool:
        """Puts placeholders into an optimizer's groups and state, before its step.

        Returns:
            Whether the step begins here: False if a subclass's step calls that of its base.
        """
        swap = self.all.get(id(optimizer))
        if swap is not None and swap.is_swapped_in:
            return False
        first = swap is None
        if swap is None:
            swap = self.all[id(optimizer)] = TracedSwap(optimizer, len(self.all))
        if first:
            swap.traced_groups = [
                self._group(swap, i, group) for i, group in enumerate(swap.groups)
            ]
            swapped_state: Any = defaultdict(dict)
            for key, entry in raw_state(swap.state).items():
                place = self._placeholders.place_of(key) if isinstance(key, Tensor) else None
                if place is None:
                    swapped_state[key] = entry
                    continue
                leaf = self._placeholders.placeholder_of(place)
                swapped_state[leaf] = {
                    name: self._substitute(swap, place, name, value)
                    if isinstance(value, Tensor)
                    else value
                    for name, value in entry.items()
                }
            swap.traced_state = swapped_state
            swap.groups_before = [dict(group) for group in swap.traced_groups]
            swap.state_before = {key: dict(entry) for key, entry in swapped_state.items()}
        swap.is_swapped_in = True
        optimizer.param_groups = swap.traced_groups
        optimizer.state = swap.traced_state
        return True

    def rewritten(self, optimizer: Optimizer) -> list[Tensor]:
        """Returns the parameters that step as lists here, and one by one in ``run``.

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

    def _substitute(self, swap: TracedSwap, place: Any, name: str, value: Tensor) -> Tensor:
        """Returns the placeholder of a tensor of the state.

        A count of steps is in double precision if the parameter is: an uncompiled step computes
        powers with a number of Python.
        """
        stands = self._placeholders.add(InputKind.STATE, value, swap.number, (place, name))
        is_double = place.owner.dtype in (torch.float64, torch.complex128)
        if name != "step" or not is_double or value.dim() or value.dtype != torch.float32:
            return stands
        wide = stands.to(torch.float64)
        swap.widened.append((stands, wide))
        return wide

    def places_of(self, optimizer: Optimizer, *groups: dict[str, Any]) -> list[StateTensor]:
        """Returns the mirrored parameters of an optimizer, of these groups or of all."""
        places = []
        for parameter in chain.from_iterable(
            group["params"] for group in groups or optimizer.param_groups
        ):
            place = self._placeholders.place_of(parameter)
            if place is None:
                raise self._refusal(
                    f"a parameter of {type(optimizer).__name__} of shape {tuple(parameter.shape)}",
                    "is not mirrored",
                    "make its module in strategy.scope()",
                )
            places.append(place)
        return places

    def _group(self, swap: TracedSwap, i: int, group: dict[str, Any]) -> dict[str, Any]:
        traced = dict(group)
        places = self.places_of(swap.optimizer, group)
        traced["params"] = params = [self._placeholders.placeholder_of(place) for place in places]
        rate = traced.get("lr")
        for name, value in traced.items():
            if name not in ("params", "lr"):
                traced[name] = self._numbers.option(swap.optimizer, i, name, value)
        if self.rates == "numbers":
            traced["lr"] = self._numbers.option(swap.optimizer, i, "lr", rate, always=True)
        elif self.rates == "constants":
            pass
        elif isinstance(rate, (float, int)) and not isinstance(rate, bool):
            # A Python number has the precision of the parameters that it is combined with.
            is_double = any(p.dtype in (torch.float64, torch.complex128) for p in params)
            dtype = torch.float64 if is_double else torch.float32
            value = torch.tensor(float(rate), dtype=dtype)
            traced["lr"] = self._placeholders.add(InputKind.RATE, value, swap.number, (i, "lr"))
        elif isinstance(rate, Tensor):
            traced["lr"] = self._placeholders.add(InputKind.RATE, rate, swap.number, (i, "lr"))
        # The same arithmetic on tensors, without looking at the counts of steps.
        if "capturable" in traced:
            traced["capturable"] = True
        if traced.get("fused"):
            traced["fused"] = False
        if "foreach" in traced and not traced.get("differentiable"):
            traced["foreach"] = self.rates == "tensors"
        return traced

    def snapshot(self, optimizer: Optimizer) -> list[Any]:
        """Returns copies of the parameters and the state of an optimizer that is swapped in."""
        swap = self.all[id(optimizer)]
        with torch.no_grad():
            params = [(p, p.clone()) for group in swap.traced_groups for p in group["params"]]
            entries = [
                (entry, name, value.clone())
                for entry in swap.traced_state.values()
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
        """Takes the placeholders out after a step."""
        swap = self.all.get(id(optimizer))
        if swap is None or not swap.is_swapped_in:
            return
        swap.is_swapped_in = False
        optimizer.param_groups = swap.groups
        optimizer.state = swap.state

    def check(self) -> None:
        """Checks the state and the options that the steps have left.

        Raises:
            StateMissing: they have created state.
            CompileError: they have changed a value that is not a tensor.
        """
        for swap in self.all.values():
            kind = type(swap.optimizer).__name__
            for before, after in zip(swap.groups_before, swap.traced_groups, strict=True):
                for name, value in after.items():
                    if name != "params" and not is_as_before(before.get(name, swap), value):
                        raise changed_options_error(kind, f"option {name!r}")
            for key, entry in swap.traced_state.items():
                known = swap.state_before.get(key, {})
                if isinstance(entry, dict):
                    _check_entry(kind, known, entry)
            with torch.no_grad():
                for stands, wide in swap.widened:
                    stands.copy_(wide)

    def end(self) -> None:
        """Swaps all optimizers out, also after an error."""
        for swap in self.all.values():
            self.swap_out(swap.optimizer)


def _check_entry(kind: str, known: dict[str, Any], entry: dict[str, Any]) -> None:
    for name, value in entry.items():
        before = known.get(name)
        if value is before:
            continue
        if isinstance(value, Tensor) and isinstance(before, Tensor):
            if value.shape != before.shape or value.dtype != before.dtype:
                raise StateMissing
            with torch.no_grad():
                before.copy_(value)  # state that each step creates again
        elif name not in known or isinstance(value, Tensor) or before is None:
            raise StateMissing
        elif not is_as_before(before, value):
            raise CompileError(
                f"the step cannot be compiled: {kind} keeps {name!r} of its state as a number of "
                "Python, which would be the same in every call; keep it in a tensor, or pass "
                "fallback='eager'"
            )


def raw_state(state: Any) -> dict[Any, Any]:
    """Returns an optimizer's state by its keys, whichever replica steps."""
    raw = getattr(state, "raw_items", None)
    return dict(state.items() if raw is None else raw())


_PLAIN = (bool, int, float, str, bytes, complex, type(None), tuple)


class _Group(dict[str, Any]):
    """A copy of a group, which records that its learning rate is read.

    Attributes:
        traced: returns the value of an option in the step, a number or a traced one.
    """

    is_rate_read = False
    traced: Callable[[str, Any], Any] = staticmethod(lambda key, value: value)

    def __getitem__(self, key: str) -> Any:
        return self._replace_read(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        return self._replace_read(key, super().get(key, default))

    def _replace_read(self, key: str, value: Any) -> Any:
        stands = self.traced(key, value)
        self.is_rate_read |= key == "lr" and stands is value
        return stands

    def items(self) -> Any:
        self.is_rate_read = True
        return super().items()

    def values(self) -> Any:
        self.is_rate_read = True
        return super().values()


class OptionGuards:
    """The groups of optimizers that a step may read, and must not change.

    Args:
        traced: returns the value of an option in the step, of optimizer, group, name and value.

    Attributes:
        read: the optimizers with learning rates that the step has read as numbers.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer], traced: Callable[[Any, int, str, Any], Any]
    ) -> None:
        self._optimizers, self._traced = list(optimizers), traced
        self.read: list[Optimizer] = []
        self._changed: list[tuple[Optimizer, str]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block, the optimizers have copies of their groups."""
        own = [optimizer.param_groups for optimizer in self._optimizers]
        copies: list[list[_Group]] = [[_Group(group) for group in groups] for groups in own]
        for optimizer, groups in zip(self._optimizers, copies, strict=True):
            for i, group in enumerate(groups):
                group.traced = partial(self._traced, optimizer, i)
            optimizer.param_groups = groups  # type: ignore[assignment]
        try:
            yield
        finally:
            for optimizer, before in zip(self._optimizers, own, strict=True):
                after = optimizer.param_groups
                optimizer.param_groups = before
                if any(getattr(group, "is_rate_read", True) for group in after):
                    self.read.append(optimizer)
                changed = _difference(before, after)
                if changed is not None:
                    self._changed.append((optimizer, changed))

    def check(self) -> None:
        """Checks that the step has changed no group.

        Raises:
            CompileError: a group has other options, or there are other groups.
        """
        for optimizer, what in self._changed:
            raise changed_options_error(type(optimizer).__name__, what)


def _difference(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str | None:
    """Returns the first difference between groups, in words."""
    if len(before) != len(after):
        return "its groups"
    for old, new in zip(before, after, strict=True):
        for name in {**old, **new}:
            if name not in old or name not in new:
                return f"option {name!r}"
            if not is_as_before(dict.get(old, name), dict.get(new, name)):  # unseen
                return f"option {name!r}"
    return None


def is_as_before(old: Any, new: Any) -> bool:
    """Whether a value is unchanged, as far as a comparison shows."""
    if old is new:
        return True
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        return False
    if isinstance(old, _PLAIN) or isinstance(new, _PLAIN):
        return type(old) is type(new) and bool(old == new)
    return True


def changed_options_error(kind: str, what: str) -> CompileError:
    """Returns the error for a step that changes an optimizer's options."""
    return CompileError(
        f"the step cannot be compiled: it changes {what} of {kind}, which a compiled step would "
        "do once and never again; do it after the step (learning rates may change from call to "
        "call), or pass fallback='eager'"
    )
