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
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from mirror.execution.run import Run
from mirror.replica.exactness.cross_example_ops import (
    Combined,
    combined_below,
    mixing_operation,
    uses_below,
    warn_of_mixing,
)
from mirror.replica.exactness.loss_graph import (
    Term,
    is_loss,
    is_of_chosen,
    is_same,
    mask_sums,
    rows_viewed,
    terms_or_unknown,
    total_weight,
)
from mirror.replica.exactness.loss_reduction import Mixed, NotReducible, weights_of_terms
from mirror.replica.exactness.node_classes import UNREADABLE, reaches_parameters
from mirror.threads.user_frames import warn_user
from mirror.values import GivenWeights, PerReplica, counts_of, is_number

_REDUCED = (uses_below, is_same, is_loss, is_of_chosen, mask_sums, rows_viewed)
_FACTS = {
    "mean": _REDUCED,
    "sum": _REDUCED,
    "cross entropy": (uses_below, total_weight),
    "unknown": (uses_below,),
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
_Graphs = tuple[Terms, list[Combined]]  # what the graphs of a replica's losses show


class LocalLosses:
    """The losses of one strategy's replicas, from which active runs have started passes."""

    def __init__(self) -> None:
        self._of_runs: weakref.WeakKeyDictionary[Run, dict[Hashable, dict[int, _Graphs]]] = (
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
        if run.is_split or run.counts is None or call_site in self._warned:
            return
        if not _are_scalar(outputs):
            return
        of_pass = self._of_runs.setdefault(run, {}).setdefault((call_site, nth), {})
        counts = [run.counts[r] for r in run.active]
        of_pass[replica_id] = _read(outputs, counts)
        for output in outputs:
            setattr(output, _CHECKED, True)
        # A worker without examples: its losses count nothing.
        if len(of_pass) < len(run.active) or not all(counts):
            return
        is_weighed = run.replicas.weighted and not run.is_given
        shares = run.shares() if is_weighed and not run.replicas.workers.is_multi_process else None
        found = _find_inexact(
            [of_pass[r] for r in run.active],
            counts,
            None if shares is None else [shares[r] for r in run.active],
        )
        if found is not None and call_site not in self._warned and _reach_parameters(outputs):
            self._warned.add(call_site)
            _warn(
                *found,
                "what computes the loss of this backward pass",
                "the loss of this backward pass inside run is {}: the replicas' gradients",
                run.shares(),
                'a sum use gradient_reduction="sum"',
            )


class ReducedLosses:
    """The losses that ``reduce("mean", losses)`` has been given, by the caller's line."""

    def __init__(self) -> None:
        self._num_checks: dict[Hashable, int] = {}

    def check(self, value: PerReplica[Any], call_site: Hashable) -> None:
        """Warns, once for each call site, if the mean of losses differs from one device's loss."""
        losses = dict(value.parts())
        num_checks = self._num_checks.get(call_site, 0)
        if len(losses) < 2 or num_checks >= _MAX_CHECKS or len(self._num_checks) > _MAX_CALL_SITES:
            return
        self._num_checks[call_site] = num_checks + 1
        outputs = list(losses.values())
        if not _are_scalar(outputs) or any(hasattr(loss, _CHECKED) for loss in outputs):
            return
        weights = value.weights
        assert weights is not None
        counts, total = counts_of(weights), sum(weights[r] for r in losses)
        if counts is None or not total or not all(counts[r] for r in losses):
            return
        counted, shares = [counts[r] for r in losses], {r: weights[r] / total for r in losses}
        found = _find_inexact(
            [_read([loss], counted) for loss in outputs],
            counted,
            None if isinstance(weights, GivenWeights) else list(shares.values()),
        )
        if found is not None and _reach_parameters(outputs):
            self._num_checks[call_site] = _MAX_CHECKS
            _warn(
                *found,
                'what computes the losses in reduce("mean", losses)',
                'the losses in reduce("mean", losses) are each {}: they',
                shares,
                'sums use reduce("sum", losses)',
            )


def _find_inexact(
    graphs: Sequence[_Graphs], counts: Sequence[float], shares: Sequence[float] | None
) -> tuple[str | None, str | None] | None:
    """Returns why replicas' losses are inexact, and what mixes examples; ``None`` if exact."""
    what = explain_inexact([terms for terms, _ in graphs], counts, shares)
    mixing = mixing_operation([combined for _, combined in graphs], counts)
    return None if what is None and mixing is None else (what, mixing)


def _warn(
    what: str | None,
    mixing: str | None,
    where: str,
    losses: str,
    shares: Mapping[int, float],
    of_sums: str,
) -> None:
    """Warns of losses that are ``what``, or of an operation ``where`` they are computed."""
    if what is None:
        warn_of_mixing(f"{mixing} in {where}")
        return
    numbers = ", ".join(f"{share:.3g}" for share in shares.values())
    warn_user(
        f"{losses.format(what)} are added up, multiplied with {numbers}, so they differ from one "
        f"device's. {_REMEDY}; for {of_sums}"
    )


def explain_inexact(
    terms_by_replica: Sequence[Terms], counts: Sequence[float], shares: Sequence[float] | None
) -> str | None:
    """Returns why the replicas' losses do not add up to one device's; ``None`` if they do.

    Args:
        counts: the replicas' numbers of examples.
        shares: the shares of their losses; ``None`` if the program chooses them.
    """
    try:
        kind, weights = weights_of_terms(_turn_sums_into_means(terms_by_replica), counts)
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


def _turn_sums_into_means(terms_by_replica: Sequence[Terms]) -> list[Terms]:
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


def _read(losses: Sequence[Any], counts: Sequence[float]) -> _Graphs:
    """Returns what the graphs of a replica's losses show, without the graphs."""
    terms = []
    for term in (term for loss in losses for term in terms_or_unknown(_node_of(loss))):
        try:
            for fact in _FACTS.get(term.kind, ()):
                term.read(fact)
            terms.append(term.detach())
        except UNREADABLE:
            terms.append(Term("unknown", facts={uses_below: []}))
    if len(set(counts)) < 2:
        return terms, []
    nodes = [node for node in map(_node_of, losses) if node is not None]
    return terms, combined_below(nodes, of_loss=True)


def _node_of(loss: Any) -> Any:
    return loss.grad_fn if isinstance(loss, Tensor) else None


def _are_scalar(outputs: Sequence[Any]) -> bool:
    """Returns whether all are numbers, and one has a graph; a branch may return a constant."""
    return any(_node_of(output) is not None for output in outputs) and all(
        output.numel() == 1 if isinstance(output, Tensor) else is_number(output)
        for output in outputs
    )


def _reach_parameters(outputs: Sequence[Any]) -> bool:
    """Returns whether a pass from one of these reaches mirrored parameters."""
    return any(reaches_parameters(_node_of(output)) for output in outputs)
