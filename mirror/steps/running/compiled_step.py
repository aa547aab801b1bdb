"""CompiledStep: what ``strategy.compile(step)`` returns; called with a distributed batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from mirror.errors import CompileError
from mirror.steps.lines import first_line, line_of
from mirror.steps.running.arguments import Arguments
from mirror.steps.running.coherence import Coherence
from mirror.values import ABSENT, PerReplica, is_number, rebuild_structure

logger = logging.getLogger(__name__)

MODES = ("auto", "inductor", "trace")
FALLBACKS = ("error", "eager")
MAX_TRACES = 8
_ODD_IN_A_ROW = 3

Run = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
Part = Callable[[int, Sequence[Any], Any], tuple[Sequence[int], Sequence[float] | None]]


class Program(Protocol):
    """A step's programs of one trace: a StepProgram, which is not imported before it is made."""

    trace: Any

    def fits(self, part: Sequence[Any]) -> bool: ...

    def can_run(self) -> bool: ...

    def run(self, parts: dict[int, Any], weights: Any) -> dict[int, Sequence[Any]]: ...


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
        self._programs: list[tuple[Any, Program, dict[Any, bool]]] = []
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
        arguments = Arguments(args, kwargs, active)
        program = self._program_for(arguments)
        if program is None:
            if self._must_not_trace(arguments):
                return None
            program = self._made(arguments)
            if program is None:
                return None
        results = program.run(arguments.tensors, weights)
        return (self._joined(program, results, weights),)

    def _program_for(self, arguments: Arguments) -> Program | None:
        signatures = set(arguments.signatures)
        for i, (assumptions, program, known) in enumerate(self._programs):
            if not (assumptions.hold() and program.can_run()):
                continue
            for signature in signatures:
                if signature not in known:
                    known[signature] = program.fits(arguments.leaves(signature))
            if all(map(known.get, signatures)):
                if i:
                    self._programs.insert(0, self._programs.pop(i))
                self._odd_in_a_row = 0
                return program
        return None

    def _must_not_trace(self, arguments: Arguments) -> bool:
        """Whether a batch is to run uncompiled: one of single examples, among larger ones.

        To a trace, a size of one is another program. A batch that is the last of its epoch is not
        worth one; where such batches come one after the other, and all parts are alike, it is.
        """
        if len(set(arguments.signatures)) > 1 and arguments.is_odd():
            return True
        if not self._programs or not arguments.is_odd():
            return False
        self._odd_in_a_row += 1
        return self._odd_in_a_row < _ODD_IN_A_ROW

    def _made(self, arguments: Arguments) -> Program | None:
        """Traces the step; returns ``None`` if it is to run uncompiled from now on."""
        if self._programs:
            why = self._programs[0][0].changed() or "the arguments have other sizes or values"
            logger.info("the compiled step %s is traced anew: %s", _name(self._step), why)
        if self._maker is None:
            self._maker = self._make_maker()
        before = self._maker.state()
        try:
            program: Program
            assumptions, program = self._maker.make(self._step, arguments)
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
        self._programs.insert(0, (assumptions, program, {}))
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

    def _joined(self, program: Any, results: dict[int, Sequence[Any]], weights: Any) -> Any:
        trace, n = program.trace, self._coherence.num_replicas
        all_weights = None
        if weights is not None:
            all_weights = [float(weights[r]) if r in results else 0.0 for r in range(n)]
        by_position = zip(*results.values(), strict=True)
        leaves: list[Any] = []
        for is_tensor, leaf in zip(trace.is_tensor, trace.leaves, strict=True):
            if is_tensor or is_number(leaf):
                values = next(by_position) if is_tensor else [leaf] * len(results)
                parts: list[Any] = [ABSENT] * n
                for r, value in zip(results, values, strict=True):
                    parts[r] = value
                leaf = PerReplica(parts, weights=all_weights)
            leaves.append(leaf)
        return rebuild_structure(trace.structure, leaves)


def _name(step: Any) -> str:
    return getattr(step, "__qualname__", type(step).__qualname__)


def _not_followed(error: Exception) -> CompileError:
    return CompileError(
        f"the step cannot be compiled: {line_of(error)} cannot be traced "
        f"({type(error).__name__}: {first_line(error)}); leave that out of the step, or pass "
        "fallback='eager'"
    )
