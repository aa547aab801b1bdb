"""RecordedUpdate: the operations of an optimizer's step, made by one parameter for many.

[Note: Stand-ins]
A step calls the same operations for each parameter, with the same numbers: a rate, decays,
corrections by the count of steps. So the optimizer's code runs over one stand-in, a tensor of one
element, for all parameters that it treats alike. Each operation is then made on the parameters:

    stand-in    exp_avg.lerp_(grad, 0.1)         torch._foreach_lerp_([exp_avg], [grad], 0.1)
    parameters  the same for each, in turn       the same call, with all in the lists

These are the kernels and the numbers of the step itself, so all bits are equal. Nothing is frozen:
what the code reads, it reads in each step. A value of a tensor may only be read of counts, which
are equal for all parameters of a stand-in.

The first time, ``UpdateRecorder`` finds which operation takes which columns. Afterwards
``NumberRecorder`` checks that the operations are the same, and notes their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, compress, groupby, repeat
from operator import is_
from typing import Any

from torch import Tensor

from mirror.compiler.torch_internals import ITEM, DispatchMode, schema_of

Columns = list[Any]  # by number of the column, the tensors of the parameters of one stand-in
_BY_LISTS = ("aten::_foreach_", "aten::_fused_")
_SEVERAL = "it computes with several parameters at once"


class Unrecordable(Exception):
    """The update cannot be recorded; the message says why."""


class OtherOperations(Exception):
    """The operations are not those that were recorded."""


@dataclass(eq=False, slots=True)
class Instruction:
    """An operation, to be made on columns of tensors.

    Attributes:
        key: the operation, the columns among its arguments, and their structure.
        of: the number of the stand-in whose parameters it takes one by one; ``None``: it is one
            call, with lists of all, or with values that all have in common.
        reads: the columns that it takes.
        gives: the columns that it makes.
        call: makes it on all columns, with the arguments that are no columns.
        drops: the columns that no later instruction takes.
    """

    key: Any
    of: int | None = None
    reads: list[int] = field(default_factory=list)
    gives: list[int] = field(default_factory=list)
    call: Callable[[Columns, Sequence[Any]], None] | None = None  # a count is read: ``None``
    drops: list[int] = field(default_factory=list)


class UpdateRecorder(DispatchMode):
    """Records the operations on stand-ins.

    Attributes:
        instructions: the operations on columns so far.
        values: for each, the arguments that are no columns.
        owners: for each column, the number of its stand-in; ``None``: all have it in common.
        device: the device of a tensor that the code has made there; ``None``: there is none.
        written: the columns that it changes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.instructions: list[Instruction] = []
        self.values: list[list[Any]] = []
        self.owners: list[int | None] = []
        self.device: Any = None
        self.written: set[int] = set()
        self._columns: dict[int, int] = {}
        self._held: list[Any] = []  # so that no id is given twice
        self._readable: set[int] = set()

    def add(self, tensor: Tensor, owner: int | None = None, *, is_readable: bool = False) -> int:
        """Returns the column of a tensor; its value may be read if all have the same."""
        column = self._columns[id(tensor)] = len(self.owners)
        self.owners.append(owner)
        self._held.append(tensor)
        if is_readable:
            self._readable.add(column)
        return column

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key, flat = _key_of(self._columns, func, args, kwargs)
        reads = [column for column in key[1] if column is not None]
        is_mutable = schema_of(func).is_mutable
        if not reads:
            if is_mutable:
                raise Unrecordable("it changes a tensor that is not the optimizer's")
            return func(*args, **kwargs)
        is_readable = self._readable.issuperset(reads)
        if func is ITEM:
            if not is_readable:
                raise Unrecordable("it reads the value of a tensor")
            self.instructions.append(Instruction(key))
            self.values.append([])
            return func(*args, **kwargs)
        values = [value for value, column in zip(flat, key[1], strict=True) if column is None]
        self.device = _device_of(values) or self.device
        result = func(*args, **kwargs)
        if is_mutable:
            known = map(self._columns.get, map(id, _written(func, args, kwargs)))
            written = {column for column in known if column is not None}
            self.written |= written
            if not is_readable:
                self._readable -= written
        by_lists = schema_of(func).name.startswith(_BY_LISTS)
        make = self._make_by_lists if by_lists else self._make_one_by_one
        self.instructions.append(make(key, (*args, *kwargs.values()), result, is_readable))
        self.values.append(values)
        return result

    def _make_one_by_one(
        self, key: Any, arguments: Sequence[Any], result: Any, is_readable: bool
    ) -> Instruction:
        """Returns an operation on the tensors of one stand-in: a call for each parameter."""
        func, columns, _, names = key
        reads = [column for column in columns if column is not None]
        owners = {self.owners[n] for n in reads} - {None}
        if len(owners) > 1:
            raise Unrecordable(_SEVERAL)
        owner = next(iter(owners), None)
        counters = iter(range(len(reads))), iter(range(len(columns)))

        def name(value: Any) -> str:
            if isinstance(value, (list, tuple)):
                return f"[{', '.join(map(name, value))}]"
            if id(value) in self._columns:
                return f"t{next(counters[0])}"
            return f"values[{next(counters[1])}]"

        words = [*map(name, arguments)]
        num = len(words) - len(names)
        named = [f"{n}={word}" for n, word in zip(names, words[num:], strict=True)]
        loop = _make_loop(", ".join([*words[:num], *named]), len(reads))
        gives: list[int] = []
        if isinstance(result, Tensor):
            if id(result) not in self._columns:
                gives.append(self.add(result, owner, is_readable=is_readable))
        elif result is not None:
            raise Unrecordable(f"{func} makes several tensors")
        rows = [(n, self.owners[n] is None and owner is not None) for n in reads]
        kernel = func._op

        def call(columns: Columns, values: Sequence[Any]) -> None:
            found = loop(
                kernel,
                values,
                [repeat(columns[n][0]) if alike else columns[n] for n, alike in rows],
            )
            if gives:
                columns[gives[0]] = found

        return Instruction(key, owner, reads, gives, call)

    def _make_by_lists(
        self, key: Any, arguments: Sequence[Any], result: Any, is_readable: bool
    ) -> Instruction:
        """Returns an operation on lists of stand-ins' tensors: one call for all parameters."""
        func, columns, _, names = key
        remaining, counter = iter(columns), iter(range(len(columns)))
        plans: list[tuple[bool, list[tuple[int | None, int]]]] = []
        for value in arguments:
            is_list = isinstance(value, (list, tuple))
            entries = [next(remaining) for _ in (value if is_list else [value])]
            plans.append((is_list, [(n, -1 if n is not None else next(counter)) for n in entries]))
        first = next((pairs for is_list, pairs in plans if is_list), [])
        leads = [column for column, _ in first if column is not None]
        owners = [self.owners[n] for n in leads]
        for is_list, pairs in plans:
            theirs = [self.owners[n] if n is not None else None for n, _ in pairs]
            if not is_list:
                is_right = theirs == [None]
            else:
                of = [o if n is None else t for (n, _), t, o in zip(pairs, theirs, owners)]  # noqa: B905
                is_right = not pairs or (len(pairs) == len(owners) and of == owners)
            if not is_right or None in owners or len(leads) != len(first):
                raise Unrecordable(_SEVERAL)
        gives = [
            self.add(tensor, owner, is_readable=is_readable)
            for tensor, owner in zip(result or (), owners, strict=False)
        ]
        kernel, num = func._op, len(arguments) - len(names)

        def call(columns: Columns, values: Sequence[Any]) -> None:
            sizes = [len(columns[n]) for n in leads]
            full = [_expand(plan, sizes, columns, values) for plan in plans]
            found = kernel(*full[:num], **dict(zip(names, full[num:], strict=True)))
            start = 0
            for column, size in zip(gives, sizes, strict=False):
                columns[column] = found[start : start + size]
                start += size

        reads = [column for column in columns if column is not None]
        return Instruction(key, None, reads, gives, call)


