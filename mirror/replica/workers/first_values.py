"""FirstValues: all workers begin with worker 0's values of variables and buffers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from mirror.execution.part import Part
from mirror.execution.replicas import Replicas
from mirror.replica.copies.buffer import Buffer
from mirror.replica.copies.buffers import Buffers
from mirror.replica.copies.registry import Registry
from mirror.replica.copies.variable import Variable


class FirstValues:
    """Gives all workers worker 0's values of what has been mirrored since the last run.

    So seeds may differ between workers, and one may have read pretrained weights. What comes later
    (a load_state_dict, say) every worker does alike; ``check_replicas`` looks whether it did.
    """

    def __init__(
        self,
        replicas: Replicas,
        registry: Registry,
        variables: Iterable[Variable],
        buffers: Buffers,
    ) -> None:
        self._workers, self._registry = replicas.workers, registry
        self._variables, self._buffers = variables, buffers
        self._num_owned = 0
        self._given: weakref.WeakSet[Variable | Buffer] = weakref.WeakSet()

    def part(self) -> Part:
        """Returns what gives the values before runs. See [Note: Parts]."""
        return Part(name="first values", prepare=self._prepare)

    def _prepare(self) -> None:
        if self._registry.num_owned == self._num_owned:
            return
        self._num_owned = self._registry.num_owned
        new = [one for one in (*self._variables, *self._buffers) if one not in self._given]
        if not new:
            return
        self._given.update(new)
        what = f"the first values of {len(new)} variables and buffers"
        needed = [isinstance(one, Variable) and one.targets[0].requires_grad for one in new]
        self._workers.exchange(what, [(one.name, n) for one, n in zip(new, needed, strict=True)])
        # Written in place, which is seen, and carried to the other replicas of this worker.
        with torch.inference_mode(False), torch.no_grad():
            self._workers.broadcast(what, list(map(_value, new)))


def _value(one: Variable | Buffer) -> Tensor:
    return one.targets[0].detach() if isinstance(one, Variable) else one.truth.detach()
