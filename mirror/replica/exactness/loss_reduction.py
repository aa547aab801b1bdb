"""Finds the weights by which the replicas' 0-d outputs add up to the whole batch's value.

A 0-d output is usually a loss, and the right weights depend on how it was computed. Its autograd
graph shows that: it is a sum of terms, each with factors (``loss_graph.py``).

    a term over a replica's examples    is in the whole batch     its weight
    mean over examples                  mean                      its number of examples
    sum, divided by their number        mean                      its number of examples
    mean of what a mask selects         mean                      the number of selected values
    sum, divided by its mask's sum      mean                      the mask's sum
    cross entropy with ignored targets  mean                      the weight of its other targets
    sum, multiplied by a constant       sum                       1
    loop over all examples              mean or sum               by what it is divided by
    of parameters only                  the same                  any weights of sum 1

Terms with the same weights are joined exactly. Any other value of the batch (a root of a mean, a
sum over an unknown number, a contrastive loss) is averaged by examples, with a warning. Without
known nodes (compiled code, a Python function, no graph) the value is taken for a mean over
examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mirror.base.bitwise import have_equal_numbers
from mirror.comm.reduce_ops import reduce_tensors
from mirror.replica.exactness.loss_graph import read_terms
from mirror.replica.exactness.node_rules import NonlinearInExamples, NotReducible, Term

Weights = Sequence[float | Tensor]

_UNCLEAR = "a sum divided by a number that may be this replica's batch size, or a constant"


class Divided(NotReducible):
    """The values are sums that are divided by a number of the replica's examples."""

    def __init__(self) -> None:
        super().__init__("a sum divided by a number that differs between replicas")


class Branched(NotReducible):
    """The values have another form on some replicas: of what their examples have none of, say."""

    def __init__(self) -> None:
        super().__init__("the result of another branch on some replicas")


def weights_of(values: Sequence[Tensor], counts: Sequence[float], has_shares: bool) -> Weights:
    """Returns the weights of the replicas' values; their weighted sum is the whole batch's value.

    Args:
        counts: the replicas' numbers of examples.
        has_shares: whether a number by which the model divides is the replica's own, even if it is
            equal on all replicas: its share of a number, say.

    Raises:
        NotReducible: no weights make the whole batch's value.
    """
    means = [count / sum(counts) for count in counts]
    if len(values) == 1 or all(value.grad_fn is None for value in values):
        return means
    terms = [
        read_terms(value.grad_fn, n, value.output_nr)
        for value, n in zip(values, counts, strict=True)
    ]
    kind, weights = weights_of_terms(terms, counts, has_shares)
    if kind == "weighted":
        return normalize_weights(weights, values[0].device)
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
    errors = [next((t.error for t in terms if t.error), None) for terms in terms_by_replica]
    if any(errors):
        error = find_common_error(errors, counts, is_near=True)
        if error is None:
            return means
        raise error
    of_replicas = list[list[Term]]()
    for terms, count in zip(terms_by_replica, counts, strict=True):
        loop = [term for term in terms if term.kind == "example"]
        if loop:  # it begins with 0 + loss
            others = [t for t in terms if t.kind not in ("example", "constant")]
            terms = [*_sums_of_loop(loop, count), *others]
        of_replicas.append([*terms])
    kinds = [[term.kind for term in terms if term.kind != "constant"] for terms in of_replicas]
    if any("unknown" in kind for kind in kinds) or _are_of_loops(kinds, counts):
        return means
    if any(kind != kinds[0] for kind in kinds) or len({*map(len, of_replicas)}) > 1:
        raise Branched
    found = [
        _TermOfReplicas(terms, counts, has_shares).classify()
        for terms in zip(*of_replicas, strict=True)
    ]
    kinds_of_all = {kind for kind, _ in found}
    if "sum" in kinds_of_all:
        if len(kinds_of_all) > 1:
            raise NotReducible("a sum over the examples, and something else added to it")
        return "sum", [1.0] * len(terms_by_replica)
    known = [weights for kind, weights in found if kind == "weighted"]
    if not known:
        return means
    if "mean" in kinds_of_all:
        known.append(list(counts))
    if not all(_are_proportional(known[0], other) for other in known[1:]):
        raise NotReducible("means over different numbers, of examples and of tokens perhaps")
    return "weighted", known[0]


