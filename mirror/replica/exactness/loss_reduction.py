"""Finds the weights by which the replicas' 0-d outputs add up to the whole batch's value.

A 0-d output is usually a loss, and the right weights depend on how it was computed. The 0-d nodes
on top of its autograd graph show that: they are sums, differences and multiples of terms.

    a term over the replica's part      is in the whole batch     its weight
    mean over examples                  mean                      its number of examples
    sum, divided by their number        mean                      its number of examples
    mean of what a mask selects         mean                      the number of selected values
    sum, divided by its mask's sum      mean                      the mask's sum
    cross entropy with ignored targets  mean                      the weight of its other targets
    sum, multiplied by a constant       sum                       1
    of parameters only                  the same                  any weights of sum 1

Terms with the same weights are joined exactly. Any other value of the batch (a root of a mean, a
sum over an unknown number, what ``cross_example_ops.py`` finds) is averaged by examples,
with a warning. Without known nodes (compiled code, a Python function, no graph) the value is
taken for a mean over examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.comm.reduce_ops import reduce_tensors
from mirror.replica.exactness.cross_example_ops import (
    are_comparisons,
    are_linear,
    are_of_examples,
    uses_below,
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
from mirror.replica.exactness.node_classes import UNREADABLE, UnknownNode

Weights = Sequence[float | Tensor]

_UNCLEAR = "a sum divided by a number that may be the part's of examples, or a constant"


class NotReducible(Exception):
    """No weights make the whole batch's value; the message describes the replicas' values."""


class Mixed(NotReducible):
    """The values combine examples in a way that is not linear."""


class Divided(NotReducible):
    """The values are sums that are divided by a number of the part."""

    def __init__(self) -> None:
        super().__init__("a sum divided by a number that differs from part to part")


class Branched(NotReducible):
    """The values have another form in some parts: of what the part has none of, say."""

    def __init__(self) -> None:
        super().__init__("the result of another branch in some parts")


def weights_of(parts: Sequence[Tensor], counts: Sequence[float], has_shares: bool) -> Weights:
    """Returns the weights of the replicas' values; their weighted sum is the whole batch's value.

    Args:
        counts: the replicas' numbers of examples.
        has_shares: whether a number by which the model divides is the part's own, even if it is
            equal in all parts: the replica's share of a number, say.

    Raises:
        NotReducible: no weights make the whole batch's value.
    """
    means = [count / sum(counts) for count in counts]
    if len(parts) == 1 or all(part.grad_fn is None for part in parts):
        return means
    terms_by_replica = [terms_or_unknown(part.grad_fn) for part in parts]
    kind, weights = weights_of_terms(terms_by_replica, counts, has_shares)
    if kind == "weighted":
        return _normal(weights, parts[0].device)
    return weights if kind == "sum" else means


def weights_of_terms(
    terms_by_replica: Sequence[Sequence[Term]], counts: Sequence[float], has_shares: bool = False
) -> tuple[str, list[Any]]:
    """Returns the kind of the replicas' values, and their weights.

    The kind is "sum", with weights of 1; "mean" over examples, also if nothing is known; or
    "weighted" by other numbers. Weights of a mean are not divided by their sum yet.

    Raises:
        NotReducible: no weights make the whole batch's value.
    """
    means = "mean", list(counts)
    loops = [_find_loop(*pair) for pair in zip(terms_by_replica, counts, strict=True)]
    if all(loops):
        return _weigh_loops([loop for loop in loops if loop], counts)
    if len({tuple(term.kind for term in terms) for terms in terms_by_replica}) > 1:
        _refuse_branches(terms_by_replica, counts)
        return means
    found = []
    for column in zip(*terms_by_replica, strict=True):
        try:
            found.append(_TermOfReplicas(column, counts, has_shares).classify())
        except UNREADABLE:
            found.append(("unknown", []))
    kinds = {kind for kind, _ in found}
    if "unknown" in kinds:
        return means
    if "sum" in kinds:
        if len(kinds) > 1:
            raise NotReducible("a sum over the examples, and something else added to it")
        return "sum", [1.0] * len(terms_by_replica)
    known = [weights for kind, weights in found if kind == "weighted"]
    if not known:
        return means
    if "mean" in kinds:
        known.append(list(counts))
    if not all(_are_proportional(known[0], other) for other in known[1:]):
        raise NotReducible("means over different numbers, of examples and of tokens perhaps")
    return "weighted", known[0]


def _refuse_branches(terms_by_replica: Sequence[Sequence[Term]], counts: Sequence[float]) -> None:
    """Raises Branched if terms differ between replicas, and are not the examples' in a loop."""
    kinds = [[t.kind for t in terms if t.kind != "constant"] for terms in terms_by_replica]
    if any(kind != kinds[0] for kind in kinds) and not any("unknown" in kind for kind in kinds):
        is_of_loop = len({frozenset(kind) for kind in kinds}) == 1
        if not is_of_loop or not _are_proportional([len(kind) for kind in kinds], counts):
            raise Branched


