"""Losses of replicas inside ``run``: whether their gradients add up to those of one device.

[Note: Local losses]
Inside ``run`` each replica has its own loss, and gradients count with the replicas' weights, their
numbers of examples unless the program sets others. For a mean over examples that is one device's
gradient. What the losses are is read of their graphs as for a split call, by the same rules:

    in run             at a backward pass, of one replica after the other: what a graph tells is
                       kept as numbers until all have come by, as the pass frees its values
    in ``reduce``      of all replicas' losses at once

The first passes from a line of the program are looked at, and the line is told of once. Where the
program sets weights, or adds gradients up, how much a loss counts is its own affair: only that
examples meet in another way than by means and sums is told then.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from mirror.data.split_batch import GivenWeights, counts_of
from mirror.execution.replicas import RunView
from mirror.replica.exactness.batch_dim_rules import meetings_below
from mirror.replica.exactness.contrastive import products_below
from mirror.replica.exactness.loss_graph import (
    Term,
    UnknownNode,
    is_loss,
    is_same,
    mask_sums,
    names_below,
    reaches_parameters,
    terms_or_untold,
    total_weight,
    views_below,
)
from mirror.replica.exactness.loss_reduction import Mixed, NotReducible, weights_of_terms
from mirror.threads.user_frames import warn_user
from mirror.values import PerReplica

_REDUCED = (products_below, meetings_below, is_same, is_loss, names_below, mask_sums, views_below)
_FACTS = {
    "mean": _REDUCED,
    "sum": _REDUCED,
    "cross entropy": (products_below, meetings_below, total_weight),
    "untold": (meetings_below,),
}
_LOOKED = "_is_judged"  # of a loss that a backward pass in run has started from

Terms = list[Term]


class LocalLosses:
    """What one strategy's replicas have started backward passes from, in runs that go on."""

    def __init__(self) -> None:
        self._of_runs: weakref.WeakKeyDictionary[RunView, dict[Hashable, dict[int, Terms]]] = (
            weakref.WeakKeyDictionary()
        )
        self._told = set[Hashable]()

    def note(
        self, run: RunView, replica_id: int, place: Hashable, nth: int, outputs: Sequence[Any]
    ) -> None:
        """Notes a replica's losses, before the ``nth`` pass from a place; judges the last one's.

        Warns if the gradients of all will not add up to those of one device.
        """
        if run.is_split or run.counts is None or place in self._told or not _are_scalar(outputs):
            return
        of_pass = self._of_runs.setdefault(run, {}).setdefault((place, nth), {})
        of_pass[replica_id] = [term for output in outputs for term in _read(output)]
        for output in outputs:
            setattr(output, _LOOKED, True)
        if len(of_pass) < len(run.active):
            return
        of_replicas = [of_pass[r] for r in run.active]
        counts = [run.counts[r] for r in run.active]
        if not all(counts):  # a worker without examples: its losses count nothing
            return
        is_weighed = run.replicas.weighted and not run.is_given
        shares = run.shares() if is_weighed and not run.replicas.workers.is_multi_process else None
        what = judge(
            of_replicas, counts, None if shares is None else [shares[r] for r in run.active]
        )
        if what is not None and place not in self._told and _train(outputs):
            self._told.add(place)
            warn_user(
                f"the loss of this backward pass inside run is {what}: the replicas' gradients "
                f"{_do(run.shares())}, which is not what one device gives. {_REMEDY}; of a sum "
                'use gradient_reduction="sum"'
            )


class ReducedLosses:
    """The losses that ``reduce("mean", losses)`` has been given, by the caller's line."""

    def __init__(self) -> None:
        self._looks: dict[Hashable, int] = {}

    def look(self, value: PerReplica[Any], place: Hashable) -> None:
        """Warns, once for a place, if the mean of losses is not the loss of one device."""
        losses = dict(value.parts())
        if len(losses) < 2 or self._looks.get(place, 0) >= _LOOKS or len(self._looks) > _PLACES:
            return
        self._looks[place] = self._looks.get(place, 0) + 1
        if not _are_scalar(list(losses.values())):
            return
        if any(hasattr(loss, _LOOKED) for loss in losses.values()):
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
        of_replicas = [_read(loss) for loss in losses.values()]
        what = judge(of_replicas, counted, None if is_given else list(shares.values()))
        if what is not None and _train(list(losses.values())):
            self._looks[place] = _LOOKS
            warn_user(
                f'the losses in reduce("mean", losses) are each {what}: they '
                f"{_do(shares)}, which is not what one device gives. {_REMEDY}; of "
                'sums use reduce("sum", losses)'
            )


def judge(
    of_replicas: Sequence[Terms], counts: Sequence[float], shares: Sequence[float] | None
) -> str | None:
    """Returns what keeps the replicas' losses from adding up to one device's, ``None``: nothing.

    Args:
        counts: the replicas' numbers of examples.
        shares: what their losses count with; ``None``: that is the program's affair.
    """
    try:
        kind, weights = weights_of_terms(_with_means(of_replicas), counts)
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


def _with_means(of_replicas: Sequence[Terms]) -> list[Terms]:
    """Returns the terms; a mean is what has been divided by just the number of its summands.

    In several steps, perhaps: by the number in the whole batch, and times that of the replicas.
    """
    rows = [list(terms) for terms in of_replicas]
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
    """Returns the terms of a loss, and all that will be asked of them, without its graph."""
    terms = []
    for term in terms_or_untold(loss.grad_fn):
        try:
            for fact in _FACTS.get(term.kind, ()):
                term.read(fact)
            terms.append(term.without_graph())
        except (UnknownNode, AttributeError, RuntimeError):  # another torch; a hook, a freed graph
            terms.append(Term("untold", facts={meetings_below: []}))
    return terms


def _are_scalar(outputs: Sequence[Any]) -> bool:
    return all(
        isinstance(output, Tensor) and output.grad_fn is not None and output.numel() == 1
        for output in outputs
    )


def _train(outputs: Sequence[Tensor]) -> bool:
    """Returns whether a pass from these reaches parameters; all else is the program's own."""
    return any(reaches_parameters(output.grad_fn) for output in outputs)


def _do(shares: Mapping[int, float]) -> str:
    return f"are added up, multiplied with {', '.join(f'{s:.3g}' for s in shares.values())}"


_LOOKS = 3
_PLACES = 1000
_REMEDY = (
    "Compute the loss outside run, over model(x) of the whole batch, or of values of all replicas "
    "(all_reduce, all_gather of mirror.get_replica_context()); of a mean over something else than "
    "examples, set mirror.get_replica_context().weight to how many the replica's part has"
)
