"""Checks that replicas' losses inside ``run`` have the gradients of one device.

Inside ``run`` each replica has its own loss. Gradients are weighted by the replicas' numbers of
examples, unless the program sets other weights. That is one device's gradient for a mean over
examples, and not for other losses. The graphs show the loss by the rules of split calls:

    in ``run``         at each replica's backward pass; facts of a graph are kept as numbers until
                       all replicas have arrived, since the pass frees saved tensors
    in ``reduce``      of all replicas' losses at once

The first passes from a line of the program are checked, and each line causes one warning. If the
program sets weights or adds gradients up, only losses that combine examples in another way than
by means and sums cause one.

Finds a forward that combines the examples of its part, in the graphs of its outputs.

A softmax or a flip over the batch, or ``x - x.mean(0)``, gives every example a value that depends
on the others. A replica has only those of its part, so the result differs from one device's.

Where the parts of a batch differ in size, a dimension that differs between the replicas in
the same way is that of the examples; nothing else in a graph shows that for certain. So a module
is checked at its first split call with uneven parts, and a loss in ``run`` likewise.

A loss combines examples by itself. So above its last layer only functions count that no mean
over examples has, as a softmax over them.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from mirror.base.torch_private import arriving_shape
from mirror.data.split_batch import GivenWeights, counts_of
from mirror.execution.replicas import Run
from mirror.replica.exactness.batch_dim_rules import batch_dim_uses, products_below
from mirror.replica.exactness.loss_graph import (
    Shape,
    Term,
    UnknownNode,
    is_loss,
    is_parameter_operand,
    is_same,
    mask_sums,
    name_of,
    names_below,
    reaches_parameters,
    saved,
    shape_of,
    terms_or_unknown,
    total_weight,
    views_below,
)
from mirror.replica.exactness.loss_reduction import Mixed, NotReducible, weights_of_terms
from mirror.replica.scatter_gather.containers import leaves_in
from mirror.threads.user_frames import warn_user
from mirror.values import PerReplica

Use = tuple[str, list[int]]
"""An operation, and the sizes of the dimensions along which it combines numbers."""

_MOST_NODES = 3000
_NORMALIZING = frozenset("Cumprod Cumsum LogSoftmax Logcumsumexp SafeSoftmax Softmax".split())
_ALONG = _NORMALIZING | frozenset(
    "Amax Amin Flip LinalgVectorNorm Logsumexp Max Mean Median Min Mode Nansum Norm Prod Roll "
    "Sort Std StdMean Sum Topk Var VarMean".split()
)
_PRODUCTS = frozenset("Bmm Cdist EuclideanDist Mm".split())
_LAYERS = ("Addmm", "Conv", "Cudnn", "Embedding", "Linear", "Mkldnn", "Native", "Thnn")
_COLLECTIVE = "GradSend"  # it returns values of all replicas

# The words of the warnings, and of `mirror check`.
MIXES_EXAMPLES = (
    "{} computes over the examples of the batch, and a replica has only those of its part"
)
GATHER_FIRST = (
    "compute it outside the model, from the gathered outputs; or gather first inside, with "
    "mirror.get_replica_context().all_gather(value)"
)


def warn_if_mixing(module: nn.Module, results: Mapping[int, Any], sizes: Sequence[float]) -> bool:
    """Warns if the outputs of a split call combine the examples of a part.

    Args:
        results: the outputs of the replicas that ran, by replica.
        sizes: all replicas' numbers of examples.

    Returns:
        Whether the outputs have graphs, and the parts that ran differ in size.
    """
    counts = [sizes[r] for r in results]
    roots = [_rows_of(out, count) for out, count in zip(results.values(), counts, strict=True)]
    if not all(roots) or len(set(counts)) < 2:
        return False
    name = mixing_operation([uses_below(nodes) for nodes in roots], counts)
    if name is not None:
        warn_of_mixing(f"{name} in the forward of {type(module).__name__}")
    return True


def warn_of_mixing(what: str) -> None:
    """Warns of an operation that combines the examples of a part."""
    text = MIXES_EXAMPLES.format(what)
    warn_user(f"{text}, so the result differs from one device's; {GATHER_FIRST}")


def mixing_operation(uses: Sequence[Sequence[Use]], counts: Sequence[float]) -> str | None:
    """Returns the name of an operation that combines examples; ``None`` if the graphs show none.

    Args:
        uses: what ``uses_below`` returns for each replica.
        counts: the replicas' numbers of examples, which differ.
    """
    for of_node in zip(*uses, strict=False):
        if len({name for name, _ in of_node}) > 1:
            return None  # the replicas' graphs differ from here on
        for sizes in zip(*(sizes for _, sizes in of_node), strict=False):
            if all(s * counts[0] == sizes[0] * c for s, c in zip(sizes, counts, strict=True)):
                return str(of_node[0][0]).lower()
    return None


def uses_below(roots: Sequence[Any], *, of_loss: bool = False) -> list[Use]:
    """Returns the operations below some nodes that combine numbers along dimensions.

    Args:
        of_loss: whether the nodes compute a loss; see the module's docstring.
    """
    return list(_uses_below(roots, not of_loss))


def _rows_of(output: Any, count: float) -> list[Any]:
    """Returns the nodes of the tensors in an output that have a row for each example."""
    return [
        leaf.grad_fn
        for leaf in leaves_in(output)
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None and leaf.shape[:1] == (count,)
    ]


def _uses_below(roots: Sequence[Any], is_in_forward: bool) -> Iterator[Use]:
    todo, seen = deque((root, is_in_forward) for root in roots), set(roots)
    while todo and len(seen) < _MOST_NODES:
        node, is_inside = todo.popleft()
        name = name_of(node)
        if name == _COLLECTIVE:
            continue
        if is_inside or name in _NORMALIZING:
            try:
                yield name, _combined_sizes(node, name)
            except (UnknownNode, AttributeError, RuntimeError, IndexError):  # new torch, or a hook
                yield name, []
        is_inside = is_inside or name.startswith(_LAYERS)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append((below, is_inside))


def _combined_sizes(node: Any, name: str) -> list[int]:
    """Returns the sizes of the dimensions along which a node combines numbers."""
    if name in _PRODUCTS:
        return _sizes_of_product(node, name)
    if name not in _ALONG:
        return []
    shape = _input_shape(node)
    dims = getattr(node, "_saved_dims" if name in ("Flip", "Roll") else "_saved_dim", None)
    if dims is None or dims == ():  # over all numbers
        return list(shape) if arriving_shape(node, 0) == () else []
    listed = dims if isinstance(dims, tuple) else (dims,)
    return [shape[_signed(dim)] for dim in listed]


def _sizes_of_product(node: Any, name: str) -> list[int]:
    """Returns what a product of matrices sums over, and its rows if it has as many columns."""
    operands = [below for below, _ in node.next_functions]
    if any(is_parameter_operand(operand) for operand in operands):
        return []
    rows, columns = arriving_shape(node, 0)[-2:]
    sizes = [rows] if rows == columns else []
    if name in ("Mm", "Bmm"):
        left = shape_of(node, 0) if operands[0] is not None else saved(node, "self").shape
        sizes.append(left[-1])
    return sizes


def _input_shape(node: Any) -> Shape:
    with_graph = (i for i, (below, _) in enumerate(node.next_functions) if below is not None)
    return shape_of(node, next(with_graph, 0))


def _signed(dim: int) -> int:
    return dim - 2**64 if dim >= 2**63 else dim


_REDUCED = (products_below, batch_dim_uses, is_same, is_loss, names_below, mask_sums, views_below)
_FACTS = {
    "mean": _REDUCED,
    "sum": _REDUCED,
    "cross entropy": (products_below, batch_dim_uses, total_weight),
    "unknown": (batch_dim_uses,),
}
_CHECKED = "_is_judged"  # an attribute of losses that a backward pass in run has started from

_MAX_CHECKS = 3


_MAX_CALL_SITES = 1000


_REMEDY = (
    "Compute the loss outside run, over model(x) of the whole batch, or of values of all replicas "
    "(all_reduce, all_gather of mirror.get_replica_context()); for a mean over something else "
    "than examples, set mirror.get_replica_context().weight to the number in the replica's part"
)


Terms = list[Term]
_OfReplicas = dict[int, tuple[Terms, list[Use]]]  # what the graphs of their losses show


class LocalLosses:
    """The losses of one strategy's replicas, from which active runs have started passes."""

    def __init__(self) -> None:
        self._of_runs: weakref.WeakKeyDictionary[Run, dict[Hashable, _OfReplicas]] = (
            weakref.WeakKeyDictionary()
        )
        self._warned = set[Hashable]()

    def record(
        self, run: Run, replica_id: int, call_site: Hashable, nth: int, outputs: Sequence[Any]
    ) -> None:
        """Records a replica's losses before its ``nth`` pass from a line of the program.

        The last replica's call compares them, and warns if their gradients do not add up to
        those of one device.
        """
        if (
            run.is_split
            or run.counts is None
            or call_site in self._warned
            or not _are_scalar(outputs)
        ):
            return
        of_pass = self._of_runs.setdefault(run, {}).setdefault((call_site, nth), {})
        counts = [run.counts[r] for r in run.active]
        of_pass[replica_id] = (
            [term for output in outputs for term in _read(output)],
            _uses(counts, outputs),
        )
        for output in outputs:
            setattr(output, _CHECKED, True)
        if len(of_pass) < len(run.active):
            return
        terms_by_replica = [of_pass[r][0] for r in run.active]
        if not all(counts):  # a worker without examples: its losses count nothing
            return
        is_weighed = run.replicas.weighted and not run.is_given
        shares = run.shares() if is_weighed and not run.replicas.workers.is_multi_process else None
        what = why_inexact(
            terms_by_replica, counts, None if shares is None else [shares[r] for r in run.active]
        )
        mixing = mixing_operation([of_pass[r][1] for r in run.active], counts)
        if (what or mixing) is None or call_site in self._warned or not _reach_parameters(outputs):
            return
        self._warned.add(call_site)
        if what is None:
            warn_of_mixing(f"{mixing} in what computes the loss of this backward pass")
        else:
            warn_user(
                f"the loss of this backward pass inside run is {what}: the replicas' gradients "
                f"{_describe_shares(run.shares())}, so they differ from one device's. {_REMEDY}; "
                'for a sum use gradient_reduction="sum"'
            )


