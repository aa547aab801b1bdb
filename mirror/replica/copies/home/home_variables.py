"""CentralParams: all mirrored parameters of a strategy that keeps them at home."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from mirror.replica.copies.home.home_variable import CentralParam
from mirror.replica.copies.variables import ReplicatedParams


class CentralParams(ReplicatedParams):
    """The mirrored parameters of a strategy that keeps them at home. See [Note: Home]."""

    kind = CentralParam

    def __iter__(self) -> Iterator[CentralParam]:
        return cast("Iterator[CentralParam]", super().__iter__())

    def _settle(self) -> None:
        for variable in self:
            if variable.handed_in_run or variable.copies[0]._version != variable.known[0]:
                variable.take(0)

    def _follow_first(self) -> None:
        self._settle()  # what the first replica has done until it failed, as on one device
        super()._follow_first()
