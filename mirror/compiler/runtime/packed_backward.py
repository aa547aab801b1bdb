"""PackedBackward: the backward program of a module, with gradients where they are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mirror.compiler.lowering.programs import CallableProgram, SlotGetter, slot_getter
from mirror.compiler.lowering.step_plan import ProgramPiece
from mirror.compiler.runtime.cuda_graphs import CapturedPieces
from mirror.replica.gradients.grad_tracker import GradTracker
from mirror.replica.gradients.packed_grads import PackedGrads


class PackedBackward:
    """A backward program that writes the gradients of parameters where they are reduced.

    Args:
        program: it returns the gradients.
        variables: whose, in its order.
        slots: where it leaves these; ``others``: those of arguments.
    """

    def __init__(
        self,
        program: CallableProgram,
        tracker: GradTracker,
        grads: PackedGrads,
        variables: Sequence[Any],
        slots: Sequence[int],
        others: Sequence[int],
    ) -> None:
        self._program, self._tracker, self.grads = program, tracker, grads
        number_of = {variable: i for i, variable in enumerate(grads.variables)}
        self._numbers = [number_of[variable] for variable in variables]
        self._get_made = slot_getter([program.gives.index(slot) for slot in slots])
        self._others, self._slots = list(dict.fromkeys(others)), slots
        self._get_others = slot_getter([program.gives.index(slot) for slot in self._others])
        self._of_replica: dict[int, tuple[CallableProgram, list[Tensor]]] = {}

    def _make(self, replica_id: int, device: torch.device) -> tuple[CallableProgram, list[Tensor]]:
        """Returns the program of a replica, and the memory that it writes."""
        made = self.grads.make(replica_id)
        memory = [made[number] for number in self._numbers]
        call, get_made, get_others = (
            self._program.programs[device],
            self._get_made,
            self._get_others,
        )

        def call_packing(inputs: list[Any]) -> Sequence[Any]:
            found = call(inputs)
            torch._foreach_copy_(memory, list(get_made(found)))
            return get_others(found)

        piece = ProgramPiece(True, None, self._program.reads, self._others, [])
        return CallableProgram(piece, {device: call_packing}, is_raw=False), memory

    def run(
        self,
        pieces: CapturedPieces,
        get_gradients: SlotGetter,
        values: list[Any],
        replica_id: int,
        device: torch.device,
    ) -> Sequence[Any]:
        """Returns the gradients of arguments, and of parameters unless the pass is packed."""
        known = self._of_replica.get(replica_id)
        if known is None:
            known = self._of_replica[replica_id] = self._make(replica_id, device)
        program, memory = known
        pieces.run(program, {replica_id: values})
        if self.grads.is_under_way:
            self._tracker.packed.arrive(self.grads, replica_id, device)
            found = get_gradients(values)
            return pieces.keep(found[: len(found) - len(memory)])
        for slot, grad in zip(self._slots, memory, strict=True):
            values[slot] = grad
        found = get_gradients(values)
        num_arguments = len(found) - len(memory)
        copies = torch._foreach_mul(memory, 1.0)
        return *pieces.keep(found[:num_arguments]), *copies