class ReducedLosses:
    """The losses that ``reduce("mean", losses)`` has been given, by the caller's line."""

    def __init__(self) -> None:
        self._num_checks: dict[Hashable, int] = {}

    def check(self, value: PerReplica[Any], call_site: Hashable) -> None:
        """Warns, once for each call site, if the mean of losses differs from one device's loss."""
        losses = dict(value.parts())
        if (
            len(losses) < 2
            or self._num_checks.get(call_site, 0) >= _MAX_CHECKS
            or len(self._num_checks) > _MAX_CALL_SITES
        ):
            return
        self._num_checks[call_site] = self._num_checks.get(call_site, 0) + 1
        if not _are_scalar(list(losses.values())):
            return
        if any(hasattr(loss, _CHECKED) for loss in losses.values()):
            return
        assert value.weights is not None
        counts, weights = counts_of(value.weights), value.weights
        if counts is None:
            return
        is_given = isinstance(weights, GivenWeights)
        counted = [counts[r] for r in losses]
        total = sum(weights[r] for r in losses)
        if not all(counted) or not total:
            return
        shares = {r: weights[r] / total for r in losses}
        terms_by_replica = [_read(loss) for loss in losses.values()]
        what = why_inexact(terms_by_replica, counted, None if is_given else list(shares.values()))
        mixing = mixing_operation([_uses(counted, [loss]) for loss in losses.values()], counted)
        if (what or mixing) is None or not _reach_parameters(list(losses.values())):
            return
        self._num_checks[call_site] = _MAX_CHECKS
        if what is None:
            warn_of_mixing(f'{mixing} in what computes the losses in reduce("mean", losses)')
        else:
            warn_user(
                f'the losses in reduce("mean", losses) are each {what}: they '
                f"{_describe_shares(shares)}, so they differ from one device's. {_REMEDY}; for "
                'sums use reduce("sum", losses)'
            )


