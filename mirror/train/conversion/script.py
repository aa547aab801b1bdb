"""A training script as it is written: where optimizers are made, of which models."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_PARAMETERS = ("parameters", "named_parameters")


@dataclass(frozen=True)
class Spot:
    """A model, and the statement before which it is whole and not yet an optimizer's.

    Attributes:
        model: as it is written, ``self.net`` for instance.
        statement: the first that takes its parameters for an optimizer, or compiles it.
        function: in which that is; ``None`` for the module.
    """

    model: str
    statement: ast.stmt
    function: ast.AST | None


class Script:
    """The syntax tree of a script, with the ways up in it."""

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self._parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
        self._called = {
            ast.unparse(node.func) for node in self.calls() if not _is_method_of_super(node)
        }

    def calls(self) -> Iterator[ast.Call]:
        """Yields all calls, in the order of their lines."""
        found = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        yield from sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def trains(self) -> bool:
        """Whether anything is called ``backward``."""
        return any(name.endswith(".backward") for name in self._called)

    def spots(self) -> list[Spot]:
        """Returns where models are to be mirrored; one of each model in a function, or branch."""
        taken: dict[tuple[str, ast.AST | None], list[ast.stmt]] = {}
        for call in self.calls():
            if not _makes_optimizer(call):
                continue
            function = self._function(call)
            for owner, statement in self._owners(call, function):
                key = (self._whole(owner), function)
                taken.setdefault(key, []).append(statement)
        return [
            Spot(model, self._before_compiling(model, statement, function), function)
            for (model, function), statements in taken.items()
            for statement in self._common(model, statements)
        ]

    def line_of_first(self, name: str) -> int | None:
        """Returns the line of the first call whose last name this is."""
        return next((c.lineno for c in self.calls() if last_name(c.func) == name), None)

    def _owners(self, call: ast.Call, function: ast.AST | None) -> Iterator[tuple[str, ast.stmt]]:
        """Yields whose parameters an optimizer gets, and the statement that takes them."""
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        for value in given:
            yield from ((owner, self._statement(call)) for owner in _owners_in(value))
            for node in ast.walk(value):
                if isinstance(node, ast.Name):
                    for statement in self._assignments(node.id, function, call.lineno):
                        yield from ((owner, statement) for owner in _owners_in(statement))

    def _assignments(self, name: str, function: ast.AST | None, before: int) -> Iterator[ast.stmt]:
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Assign)
                and node.lineno < before
                and self._function(node) is function
                and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
            ):
                yield node

    def _whole(self, owner: str) -> str:
        """Returns the model that a module is part of: the shortest of its names that is called."""
        parts = owner.split(".")
        names = [".".join(parts[: i + 1]) for i in range(len(parts))]
        return next((n for n in names if n in self._called and n != "self"), owner)

    def _before_compiling(
        self, model: str, statement: ast.stmt, function: ast.AST | None
    ) -> ast.stmt:
        for call in self.calls():
            is_of_it = any(ast.unparse(argument) == model for argument in call.args)
            if call.lineno < statement.lineno and self._function(call) is function and is_of_it:
                if ast.unparse(call.func) in ("torch.compile", "compile"):
                    return self._statement(call)
        return statement

    def _common(self, model: str, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Returns one statement that all of them are in, or behind; all, if branches make it."""
        paths = [self._path(statement) for statement in statements]
        shared = [nodes[0] for nodes in zip(*paths, strict=False) if len(set(nodes)) == 1]
        block = shared[-1] if shared else None
        depth = len(shared)
        if block is not None and depth == min(map(len, paths)):
            return [min(statements, key=lambda s: s.lineno)]
        if isinstance(block, ast.If) and not self._assigns(block, model):
            return [self._whole_if(block)]
        if isinstance(block, (ast.If, ast.Try)):
            return statements
        return [min((path[depth] for path in paths), key=lambda s: s.lineno)]

    def _whole_if(self, block: ast.If) -> ast.If:
        """Returns the ``if`` that an ``elif`` belongs to; nothing can stand before that."""
        up = self._parents[block]
        while (
            isinstance(up, ast.If) and up.orelse == [block] and up.col_offset == block.col_offset
        ):
            block, up = up, self._parents[up]
        return block

    def _assigns(self, block: ast.stmt, model: str) -> bool:
        return any(
            ast.unparse(target) == model
            for node in ast.walk(block)
            if isinstance(node, ast.Assign)
            for target in node.targets
        )

    def _path(self, node: ast.AST) -> list[ast.stmt]:
        """Returns the statements that a node is in, outermost first, inside its function."""
        function, path = self._function(node), []
        up: ast.AST | None = node
        while up is not None and up is not function:
            if isinstance(up, ast.stmt):
                path.append(up)
            up = self._parents.get(up)
        return path[::-1]

    def _statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return node

    def _function(self, node: ast.AST) -> ast.AST | None:
        up = self._parents.get(node)
        while up is not None and not isinstance(up, (ast.FunctionDef, ast.AsyncFunctionDef)):
            up = self._parents.get(up)
        return up


def last_name(node: ast.expr) -> str:
    """Returns ``SGD`` of ``torch.optim.SGD``; nothing of what has no name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _makes_optimizer(call: ast.Call) -> bool:
    """Whether this looks like a class of optimizers: all of them are given parameters."""
    function = call.func
    if isinstance(function, ast.Call):  # getattr(torch.optim, name)(model.parameters())
        arguments = [ast.unparse(argument) for argument in function.args]
        return last_name(function.func) == "getattr" and arguments[0].endswith("optim")
    name = ast.unparse(function)
    is_class = last_name(function)[:1].isupper()
    return is_class and not name.startswith(("nn.", "torch.nn.")) and "Parameter" not in name


def _owners_in(node: ast.AST) -> Iterator[str]:
    """Yields ``model`` for every ``model.parameters()``."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            if call.func.attr in _PARAMETERS:
                yield ast.unparse(call.func.value)


def _is_method_of_super(call: ast.Call) -> bool:
    return ast.unparse(call.func).startswith("super()")
