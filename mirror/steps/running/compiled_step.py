"""CompiledStep: what ``strategy.compile(step)`` returns; called with a distributed batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mirror.errors import CompileError
from mirror.steps.lines import first_line, line_of
from mirror.steps.running.assumptions import comparable
from mirror.steps.running.coherence import Coherence
from mirror.values import PerReplica, leaves_of, rebuild_structure, regroup

logger = logging.getLogger(__name__)

MODES = ("auto", "inductor", "trace")
FALLBACKS = ("error", "eager")
MAX_TRACES = 8
_ODD_IN_A_ROW = 3

Run = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
Part = Callable[[int, Sequence[Any], Any], tuple[Sequence[int], Sequence[float] | None]]


class CompiledStep:
    """A training step, run on all replicas as compiled programs.

    Called as ``strategy.run(step, args, kwargs)`` calls it: ``compiled(batch)``. The first call is
    not compiled, the second one traces; what a trace took for granted is compared before every
    call, and a change traces anew. See [Note: Assumptions].

    Attributes:
        num_traces: how often the step has been traced.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        run: Run,
        taking_part: Part,
        coherence: Coherence,
        maker: Callable[[], Any],
        *,
        fallback: str,
    ) -> None:
        self._step, self._run, self._taking_part = step, run, taking_part
        self._coherence, self._make_maker = coherence, maker
        self._maker: Any = None
        self._falls_back = fallback == "eager"
        self._has_run = self._is_eager = False
        self._programs: list[tuple[Any, Any, dict[Any, bool]]] = []
        self._odd_in_a_row = 0
        self.num_traces = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the step on all replicas; returns what ``strategy.run`` returns.

        Raises:
            CompileError: the step does what no trace can follow.
            StrategyError: called inside ``run``, or after ``close``.
        """
        if self._is_eager or not self._has_run or self._coherence.wants_eager():
            result = self._run(self._step, args, kwargs)
            self._has_run = True
            return result
        active, weights = self._taking_part(self._coherence.num_replicas, args, kwargs)
        made = self._coherence.alone(partial(self._call, args, kwargs, active, weights))
        return self._run(self._step, args, kwargs) if made is None else made[0]

    def _call(
        self, args: Any, kwargs: Any, active: Sequence[int], weights: Any
    ) -> tuple[Any] | None:
        """Makes the step; returns the result in a tuple, ``None`` if it is not to be compiled."""
        self._coherence.prepare()
        tree = (args, kwargs)
        leaves = leaves_of(tree)
        own = [isinstance(leaf, PerReplica) for leaf in leaves]
        parts = {r: _part(leaves, r) for r in active}
        signatures = {_signature(part) for part in parts.values()}
        program = self._program_for(signatures, parts)
        if program is None:
            first = next(iter(parts.values()))
            if self._is_odd(first, own, signatures):
                return None
            program = self._made(tree, leaves, own, first, signatures)
            if program is None:
                return None
        tensors = {r: [t for t in part if isinstance(t, Tensor)] for r, part in parts.items()}
        results = program.run(tensors, weights)
        return (self._joined(program, results, weights),)

    def _program_for(self, signatures: set[Any], parts: dict[int, list[Any]]) -> Any:
        for i, (guards, program, known) in enumerate(self._programs):
            if not guards.hold() or not program.can_run():
                continue
            for signature in signatures:
                if signature not in known:
                    part = next(p for p in parts.values() if _signature(p) == signature)
                    known[signature] = program.fits(part)
            if all(known[signature] for signature in signatures):
                if i:
                    self._programs.insert(0, self._programs.pop(i))
                self._odd_in_a_row = 0
                return program
        return None

    def _is_odd(self, part: list[Any], own: Sequence[bool], signatures: set[Any]) -> bool:
        """Whether a batch is to be run uncompiled: single examples, beside a program for more."""
        if not self._programs:
            return len(signatures) > 1 and any(1 in _sizes(s) for s in signatures)
        guards, *_ = self._programs[0]
        if not guards.hold() or not any(1 in _sizes(s) or 0 in _sizes(s) for s in signatures):
            return False
        self._odd_in_a_row += 1
        mixed = len(signatures) > 1
        return mixed or self._odd_in_a_row < _ODD_IN_A_ROW

    def _made(
        self, tree: Any, leaves: Sequence[Any], own: Sequence[bool], part: list[Any], wanted: Any
    ) -> Any | None:
        """Traces the step; returns ``None`` if it is to run uncompiled from now on."""
        if self._programs:
            why = self._programs[0][0].changed() or "the arguments have other sizes or values"
            logger.info("the compiled step %s is traced anew: %s", _name(self._step), why)
        if self._maker is None:
            self._maker = self._make_maker()
        before = self._maker.state()
        try:
            guards, program = self._maker.make(self._step, tree, leaves, own, part)
        except Exception as error:
            self._maker.put_back(before)
            refused = error if isinstance(error, CompileError) else _not_followed(error)
            if self._falls_back:
                logger.warning("%s; it runs uncompiled", refused)
                self._is_eager = True
                return None
            if refused is error:
                raise
            raise refused from error
        self.num_traces += 1
        self._programs.insert(0, (guards, program, {}))
        if len(self._programs) > MAX_TRACES:
            del self._programs[MAX_TRACES:]
            if self.num_traces % MAX_TRACES == 1:
                logger.warning(
                    "the step %s has been traced %d times, which takes longer than to run it "
                    "uncompiled; pass values that change in every call as tensors",
                    _name(self._step),
                    self.num_traces,
                )
        return program

    def _joined(self, program: Any, results: dict[int, list[Any]], weights: Any) -> Any:
        trace = program.trace
        joined = {}
        for r, values in results.items():
            found = iter(values)
            joined[r] = rebuild_structure(
                trace.structure,
                [
                    next(found) if is_tensor else leaf
                    for is_tensor, leaf in zip(trace.is_tensor, trace.leaves, strict=True)
                ],
            )
        n = self._coherence.num_replicas
        all_weights = None
        if weights is not None:
            all_weights = [float(weights[r]) if r in results else 0.0 for r in range(n)]
        return regroup(joined, n, all_weights)


def _part(leaves: Sequence[Any], r: int) -> list[Any]:
    part: list[Any] = []
    for leaf in leaves:
        value = leaf.values[r] if isinstance(leaf, PerReplica) else leaf
        if isinstance(value, Tensor):
            part.append(value if value.is_contiguous() else _laid_out(value))
        elif isinstance(leaf, PerReplica):
            part += leaves_of(value)
        else:
            part.append(value)
    return part


def _laid_out(tensor: Tensor) -> Tensor:
    """Returns a tensor laid out in a way that a program may have been made for."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return tensor.contiguous()


def _signature(part: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        [
            (leaf.shape, leaf.dtype, leaf.is_contiguous(), leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else _value(leaf)
            for leaf in part
        ]
    )


def _value(leaf: Any) -> Any:
    value = comparable(leaf)
    return (type(leaf), value) if value is leaf else id(leaf)


def _sizes(signature: tuple[Any, ...]) -> list[int]:
    return [
        entry[0][0]
        for entry in signature
        if isinstance(entry, tuple) and isinstance(entry[0], torch.Size) and len(entry[0])
    ]


def _name(step: Any) -> str:
    return getattr(step, "__qualname__", type(step).__qualname__)


def _not_followed(error: Exception) -> CompileError:
    return CompileError(
        f"the step cannot be compiled: {line_of(error)} cannot be traced "
        f"({type(error).__name__}: {first_line(error)}); leave that out of the step, or pass "
        "fallback='eager'"
    )