def _uses(counts: Sequence[float], losses: Sequence[Any]) -> list[Use]:
    """Returns the operations below a replica's losses that may combine examples."""
    if len(set(counts)) < 2:
        return []
    return uses_below([loss.grad_fn for loss in losses], of_loss=True)


def why_inexact(
    terms_by_replica: Sequence[Terms], counts: Sequence[float], shares: Sequence[float] | None
) -> str | None:
    """Returns why the replicas' losses do not add up to one device's; ``None`` if they do.

    Args:
        counts: the replicas' numbers of examples.
        shares: the shares of their losses; ``None`` if the program chooses them.
    """
    try:
        kind, weights = weights_of_terms(_with_means(terms_by_replica), counts)
    except Mixed as why:
        return str(why)
    except NotReducible as why:
        return None if shares is None else str(why)
    if shares is None:
        return None
    if kind == "sum":
        return "a sum over the examples"
    numbers = [float(weight) for weight in weights]
    total = sum(numbers)
    pairs = zip(numbers, shares, strict=True)
    if not total or all(math.isclose(n / total, s, rel_tol=1e-4) for n, s in pairs):
        return None
    return f"a mean over {', '.join(f'{number:g}' for number in numbers)} in the replicas' parts"


def _with_means(terms_by_replica: Sequence[Terms]) -> list[Terms]:
    """Returns the terms; a sum that is divided by the number of its summands becomes a mean.

    The division may take several steps: by the whole batch's number, times that of replicas.
    """
    rows = [list(terms) for terms in terms_by_replica]
    if len({tuple(term.kind for term in terms) for terms in rows}) > 1:
        return rows
    for i, column in enumerate(zip(*rows, strict=True)):
        if column[0].kind == "sum" and all(len(t.factors) > 1 and _is_mean(t) for t in column):
            for terms in rows:
                terms[i] = replace(terms[i], kind="mean", factors=())
    return rows


