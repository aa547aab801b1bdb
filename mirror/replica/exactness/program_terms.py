"""ProgramTerms: the terms of what a compiled program returns, whose graph only its trace had.

    in the trace                      in a call on replica r
    a number                          the same
    a mask                            its sum, a result of the program
    another tensor without a graph    a result of the program

The node of the call has them as ``mirror_terms``, where ``loss_graph.py`` finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mirror.replica.exactness.loss_graph import read_terms
from mirror.replica.exactness.node_rules import NonlinearInExamples, NotReducible, Term

_OF_OTHER_COUNT = "computed by a program that was traced for {} examples on the replica, not {}"


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor: which of a program's additional results it is."""

    number: int


class ProgramTerms:
    """The terms of the 0-d outputs of one program.

    Args:
        count: the number of examples of the replica, in the trace.
        number_of: returns the value of a tensor that is a Python number; ``None`` for others.

    Attributes:
        tensors: those of the trace that the terms hold; the program is to return them.
    """

    def __init__(self, count: float, number_of: Callable[[Tensor], float | None]) -> None:
        self._count, self._number_of = count, number_of
        self._by_output: dict[int, list[Term]] = {}
        self.tensors: list[Tensor] = []

    def add(self, number: int, output: Tensor) -> None:
        """Reads the terms of an output from its graph.

        Raises:
            NotReducible: it shows none.
        """
        terms = read_terms(output.grad_fn, self._count, output.output_nr)
        for term in terms:
            if term.error is not None:
                raise term.error
            if term.kind == "unknown":
                raise NotReducible("computed in a way that its graph does not show")
        self._by_output[number] = [
            _map_values(self._with_sums(term), lambda value: self._keep(value, output.device))
            for term in terms
        ]

    def of_call(self, values: Sequence[Tensor], number: int, count: float) -> list[Term] | None:
        """Returns the terms of an output in one call; ``None``: it has none.

        Args:
            values: what the call has computed for ``tensors``.
        """
        terms = self._by_output.get(number)
        if terms is None:
            return None
        if count != self._count:
            what = _OF_OTHER_COUNT.format(self._count, count)
            return [Term("nonlinear", error=NonlinearInExamples(what, "program", count))]

        def fill(value: Any) -> Any:
            return values[value.number] if isinstance(value, _Place) else value

        return [_map_values(term, fill) for term in terms]

    def _with_sums(self, term: Term) -> Term:
        """Returns a term with the sums of its masks, as ``Term.mask_sums`` takes them."""
        masks = tuple(total for mask in term.rows.masks for total in _sums_of_mask(mask))
        return replace(term, rows=replace(term.rows, masks=masks))

    def _keep(self, value: Any, device: torch.device) -> Any:
        if not isinstance(value, Tensor):
            return value
        number = self._number_of(value)
        if number is not None:
            return number
        if value.device != device:
            raise NotReducible(f"computed on {device.type} with a tensor of {value.device.type}")
        self.tensors.append(value.detach().clone())
        return _Place(len(self.tensors) - 1)


def _sums_of_mask(mask: Any) -> Iterator[Any]:
    if not isinstance(mask, Tensor):
        yield mask
        return
    total = mask.sum()
    yield total
    if mask.dtype is torch.bool:
        yield mask.numel() - total


def _map_values(term: Term, change: Callable[[Any], Any]) -> Term:
    """Returns a term with other tensors and numbers in the place of its own."""
    rows = term.rows
    changed = replace(
        rows,
        factors=tuple((is_div, change(value)) for is_div, value in rows.factors),
        masks=tuple(map(change, rows.masks)),
        constants=tuple(map(change, rows.constants)),
    )
    return replace(term, rows=changed, weight=change(term.weight))
