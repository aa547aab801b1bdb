"""Comparison: whether all replicas hold the same bits, exactly or by sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mirror.errors import ReplicaMismatchError
from mirror.execution.runner import Runner
from mirror.replica.params.bitwise import same_bits, same_values, sum_of_bits
from mirror.replica.params.param_paths import path_of
from mirror.values import leaves_of


class SumOfReplica(Protocol):
    """Looks whether two nested values are equal."""

    def __call__(self, first: Any, other: Any, what: Callable[[], str]) -> None:
        """Raises ReplicaMismatchError, now or in the end, if they are not.

        Args:
            what: says what it is that differs, and where.
        """


class SeeReplica(Protocol):
    """Sees a value, and what it is."""

    def __call__(self, value: Any, what: Callable[[], str]) -> None:
        """Is shown one value of the first replica."""


class ComparableParam(Protocol):
    """A parameter, whose copies are compared."""

    name: str

    @property
    def home(self) -> Tensor: ...

    @property
    def targets(self) -> Sequence[Tensor]: ...

    def owner(self) -> Tensor | None: ...


class ComparableOptimizers(Protocol):
    """What keeps optimizers' state equal."""

    def check(self, look: SumOfReplica) -> None:
        """Shows the state of every replica to ``look``, beside that of the first."""

    def show_first(self, see: SeeReplica) -> None:
        """Shows what the first replica has to ``see``, in one order."""


class ReplicaChecks:
    """Whether parameters and optimizer state are equal on all replicas of a strategy.

    What the cross-replica context has left is carried to all before.
    """

    def __init__(
        self,
        runner: Runner,
        variables: Iterable[ComparableParam],
        optimizers: ComparableOptimizers,
    ) -> None:
        self._runner, self._replicas = runner, runner.replicas
        self._variables, self._optimizers = variables, optimizers

    def check(self) -> None:
        """Compares bit for bit.

        Raises:
            ReplicaMismatchError: naming the first variable and replica that differ.
        """
        self._runner.prepare("a comparison of the replicas")
        with torch.inference_mode(False), torch.no_grad():
            self._show(_exactly)

    def check_sums(self) -> None:
        """Compares sums of bits, which every device takes of what it holds itself.

        What has drifted apart has another sum, be it by a last bit here and there; only what lies
        in another order has not. On simulated devices, where nothing travels, it is ``check``.

        Raises:
            ReplicaMismatchError: naming the first variable and replica that differ.
        """
        if self._replicas.are_simulated:
            self.check()
            return
        self._runner.prepare("a comparison of the replicas")
        with torch.inference_mode(False), torch.no_grad():
            sums = _Sums()
            self._show(sums)
            sums.compare()

    def show_first(self, see: SeeReplica) -> None:
        """Shows every value of the first replica to ``see``."""
        for variable in self._variables:

            def what(variable: ComparableParam = variable) -> str:
                return f"parameter {path_of(variable.owner(), variable.name)!r}"

            see(variable.home, what)
        self._optimizers.show_first(see)

    def _show(self, look: SumOfReplica) -> None:
        names = self._replicas.names
        whose = (
            f"home ({self._replicas.parameter_device})"
            if self._replicas.has_parameter_device
            else names[0]
        )
        for variable in self._variables:
            for r, other in enumerate(variable.targets):
                if other is variable.home:
                    continue

                def what(variable: ComparableParam = variable, r: int = r) -> str:
                    path = path_of(variable.owner(), variable.name)
                    return f"parameter {path!r} differs on {names[r]} from {whose}"

                look(variable.home, other, what)
        self._optimizers.check(look)


def _exactly(first: Any, other: Any, what: Callable[[], str]) -> None:
    if not same_values(first, other):
        raise _mismatch(what())


class _Sums:
    """Collects sums of bits on their devices, and looks at all of them at once."""

    def __init__(self) -> None:
        self._firsts: dict[int, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor, Callable[[], str]]] = []

    def __call__(self, first: Any, other: Any, what: Callable[[], str]) -> None:
        pairs = [list(leaves_of(value)) for value in (first, other)]
        tensors = [[leaf for leaf in leaves if isinstance(leaf, Tensor)] for leaves in pairs]
        plain = [[None if isinstance(leaf, Tensor) else leaf for leaf in p] for p in pairs]
        alike = [[(t.shape, t.dtype, t.layout) for t in found] for found in tensors]
        if alike[0] != alike[1] or not same_values(*plain):
            raise _mismatch(what())
        for one, another in zip(*tensors, strict=True):
            if one.layout is torch.strided:
                known = self._firsts.get(id(one))
                if known is None:
                    known = self._firsts[id(one)] = sum_of_bits(one)
                self._pairs.append((known, sum_of_bits(another), what))
            elif not same_bits(one, another):
                raise _mismatch(what())

    def compare(self) -> None:
        """Raises ReplicaMismatchError for the first sums that differ."""
        sums = {id(s): s for one, other, _ in self._pairs for s in (one, other)}
        by_device: dict[torch.device, list[int]] = {}
        for key, tensor in sums.items():
            by_device.setdefault(tensor.device, []).append(key)
        values: dict[int, int] = {}
        for keys in by_device.values():
            values.update(zip(keys, torch.stack([sums[k] for k in keys]).tolist(), strict=True))
        for one, other, what in self._pairs:
            if values[id(one)] != values[id(other)]:
                raise _mismatch(what())


def _mismatch(what: str) -> ReplicaMismatchError:
    return ReplicaMismatchError(
        f"{what}; replicas must hold the same bits: look for a write inside run that is not the "
        "same on all replicas"
    )