def _are_of_loops(kinds: Sequence[Sequence[str]], counts: Sequence[float]) -> bool:
    """Returns whether there are as many equal terms as examples: layers were called in a loop."""
    is_equal = len({frozenset(kind) for kind in kinds}) == 1 and len({*map(len, kinds)}) > 1
    return is_equal and _are_proportional([len(kind) for kind in kinds], counts)


def find_common_error(
    errors: Sequence[NonlinearInExamples | None], counts: Sequence[float], *, is_near: bool = False
) -> NonlinearInExamples | None:
    """Returns why values combine examples; ``None`` if the sizes on the replicas deny it.

    Args:
        is_near: whether the error of some of the replicas suffices, if its size is theirs.
    """
    found = [(error, n) for error, n in zip(errors, counts, strict=True) if error is not None]
    sizes, numbers = [error.size for error, _ in found], [n for _, n in found]
    if len(found) < len(counts):
        is_of_examples = is_near and sizes == numbers
    else:
        is_of_examples = len(set(counts)) == 1 or _are_proportional(sizes, numbers)
    return found[0][0] if is_of_examples else None


def _sums_of_loop(terms: Sequence[Term], count: float) -> list[Term]:
    """Returns the sums over all examples that a loop over single ones has added up.

    As in ``loss = sum(criterion(o, t) for o, t in zip(output, target)) / len(output)``.

    Raises:
        NotReducible: the loop does not treat all examples in the same way.
    """
    by_example: dict[int | None, list[Term]] = {}
    for term in terms:
        by_example.setdefault(term.rows.index, []).append(term)
    first, *others = by_example.values()
    if len(by_example) != count or any(len(other) != len(first) for other in others):
        what = "a sum over single examples that leaves some out, or counts some twice"
        raise NonlinearInExamples(what, "loop", count)
    for other in others:
        for one, another in zip(first, other, strict=True):
            pairs = [[float(v) for _, v in term.rows.factors] for term in (one, another)]
            if len(pairs[0]) != len(pairs[1]) or not _are_close(*pairs):
                raise NotReducible("a sum over single examples with different weights")
    return [replace(term, kind="sum", shape=(int(count),)) for term in first]


def is_compiled(values: Sequence[Tensor]) -> bool:
    """Returns whether compiled code has computed the values: its nodes show no terms."""
    return all("CompiledFunction" in type(value.grad_fn).__name__ for value in values)


def weighted_sum(values: Sequence[Tensor], weights: Weights) -> Tensor:
    """Returns the weighted sum; a value of weight 0 may be nan, and gets no gradient."""
    terms: list[Tensor] = []
    for value, weight in zip(values, weights, strict=True):
        if isinstance(weight, Tensor):
            kept = torch.where(weight == 0, torch.zeros_like(value), value)
            terms.append(kept * weight.to(value.dtype))
        elif weight:
            terms.append(value * weight)
    return reduce_tensors(terms, terms[0].device)


