"""Placeholders: the fake tensors of a trace, one for each tensor that a step finds outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mirror.compiler.step_inputs import InputKind, StateTensor, StepInput
from mirror.compiler.torch_internals import IS_PARAMETER, fake_mode, make_fake
from mirror.replica.exactness.node_classes import STANDS_FOR_PARAMETER

_MOVED = (InputKind.STATE, InputKind.RATE, InputKind.NUMBER, InputKind.OWN_NUMBER)


class Placeholders:
    """The inputs of a traced step, created when the step first uses them.

    Args:
        places: the strategy's parameters and buffers.
        grads: the gradients that an earlier step has left.
        num_replicas: of all workers.

    Attributes:
        mode: the mode of the fake tensors.
        inputs: all inputs so far.
        assigned: by ``id`` of the record, the values of buffers at the end of the step.
    """

    def __init__(
        self, places: Sequence[StateTensor], grads: dict[StateTensor, Tensor], num_replicas: int
    ) -> None:
        self.mode = fake_mode()
        self.inputs: list[StepInput] = []
        self._grads = grads
        self._places = places
        self._leaves: dict[StateTensor, Tensor] = {}
        self._by_object = {key: place for place in places for key in place.ids()}
        self.assigned: dict[int, Tensor] = {}
        self._by_place: dict[tuple[InputKind, Any, Any], StepInput] = {}
        for place in places:
            kind = InputKind.PARAMETER if place.is_parameter else InputKind.BUFFER
            self.add(kind, place.tensor_of(0), place)
        device = places[0].tensor_of(0).device if places else torch.device("cpu")
        one = torch.ones((), dtype=torch.float64, device=device)
        self.add(InputKind.COUNT, one)
        self.add(InputKind.WEIGHT, one)
        self.add(
            InputKind.REPLICA_INDEX, torch.zeros(num_replicas, dtype=torch.bool, device=device)
        )
        self.add(InputKind.SEED, torch.zeros((), dtype=torch.int64, device=device))

    def add(
        self,
        kind: InputKind,
        tensor: Tensor,
        of: Any = None,
        key: Any = None,
        *,
        dynamic: Sequence[int] = (),
        batched: bool = False,
    ) -> Tensor:
        """Returns the placeholder of a tensor; the same for the same tensor.

        Args:
            dynamic: dimensions of any size.
            batched: whether the first dimension is the batch dimension.
        """
        known = self._by_place.get((kind, of, key))
        if known is None:
            # Rates, and counts of steps, which optimizers keep on the host, go to the device.
            where = self.device if kind in _MOVED and not tensor.dim() else None
            batch = [0] if batched and tensor.dim() else []
            fake = make_fake(self.mode, tensor, batch, dynamic, where)
            known = self._by_place[kind, of, key] = StepInput(kind, fake, of, key)
            self.inputs.append(known)
        return known.fake

    def add_fake(self, kind: InputKind, fake: Tensor, of: Any) -> Tensor:
        """Makes a placeholder that the trace has created an input."""
        self.inputs.append(StepInput(kind, fake, of))
        return fake

    def add_found(self, tensor: Tensor) -> Tensor:
        """Returns the placeholder of a tensor outside of the step, which it may write."""
        with torch.no_grad():
            fake = make_fake(self.mode, tensor)
        self.inputs.append(StepInput(InputKind.SHARED, fake, value=tensor))
        return fake

    def get_only(self, kind: InputKind) -> Tensor:
        """Returns the placeholder of the only input of a kind."""
        return self._by_place[kind, None, None].fake

    @property
    def device(self) -> torch.device:
        """The device of the trace."""
        return self.get_only(InputKind.COUNT).device

    def add_entering(self, place: StateTensor) -> Tensor | None:
        """Returns the placeholder of the gradient of an earlier step; ``None``: there is none."""
        grad = self._grads.get(place)
        return None if grad is None else self.add(InputKind.GRADIENT, grad, place)

    # While a step is traced

    def make_leaves(self) -> dict[StateTensor, Tensor]:
        """Creates the placeholder of each parameter, a leaf of autograd."""
        for place in self._places:
            if place.is_parameter:
                leaf = self._by_place[InputKind.PARAMETER, place, None].fake.detach()
                leaf.requires_grad_(place.owner.requires_grad)
                setattr(leaf, IS_PARAMETER, True)
                setattr(leaf, STANDS_FOR_PARAMETER, True)
                self._leaves[place] = leaf
                self._by_object[id(leaf)] = place
        return dict(self._leaves)

    def placeholder_of(self, place: StateTensor) -> Tensor:
        """Returns the placeholder of a parameter or a buffer."""
        if place.is_parameter:
            return self._leaves[place]
        return self._by_place[InputKind.BUFFER, place, None].fake

    def index_by_id(self) -> dict[int, Tensor]:
        """Returns the placeholders by the ``id`` of each object that stands for a parameter."""
        return {key: self.placeholder_of(place) for place in self._places for key in place.ids()}

    def place_of(self, parameter: Tensor) -> StateTensor | None:
        """Returns the StateTensor of an object that stands for a parameter or buffer."""
        return self._by_object.get(id(parameter))

    @contextmanager
    def substituting(self, gradients: Any) -> Iterator[None]:
        """Within the block, mirrored parameters and buffers resolve to their placeholders."""
        kept: list[tuple[Any, dict[str, Any]]] = []
        try:
            for place in self._places:
                record, stands = place.record, self.placeholder_of(place)
                if record is None:
                    continue
                changed: dict[str, Any] = {"copies": [stands]}
                if place.is_parameter:
                    changed = {"copies": (stands,), "targets": (stands,), "gradients": gradients}
                else:
                    changed |= {"_stale": record._stale, "_may_differ": record._may_differ}
                kept.append((record, {name: getattr(record, name) for name in changed}))
                for name, value in changed.items():
                    setattr(record, name, value)
            yield
            for record, before in kept:
                if "targets" not in before:
                    self.assigned[id(record)] = record.copies[0]
        finally:
            for record, before in kept:
                for name, value in before.items():
                    setattr(record, name, value)
