"""Maker: makes a step's programs of a trace, and what tells when they hold no more."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from typing import Any

import torch

from mirror.accelerator.graphs import CudaGraph, has_graphs
from mirror.execution.replicas import Replicas
from mirror.replica.collectives.reducer import Reducer
from mirror.replica.copies.registry import Registry
from mirror.replica.finite import Finite
from mirror.replica.modules.recording import suspend_recording
from mirror.steps.inputs import Kind
from mirror.steps.lines import first_line
from mirror.steps.pieces.cut import pieces_of
from mirror.steps.pieces.kept import Ready, find, keep
from mirror.steps.pieces.key import key_of
from mirror.steps.pieces.parts import Piece, Pieces
from mirror.steps.pieces.programs import Called, compiled, interpreted
from mirror.steps.pieces.trace import Trace, trace
from mirror.steps.places import places_of
from mirror.steps.running.arguments import Arguments
from mirror.steps.running.assumptions import Assumptions
from mirror.steps.running.at_once import AtOnce
from mirror.steps.running.bindings import Bindings
from mirror.steps.running.captures import Captures
from mirror.steps.running.coherence import Coherence
from mirror.steps.running.reductions import Reductions
from mirror.steps.running.step_program import StepProgram
from mirror.steps.torch_internals import Sizes, sizes_of

logger = logging.getLogger(__name__)


class Maker:
    """Makes the programs of one strategy's steps.

    Args:
        mode: ``"inductor"``, ``"trace"``, or ``"auto"``: the former where there is a compiler.
    """

    def __init__(
        self,
        replicas: Replicas,
        registry: Registry,
        reducer: Reducer,
        coherence: Coherence,
        finite: Finite | None,
        mode: str,
    ) -> None:
        self._replicas, self._registry = replicas, registry
        self._reductions = Reductions(replicas, reducer, finite)
        self._looks_at_gradients = finite is not None
        self._coherence = coherence
        self._mode = mode

    def make(
        self, step: Callable[..., Any], arguments: Arguments
    ) -> tuple[Assumptions, StepProgram]:
        """Traces a step, called with these arguments, and makes its programs.

        An open scope does not record the modules that the tracer and the compiler make.
        """
        with suspend_recording():
            return self._make(step, arguments)

    def _make(
        self, step: Callable[..., Any], arguments: Arguments
    ) -> tuple[Assumptions, StepProgram]:
        places = places_of(self._registry)
        traced = trace(
            step,
            arguments.caller(step),
            arguments.leaves(arguments.signatures[0]),
            arguments.own,
            self._replicas,
            places,
            self._coherence.gradients(places),
            meets_alone=self._looks_at_gradients,
        )
        pieces, levels, sizes = self._finished(traced)
        for meeting, lie in zip(traced.meetings, pieces.lies, strict=True):
            meeting.lie = lie
        used = [one.of for one in traced.inputs if one.kind is Kind.PARAMETER]
        assumptions = Assumptions(step, traced.modules, used, traced.leases, traced.rates_read)
        program = StepProgram(
            self._replicas,
            traced,
            pieces,
            levels,
            sizes,
            Bindings(self._replicas, traced, pieces),
            self._reductions,
            self._coherence,
            self._launcher(traced),
        )
        return assumptions, program

    def _finished(self, trace: Trace) -> tuple[Pieces, list[Ready], Sizes]:
        """Returns the programs of a step: those that were kept, or new ones."""
        num_replicas = self._replicas.workers.num_replicas
        step = trace.graph, trace.inputs, trace.mode, trace.meetings, num_replicas
        key = None
        if self._mode != "trace" and set(self._replicas.devices) == {torch.device("cpu")}:
            key = key_of(*step, trace.device)
        kept = None if key is None else find(key)
        if kept is not None:
            logger.info("the programs of a compiled step come from the disk: %s", key)
            return kept
        pieces = pieces_of(*step)
        levels = [
            (self._ready(level.shared, trace), self._ready(level.own, trace))
            for level in pieces.levels
        ]
        sizes = sizes_of(trace.mode, trace.fakes)
        if key is not None:
            keep(key, pieces, levels, sizes)
        return pieces, levels, sizes

    def _ready(self, piece: Piece | None, trace: Trace) -> Called | None:
        if piece is None:
            return None
        devices = tuple(dict.fromkeys(self._replicas.devices))
        if self._mode == "trace" or (self._mode == "auto" and not _has_compiler()):
            return interpreted(piece, trace.device, devices)
        try:
            return compiled(piece, trace.mode, trace.device, devices)
        except Exception as error:
            if self._mode == "inductor":
                raise
            logger.warning(
                "a compiled step runs by torch's own kernels, because inductor failed: %s: %s",
                type(error).__name__,
                first_line(error),
            )
            return interpreted(piece, trace.device, devices)

    def _launcher(self, trace: Trace) -> AtOnce | Captures:
        """Returns what runs the programs: as graphs where there are any, and they are wanted."""
        devices = self._replicas.devices
        if self._mode == "trace" or not has_graphs(devices[0]):
            return AtOnce(self._replicas)
        stay = [i for i, one in enumerate(trace.inputs) if one.stays]
        return Captures(devices, stay, CudaGraph)


def _has_compiler() -> bool:
    return shutil.which("g++") is not None or torch.accelerator.is_available()
