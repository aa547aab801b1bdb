"""The rules by which functions of torch combine examples: what a node makes of its inputs.

Each tensor of a graph has a ``Content``:

    content                    such as
    the same on all replicas   parameters, a penalty of them, the result of a collective
    rows                       one number or several for each example: the output of a layer
    rows of one example        ``h[i]``, in a loop over the examples
    terms                      means and sums over the examples; linear functions keep them

Any other function along the dimension of the examples, and a function of terms that is not linear,
raises ``NonlinearInExamples``: each replica has its own examples, so no weights join such values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mirror.replica.exactness.node_classes import (
    ADDS,
    CHOICES,
    FOLDS,
    JOINED,
    MASKS,
    MOVES,
    PIECES,
    PRODUCTS,
    SCALES,
    SOLVES,
    SUMS,
    VIEWS,
    Shape,
    UnknownNode,
    combined_dims,
    read_saved,
    signed,
)

_OF_TERMS = "a function of values that were reduced over the examples before ({})"
_ALONG = "{} over this replica's examples, or a function of their order"
_COMPARES = (
    "made of comparisons of the examples with each other (a contrastive loss): those between "
    "examples of different replicas are missing"
)


class NotReducible(Exception):
    """No weights make the whole batch's value; the message describes the replicas' values."""


class NonlinearInExamples(NotReducible):
    """A value combines examples in a way that is not linear.

    Attributes:
        operation: the name of the function that combines them.
        size: the size of the dimension that was taken for the examples.
    """

    def __init__(self, what: str, operation: str, size: float) -> None:
        super().__init__(what.format(operation.lower()))
        self.operation, self.size = operation.lower(), size


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor of which each number belongs to one example.

    Attributes:
        dim: the dimension of the examples; ``None`` if it is not known.
        index: the example, if all numbers belong to one.
        is_certain: whether that dimension has had the size of the number of examples.
        is_chosen: whether indices or a mask have chosen examples.
        factors: numbers by which all numbers are divided (True) or multiplied (False).
        masks: tensors without a graph that were multiplied with it, or have masked it; as a
            number, the sum of one.
        constants: tensors without a graph, and numbers, that no weights make up for if they
            differ between replicas.
    """

    dim: int | None = None
    index: int | None = None
    is_certain: bool = False
    is_chosen: bool = False
    factors: tuple[tuple[bool, Any], ...] = ()
    masks: tuple[Any, ...] = ()
    constants: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of one replica's value.

    Attributes:
        kind: "same", "constant", "mean", "sum", "cross entropy", "example" (a function of one),
            "nonlinear" or "unknown".
        rows: the rows that were reduced; their factors include those of the term.
        shape: the sizes of the dimensions that were reduced, that of the examples first.
        operation: the name of the function that has reduced them.
        weight: the weight of all targets of a cross entropy.
        error: of kind "nonlinear", the reason.
    """

    kind: str
    rows: Rows = field(default_factory=Rows)
    shape: Shape = ()
    operation: str = ""
    weight: Any = None
    error: NonlinearInExamples | None = None

    def mask_sums(self) -> list[float]:
        """Returns the sums of all tensors that may be the mask of a sum."""
        sums = [total for mask in self.rows.masks for total in _sums_of(mask)]
        if self.rows.is_chosen:
            sums += [float(self.shape[0]), float(math.prod(self.shape))]
        return sums

    def detach(self) -> Term:
        """Returns the term with its factors and masks as numbers."""
        factors = tuple((is_div, float(value)) for is_div, value in self.rows.factors)
        masks = tuple(total for mask in self.rows.masks for total in _sums_of(mask))
        return replace(self, rows=replace(self.rows, factors=factors, masks=masks))


def _sums_of(mask: Any) -> list[float]:
    if not isinstance(mask, Tensor):
        return [mask]
    total = float(mask.sum())
    return [total, mask.numel() - total] if mask.dtype is torch.bool else [total]


@dataclass(frozen=True, slots=True)
class Content:
    """What one tensor of a graph consists of: rows, plus terms; the same everywhere if neither."""

    rows: Rows | None = None
    terms: tuple[Term, ...] = ()

    def changed(self, **changes: Any) -> Content:
        """Returns the content with other attributes of its rows, if it has rows."""
        return Content(replace(self.rows, **changes), self.terms) if self.rows else self

    def extended(self, name: str, added: Any) -> Content:
        """Returns the content with one more factor, mask or constant of its rows and terms."""

        def extend(rows: Rows) -> Rows:
            changes: dict[str, Any] = {name: (*getattr(rows, name), added)}
            return replace(rows, **changes)

        terms = tuple(replace(term, rows=extend(term.rows)) for term in self.terms)
        return Content(extend(self.rows) if self.rows else None, terms)

    def without_factors(self) -> Content:
        """Returns the content after a function that is not linear: factors are no longer these."""
        rows = self.rows
        if rows is None or not rows.factors:
            return self
        numbers = (number for _, number in rows.factors)
        return self.changed(factors=(), constants=(*rows.constants, *numbers))

    def as_terms(self, *, is_negative: bool = False) -> Content:
        """Returns the content with the rows of one example as a term."""
        rows = self.rows
        if rows is None or rows.index is None:
            return self
        if is_negative:
            rows = replace(rows, factors=(*rows.factors, (False, -1.0)))
        return Content(None, (*self.terms, Term("example", rows)))


def _shifted(rows: Rows, shift: int) -> Rows:
    return rows if rows.dim is None else replace(rows, dim=rows.dim + shift)


SAME = Content()
UNKNOWN = Content(terms=(Term("unknown"),))


@dataclass(slots=True)
class Operation:
    """One node of torch, with the contents of its inputs.

    Attributes:
        number: which of the node's results is described; ``shape`` is that of this one.
        inputs: ``None`` is an input without a graph.
        shapes: the shapes of the others.
        count: the replica's number of examples.
        through_layers: whether the search goes through layers.
    """

    node: Any
    name: str
    number: int
    shape: Shape
    inputs: Sequence[Content | None]
    shapes: list[Shape]
    count: int
    through_layers: bool

    @property
    def first(self) -> Content:
        """The content of the first input with a graph."""
        for content in self.inputs:
            if content is not None:
                return content
        raise UnknownNode

    def error(self, what: str, size: int) -> NonlinearInExamples:
        """Returns the error of a function along the examples; ``size`` is that of their dim."""
        return NonlinearInExamples(what, self.name, size)

    def refuse_terms(self) -> None:
        """Raises NonlinearInExamples if an input has terms."""
        i = 0
        for content in self.inputs:
            if content is not None:
                if content.terms:
                    term = content.terms[0]
                    is_sure = not self.shapes[i] or term.rows.is_chosen
                    is_sure = not term.shape or (is_sure and not self.through_layers)
                    size = self.count if is_sure else term.shape[0]
                    raise NonlinearInExamples(_OF_TERMS, term.operation or self.name, size)
                i += 1

    def combined(self, *, is_linear: bool) -> Content:
        """Returns the content of a function of the inputs, number by number.

        Raises:
            NonlinearInExamples: it compares examples, or is not linear and has terms.
        """
        if not is_linear:
            self.refuse_terms()
        rows, terms, i = list[Rows](), tuple[Term, ...](), 0
        for content in self.inputs:
            if content is not None:
                terms += content.terms
                shift = len(self.shape) - len(self.shapes[i])
                if content.rows is not None:
                    rows.append(content.rows if not shift else _shifted(content.rows, shift))
                i += 1
        found = Content(self.join_rows(rows) if rows else None, terms)
        return found if is_linear else found.without_factors()

    def join_rows(self, rows: Sequence[Rows]) -> Rows:
        """Returns the rows of a function of several rows, whose dimensions are those of it."""
        first = rows[0]
        if len(rows) == 1:
            return first
        dims = {one.dim for one in rows}
        if any(one.index != first.index for one in rows):
            raise self.error(_ALONG, self.count)
        if len(dims) > 1 and None not in dims:
            sizes = [self.shape[dim] for dim in dims if dim is not None]
            if all(size % self.count == 0 for size in sizes):
                raise self.error(_COMPARES, sizes[0])
        return Rows(
            first.dim if len(dims) == 1 else None,
            first.index,
            any(one.is_certain for one in rows),
            any(one.is_chosen for one in rows),
            first.factors if all(one.factors == first.factors for one in rows) else (),
            tuple(mask for one in rows for mask in one.masks),
            tuple(constant for one in rows for constant in one.constants),
        )

    def followed(self) -> Content:
        """Returns the first input's content in another shape.

        A view splits or joins dimensions, so the numbers of an example lie at the same places.
        Other functions leave dimensions out: the examples' is found by its size.
        """
        content, before, after = self.first, self.shapes[0], self.shape
        rows = content.rows
        if rows is None or rows.dim is None or before == after:
            return content
        size, count, added = before[rows.dim], self.count, len(after) - len(before)
        if self.name in ("Expand", "Unsqueeze"):
            start = 0 if self.name == "Expand" else signed(self.node._saved_dim) % len(after)
            return content.changed(dim=rows.dim + added * (start <= rows.dim))
        among = [k for k, number in enumerate(after) if number == size]
        if math.prod(before) == math.prod(after):
            step = math.prod(before[rows.dim + 1 :])
            spans = [(math.prod(after[k + 1 :]), math.prod(after[k:])) for k in range(len(after))]
            among = [k for k, (a, b) in enumerate(spans) if a >= step and b <= step * size]
            among = [k for k in among if after[k] >= min(size, count, 2)]
            if not among and size > 1:
                among = [k for k, (a, b) in enumerate(spans) if a <= step and b >= step * size]
        exact = [k for k in among if after[k] == count]
        same = [k for k in among if after[k] == size]
        found = exact if len(exact) == 1 else same or [k for k in among if after[k] % count == 0]
        dim = found[0] if len(found) == 1 or (found and count > 1) else None
        return content.changed(dim=dim, is_certain=rows.is_certain or bool(exact))


def _add(at: Operation) -> Content:
    indices = {one.rows.index for one in at.inputs if one and one.rows}
    if not at.shape or len(indices) > 1 or any(one and one.terms for one in at.inputs):
        at.inputs = [
            one and one.as_terms(is_negative=i == 1 and at.name == "Sub")
            for i, one in enumerate(at.inputs)
        ]
    content = at.combined(is_linear=True)
    if content.rows is None and content.terms:
        added = ["constant"] if None in at.inputs or len(at.inputs) == 1 else []
        added += ["same"] if SAME in at.inputs else []
        return Content(None, (*content.terms, *map(Term, added)))
    return content


def _scale(at: Operation) -> Content:
    first, second = (*at.inputs, None)[:2]
    is_div = at.name == "Div"
    if is_div and first in (None, SAME):
        return at.combined(is_linear=False)
    if first is not None and second is not None:
        return at.combined(is_linear=SAME in at.inputs)
    other = read_saved(at.node, "self" if first is None else "other")
    content = at.combined(is_linear=True)
    if not isinstance(other, Tensor) or not other.dim():
        return content.extended("factors", (is_div, other))
    if content.terms:
        return content.extended("constants", other)
    return content if is_div else content.extended("masks", other)


def _mask(at: Operation) -> Content:
    content = at.combined(is_linear=True)
    if content.rows is None:  # a choice of two reduced values, or of one and a constant
        return content if sum(one is not None for one in at.inputs) == 1 else UNKNOWN
    mask = read_saved(at.node, "mask" if at.name == "MaskedFill" else "condition")
    return content.extended("masks", mask)


def _reduce(at: Operation) -> Content:
    shape = at.shapes[0]
    dims = combined_dims(at.node, at.name, shape, at.shape) or range(len(shape))
    return _reduced(at, at.first, shape, dims, at.name)


def _reduced(
    at: Operation, content: Content, shape: Shape, dims: Sequence[int], kind: str
) -> Content:
    """Returns the mean or sum of a tensor along dimensions."""
    rows, sizes = content.rows, tuple(shape[dim] for dim in dims)
    if rows is None:
        return Content(None, tuple(_reduce_term(term, kind, sizes) for term in content.terms))
    if rows.index is not None:
        return content
    if rows.dim not in dims and (rows.dim is not None or len(dims) < len(shape)):
        return at.followed()
    if kind == "Sum":
        at.refuse_terms()
    if rows.dim is not None:
        sizes = (shape[rows.dim], *(shape[dim] for dim in dims if dim != rows.dim))
    return Content(None, (*content.terms, Term(kind.lower(), rows, sizes, kind)))


def _reduce_term(term: Term, kind: str, sizes: Shape) -> Term:
    if kind == "Sum":
        return replace(term, shape=(*term.shape, *sizes)) if term.kind == "sum" else term
    if term.kind != "example":
        return term
    factors = (*term.rows.factors, (True, float(math.prod(sizes))))
    return replace(term, rows=replace(term.rows, factors=factors))


def _loss(at: Operation) -> Content:
    """One of torch's loss functions, with its mean or sum over all numbers."""
    after, shape = at.shape, max(at.shapes, key=len)
    at.shape = shape
    content, reduction = at.combined(is_linear=False), at.node._saved_reduction
    rows = content.rows
    if rows is None or rows.index is not None:
        return content
    content = content.changed(is_certain=True)
    if reduction == 0:
        at.shape, at.inputs = after, [content]
        return at.followed()
    if at.name.startswith("NllLoss") and reduction == 1:
        weight = read_saved(at.node, "total_weight")
        return Content(None, (Term("cross entropy", rows, (), at.name, weight),))
    return _reduced(at, content, shape, range(len(shape)), ("Mean", "Sum")[reduction - 1])


