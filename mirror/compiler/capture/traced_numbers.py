"""Numbers of Python that change from call to call, as inputs of a trace.

[Note: Traced numbers]
A trace keeps a number of Python as a constant until the number changes: an option of an optimizer
(momentum, betas, weight decay, eps), or an argument of the step. From then on the trace has a
``TracedNumber`` in its place, which is a number to Python code and an input to the graph:

    arithmetic with numbers    another TracedNumber; the host computes it before each call, in
                               double precision, as an uncompiled step does
    arithmetic with tensors    an operation of the graph; the number is an input, a 0-d tensor
    comparisons                a bool of Python, and a guard: the outcome must be the same
    any other use              the number itself, and a guard: the number must be the same
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from mirror.compiler.step_inputs import InputKind

# What a number is made of: ("source", number), ("number", value), or (operation, *expressions).
Expression = tuple[Any, ...]

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
}
_UNARY: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "bool": bool,
}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}
_FUNCTIONS = {**_ARITHMETIC, **_UNARY, **_COMPARISONS}
_HALF = (torch.float16, torch.bfloat16)
_WITH_ALPHA, _WITH_VALUE = ("add", "sub", "subtract", "rsub"), ("addcmul", "addcdiv")
_SCALING = (*_WITH_ALPHA, *_WITH_VALUE)


@dataclass(frozen=True, slots=True)
class NumberSource:
    """The place of a number, the same in every call.

    Attributes:
        optimizer: the number of the optimizer among those of the trace; ``None``: an argument.
        group: of an option, the number of the parameter group.
        name: of an option its name, of an argument its number among the leaves.
        index: of an option that is a tuple, which entry.
        is_own: whether every replica has one of its own.
        kind: ``int`` or ``float``, the type that it must have.
    """

    optimizer: Any
    group: int
    name: Any
    index: int | None
    is_own: bool
    kind: type

    def describe(self, argument_names: Sequence[str]) -> str:
        """Returns its name for messages."""
        if self.optimizer is None:
            known = self.name < len(argument_names)
            return argument_names[self.name] if known else "an argument"
        index = "" if self.index is None else f"[{self.index}]"
        return f"option {self.name!r}{index} of {type(self.optimizer).__name__}"

    def read_option(self) -> Any:
        """Returns the option of the optimizer now."""
        value = self.optimizer.param_groups[self.group].get(self.name)
        return value if self.index is None else value[self.index]


class TracedNumbers:
    """The numbers of one trace that are inputs. See [Note: Traced numbers].

    Args:
        add: adds an input of a kind, with a tensor and its expression; returns its placeholder.
        options: the options that have changed: of optimizer, group and name.
        arguments: the numbers of the leaves that have changed.

    Attributes:
        sources: the places of the numbers.
        values_then: their values in the trace.
        guards: comparisons, with their outcomes.
    """

    def __init__(
        self,
        add: Callable[[InputKind, Tensor, Expression], Tensor],
        options: Callable[[Any, int, str], bool],
        arguments: Callable[[int], bool],
    ) -> None:
        self._add, self._is_option, self._is_argument = add, options, arguments
        self.sources: list[NumberSource] = []
        self.values_then: list[Any] = []
        self.guards: dict[Expression, Any] = {}

    def option(
        self, optimizer: Any, group: int, name: str, value: Any, *, always: bool = False
    ) -> Any:
        """Returns the value of an option in the step: the number itself, or a traced one.

        Args:
            always: whether it is an input even if it has never changed.
        """
        if not always and not self._is_option(optimizer, group, name):
            return value
        if _is_plain_number(value):
            return self._trace_source(
                NumberSource(optimizer, group, name, None, False, float), value
            )
        if type(value) in (tuple, list) and value and all(map(_is_plain_number, value)):
            return type(value)(
                self._trace_source(NumberSource(optimizer, group, name, i, False, float), one)
                for i, one in enumerate(value)
            )
        return value

    def argument(self, leaf: int, value: Any, *, is_own: bool) -> Any:
        """Returns the value of a number among the step's arguments."""
        if not _is_plain_number(value) or not self._is_argument(leaf):
            return value
        kind = int if isinstance(value, int) else float
        return self._trace_source(NumberSource(None, 0, leaf, None, is_own, kind), value)

    def _trace_source(self, source: NumberSource, value: Any) -> Any:
        value = source.kind(value)
        if source not in self.sources:
            self.sources.append(source)
            self.values_then.append(value)
        made = _INT if isinstance(value, int) else _FLOAT
        return made(self, value, ("source", self.sources.index(source)))

    def tensor(self, number: Any, dtype: torch.dtype) -> Tensor:
        """Returns the 0-d tensor that a number is in the graph."""
        expression = number.expression
        is_own = any(self.sources[i].is_own for i in _sources_in(expression))
        kind = InputKind.OWN_NUMBER if is_own else InputKind.NUMBER
        wide = torch.int64 if isinstance(number.value, int) else torch.float64
        found = self._add(kind, torch.zeros((), dtype=wide), expression)
        return found if found.dtype == dtype else found.to(dtype)

    def add_guard(self, expression: Expression, outcome: Any) -> None:
        """Adds a guard: an expression, and its value in every call."""
        self.guards[expression] = outcome

    # Functions of torch that are called with numbers

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls a function of torch that has traced numbers among its arguments."""
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_"):
            return self._call_each(name, args, kwargs)
        if name.strip("_") in _SCALING and any(is_half(arg) for arg in args):
            return self._call_in_single(name, args, kwargs)
        args, kwargs = self._call_scaled(name, list(args), dict(kwargs))
        if not has_traced((args, kwargs)):
            return func(*args, **kwargs)
        if name in ("tensor", "as_tensor", "scalar_tensor") and is_traced_number(args[0]):
            default = torch.get_default_dtype()
            kind = kwargs.get("dtype") or (torch.int64 if args[0].is_int else default)
            return self.tensor(args[0], kind).clone()
        if name in ("lerp", "lerp_") and args[0].dtype in _HALF:
            return self._half_lerp(name, *args)
        tensors = [t for t in _iterate_leaves((args, kwargs)) if isinstance(t, Tensor)]
        try:
            return func(*self._as_tensors(args, tensors), **self._as_tensors(kwargs, tensors))
        except Exception:  # it takes no tensors there: the number itself, then
            return func(*_as_numbers(args), **_as_numbers(kwargs))

    def _call_in_single(self, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Calls a function of half tensors in single precision, as their kernels compute."""
        start = args[0]
        wide = [arg.float() if is_half(arg) else arg for arg in args]
        found: Tensor = self.call_any(getattr(torch, name.strip("_")), wide, kwargs)
        if name.endswith("_"):
            return cast("Tensor", start.copy_(found))
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        return found.to(reduce(torch.promote_types, [tensor.dtype for tensor in tensors]))

    def _call_scaled(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Multiplies by ``alpha=`` or ``value=``, which torch does not take as tensors."""
        bare = name.strip("_")
        if bare in _WITH_ALPHA and is_traced_number(kwargs.get("alpha")):
            alpha = kwargs.pop("alpha")
            at, other = (1, args[1]) if len(args) > 1 else ("other", kwargs.get("other"))
            scaled = self._product(other, alpha)
            if at == 1:
                args[1] = scaled
            else:
                kwargs["other"] = scaled
        if bare in _WITH_VALUE and is_traced_number(kwargs.get("value")):
            args[1] = self._product(args[1], kwargs.pop("value"))
        return args, kwargs

    def _product(self, other: Any, number: Any) -> Any:
        if isinstance(other, Tensor):
            return other * self._promote(number, [other])
        return other * number

    def _half_lerp(self, name: str, start: Tensor, end: Any, weight: Any) -> Tensor:
        wide = self.tensor(weight, torch.float32)
        found = torch.lerp(start.float(), end.float(), wide).to(start.dtype)
        return start.copy_(found) if name == "lerp_" else found

    def _call_each(self, name: str, args: Any, kwargs: Any) -> Any:
        """Calls a function of lists of tensors tensor by tensor."""
        bare = name.removeprefix("_foreach_")
        lists = [arg for arg in args if _is_list_of_tensors(arg)]
        rows = range(len(lists[0]))
        own = getattr(Tensor, bare, None) or getattr(torch, bare)
        if bare in ("addcmul", "addcmul_", "addcdiv", "addcdiv_") and len(args) > 3:
            args, kwargs = args[:3], {**kwargs, "value": args[3]}
        if "scalars" in kwargs:
            values = kwargs.pop("scalars")
            found = [
                self.call_any(own, [_row(arg, i) for arg in args], {"value": values[i]})
                for i in rows
            ]
        else:
            if bare == "pow" and is_traced_number(args[0]):
                own = torch.pow
            found = [self.call_any(own, [_row(arg, i) for arg in args], kwargs) for i in rows]
        return None if name.endswith("_") else found

    def call_any(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a function of torch, with numbers or without."""
        if has_traced((args, kwargs)):
            return self.call(func, args, kwargs)
        return func(*args, **kwargs)

    def _promote(self, number: Any, tensors: Sequence[Tensor]) -> Tensor:
        """Returns a number as a 0-d tensor of the dtype that torch gives numbers there."""
        if not tensors:
            is_int = number.is_int
            return self.tensor(number, torch.int64 if is_int else torch.get_default_dtype())
        kinds = [torch.result_type(tensor, number.value) for tensor in tensors]
        dtype = reduce(torch.promote_types, kinds)
        if dtype in _HALF and any(tensor.dim() for tensor in tensors):
            dtype = torch.float32  # the kernels of half types compute in it, numbers too
        return self.tensor(number, dtype)

    def _as_tensors(self, tree: Any, tensors: Sequence[Tensor]) -> Any:
        def to_tensors(leaf: Any) -> Any:
            if isinstance(leaf, slice):
                return _as_numbers(leaf)
            return self._promote(leaf, tensors) if is_traced_number(leaf) else leaf

        return _map_leaves(to_tensors, tree)

    # In every call

    def hold(self, values: Sequence[Any]) -> bool:
        """Whether all comparisons have the outcomes that they had."""
        if any(type(v) is not s.kind for v, s in zip(values, self.sources, strict=True)):
            return False
        return all(
            evaluate(expression, values) == outcome for expression, outcome in self.guards.items()
        )

    def find_change(self, values: Sequence[Any], argument_names: Sequence[str]) -> str | None:
        """Returns which comparison has another outcome than in the trace, in words."""
        names = [source.describe(argument_names) for source in self.sources]
        changes = [
            f"{name} was {then!r} and is {now!r}"
            for name, then, now in zip(names, self.values_then, values, strict=True)
        ]
        for text, source, value in zip(changes, self.sources, values, strict=True):
            if type(value) is not source.kind:
                return text
        for expression, outcome in self.guards.items():
            now = evaluate(expression, values)
            if now != outcome:
                used = ", ".join(changes[i] for i in dict.fromkeys(_sources_in(expression)))
                return f"`{_as_text(expression, names)}` was {outcome} and is {now} ({used})"
        return None


def evaluate(expression: Expression, values: Sequence[Any]) -> Any:
    """Returns the number that an expression is, given what the sources are."""
    kind = expression[0]
    if kind == "source":
        return values[expression[1]]
    if kind == "number":
        return expression[1]
    return _FUNCTIONS[kind](*[evaluate(one, values) for one in expression[1:]])


def _as_text(expression: Expression, names: Sequence[str]) -> str:
    """Returns an expression as Python, in which the sources have these names."""
    kind, *parts = expression
    if kind == "source":
        return names[parts[0]]
    if kind == "number":
        return repr(parts[0])
    texts = [_as_text(part, names) for part in parts]
    if kind in _SIGNS:
        return f" {_SIGNS[kind]} ".join(
            f"({text})" if len(part) > 2 else text for part, text in zip(parts, texts, strict=True)
        )
    return f"{kind}({texts[0]})"


def _sources_in(expression: Expression) -> Iterator[int]:
    if expression[0] == "source":
        yield expression[1]
    elif expression[0] != "number":
        for one in expression[1:]:
            yield from _sources_in(one)


def _is_plain_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _TracedNumber:
    """A number of Python that is an input of the graph. See [Note: Traced numbers].

    Attributes:
        value: its value in the traced call.
        expression: its computation from the sources.
    """

    is_int: ClassVar[bool]

    def __init__(self, numbers: TracedNumbers, value: Any, expression: Expression) -> None:
        self.numbers, self.value, self.expression = numbers, value, expression

    def specialize(self) -> Any:
        """Returns the number itself, and guards that it is the same in every call."""
        self.numbers.add_guard(("eq", self.expression, ("number", self.value)), True)
        return self.value

    def _combine(self, name: str, *others: Any) -> Any:
        values, expressions = [], []
        for one in others:
            if is_traced_number(one):
                values.append(one.value)
                expressions.append(one.expression)
            elif isinstance(one, (bool, int, float)):
                values.append(one)
                expressions.append(("number", one))
            else:
                return NotImplemented
        value, expression = _FUNCTIONS[name](*values), (name, *expressions)
        if name in _COMPARISONS or name == "bool":
            self.numbers.add_guard(expression, value)
            return value
        if type(value) not in (int, float):
            return NotImplemented
        return (_INT if type(value) is int else _FLOAT)(self.numbers, value, expression)

    def __hash__(self) -> int:
        return hash(self.specialize())

    def __format__(self, spec: str) -> str:
        return format(self.specialize(), spec)

    def __repr__(self) -> str:
        return repr(self.specialize())

    __str__ = __repr__

    def __float__(self) -> float:
        return float(self.specialize())

    def __int__(self) -> int:
        return int(self.specialize())

    def __index__(self) -> int:
        return operator.index(self.specialize())

    def __trunc__(self) -> int:
        return int(self.specialize())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.specialize(), digits)

    def __divmod__(self, other: Any) -> Any:
        return divmod(self.specialize(), other)


