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

from mirror.data.split_batch import GivenWeights, counts_of
from mirror.execution.run import Run
from mirror.replica.exactness.batch_dim_rules import batch_dim_uses, products_below
from mirror.replica.exactness.cross_example_ops import (
    Use,
    mixing_operation,
    uses_below,
    warn_of_mixing,
)
from mirror.replica.exactness.loss_graph import (
    Term,
    UnknownNode,
    is_loss,
    is_same,
    mask_sums,
    names_below,
    reaches_parameters,
    terms_or_unknown,
    total_weight,
    views_below,
)
from mirror.replica.exactness.loss_reduction import Mixed, NotReducible, weights_of_terms
from mirror.threads.user_frames import warn_user
from mirror.values import PerReplica

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
        what = explain_inexact(
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
        what = explain_inexact(
            terms_by_replica, counted, None if is_given else list(shares.values())
        )
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


def _read(loss: Tensor) -> Terms:
    """Returns the terms of a loss, with what ``explain_inexact`` needs, without the graph."""
    terms = []
    for term in terms_or_unknown(loss.grad_fn):
        try:
            for fact in _FACTS.get(term.kind, ()):
                term.read(fact)
            terms.append(term.detach())
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