def _is_mean(term: Term) -> bool:
    divided = 1.0
    for is_div, value in term.factors:
        if not value:
            return False
        divided = divided * value if is_div else divided / value
    sizes = [math.prod(term.shape[: k + 1]) for k in range(len(term.shape))]
    return any(math.isclose(divided, size, rel_tol=1e-5) for size in sizes)


def _read(loss: Tensor) -> Terms:
    """Returns the terms of a loss with the facts that ``why_inexact`` needs, without its graph."""
    terms = []
    for term in terms_or_unknown(loss.grad_fn):
        try:
            for fact in _FACTS.get(term.kind, ()):
                term.read(fact)
            terms.append(term.without_graph())
        except (UnknownNode, AttributeError, RuntimeError):  # new torch, hook, or freed graph
            terms.append(Term("unknown", facts={batch_dim_uses: []}))
    return terms


def _are_scalar(outputs: Sequence[Any]) -> bool:
    return all(
        isinstance(output, Tensor) and output.grad_fn is not None and output.numel() == 1
        for output in outputs
    )


def _reach_parameters(outputs: Sequence[Tensor]) -> bool:
    """Returns whether a pass from one of these reaches mirrored parameters."""
    return any(reaches_parameters(output.grad_fn) for output in outputs)


def _describe_shares(shares: Mapping[int, float]) -> str:
    return f"are added up, multiplied with {', '.join(f'{s:.3g}' for s in shares.values())}"