def _move(at: Operation) -> Content:
    content, node, num_dims = at.first, at.node, len(at.shape)
    rows = content.rows
    if at.name == "Neg" and rows is not None and rows.index is not None:
        return content.extended("factors", (False, -1.0))
    if rows is None or rows.dim is None or at.name not in ("Permute", "T", "Transpose"):
        return content
    order = [*range(num_dims)]
    if at.name == "Permute":
        order = [signed(dim) % num_dims for dim in node._saved_dims]
    elif num_dims > 1:
        i, j = (0, 1) if at.name == "T" else (signed(node._saved_dim0), signed(node._saved_dim1))
        order[i], order[j] = order[j], order[i]
    return content.changed(dim=order.index(rows.dim))


def _piece(at: Operation) -> Content:
    content, node, shape = at.first, at.node, at.shapes[0]
    rows = content.rows
    if rows is None or rows.dim is None or at.name == "Diagonal":
        return at.followed()
    dim, is_one = signed(node._saved_dim) % len(shape), at.name in ("Select", "Unbind")
    if dim != rows.dim:
        return at.followed()
    size, left = shape[dim], 1 if is_one else at.shape[dim]
    if not is_one and (left == size or left % at.count == 0):
        return content  # of several views of the examples
    if size % at.count or at.through_layers:  # recurrent layers take pieces, too
        return content.changed(dim=None)
    if left > 1:
        raise at.error(_ALONG, size)
    names = {"Select": "_saved_index", "Slice": "_saved_start"}
    index = signed(getattr(node, names[at.name])) if at.name in names else at.number
    return content.changed(dim=None, index=index % size % at.count)


