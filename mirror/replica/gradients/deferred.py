"""Deferred gradients: what replicas gather under ``no_sync``, until the next reduction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from mirror.replica.copies.variable import ReplicatedParam
from mirror.replica.gradients.arrivals import ReplicaGrads, plus


class DeferredGrads(dict[ReplicatedParam, list["Tensor | None"]]):
    """Per variable the replicas' summands, weighted by the shares of their passes."""

    def add(self, variables: Sequence[ReplicatedParam], columns: Sequence[ReplicaGrads]) -> None:
        """Adds the gradients of a pass to what was kept back before."""
        for i, variable in enumerate(variables):
            if any(column[i] is not None for column in columns):
                summands = self.setdefault(variable, [None] * len(columns))
                for r, column in enumerate(columns):
                    summands[r] = plus(summands[r], column[i])

    def take_with(
        self, variables: Sequence[ReplicatedParam], columns: Sequence[ReplicaGrads]
    ) -> tuple[list[ReplicatedParam], list[ReplicaGrads]]:
        """Returns the gradients of a pass with all that was kept back, which is let go."""
        variables, columns = list(variables), [list(column) for column in columns]
        position = {variable: i for i, variable in enumerate(variables)}
        while self:
            variable, summands = self.popitem()
            if variable not in position:
                position[variable] = len(variables)
                variables.append(variable)
                for column in columns:
                    column.append(None)
            for column, summand in zip(columns, summands, strict=True):
                column[position[variable]] = plus(column[position[variable]], summand)
        return variables, columns

    def grads_of(self, variable: ReplicatedParam, replica_id: int) -> Tensor | None:
        """Returns what one replica has kept back."""
        return self[variable][replica_id] if variable in self else None

    def drop(self, variable: ReplicatedParam, replica_ids: Iterable[int]) -> None:
        """Forgets what these replicas have kept back."""
        summands = self.get(variable)
        if summands is not None:
            for r in replica_ids:
                summands[r] = None
            if all(summand is None for summand in summands):
                del self[variable]
