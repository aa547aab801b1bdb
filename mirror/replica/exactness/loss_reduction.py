"""0-d outputs of a split call: what a replica's counts with in that of the whole batch.

[Note: Scalar outputs]
A 0-d output is mostly a loss, and how the replicas' join depends on how each has come about. The
few 0-d nodes on top of its graph tell: sums, differences and multiples of terms, and each term is

    over the replica's part             in the whole batch's      counts with
    mean over examples                  mean                      its number of examples
    sum, divided by their number        mean                      its number of examples
    mean of what a mask has chosen      mean                      the number of the chosen
    sum, divided by that of its mask    mean                      that sum
    cross entropy with targets ignored  mean                      the weight of its other targets
    sum, multiplied with a constant     sum                       1
    of parameters alone                 the same                  anything of sum 1

Terms that count with the same are joined exactly. Others, and what is none of these though it
comes from the batch (a root of a mean, a sum over an unknown number), stay means over examples,
with a warning, and so do comparisons of the examples with each other (``contrasts.py``) and what
is made of reduced values (``meetings.py``). What nodes do not tell (compiled code, a function
written in Python, no graph) is taken for a mean over examples; of compiled code that got labels
below zero, which losses ignore, ``inexact.py`` tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.replica.collectives.reduce_ops import summed
from mirror.replica.exactness.batch_dim_rules import are_linear, meetings_below
from mirror.replica.exactness.contrastive import compare_examples
from mirror.replica.exactness.loss_graph import (
    CHOICES,
    Term,
    UnknownNode,
    is_loss,
    is_same,
    mask_sums,
    names_below,
    terms_or_untold,
    total_weight,
    views_below,
)

Weights = Sequence[float | Tensor]


class NotReducible(Exception):
    """Values that no weights join into the whole batch's; says what they are."""


class Mixed(NotReducible):
    """Values in which examples have come together in a way that is not linear."""


def weights_of(parts: Sequence[Tensor], counts: Sequence[float], has_shares: bool) -> Weights:
    """Returns what the replicas' values are multiplied with, to be added then.

    Args:
        counts: the replicas' numbers of examples.
        has_shares: whether a number by which the model divides came as each replica's share.

    Raises:
        Undecided: no weights make the value of the whole batch of these.
    """
    means = [count / sum(counts) for count in counts]
    if len(parts) == 1 or not all(part.grad_fn is not None for part in parts):
        return means
    of_replicas = [terms_or_untold(part.grad_fn) for part in parts]
    kind, weights = weights_of_terms(of_replicas, counts, has_shares)
    if kind == "weighted":
        return _normal(weights, parts[0].device)
    return weights if kind == "sum" else means


def weights_of_terms(
    of_replicas: Sequence[Sequence[Term]], counts: Sequence[float], has_shares: bool = False
) -> tuple[str, list[Any]]:
    """Returns what the replicas' values are, and what they are multiplied with.

    A "sum", each with 1; a "mean" over the examples, or untold, or "weighted" by others numbers:
    of these the weights are yet to be divided by their sum.

    Raises:
        Undecided: no weights make the value of the whole batch of these.
    """
    means = "mean", list(counts)
    if len({tuple(term.kind for term in terms) for terms in of_replicas}) > 1:
        return means
    found = []
    for column in zip(*of_replicas, strict=True):
        try:
            found.append(_Column(column, counts, has_shares).decided())
        except (UnknownNode, AttributeError, RuntimeError):  # another torch; a hook, a freed graph
            found.append(("untold", []))
    kinds = {kind for kind, _ in found}
    if "untold" in kinds:
        return means
    if "sum" in kinds:
        if len(kinds) > 1:
            raise NotReducible("a sum over the examples, and something else added to it")
        return "sum", [1.0] * len(of_replicas)
    known = [weights for kind, weights in found if kind == "weighted"]
    if not known:
        return means
    if "mean" in kinds:
        known.append(list(counts))
    if len(known) > 1 and not all(_are_proportional(known[0], other) for other in known[1:]):
        raise NotReducible("means over different numbers, of examples and of tokens perhaps")
    return "weighted", known[0]