def _join(at: Operation) -> Content:
    """A stack or concatenation: of single examples in their order, it has rows again."""
    axis = signed(at.node._saved_dim) % len(at.shape)
    given = [one for one in at.inputs if one is not None]
    indices = [one.rows.index if one.rows and not one.terms else None for one in given]
    in_order = [k % at.count for k in range(len(at.inputs))]
    if len(at.inputs) == at.shape[axis] >= at.count and indices == in_order:
        of_all = [replace(one.rows, index=None) for one in given if one.rows]
        return Content(replace(at.join_rows(of_all), dim=axis, is_certain=True))
    if len({*indices}) > 1 or any(one.terms for one in given):
        given = [one.as_terms() for one in given]
    terms = tuple(term for one in given for term in one.terms)
    if terms and (len(given) < len(at.inputs) or SAME in given):
        terms += (Term("constant"),)
    rows = [one.rows for one in given if one.rows]
    if at.name == "Stack":
        dims = [None if one.dim is None else one.dim + (axis <= one.dim) for one in rows]
        rows = [replace(one, dim=dim) for one, dim in zip(rows, dims, strict=True)]
    return Content(at.join_rows(rows) if rows else None, terms)


def _choose(at: Operation) -> Content:
    is_first = at.first.rows is not None and at.first.rows.dim == 0 and at.shape
    return (at.first if is_first else at.followed()).changed(is_chosen=True)


