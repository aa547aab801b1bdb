"""Mutants of a file of Python: the same text but for one operator, condition, constant or call."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from tests.scripts.affected.marked import functions

OTHER: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd},
}
# What a person reads says nothing that a test should hold word for word.
SPOKEN = {"__repr__", "__str__"}


@dataclass(frozen=True)
class Mutant:
    """Attributes:
    file: below the root of the tree.
    function: its qualified name.
    line: where it differs.
    was, now: the source of what differs.
    text: of the whole file.
    """

    file: str
    function: str
    line: int
    was: str
    now: str
    text: str


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """Yields the mutants of all functions of a file, one change each."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    seen = set()
    # The innermost function first: what is in it is that one's.
    for name, function in reversed(list(functions(ast.parse(text)))):
        if function.name in SPOKEN:
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
            yield Mutant(file, name, node.lineno, was, now, changed)


def _changes(function: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """Yields nodes, and what may stand in their place."""
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
    """Walks what runs: no annotations, decorators, nor what an error says."""
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = [d for d in [*function.args.defaults, *function.args.kw_defaults] if d]
        children: list[ast.AST] = [*function.body, *defaults]
    elif isinstance(function, ast.Raise | ast.JoinedStr):
        children = []
    elif isinstance(function, ast.AnnAssign):
        children = [function.value] if function.value else []
    else:
        children = list(ast.iter_child_nodes(function))
    for child in children:
        yield child
        yield from _walk(child)


def _other(operator: ast.AST) -> ast.AST:
    return OTHER[type(operator)]()


def _with(node: ast.AST, field: str, value: object) -> ast.AST:
    other = copy.copy(node)
    setattr(other, field, value)
    return other


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(each, ast.JoinedStr)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in ast.walk(node)
    )
