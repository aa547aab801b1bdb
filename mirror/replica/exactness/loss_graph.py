"""Follows the examples from layers to a loss or an output, through an autograd graph.

The outputs of layers show which dimension has the examples: the first one, if its size is a
multiple of their number. From there ``node_rules.py`` says what each tensor consists of. Whether
layers themselves combine examples only different sizes on the replicas show for certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mirror.base.torch_private import ACCUMULATES, arriving_shape
from mirror.replica.exactness.node_classes import (
    COLLECTIVE,
    UNREADABLE,
    Shape,
    depends_on_more,
    is_of_layer,
    is_parameter,
    name_of,
)
from mirror.replica.exactness.node_rules import (
    RULES,
    SAME,
    UNKNOWN,
    Content,
    NonlinearInExamples,
    Operation,
    Rows,
    Term,
    other,
)

_Edge = tuple[Any, int]  # a node, and which of its results
_ENDS = (COLLECTIVE, ACCUMULATES)
_BEYOND: tuple[str, bool, Sequence[_Edge]] = ("", True, ())  # what is known of other nodes
_MOST_NODES = 5000  # of one graph
# The attribute of a node that is a program's call: it returns the terms of a 0-d result, by its
# number and the number of examples. See ``program_terms.py``.
TERMS = "mirror_terms"


def read_terms(root: Any, count: float, number: int = 0) -> list[Term]:
    """Returns the terms of a 0-d value; one of kind "unknown" if the nodes show none.

    Args:
        root: the value's node; ``None`` for a value without a graph.
        count: the replica's number of examples.
        number: which of the node's results it is.
    """
    if root is None:
        return [Term("constant")]
    try:
        content = _GraphReader([root], count).read(root, number).as_terms()
    except NonlinearInExamples as error:
        return [Term("nonlinear", error=error.with_traceback(None))]
    except UNREADABLE:
        return [Term("unknown")]
    return [Term("same")] if content == SAME else [*content.terms] or [Term("unknown")]


def find_nonlinear(roots: Sequence[Any], count: float) -> NonlinearInExamples | None:
    """Returns why layers or outputs combine the examples; ``None`` if they do not.

    Args:
        roots: the nodes of the outputs of a model, or of a loss.
    """
    reader = _GraphReader(roots, count, through_layers=True)
    try:
        for root in roots:
            content = reader.read(root)
            if content.rows is not None and content.terms:
                term = content.terms[0]
                return NonlinearInExamples(term.operation, term.operation, (*term.shape, count)[0])
    except NonlinearInExamples as error:
        return error.with_traceback(None)
    except UNREADABLE:
        pass
    return None


class _GraphReader:
    """Finds the contents of the tensors of one replica's graph, those of inputs first."""

    def __init__(
        self, roots: Sequence[Any], count: float, *, through_layers: bool = False
    ) -> None:
        self._count, self._through_layers = int(count), through_layers
        # By node: its name, whether it is a layer's, and its inputs, none where the search ends.
        self._nodes: dict[Any, tuple[str, bool, Sequence[_Edge]]] = {}
        self._contents: dict[_Edge, Content] = {}
        self._shapes: dict[_Edge, Shape] = {}
        todo = [*roots]
        for node in todo:  # the nearest first
            if node is None or node in self._nodes or len(self._nodes) > _MOST_NODES:
                continue
            name = name_of(node)
            of_layer = is_of_layer(node, name)
            is_end = name in _ENDS or (of_layer and not through_layers)
            edges = () if is_end else node.next_functions
            self._nodes[node] = name, of_layer, edges
            for below, _ in edges:
                todo.append(below)

    def read(self, root: Any, number: int = 0) -> Content:
        """Returns the content of a node's result, its first one if not told otherwise.

        Raises:
            NonlinearInExamples: it combines examples in a way that is not linear.
        """
        contents, todo = self._contents, [(root, number)]
        while todo:
            edge = todo.pop()
            if edge in contents:
                continue
            _, _, edges = self._nodes.get(edge[0], _BEYOND)
            size = len(todo)
            for below in edges:
                if below[0] is not None and below not in contents:
                    todo.append(below)
            if len(todo) > size:
                todo.insert(size, edge)  # again, after its inputs
            else:
                contents[edge] = self._content_of(edge)
        return contents[root, number]

    def _content_of(self, edge: _Edge) -> Content:
        (node, number), contents, is_same = edge, self._contents, True
        name, of_layer, edges = self._nodes.get(node, _BEYOND)
        shape = self._shapes[edge] = arriving_shape(node, number)
        if of_layer and (of_program := getattr(node, TERMS, None)) is not None:
            terms = of_program(number, self._count)
            if terms is not None:
                return SAME if terms == [Term("same")] else Content(None, tuple(terms))
        inputs, shapes = list[Content | None](), list[Shape]()
        for below in edges:
            content = None
            if below[0] is not None:
                content = contents[below]
                is_same = is_same and content is SAME
                shapes.append(self._shapes[below])
            inputs.append(content)
        if name in _ENDS:
            return SAME if name == COLLECTIVE or is_parameter(node) else self._output(shape)
        if not shapes or (is_same and depends_on_more(node, name)):
            return self._output(shape)
        if is_same:
            return SAME
        at = Operation(
            *(node, name, number, shape, inputs, shapes),
            count=self._count,
            through_layers=self._through_layers,
        )
        if of_layer:
            at.refuse_terms()
            return self._output(shape)
        try:
            return RULES.get(name, other)(at)
        except UNREADABLE:
            return self._output(shape)

    def _output(self, shape: Shape) -> Content:
        """Returns the content of a layer's output, or of an input of the model."""
        if not shape:
            return UNKNOWN
        dim, count = 0, self._count
        if len(shape) > 2 and shape[1] == count:
            if shape[0] % count == 0:
                return Content(Rows())  # either dimension may have the examples
            dim = 1
        return Content(Rows(dim, is_certain=shape[dim] == count))