def _product(at: Operation) -> Content:
    """A product or distance: of all rows by all columns, along the examples, or for each."""
    if at.name == "Pdist":
        raise at.error(_COMPARES, at.shapes[0][0])
    inputs = [*at.inputs, None][:2]
    if None not in inputs:
        at.refuse_terms()
    content, shapes, kept = Content(None, at.first.terms), iter(at.shapes), list[int]()
    rows = list[Rows]()
    for i, one in enumerate(inputs):
        shape = next(shapes) if one is not None else ()
        if one is None or one.rows is None:
            continue
        rows.append(one.rows)
        from_last = len(shape) - 1 - (one.rows.dim if one.rows.dim is not None else -2)
        if from_last == (i == 1 and at.name in ("Bmm", "Mm")):
            if shape[one.rows.dim or 0] % at.count == 0:
                raise at.error(_ALONG, shape[one.rows.dim or 0])
        elif 0 <= from_last < 2:
            kept.append(i)
    if len(kept) > 1:
        raise at.error(_COMPARES, at.shape[-2])
    if rows:
        dim = max(len(at.shape) - 2 + kept[0], 0) if kept else None
        if not kept and len(at.shape) > 2 and all(one.dim == 0 for one in rows):
            dim = 0  # a product for each example
        content = Content(replace(at.join_rows([replace(r, dim=None) for r in rows]), dim=dim))
    # Columns without a graph may be examples, too.
    is_of_matrices = len(at.shape) > 1 and all(size == 1 for size in at.shape[:-2])
    if kept and not (is_of_matrices and at.shape[-1 - kept[0]] % at.count == 0):
        return content
    if None in inputs and (kept or content.terms):
        constant = read_saved(at.node, _OPERANDS[at.name][inputs.index(None)])
        return content.extended("constants", constant)
    return content