def _binary(name: str, *, is_reversed: bool) -> Callable[[Any, Any], Any]:
    if is_reversed:
        return lambda self, other: self._combine(name, other, self)
    return lambda self, other: self._combine(name, self, other)


for _name in (*_ARITHMETIC, *_COMPARISONS):
    setattr(_TracedNumber, f"__{_name}__", _binary(_name, is_reversed=False))
for _name in _ARITHMETIC:
    setattr(_TracedNumber, f"__r{_name}__", _binary(_name, is_reversed=True))
for _name in _UNARY:
    setattr(_TracedNumber, f"__{_name}__", lambda self, _name=_name: self._combine(_name, self))


# Torch's functions take symbols where they take numbers. These have no node, so that none but
# those that ``TracedNumbers.call`` sees can use one.


class TracedFloat(_TracedNumber, torch.SymFloat):
    """A float that is an input of the graph."""

    is_int = False


class TracedInt(_TracedNumber, torch.SymInt):
    """An int that is an input of the graph."""

    is_int = True


_FLOAT, _INT = TracedFloat, TracedInt


def is_traced_number(value: Any) -> bool:
    """Whether a value is a number that is an input of the graph."""
    return isinstance(value, _TracedNumber)


def is_half(value: Any) -> bool:
    """Whether a value is a tensor of a half type, with dimensions."""
    return isinstance(value, Tensor) and value.dtype in _HALF and value.dim() > 0


