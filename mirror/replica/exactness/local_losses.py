"""Warns of losses and outputs that replicas compute differently from one device.

Inside ``run`` each replica has its own loss. Gradients are weighted by the replicas' numbers of
examples, unless the program sets other weights. That is one device's gradient for a mean over
examples, and not for other losses. The graphs show the loss by the rules of split calls:

    in ``run``         at each replica's backward pass; what a graph shows is kept as numbers until
                       all replicas have arrived, since the pass frees saved tensors
    in ``reduce``      of all replicas' losses at once
    in a split call    of outputs with a row for each example; ``loss_reduction.py`` has the losses

If the replicas' numbers of examples differ, layers that combine examples are found as well: only
different sizes show which dimension inside a model has the examples.

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

from torch import Tensor, nn

from mirror.base.containers import leaves_in
from mirror.execution.run import Run
from mirror.replica.exactness.loss_graph import find_nonlinear, read_terms
from mirror.replica.exactness.loss_reduction import find_common_error, weights_of_terms
from mirror.replica.exactness.node_classes import UNREADABLE, is_parameter, walk
from mirror.replica.exactness.node_rules import NonlinearInExamples, NotReducible, Rows, Term
from mirror.threads.user_frames import warn_user
from mirror.values import GivenWeights, PerReplica, counts_of, is_number

# The words of the warnings, and of `mirror check`.
MIXES_EXAMPLES = "{} computes over the examples of the batch, and a replica has only its own"
GATHER_FIRST = (
    "compute it outside the model, from the gathered outputs; or gather first inside, with "
    "mirror.get_replica_context().all_gather(value)"
)
_REMEDY = (
    "Compute the loss outside run, over model(x) of the whole batch, or of values of all replicas "
    "(all_reduce, all_gather of mirror.get_replica_context()); for a mean over something else "
    "than examples, set mirror.get_replica_context().weight to its number on the replica"
)

_CHECKED = "_is_judged"  # an attribute of losses that a backward pass in run has started from
_MAX_CHECKS = 3
_MAX_CALL_SITES = 1000


_Reading = tuple[list[Term], NonlinearInExamples | None]  # of one replica's losses


def warn_if_mixing(module: nn.Module, results: Mapping[int, Any], sizes: Sequence[float]) -> bool:
    """Warns if the outputs of a split call combine the examples of a replica.

    Args:
        results: the outputs of the replicas that ran, by replica.
        sizes: all replicas' numbers of examples.

    Returns:
        Whether the outputs have graphs, and the replicas that ran have different numbers.
    """
    counts = [sizes[r] for r in results]
    errors = list[NonlinearInExamples | None]()
    for output, count in zip(results.values(), counts, strict=True):
        tensors = [leaf for leaf in leaves_in(output) if isinstance(leaf, Tensor)]
        nodes = [t.grad_fn for t in tensors if t.grad_fn and t.shape[:1] == (count,)]
        if not nodes or len(set(counts)) < 2:
            return False
        errors.append(find_nonlinear(nodes, count))
    error = find_common_error(errors, counts)
    if error is not None:
        what = f"{error.operation} in the forward of {type(module).__name__}"
        warn_user(
            f"{MIXES_EXAMPLES.format(what)}, so the result differs from one device's; "
            f"{GATHER_FIRST}"
        )
    return True


class LocalLosses:
    """The losses of one strategy's replicas, from which active runs have started passes."""

    def __init__(self) -> None:
        self._of_runs: weakref.WeakKeyDictionary[Run, dict[Hashable, dict[int, _Reading]]] = (
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
        of_pass[replica_id] = _read(outputs, run.counts[replica_id], counts)
        for output in outputs:
            setattr(output, _CHECKED, True)
        # A worker without examples: its losses count nothing.
        if len(of_pass) < len(run.active) or not all(counts):
            return
        is_weighed = run.replicas.weighted and not run.is_given
        shares = run.shares() if is_weighed and not run.replicas.workers.is_multi_process else None
        what = explain_inexact(
            [of_pass[r] for r in run.active],
            counts,
            None if shares is None else [shares[r] for r in run.active],
        )
        if what is not None and call_site not in self._warned and _reach_parameters(outputs):
            self._warned.add(call_site)
            _warn(
                f"the loss of this backward pass inside run is {what}: the replicas' gradients",
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
        all_counts, total = counts_of(weights), sum(weights[r] for r in losses)
        if all_counts is None or not total or not all(all_counts[r] for r in losses):
            return
        counts, shares = [all_counts[r] for r in losses], {r: weights[r] / total for r in losses}
        what = explain_inexact(
            [_read([loss], n, counts) for loss, n in zip(outputs, counts, strict=True)],
            counts,
            None if isinstance(weights, GivenWeights) else list(shares.values()),
        )
        if what is not None and _reach_parameters(outputs):
            self._num_checks[call_site] = _MAX_CHECKS
            _warn(
                f'the losses in reduce("mean", losses) are each {what}: they',
                shares,
                'sums use reduce("sum", losses)',
            )


def _warn(losses: str, shares: Mapping[int, float], of_sums: str) -> None:
    numbers = ", ".join(f"{share:.3g}" for share in shares.values())
    warn_user(
        f"{losses} are added up, multiplied with {numbers}, so they differ from one device's. "
        f"{_REMEDY}; for {of_sums}"
    )


def explain_inexact(
    readings: Sequence[_Reading], counts: Sequence[float], shares: Sequence[float] | None
) -> str | None:
    """Returns why the replicas' losses do not add up to one device's; ``None`` if they do.

    Args:
        readings: what the graphs of each replica's losses show.
        counts: the replicas' numbers of examples.
        shares: the shares of their losses; ``None`` if the program chooses them.
    """
    error = find_common_error([error for _, error in readings], counts)
    try:
        kind, weights = weights_of_terms([[*map(_sum_as_mean, t)] for t, _ in readings], counts)
    except NotReducible as why:
        if shares is not None or isinstance(why, NonlinearInExamples):
            return str(why)
    else:
        numbers = [float(weight) for weight in weights]
        if shares is not None and kind == "sum":
            return "a sum over the examples"
        if shares is not None and not _are_shares(numbers, shares):
            values = ", ".join(f"{number:g}" for number in numbers)
            return f"a mean over {values} values on the replicas"
    return None if error is None else f"computed with {error}"


def _are_shares(numbers: Sequence[float], shares: Sequence[float]) -> bool:
    total = sum(numbers)
    pairs = zip(numbers, shares, strict=True)
    return not total or all(math.isclose(n / total, s, rel_tol=1e-4) for n, s in pairs)


def _sum_as_mean(term: Term) -> Term:
    """Returns a sum that is divided by the number of its summands as a mean.

    The division may take several steps: by the whole batch's number, times that of replicas.
    """
    return replace(term, kind="mean", rows=Rows()) if _is_mean(term) else term


def _is_mean(term: Term) -> bool:
    if term.kind != "sum" or len(term.rows.factors) < 2:
        return False
    divided = 1.0
    for is_div, value in term.rows.factors:
        if not value:
            return False
        divided = divided * abs(value) if is_div else divided / abs(value)
    sizes = [math.prod(term.shape[: k + 1]) for k in range(len(term.shape))]
    return any(math.isclose(divided, size, rel_tol=1e-5) for size in sizes)


def _read(losses: Sequence[Any], count: float, counts: Sequence[float]) -> _Reading:
    """Returns what the graphs of a replica's losses show, without the graphs."""
    terms = list[Term]()
    for term in (term for loss in losses for term in _terms_of(loss, count)):
        try:
            terms.append(term.detach())
        except UNREADABLE:
            terms.append(Term("unknown"))
    nodes = [node for node in map(_node_of, losses) if node is not None]
    return terms, find_nonlinear(nodes, count) if len(set(counts)) > 1 else None


def _terms_of(loss: Any, count: float) -> list[Term]:
    number = loss.output_nr if isinstance(loss, Tensor) else 0
    return read_terms(_node_of(loss), count, number)


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
    return any(is_parameter(node) for node in walk(map(_node_of, outputs), lambda node: True))
