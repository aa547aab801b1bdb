"""Maker: makes a step's programs of a trace, and what tells when they hold no more."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mirror.execution.replicas import Replicas
from mirror.replica.collectives.reducer import Reducer
from mirror.replica.copies.registry import Registry
from mirror.steps.inputs import Kind
from mirror.steps.lines import first_line
from mirror.steps.pieces.parts import Piece
from mirror.steps.pieces.programs import Called, compiled, interpreted
from mirror.steps.pieces.trace import trace
from mirror.steps.places import places_of
from mirror.steps.running.assumptions import Assumptions
from mirror.steps.running.bindings import Bindings
from mirror.steps.running.coherence import Coherence
from mirror.steps.running.reductions import Reductions
from mirror.steps.running.step_program import StepProgram
from mirror.values import PerReplica, leaves_of, map_structure

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
        mode: str,
    ) -> None:
        self._replicas, self._registry = replicas, registry
        self._reductions = Reductions(replicas, reducer)
        self._coherence = coherence
        self._mode = mode

    def make(
        self,
        step: Callable[..., Any],
        tree: Any,
        leaves: Sequence[Any],
        own: Sequence[bool],
        part: Sequence[Any],
    ) -> tuple[Assumptions, StepProgram]:
        """Traces a step and makes its programs.

        Args:
            tree: the arguments of a call; ``leaves`` are its leaves.
            own: of each leaf, whether it is a PerReplica.
            part: one replica's leaves, those of nested parts one by one.
        """
        places = places_of(self._registry)
        grads = self._coherence.gradients(places)
        belongs: list[bool] = []
        for leaf, is_own in zip(leaves, own, strict=True):
            belongs += [is_own] * (len(leaves_of(_any_part(leaf))) if is_own else 1)

        def call(args: Sequence[Any]) -> Any:
            found = iter(args)

            def leaf_of(leaf: Any) -> Any:
                if isinstance(leaf, PerReplica):
                    return map_structure(lambda _: next(found), _any_part(leaf))
                return next(found)

            arguments, named = map_structure(leaf_of, tree)
            return step(*arguments, **named)

        traced = trace(step, call, part, belongs, self._replicas, places, grads)
        levels = [
            (self._ready(level.shared, traced.mode), self._ready(level.own, traced.mode))
            for level in traced.pieces.levels
        ]
        used = [one.of for one in traced.inputs if one.kind is Kind.PARAMETER]
        guards = Assumptions(step, traced.modules, used, traced.leases)
        bindings = Bindings(
            self._replicas, traced.inputs, traced.written, traced.leases, traced.draws
        )
        program = StepProgram(
            self._replicas, traced, levels, bindings, self._reductions, self._coherence
        )
        return guards, program

    def _ready(self, piece: Piece | None, mode: Any) -> Called | None:
        if piece is None:
            return None
        if self._mode == "trace" or (self._mode == "auto" and not _has_compiler(piece)):
            return interpreted(piece)
        try:
            return compiled(piece, mode)
        except Exception as error:
            if self._mode == "inductor":
                raise
            logger.warning(
                "a compiled step runs by torch's own kernels, because inductor failed: %s: %s",
                type(error).__name__,
                first_line(error),
            )
            return interpreted(piece)

    def state(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Returns what a trace that fails must leave as it was."""
        return []

    def put_back(self, state: Any) -> None:
        """Puts back what ``state`` has returned."""


def _any_part(leaf: PerReplica[Any]) -> Any:
    return next(value for _, value in leaf.parts())


def _has_compiler(piece: Piece) -> bool:
    return shutil.which("g++") is not None or torch.accelerator.is_available()