def has_traced(tree: Any) -> bool:
    """Whether a traced number is among arguments."""
    return any(map(is_traced_number, _iterate_leaves(tree)))


def _iterate_leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _iterate_leaves(one)
    elif isinstance(tree, dict):
        yield from _iterate_leaves(list(tree.values()))
    elif isinstance(tree, slice):
        yield from (tree.start, tree.stop, tree.step)
    else:
        yield tree


def _map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    if type(tree) in (list, tuple):
        return type(tree)(_map_leaves(function, one) for one in tree)
    if type(tree) is dict:
        return {name: _map_leaves(function, one) for name, one in tree.items()}
    return function(tree)


def _as_numbers(tree: Any) -> Any:
    def to_numbers(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*map(to_numbers, (leaf.start, leaf.stop, leaf.step)))
        return leaf.specialize() if is_traced_number(leaf) else leaf

    return _map_leaves(to_numbers, tree)


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(one, Tensor) for one in value)


def _row(value: Any, i: int) -> Any:
    return value[i] if isinstance(value, (list, tuple)) else value


def values_of(sources: Iterable[NumberSource], arguments: Mapping[int, Any]) -> list[Any]:
    """Returns the values of the sources; ``None`` for one that is not a number any more.

    Args:
        arguments: one replica's leaves that are not tensors, by their number.
    """
    values: list[Any] = []
    for source in sources:
        if source.optimizer is None:
            values.append(arguments.get(source.name))
            continue
        try:
            value = source.read_option()
        except (TypeError, IndexError):
            value = None
        values.append(float(value) if _is_plain_number(value) else None)
    return values
