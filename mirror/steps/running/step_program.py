"""StepProgram: one trace of a step, made ready, and run on all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mirror.execution.replicas import Replicas
from mirror.replica.collectives.collectives import fused_all_reduce
from mirror.steps.pieces.programs import Called
from mirror.steps.pieces.trace import Trace, layout
from mirror.steps.running.bindings import Bindings
from mirror.steps.running.coherence import Coherence
from mirror.steps.running.reductions import Reductions
from mirror.steps.torch_internals import sizes_fit
from mirror.values import ABSENT


class StepProgram:
    """A traced step on all replicas.

    Args:
        replicas: who they are.
        levels: of each level the programs that are run, shared and own.
        bindings: finds the tensors that the trace's inputs are.
        reductions: reduces local gradients.
    """

    def __init__(
        self,
        replicas: Replicas,
        trace: Trace,
        levels: Sequence[tuple[Called | None, Called | None]],
        bindings: Bindings,
        reductions: Reductions,
        coherence: Coherence,
    ) -> None:
        self._replicas, self.trace = replicas, trace
        self._coherence = coherence
        self._levels = [
            (*called, level.meetings)
            for called, level in zip(levels, trace.pieces.levels, strict=True)
        ]
        self._bindings, self._reductions = bindings, reductions
        self._spare = [ABSENT] * (trace.pieces.num_slots - len(trace.inputs))

    def fits(self, part: Sequence[Any]) -> bool:
        """Whether the trace holds for these leaves of a replica's arguments."""
        tensors = [leaf for leaf in part if isinstance(leaf, Tensor)]
        plain = [leaf for leaf in part if not isinstance(leaf, Tensor)]
        trace = self.trace
        return (
            plain == trace.plain
            and list(map(layout, tensors)) == trace.layouts
            and sizes_fit(trace.mode, trace.fakes, tensors)
        )

    def can_run(self) -> bool:
        """Whether what the step found outside of itself is there: state, gradients."""
        return self._bindings.hold()

    @torch.no_grad()
    def run(
        self, parts: dict[int, list[Any]], weights: Sequence[float] | None
    ) -> dict[int, list[Tensor]]:
        """Runs the step; returns what it gives, by replica that takes part.

        Args:
            parts: by replica that takes part, the tensors among its leaves.
            weights: by replica, what it counts for; ``None``: all the same.
        """
        bindings = self._bindings
        own = bindings.values(parts, weights, self._spare)
        shared = {r: own[r] if r in own else bindings.idle(r, self._spare) for r in bindings.homes}
        active = tuple(own)
        shares = self._reductions.shares(active, weights)
        for shared_program, own_program, meetings in self._levels:
            if shared_program is not None:
                for home, values in shared.items():
                    shared_program.run(values)
                    bindings.hand_on(home, values, own, shared_program.gives)
            if own_program is not None:
                for values in own.values():
                    own_program.run(values)
            for number, brought, gotten in meetings:
                meeting = self.trace.meetings[number]
                payloads = {r: [v[i] for i in brought] for r, v in own.items()}
                if meeting.op is None:
                    reduced = self._reductions.reduce(payloads, shares)
                else:
                    reduced = fused_all_reduce(self._replicas, meeting.op, payloads)
                for r, values in {**shared, **own}.items():
                    found = reduced[r if r in reduced else active[0]]
                    for slot, tensor in zip(gotten, found, strict=True):
                        if slot >= 0:
                            values[slot] = tensor
        increment_version(bindings.written(active))
        results = {
            r: [values[slot] for slot in self.trace.pieces.results] for r, values in own.items()
        }
        at_home = shared[bindings.homes[0]]
        slots = self.trace.pieces.results
        grads = {
            place: None if at is None else at_home[slots[at]]
            for place, at in self.trace.grads.items()
        }
        self._coherence.stepped(self.trace.written, self.trace.leases, grads, active)
        return results