# The names under which products save their operands.
_OPERANDS = {
    **dict.fromkeys(("Bmm", "Mm"), ("self", "mat2")),
    **dict.fromkeys(("Cdist", "EuclideanDist"), ("x1", "x2")),
    **{"Dot": ("self", "tensor"), "Mv": ("self", "vec")},
}


def _fold(at: Operation) -> Content:
    """Sums at indices, as of the nodes of each graph: rows, where these have examples' size."""
    dim = signed(at.node._saved_dim) % len(at.shape)
    if at.shape[dim] % at.count:
        return other(at)
    at.refuse_terms()
    rows = [replace(one.rows, dim=None) for one in at.inputs if one and one.rows]
    is_certain = at.shape[dim] == at.count
    if not rows or any(one.index is not None for one in rows):
        return other(at)
    found = replace(at.join_rows(rows), dim=dim, is_certain=is_certain)
    return Content(found).without_factors()


def _write(at: Operation) -> Content:
    """What was written in place, into a slice."""
    terms = tuple(term for one in at.inputs if one for term in one.terms)
    into = at.inputs[0]
    return Content(into.rows if into and into.rows else Rows(), terms)


def _solve(at: Operation) -> Content:
    """Of a matrix without a graph: each column (or row) of the right side is solved by itself."""
    num_dims = len(at.shapes[0])
    if at.inputs[0] is not None or num_dims < 2:
        return other(at)
    return other(at, [num_dims - (2 if at.node._saved_left else 1)])


def other(at: Operation, dims: Sequence[int] | None = None) -> Content:
    """A function that its shapes show: along dimensions, or of each number; or an unknown one."""
    if hasattr(at.node, "_saved_reduction"):
        return _loss(at)
    at.refuse_terms()
    shape = at.shapes[0]
    if dims is None:
        dims = combined_dims(at.node, at.name, shape, at.shape)
    if not dims and all(_fits(some, at.shape) for some in at.shapes):
        return at.combined(is_linear=False)
    rows = at.first.rows
    if rows is None or rows.index is not None:
        return at.first if rows else Content(Rows())
    is_of_all = not at.shape and not at.through_layers
    size = at.count if is_of_all else shape[rows.dim or 0]
    if (is_of_all or rows.dim in dims) and size % at.count == 0:
        raise at.error(_ALONG, size)
    is_lost = rows.dim in dims
    return (at.first.changed(dim=None) if is_lost else at.followed()).without_factors()


def _fits(some: Shape, shape: Shape) -> bool:
    """Returns whether a shape broadcasts to another one."""
    pairs = zip(reversed(some), reversed(shape), strict=False)
    return len(some) <= len(shape) and all(a in (1, b) for a, b in pairs)


RULES: dict[str, Callable[[Operation], Content]] = {
    **dict.fromkeys(ADDS, _add),
    **dict.fromkeys(SCALES, _scale),
    **dict.fromkeys(MASKS, _mask),
    **dict.fromkeys(SUMS, _reduce),
    **dict.fromkeys(MOVES, _move),
    **dict.fromkeys(VIEWS, Operation.followed),
    **dict.fromkeys(PIECES, _piece),
    **dict.fromkeys(JOINED, _join),
    **dict.fromkeys(CHOICES, _choose),
    **dict.fromkeys((*PRODUCTS, "Pdist"), _product),
    **dict.fromkeys(FOLDS, _fold),
    **dict.fromkeys(SOLVES, _solve),
    "CopySlices": _write,
}