def _find_loop(terms: Sequence[Term], count: float) -> tuple[bool, float] | None:
    """Returns what shows a loop that adds one term for each example; ``None`` if nothing does.

    As in ``loss = sum(criterion(o, t) for o, t in zip(output, target)) / len(output)``, or in
    ``torch.stack([criterion(o, t) for o, t in zip(output, target)]).mean()``.

    Returns:
        Whether each example is counted once, and what the terms are divided by.
    """
    terms = [term for term in terms if term.kind != "constant"]  # the 0 at the beginning
    kinds = {term.kind for term in terms}
    if len(kinds) != 1 or not kinds <= {"mean", "sum", "cross entropy"}:
        return None
    if any(float(value) == 0 for term in terms for _, value in term.factors):
        return None
    try:
        uses = [[use for use in t.read(uses_below) if use.size == count] for t in terms]
    except UNREADABLE:
        return None
    indices = [use.index for of_term in uses for use in of_term if use.index is not None]
    if any(len(of_term) != 1 for of_term in uses) or len(indices) < len(terms):
        return None
    divided = [
        math.prod(float(v) ** (1 if is_div else -1) for is_div, v in t.factors) for t in terms
    ]
    if not _are_all_close(divided):
        return None
    is_complete = sorted(indices) == [*range(int(count))]
    if not is_complete and any(use.kept == count for of_term in uses for use in of_term):
        return None  # the dimension may be another one
    return is_complete, divided[0]


def _weigh_loops(
    loops: Sequence[tuple[bool, float]], counts: Sequence[float]
) -> tuple[str, list[Any]]:
    """Returns the kind and the weights of values that loops over examples have added up.

    Raises:
        NotReducible: no weights make the whole batch's value.
    """
    if not all(is_complete for is_complete, _ in loops):
        raise Mixed("a sum over single examples that leaves some out, or counts some twice")
    divisors = [divisor for _, divisor in loops]
    if _are_close(divisors, counts):
        return "mean", list(counts)
    if not _are_all_close(divisors):
        raise Divided
    if len(set(counts)) == 1 and (divisors[0] / counts[0]).is_integer():
        raise NotReducible(_UNCLEAR)
    return "sum", [1.0] * len(loops)


def is_compiled(parts: Sequence[Tensor]) -> bool:
    """Returns whether compiled code has computed the values: its nodes show no terms."""
    return all("CompiledFunction" in type(part.grad_fn).__name__ for part in parts)


def weighted_sum(parts: Sequence[Tensor], weights: Weights) -> Tensor:
    """Returns the weighted sum; a part of weight 0 may be nan, and gets no gradient."""
    terms: list[Tensor] = []
    for part, weight in zip(parts, weights, strict=True):
        if isinstance(weight, Tensor):
            kept = torch.where(weight == 0, torch.zeros_like(part), part)
            terms.append(kept * weight.to(part.dtype))
        elif weight:
            terms.append(part * weight)
    return reduce_tensors(terms, terms[0].device)