class NumberRecorder(DispatchMode):
    """Records the numbers of operations that are known already.

    Raises OtherOperations in place of an operation that is not the known one.

    Args:
        known: the known operations.
        stand_ins: the tensors of the first columns, as then.
    """

    def __init__(self, known: RecordedUpdate, stand_ins: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: list[list[Any]] = []
        self.device: Any = None
        self._instructions = known.instructions
        self._columns = {id(tensor): i for i, tensor in enumerate(stand_ins)}
        self._held: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        key, flat = _key_of(self._columns, func, args, kwargs)
        if key[1].count(None) == len(flat):
            if schema_of(func).is_mutable:
                raise OtherOperations
            return func(*args, **kwargs)
        number = len(self.values)
        if number >= len(self._instructions) or self._instructions[number].key != key:
            raise OtherOperations
        values = [*compress(flat, map(is_, key[1], repeat(None)))]
        if any(map(isinstance, values, repeat(Tensor))):
            self.device = _device_of(values) or self.device
        self.values.append(values)
        result = func(*args, **kwargs)
        gives = self._instructions[number].gives
        if gives:
            made = [result] if isinstance(result, Tensor) else result
            self._held += made
            self._columns.update(zip(map(id, made), gives, strict=True))
        return result


def _key_of(
    columns: dict[int, int], func: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, list[Any]]:
    """Returns the key of an operation, and its arguments without their structure."""
    flat: list[Any] = []
    sizes: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            flat += value
            sizes.append(len(value))
        else:
            flat.append(value)
            sizes.append(None)
    return (func, [*map(columns.get, map(id, flat))], sizes, [*kwargs]), flat


def _device_of(values: Sequence[Any]) -> Any:
    """Returns the device of a tensor among arguments that are no columns; ``None``: the host's."""
    device = None
    for value in values:
        if isinstance(value, Tensor):
            if value.dim():
                raise Unrecordable("it uses a tensor that is not the optimizer's")
            if value.device.type != "cpu":
                device = value.device
    return device


def _expand(plan: Any, sizes: Sequence[int], columns: Columns, values: Sequence[Any]) -> Any:
    """Returns an argument for all parameters, from that for their stand-ins."""
    is_list, pairs = plan
    if not is_list:
        column, number = pairs[0]
        return values[number] if column is None else columns[column][0]
    parts = [
        [values[number]] * size if column is None else columns[column]
        for (column, number), size in zip(pairs, sizes, strict=False)
    ]
    return parts[0] if len(parts) == 1 else [*chain.from_iterable(parts)]


@lru_cache(maxsize=256)
def _make_loop(arguments: str, num_columns: int) -> Callable[[Any, Sequence[Any], list[Any]], Any]:
    """Returns a function that makes a call for each row of columns ``t0``, ``t1`` and so on."""
    names = "".join(f"t{i}, " for i in range(num_columns))
    source = f"lambda call, values, rows: [call({arguments}) for {names}in zip(*rows)]"
    made: Callable[[Any, Sequence[Any], list[Any]], Any] = eval(source)
    return made


class RecordedUpdate:
    """The operations of one step, for any parameters that stand-ins stand for.

    Attributes:
        instructions: the operations.
        device: the only device on which it may run; ``None``: any.
        written: those of the given columns that it changes.
    """

    def __init__(self, recorder: UpdateRecorder, num_given: int) -> None:
        self.instructions, self._values = recorder.instructions, recorder.values
        self.device, self.written = recorder.device, recorder.written & {*range(num_given)}
        self._num_columns, self._num_given = len(recorder.owners), num_given
        last: dict[int, Instruction] = {}
        for one in self.instructions:
            for column in (*one.reads, *one.gives):
                if column >= num_given:
                    last[column] = one
        for column, one in last.items():
            one.drops.append(column)
        # By stand-in, operations that can be made on some of its parameters, then on others.
        self._blocks: list[tuple[int | None, slice]] = []
        made = [i for i, one in enumerate(self.instructions) if one.call is not None]
        for owner, numbers in groupby(made, key=lambda i: self.instructions[i].of):
            block = [*numbers]
            ours = [self.instructions[i] for i in block]
            dropped = {n for one in ours for n in one.drops}
            is_closed = dropped.issuperset(n for one in ours for n in one.gives)
            self._blocks.append((owner if is_closed else None, slice(block[0], block[-1] + 1)))

    def with_numbers(self, recorder: NumberRecorder) -> RecordedUpdate:
        """Returns the same operations with other numbers.

        Raises:
            OtherOperations: there are fewer.
        """
        if len(recorder.values) != len(self.instructions):
            raise OtherOperations
        other: RecordedUpdate = object.__new__(RecordedUpdate)
        vars(other).update(vars(self), _values=recorder.values, device=recorder.device)
        return other

    def run(self, given: Columns, chunks: Sequence[Sequence[slice]]) -> None:
        """Makes the update.

        Args:
            given: the columns of parameters, gradients, state, and options.
            chunks: by stand-in, the parameters that are updated together, operation by operation.
        """
        columns: Columns = [*given, *repeat(None, self._num_columns - self._num_given)]
        for owner, block in self._blocks:
            if owner is None or len(chunks[owner]) == 1:
                self._run(block, columns)
                continue
            used = {n for one in self.instructions[block] for n in one.reads}
            whole = chunks[owner][-1].stop
            for part in chunks[owner]:
                own: Columns = [None] * self._num_columns
                for n in used:
                    if columns[n] is not None:
                        own[n] = columns[n][part] if len(columns[n]) == whole else columns[n]
                self._run(block, own)

    def _run(self, block: slice, columns: Columns) -> None:
        for one, values in zip(self.instructions[block], self._values[block], strict=True):
            if one.call is not None:
                one.call(columns, values)
            for column in one.drops:
                columns[column] = None


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors that an operation writes to."""
    unscales = kwargs.get("grad_scale") is not None  # else a fused step only reads gradients
    for i, argument in enumerate(schema_of(func).arguments):
        if argument.name == "grads" and not unscales:
            continue
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written = value if isinstance(value, (list, tuple)) else [value]
            yield from [tensor for tensor in written if tensor is not None]