def is_compiled(parts: Sequence[Tensor]) -> bool:
    """Whether compiled code has given the values, whose nodes tell nothing."""
    return all("CompiledFunction" in type(part.grad_fn).__name__ for part in parts)


def joined_value(parts: Sequence[Tensor], weights: Weights) -> Tensor:
    """Returns the weighted sum; what counts nothing may be nan, and gets no gradient."""
    terms: list[Tensor] = []
    for part, weight in zip(parts, weights, strict=True):
        if isinstance(weight, Tensor):
            kept = torch.where(weight == 0, torch.zeros_like(part), part)
            terms.append(kept * weight.to(part.dtype))
        elif weight:
            terms.append(part * weight)
    return summed(terms, terms[0].device)


class _Column:
    """One term of all replicas that ran."""

    def __init__(self, terms: Sequence[Term], counts: Sequence[float], has_shares: bool) -> None:
        self._terms = terms
        self._counts = counts
        self._has_shares = has_shares

    def decided(self) -> tuple[str, list[Any]]:
        """Returns "same", "constant", "mean", "sum", or "weighted" and with what."""
        first = self._terms[0]
        if first.kind in ("same", "constant"):
            return first.kind, []
        if first.kind == "untold":
            self._inner()  # what is below may tell
            raise UnknownNode
        if first.kind not in ("mean", "sum", "cross entropy"):
            raise Mixed(first.kind)
        if compare_examples(self._terms, self._counts):
            raise Mixed(
                "made of comparisons of the examples with each other (a contrastive loss), of "
                "which those of unlike parts are missing"
            )
        inner = self._inner()
        if first.kind == "cross entropy":
            self._refuse_varying_factors()
            return "weighted", self._read(total_weight)
        if first.read(is_same):
            return "same", []
        if inner == "Mean":
            return "mean", []
        if first.kind == "mean":
            return self._of_mean(inner == "Sum")
        if inner == "Sum" or self._has_batch():
            return self._of_sum()
        sizes = [math.prod(term.shape) for term in self._terms]
        if len(set(sizes)) > 1 and not _are_proportional(sizes, self._counts):
            raise NotReducible(f"sums over {', '.join(map(str, sizes))} numbers")
        return "mean", []

    def _read(self, fact: Any) -> list[Any]:
        return [term.read(fact) for term in self._terms]

    def _inner(self) -> str | None:
        """Returns how the examples have come together before: "Mean", "Sum", or not at all."""
        found = self._read(meetings_below)
        if len({tuple((m.how, m.rows is None) for m in meetings) for meetings in found}) > 1:
            raise UnknownNode
        hows = set()
        for meetings in zip(*found, strict=True):
            if meetings[0].is_of_examples(meetings, self._counts):
                if not are_linear(meetings):
                    what = meetings[0].how.lower()
                    raise Mixed(
                        "a function of what has been reduced over the examples before, or of "
                        f"their order ({what})"
                    )
                hows.add(meetings[0].how)
        if len(hows) > 1:
            raise Mixed("means and sums over the examples together")
        return hows.pop() if hows else None

    def _of_mean(self, is_sum: bool) -> tuple[str, list[Any]]:
        if is_sum:
            return self._of_sum()
        self._refuse_varying_factors()
        sizes = [math.prod(term.shape) for term in self._terms]
        if _are_proportional(sizes, self._counts):
            return "mean", []
        if all(term.read(names_below) & CHOICES for term in self._terms):
            return "weighted", sizes
        if len(set(sizes)) == 1:
            return "mean", []
        raise NotReducible(f"means over {', '.join(map(str, sizes))} numbers")

    def _refuse_varying_factors(self) -> None:
        for values in self._factors():
            if not _are_close(values, values[:1] * len(values)):
                raise NotReducible("a mean multiplied with what differs from part to part")

    def _factors(self) -> Iterator[list[float]]:
        if len({tuple(is_div for is_div, _ in term.factors) for term in self._terms}) > 1:
            raise UnknownNode
        for column in zip(*(term.factors for term in self._terms), strict=True):
            yield [abs(float(value)) for _, value in column]

    def _has_batch(self) -> bool:
        """Whether the first dimension of what is summed is that of the examples."""
        if not all(term.shape for term in self._terms):
            return False
        sizes = [term.shape[0] for term in self._terms]
        if sizes == list(self._counts):
            return True
        if not _are_proportional(sizes, self._counts) or sizes[0] % self._counts[0]:
            return all(term.read(names_below) & CHOICES for term in self._terms)
        is_fused = self._terms[0].read(is_loss)
        if len(set(self._counts)) > 1 or is_fused:
            return True
        views = self._terms[0].read(views_below)
        return any(self._counts[0] in sizes[:1] for sizes in views)

    def _of_sum(self) -> tuple[str, list[Any]]:
        divided = multiplied = False
        weights: list[Any] | None = None
        unclear = False
        for i, values in enumerate(self._factors()):
            is_div = self._terms[0].factors[i][0]
            numbers = values if is_div else [1 / v if v else math.inf for v in values]
            masks = self._masks(numbers) if is_div and weights is None and not divided else None
            if is_div and self._is_number_of_examples(numbers):
                multiplied = multiplied or divided
                divided = True
            elif masks is not None:
                weights = masks
            elif not _are_close(numbers, numbers[:1] * len(numbers)):
                if not _are_proportional(numbers, self._counts):
                    raise NotReducible("a sum divided by a number that differs from part to part")
                multiplied = multiplied or divided
                divided = True
            elif is_div and self._has_shares:
                divided = True
            else:
                unclear = unclear or self._may_be_of_examples(numbers[0], is_div)
        if weights is not None and not divided:
            return "weighted", weights
        if multiplied or weights is not None:
            raise NotReducible("a sum divided twice by numbers of the part")
        if divided:
            return "mean", []
        if unclear:
            raise NotReducible(
                "a sum divided by a number that may be the part's of examples, or a constant"
            )
        for of_replicas in zip(*self._read(mask_sums), strict=False):
            if _are_close(of_replicas, [1.0] * len(of_replicas)):
                raise NotReducible("a sum with weights whose sum is 1 in every part")
        return "sum", []

    def _is_number_of_examples(self, numbers: Sequence[float]) -> bool:
        if not _are_proportional(numbers, self._counts):
            return False
        for k in range(1, max(len(term.shape) for term in self._terms) + 1):
            if _are_close(numbers, [math.prod(term.shape[:k]) for term in self._terms]):
                return True
        return _are_close(numbers, self._counts)

    def _may_be_of_examples(self, number: float, is_div: bool) -> bool:
        """Whether a number, equal on all parts, may come from their size."""
        if len(set(self._counts)) > 1 or not math.isfinite(number):
            return False
        quotient = number / self._counts[0]
        is_multiple = quotient >= 1 and math.isclose(quotient, round(quotient), rel_tol=1e-6)
        if is_div or not is_multiple:
            return is_multiple
        return math.prod(self._terms[0].shape) % round(number) == 0

    def _masks(self, numbers: Sequence[float]) -> list[float] | None:
        """Returns the sums of the masks by which the sums are divided, if they are."""
        for of_replicas in zip(*self._read(mask_sums), strict=False):
            pairs = zip(of_replicas, numbers, strict=True)
            # Of an empty mask the divisor may be another, so that it is not 0.
            if all(not mask or math.isclose(mask, n, rel_tol=1e-5) for mask, n in pairs):
                if any(of_replicas):
                    return list(of_replicas)
        return None


def _normal(weights: Sequence[Any], device: torch.device) -> Weights:
    """Returns weights of sum 1; tensors as tensors, so that no device is waited for."""
    if not any(isinstance(weight, Tensor) for weight in weights):
        total = sum(weights)
        return [weight / total if total else 1.0 for weight in weights]
    tensors = [torch.as_tensor(w, dtype=torch.float64).to(device) for w in weights]
    total = summed(tensors, device)
    return [tensor / total for tensor in tensors]


def _are_proportional(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return _are_close(
        [float(s) * float(others[0]) for s in some], [float(o) * float(some[0]) for o in others]
    )


def _are_close(some: Sequence[float], others: Sequence[float]) -> bool:
    return all(math.isclose(s, o, rel_tol=1e-5) for s, o in zip(some, others, strict=True))
