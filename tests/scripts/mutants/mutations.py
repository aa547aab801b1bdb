"""Mutants of a file of Python: the same text but for one operator, condition, constant or call."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

OTHER: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd},
}
# No test should fix the words of texts for people.
TEXTS = {"__repr__", "__str__"}
FOR_PEOPLE = {"stacklevel"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
# Their negation is what OTHER has for them already.
OPPOSITES = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)


@dataclass(frozen=True)
class Mutant:
    """Attributes:
    file: below the root of the tree.
    function: its qualified name.
    line: where it differs.
    was, now: the source of what differs.
    number: of those of the function with the same ``was`` and ``now``, from 0.
    text: of the whole file.
    """

    file: str
    function: str
    line: int
    was: str
    now: str
    number: int
    text: str

    @property
    def name(self) -> str:
        """A name that stays the same while other lines of the file change."""
        was, now = (" ".join(each.split()) for each in (self.was, self.now))
        number = f" (number {self.number + 1})" if self.number else ""
        return f"{self.file}:{self.function}: {was} -> {now}{number}"


def spread(mutants: list[Mutant], size: int, seed: int) -> list[Mutant]:
    """Returns so many mutants at random, in proportion from every file.

    The seed and the name of a mutant give its position: a change of other code hardly changes
    which mutants are drawn.
    """
    of_file = Counter(mutant.file for mutant in mutants)
    before: Counter[str] = Counter()
    places = []
    for chance, i in sorted((_chance(mutant.name, seed), i) for i, mutant in enumerate(mutants)):
        file = mutants[i].file
        place = (before[file] + _chance(file, seed)) / of_file[file]
        places.append((place, chance, i))
        before[file] += 1
    return [mutants[i] for i in sorted(i for _, _, i in sorted(places)[:size])]


def _chance(name: str, seed: int) -> float:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6], "big") / 2**48


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """Yields the mutants of all functions of a file, one change each."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    seen = set()
    numbers: Counter[tuple[str, str, str]] = Counter()
    # The innermost function first, so that its code is not counted for the outer one.
    for name, function in reversed(list(functions(ast.parse(text)))):
        if function.name in TEXTS or _returns_text(function):
            continue
        for node, other in _changes(function):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            was, now = text[start:end], ast.unparse(other)
            if isinstance(node, ast.expr) and not isinstance(node, ast.Constant):
                now = f"({now})"
            if (start, end, now) in seen:
                continue
            seen.add((start, end, now))
            changed = text[:start] + now + text[end:]
            number = numbers[name, was, now]
            numbers[name, was, now] += 1
            yield Mutant(file, name, node.lineno, was, now, number, changed)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yields the functions of a module, or of a part of it, by their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield f"{prefix}{node.name}", node
        inside = f"{prefix}{node.name}." if isinstance(node, Function | ast.ClassDef) else prefix
        yield from functions(node, inside)


def _changes(function: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """Yields nodes, each with what replaces it."""
    for node in _walk(function):
        if isinstance(node, ast.Compare):
            for i, operator in enumerate(node.ops):
                if type(operator) in OTHER:
                    yield (
                        node,
                        _with(node, "ops", [*node.ops[:i], _other(operator), *node.ops[i + 1 :]]),
                    )
        elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in OTHER:
            if not _is_text(node):
                yield node, _with(node, "op", _other(node.op))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, node.operand
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            if not _has_opposite(node.test) and not _is_for_people(node):
                yield node.test, ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield node, ast.Constant(value)
        elif isinstance(node, ast.Return) and not _is_none(node.value):
            yield node, ast.Return(ast.Constant(None))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, ast.Pass()
        elif isinstance(node, ast.Continue):
            yield node, ast.Break()
        elif isinstance(node, ast.Break):
            yield node, ast.Continue()


def _walk(function: ast.AST) -> Iterator[ast.AST]:
    """Walks what runs: no annotations, decorators, assertions, nor texts of errors."""
    if isinstance(function, Function):
        defaults = [d for d in [*function.args.defaults, *function.args.kw_defaults] if d]
        children: list[ast.AST] = [*function.body, *defaults]
    elif _is_for_people(function):
        children = []
    elif isinstance(function, ast.AnnAssign):
        children = [function.value] if function.value else []
    else:
        children = list(ast.iter_child_nodes(function))
    for child in children:
        yield child
        yield from _walk(child)


def _returns_text(function: Function) -> bool:
    """Whether a function returns nothing but texts for people, which it builds itself."""
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    if not isinstance(function.returns, ast.Name) or function.returns.id != "str":
        return False
    return bool(returned) and all(
        any(isinstance(each, ast.JoinedStr) or _is_sentence(each) for each in ast.walk(value))
        for value in returned
        if value
    )


def _is_for_people(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg in FOR_PEOPLE
    if isinstance(node, ast.IfExp):
        return _is_words(node.body) and _is_words(node.orelse)
    return isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert)


def _is_sentence(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value


def _is_words(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _has_opposite(test: ast.expr) -> bool:
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not)
    return (
        isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], OPPOSITES)
    )


def _other(operator: ast.AST) -> ast.AST:
    return OTHER[type(operator)]()


def _with(node: ast.AST, field: str, value: object) -> ast.AST:
    other = copy.copy(node)
    setattr(other, field, value)
    return other


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _is_text(node: ast.AST) -> bool:
    return any(map(_is_words, ast.walk(node)))