class _TermOfReplicas:
    """The same term of every replica that ran."""

    def __init__(self, terms: Sequence[Term], counts: Sequence[float], has_shares: bool) -> None:
        self._terms, self._counts, self._has_shares = terms, counts, has_shares
        self._sizes = [math.prod(term.shape) for term in terms]

    def classify(self) -> tuple[str, list[Any]]:
        """Returns "same", "constant", "mean", "sum" or "weighted", and the weights of the last."""
        kind = self._terms[0].kind
        self._refuse_unequal_constants()
        if kind in ("same", "constant"):
            return kind, []
        if kind == "sum" and self._is_of_examples():
            return self._weights_of_sum()
        if kind != "sum" and not all(_are_all_close(values) for _, values in self._factors()):
            raise NotReducible("a mean multiplied by a number that differs between replicas")
        if kind == "cross entropy":
            return "weighted", [term.weight for term in self._terms]
        if _are_proportional(self._sizes, self._counts):
            return "mean", []
        if kind == "mean" and all(term.rows.is_chosen for term in self._terms):
            return "weighted", self._sizes
        if len(set(self._sizes)) == 1:
            return "mean", []
        raise NotReducible(f"{kind}s over {', '.join(map(str, self._sizes))} numbers")

    def _refuse_unequal_constants(self) -> None:
        constants = [term.rows.constants for term in self._terms]
        if not constants[0] or max(self._counts) <= 1 or len({*map(len, constants)}) > 1:
            return
        for first, *others in zip(*constants, strict=True):
            if not all(_is_equal(other, first) for other in others):
                what = (
                    "computed with numbers without a gradient that differ between replicas, as if "
                    "they came from their examples"
                )
                raise NonlinearInExamples(what, "product", 0)

    def _factors(self) -> Iterator[tuple[bool, list[float]]]:
        """Yields the replicas' factors of the term, and whether it is divided by them."""
        factors = [term.rows.factors for term in self._terms]
        if len({tuple(is_div for is_div, _ in of_replica) for of_replica in factors}) > 1:
            raise Branched
        for of_replicas in zip(*factors, strict=True):
            yield of_replicas[0][0], [abs(float(value)) for _, value in of_replicas]

    def _is_of_examples(self) -> bool:
        """Returns whether the first dimension that was summed is that of the examples."""
        if not all(term.shape for term in self._terms):
            return False
        sizes, count = [term.shape[0] for term in self._terms], self._counts[0]
        if sizes == list(self._counts):
            return True
        if not _are_proportional(sizes, self._counts) or sizes[0] % count:
            return all(term.rows.is_chosen for term in self._terms)
        return len(set(self._counts)) > 1 or self._terms[0].rows.is_certain

    def _weights_of_sum(self) -> tuple[str, list[Any]]:
        """Returns what a sum is after its divisions, by numbers of examples or by constants."""
        num_divided, unclear = 0, False
        weights: list[Any] | None = None
        for is_div, values in self._factors():
            numbers = values if is_div else [1 / v if v else math.inf for v in values]
            masks = None
            if is_div and weights is None and not num_divided:
                masks = self._masks(numbers)
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
            raise NotReducible("a sum divided twice by numbers of the replica's examples")
        if num_divided:
            return "mean", []
        if unclear:
            raise NotReducible(_UNCLEAR)
        sums_by_mask = zip(*(term.mask_sums() for term in self._terms), strict=False)
        if any(_are_all_close((1.0, *sums)) for sums in sums_by_mask):
            raise NotReducible("a sum with weights whose sum is 1 on every replica")
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
        """Returns whether a number that is equal on all replicas may be a number of examples."""
        if len(set(self._counts)) > 1 or not math.isfinite(number):
            return False
        quotient = number / self._counts[0]
        is_multiple = quotient >= 1 and math.isclose(quotient, round(quotient), rel_tol=1e-6)
        return is_multiple and (is_div or self._sizes[0] % round(number) == 0)

    def _masks(self, numbers: Sequence[float]) -> list[float] | None:
        """Returns the sums of the masks if the terms are divided by them, else ``None``."""
        for sums in zip(*(term.mask_sums() for term in self._terms), strict=False):
            # A program may replace the divisor 0 of an empty mask.
            pairs = zip(sums, numbers, strict=True)
            if any(sums) and all(not m or math.isclose(m, n, rel_tol=1e-5) for m, n in pairs):
                return list(sums)
        return None


def normalize_weights(weights: Sequence[Any], device: torch.device) -> Weights:
    """Returns weights of sum 1; tensors stay tensors, so the host waits for no device."""
    if not any(isinstance(weight, Tensor) for weight in weights):
        total = sum(weights)
        return [weight / total if total else 1.0 for weight in weights]
    tensors = [torch.as_tensor(w, dtype=torch.float64).to(device) for w in weights]
    total = reduce_tensors(tensors, device)
    return [tensor / total for tensor in tensors]


def _is_equal(some: Any, other: Any) -> bool:
    if isinstance(some, Tensor) and isinstance(other, Tensor) and some.dim():
        return have_equal_numbers(some, other)
    return math.isclose(float(some), float(other), rel_tol=1e-5)


def _are_proportional(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return _are_close(
        [float(s) * float(others[0]) for s in some], [float(o) * float(some[0]) for o in others]
    )


def _are_close(some: Sequence[float], others: Sequence[float]) -> bool:
    return all(math.isclose(s, o, rel_tol=1e-5) for s, o in zip(some, others, strict=True))


def _are_all_close(numbers: Sequence[float]) -> bool:
    return _are_close(numbers, [numbers[0]] * len(numbers))