class _TermOfReplicas:
    """The same term of every replica that ran."""

    def __init__(self, terms: Sequence[Term], counts: Sequence[float], has_shares: bool) -> None:
        self._terms, self._counts, self._has_shares = terms, counts, has_shares
        self._sizes = [math.prod(term.shape) for term in terms]

    def classify(self) -> tuple[str, list[Any]]:
        """Returns "same", "constant", "mean", "sum" or "weighted", and the weights of the last."""
        first = self._terms[0]
        if first.kind in ("same", "constant"):
            return first.kind, []
        if first.kind == "unknown":
            self._find_reduction()  # raises if the nodes below show how examples are combined
            raise UnknownNode
        if first.kind not in ("mean", "sum", "cross entropy"):
            raise Mixed(first.kind)
        by_node = zip(
            *([u for u in uses if u.compared] for uses in self._read(uses_below)), strict=False
        )
        if any(are_comparisons(uses, self._counts) for uses in by_node):
            raise Mixed(
                "made of comparisons of the examples with each other (a contrastive loss): "
                "comparisons between examples of different parts are missing"
            )
        inner = self._find_reduction()
        if first.kind == "cross entropy":
            self._refuse_varying_factors()
            return "weighted", self._read(total_weight)
        if first.read(is_same):
            return "same", []
        if inner == "Mean":
            return "mean", []
        if inner == "Sum" or (first.kind == "sum" and self._has_batch()):
            return self._weights_of_sum()
        if first.kind == "mean":
            self._refuse_varying_factors()
        if _are_proportional(self._sizes, self._counts):
            return "mean", []
        if first.kind == "mean":
            if all(self._read(is_of_chosen)):
                return "weighted", self._sizes
        if len(set(self._sizes)) == 1:
            return "mean", []
        raise NotReducible(f"{first.kind}s over {', '.join(map(str, self._sizes))} numbers")

    def _read(self, fact: Any) -> list[Any]:
        return [term.read(fact) for term in self._terms]

    def _find_reduction(self) -> str | None:
        """Returns how the examples were reduced below the term: "Mean", "Sum" or ``None``."""
        found = [[u for u in uses if u.size is not None] for uses in self._read(uses_below)]
        if len({tuple((use.how, use.rows is None) for use in uses) for uses in found}) > 1:
            raise UnknownNode
        hows = set()
        for uses in zip(*found, strict=True):
            if are_of_examples(uses, self._counts):
                if not are_linear(uses):
                    raise Mixed(
                        "a function of values that were reduced over the examples before, or of "
                        f"their order ({uses[0].how.lower()})"
                    )
                hows.add(uses[0].how)
        if len(hows) > 1:
            raise Mixed("means and sums over the examples together")
        return hows.pop() if hows else None

    def _refuse_varying_factors(self) -> None:
        for _, values in self._factors():
            if not _are_all_close(values):
                raise NotReducible("a mean multiplied by a number that differs from part to part")

    def _factors(self) -> Iterator[tuple[bool, list[float]]]:
        """Yields the replicas' factors of the term, and whether it is divided by them."""
        if len({tuple(is_div for is_div, _ in term.factors) for term in self._terms}) > 1:
            raise Branched
        for column in zip(*(term.factors for term in self._terms), strict=True):
            yield column[0][0], [abs(float(value)) for _, value in column]

    def _has_batch(self) -> bool:
        """Returns whether the summed tensor's first dimension is the examples."""
        if not all(term.shape for term in self._terms):
            return False
        rows, count = [term.shape[0] for term in self._terms], self._counts[0]
        if rows == list(self._counts):
            return True
        if not _are_proportional(rows, self._counts) or rows[0] % count:
            return all(self._read(is_of_chosen))
        first = self._terms[0]
        return (
            len(set(self._counts)) > 1 or first.read(is_loss) or count in first.read(rows_viewed)
        )

    def _weights_of_sum(self) -> tuple[str, list[Any]]:
        """Returns what a sum is after its divisions: by numbers of the part, or by constants."""
        num_divided, unclear = 0, False
        weights: list[Any] | None = None
        for is_div, values in self._factors():
            numbers = values if is_div else [1 / v if v else math.inf for v in values]
            masks = (
                self._masks(numbers) if is_div and weights is None and not num_divided else None
            )
            if is_div and self._is_number_of_examples(numbers):
                num_divided += 1
            elif masks is not None:
                weights = masks
            elif not _are_all_close(numbers):
                if not _are_proportional(numbers, self._counts):
                    raise Divided
                num_divided += 1
            elif is_div and self._has_shares:
                num_divided = num_divided or 1
            else:
                unclear = unclear or self._may_be_of_examples(numbers[0], is_div)
        if weights is not None and not num_divided:
            return "weighted", weights
        if num_divided > 1 or weights is not None:
            raise NotReducible("a sum divided twice by numbers of the part")
        if num_divided:
            return "mean", []
        if unclear:
            raise NotReducible(_UNCLEAR)
        if any(_are_all_close((1.0, *sums)) for sums in zip(*self._read(mask_sums), strict=False)):
            raise NotReducible("a sum with weights whose sum is 1 in every part")
        return "sum", []

    def _is_number_of_examples(self, numbers: Sequence[float]) -> bool:
        if not _are_proportional(numbers, self._counts):
            return False
        most = max(len(term.shape) for term in self._terms)
        return _are_close(numbers, self._counts) or any(
            _are_close(numbers, [math.prod(term.shape[:k]) for term in self._terms])
            for k in range(1, most + 1)
        )

    def _may_be_of_examples(self, number: float, is_div: bool) -> bool:
        """Returns whether a number that is equal on all parts may come from their size."""
        if len(set(self._counts)) > 1 or not math.isfinite(number):
            return False
        quotient = number / self._counts[0]
        is_multiple = quotient >= 1 and math.isclose(quotient, round(quotient), rel_tol=1e-6)
        return is_multiple and (is_div or self._sizes[0] % round(number) == 0)

    def _masks(self, numbers: Sequence[float]) -> list[float] | None:
        """Returns the sums of the masks if the terms are divided by them, else ``None``."""
        for sums in zip(*self._read(mask_sums), strict=False):
            # A program may replace the divisor 0 of an empty mask.
            pairs = zip(sums, numbers, strict=True)
            if any(sums) and all(not m or math.isclose(m, n, rel_tol=1e-5) for m, n in pairs):
                return list(sums)
        return None


def _normal(weights: Sequence[Any], device: torch.device) -> Weights:
    """Returns weights of sum 1; tensors stay tensors, so the host waits for no device."""
    if not any(isinstance(weight, Tensor) for weight in weights):
        total = sum(weights)
        return [weight / total if total else 1.0 for weight in weights]
    tensors = [torch.as_tensor(w, dtype=torch.float64).to(device) for w in weights]
    total = reduce_tensors(tensors, device)
    return [tensor / total for tensor in tensors]


def _are_proportional(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return _are_close(
        [float(s) * float(others[0]) for s in some], [float(o) * float(some[0]) for o in others]
    )


def _are_close(some: Sequence[float], others: Sequence[float]) -> bool:
    return all(math.isclose(s, o, rel_tol=1e-5) for s, o in zip(some, others, strict=True))


def _are_all_close(numbers: Sequence[float]) -> bool:
    return _are_close(numbers, [numbers[0]] * len(numbers))
