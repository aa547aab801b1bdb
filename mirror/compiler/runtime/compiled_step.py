"""CompiledStep: the function that ``strategy.compile(step)`` returns; takes a distributed batch.

An error in a trace may be the user's own, such as shapes that do not fit. Its text is then not
that of an uncompiled step, because a trace has no values. So an error that is neither a refusal
nor raised by torch's tracer itself makes the call run uncompiled, which raises the user's error.
If that call succeeds, the trace was at fault, and the call ends in a CompileError that says that
the step was executed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from mirror.base.dynamo import TRACERS
from mirror.base.timeline import COMPILED, CROSS
from mirror.compiler.runtime.param_sync import ParamSync
from mirror.compiler.runtime.step_arguments import StepArguments
from mirror.compiler.runtime.worker_consensus import (
    CallShares,
    ProgramCollectives,
    WorkerConsensus,
)
from mirror.compiler.step_errors import (
    ProgramFailed,
    RunsUncompiled,
    StateMissing,
    quoted_line_of,
)
from mirror.compiler.varying_inputs import VaryingInputs
from mirror.errors import CompileError, first_line
from mirror.values import ABSENT, PerReplica, is_number, rebuild_structure

logger = logging.getLogger(__name__)

MODES = ("auto", "inductor", "graphs", "trace")
FALLBACKS = ("error", "eager")
MAX_TRACES = 8
_OFTEN = 4  # calls a trace
_ODD_IN_A_ROW = 3
_MAX_KNOWN = 1000
_MAX_MESSAGE = 2000

Run = Callable[[Any, Sequence[Any], dict[str, Any]], Any]
FindParticipants = Callable[
    [int, Sequence[Any], Any], tuple[Sequence[int], Sequence[float] | None]
]


class StepProgramProtocol(Protocol):
    """The programs of one trace: a StepProgram, which is imported when the first is built."""

    trace: Any
    collectives: ProgramCollectives
    structure: Any
    weights: dict[int, float] | None

    def fits(self, part: Sequence[Any]) -> bool: ...

    def numbers_hold(self, arguments: StepArguments) -> bool: ...

    def find_change(self, arguments: StepArguments, part: Sequence[Any] | None) -> str | None: ...

    def can_run(self) -> bool: ...

    def run(
        self, parts: dict[int, Any], weights: Any, weighing: CallShares
    ) -> dict[int, Sequence[Any]]: ...


class CompiledStep:
    """A training step, run on all replicas as compiled programs.

    It takes the arguments of ``strategy.run(step, args, kwargs)``: ``compiled(batch)``. The first
    call is not compiled, and the second one traces. Guards of the trace are compared before every
    call, and a change causes a retrace. See [Note: Assumptions].

    Attributes:
        num_traces: how often the step has been traced.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        run: Run,
        participants: FindParticipants,
        param_sync: ParamSync,
        consensus: WorkerConsensus,
        make_builder: Callable[[], Any],
        *,
        fallback: str,
        is_eager: bool = False,
    ) -> None:
        self._step, self._run, self._participants = step, run, participants
        self._param_sync, self._consensus, self._make_builder = param_sync, consensus, make_builder
        self._builder: Any = None
        self._falls_back = fallback == "eager"
        self._has_run = False
        self._gives_up = False
        self._refused: CompileError | None = None
        consensus.is_final = is_eager
        self._programs: list[tuple[Any, StepProgramProtocol, dict[Any, bool]]] = []
        self._odd_in_a_row = self._waits = self._num_calls = 0
        self._fixes_sizes = False  # whether the step is another one for every size of a batch
        self._traced_at: deque[int] = deque(maxlen=MAX_TRACES)
        self._varying = VaryingInputs()
        self._untraceable: set[Any] = set()  # signatures of arguments that run uncompiled
        self.num_traces = 0

    def clear(self) -> None:
        """Drops all programs and the objects that they keep alive; the next call traces again."""
        self._programs.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Executes the step on all replicas; returns what ``strategy.run`` returns.

        Raises:
            CompileError: the step cannot be traced.
            StrategyError: called inside ``run``, or after ``close``.
        """
        if self._consensus.is_final or not self._has_run or self._param_sync.wants_eager():
            if not (self._has_run or self._consensus.is_final):
                self._observe_first(args, kwargs)
            result = self._run(self._step, args, kwargs)
            if not self._has_run:
                self._varying.observe_options(self._param_sync.optimizers())
            self._has_run = True
            return result
        active, weights = self._participants(self._param_sync.num_replicas, args, kwargs)
        made = self._param_sync.call_exclusively(
            partial(self._call, args, kwargs, active, weights)
        )
        if made is None:
            return self._run_uncompiled(args, kwargs)
        result, has_stepped = made
        if has_stepped:
            self._param_sync.end_step()
        return result

    def _observe_first(self, args: Any, kwargs: Any) -> None:
        """Records the arguments of the first call: what differs in the second call varies."""
        active, _ = self._participants(self._param_sync.num_replicas, args, kwargs)
        arguments = StepArguments(args, kwargs, active)
        self._varying.observe_arguments(arguments.structure, arguments.columns, arguments.own)

    def _run_uncompiled(self, args: Any, kwargs: Any) -> Any:
        """Runs a call that has no program; raises if only its trace has failed."""
        refused, self._refused = self._refused, None
        result = self._run(self._step, args, kwargs)
        if refused is not None:
            self._refuse(refused)  # what stopped the trace is no error of the step
        return result

    def _refuse(self, refused: CompileError) -> None:
        """Makes a step that cannot be traced run uncompiled from now on, or raises."""
        if not self._falls_back:
            raise refused
        logger.warning("%s; it runs uncompiled", refused)
        self._gives_up = True

    def _call(
        self, args: Any, kwargs: Any, active: Sequence[int], weights: Any
    ) -> tuple[Any, bool] | None:
        """Executes the step; returns the result, and whether an optimizer has stepped.

        Returns ``None`` if the call is to run uncompiled.
        """
        timeline = self._param_sync.timeline
        timeline.use()
        timeline.begin(CROSS, COMPILED)
        try:
            return self._call_program(args, kwargs, active, weights)
        finally:
            timeline.end(CROSS, COMPILED)

    def _call_program(
        self, args: Any, kwargs: Any, active: Sequence[int], weights: Any
    ) -> tuple[Any, bool] | None:
        self._num_calls += 1
        self._param_sync.prepare()
        arguments = StepArguments(args, kwargs, active)
        program = self._program_for(arguments)
        if self._gives_up:
            program = None
        elif program is None and not self._must_not_trace(arguments):
            program = self._build(arguments)
        if program is not None and program.trace.argument_grads:
            program = None if arguments.must_get_gradients_uncompiled() else program
        if self._gives_up:
            self._consensus.is_final = True  # agree() sends it to the other workers
        weighing = self._consensus.agree(
            None if program is None else program.collectives, arguments.active, weights
        )
        if program is None or weighing is None:
            return None
        self._param_sync.begin()
        try:
            results = program.run(arguments.tensors, weights, weighing)
        except ProgramFailed as failed:
            self._give_up_program(failed)
            return None
        local = weighing.local
        if program.weights is not None:
            weights = [program.weights.get(r, 0.0) for r in range(self._param_sync.num_replicas)]
            local = sum(weights)
        self._param_sync.end(local)
        has_stepped = bool(program.trace.swaps or program.trace.stepped_apart)
        return self._join(program, results, weights), has_stepped

    def _give_up_program(self, failed: ProgramFailed) -> None:
        """Makes the step run uncompiled from now on, after a program has failed; or raises."""
        cause = failed.__cause__
        said = f"its program failed ({type(cause).__name__}: {str(cause)[:_MAX_MESSAGE]})"
        if failed.has_changed or self._param_sync.has_other_workers:
            raise CompileError(
                f"the compiled step {_name(self._step)} failed: {said}, and may have changed "
                "parameters, state or buffers; restore the last checkpoint, and pass mode='trace' "
                "or call strategy.run(step, ...)"
            ) from cause
        self._param_sync.cancel()
        error = CompileError(
            f"the compiled step {_name(self._step)} failed: {said}; nothing has been changed; "
            "pass mode='trace', or fallback='eager'"
        )
        error.__cause__ = cause
        self._refuse(error)
        self._consensus.is_final = True

    def _program_for(self, arguments: StepArguments) -> StepProgramProtocol | None:
        signatures = set(arguments.signatures)
        structure = arguments.structure
        for i, (assumptions, program, known) in enumerate(self._programs):
            if program.structure != structure:
                continue
            if not (assumptions.hold() and program.can_run()):
                continue
            if len(known) > _MAX_KNOWN:  # numbers that are inputs, say: another one in every call
                known.clear()
            for signature in signatures:
                if signature not in known:
                    known[signature] = program.fits(arguments.leaves(signature))
            if all(map(known.get, signatures)) and program.numbers_hold(arguments):
                if i:
                    self._programs.insert(0, self._programs.pop(i))
                self._odd_in_a_row = 0
                return program
        return None

    def _must_not_trace(self, arguments: StepArguments) -> bool:
        """Whether a call must run uncompiled: with parts of one example among larger ones.

        A size of one needs a program of its own. The last batch of an epoch is not worth one.
        Several such batches in a row are, if the parts of all replicas have the same sizes. A
        batch without examples is never traced: torch divides by their number in a mean.
        """
        if arguments.has_empty() or not self._untraceable.isdisjoint(arguments.signatures):
            return True
        are_mixed = len(set(arguments.signatures)) > 1
        if are_mixed and (self._fixes_sizes or arguments.is_odd()):
            return True
        if not self._programs or not arguments.is_odd():
            return False
        self._odd_in_a_row += 1
        return self._odd_in_a_row < _ODD_IN_A_ROW

    def _build(self, arguments: StepArguments) -> StepProgramProtocol | None:
        """Traces the step; returns ``None`` if this call is to run uncompiled."""
        if self._programs:
            why = self._explain_retrace(arguments)
            logger.info("the compiled step %s is traced again: %s", _name(self._step), why)
        if self._builder is None:
            self._builder = self._make_builder()
        self._observe(arguments)
        try:
            program: StepProgramProtocol
            with self._param_sync.timeline.compiling():
                assumptions, program = self._builder.build(self._step, arguments, self._varying)
        except RunsUncompiled:
            self._untraceable.update(arguments.signatures)
            return None
        except StateMissing:
            self._waits += 1
            if self._waits > MAX_TRACES:
                raise _unstable_state_error() from None
            return None
        except CompileError as error:
            self._refuse(error)
            return None
        except Exception as error:
            refused = _untraceable_error(error)
            refused.__cause__ = error
            if _is_of_tracing(error):
                self._refuse(refused)
            else:
                self._refused = refused  # once it has run uncompiled
            return None
        self.num_traces += 1
        self._waits = 0
        fits = {s: program.fits(arguments.leaves(s)) for s in set(arguments.signatures)}
        self._programs.insert(0, (assumptions, program, fits))
        del self._programs[MAX_TRACES:]
        self._traced_at.append(self._num_calls)
        is_often = self._num_calls - self._traced_at[0] < _OFTEN * MAX_TRACES
        if len(self._traced_at) == MAX_TRACES and is_often:
            self._consensus.is_final = True
            logger.warning(
                "the step %s was traced %d times in %d calls, which takes longer than to run it "
                "uncompiled, as it is from now on; pass what changes from call to call as tensors",
                _name(self._step),
                MAX_TRACES,
                self._num_calls - self._traced_at[0] + 1,
            )
        if not all(fits.values()):
            self._fixes_sizes = True
            return None
        return program if program.numbers_hold(arguments) else None

    def _explain_retrace(self, arguments: StepArguments) -> str:
        """Returns the reason why the last trace is not valid, in words."""
        assumptions, program, known = self._programs[0]
        if program.structure != arguments.structure:
            return "the arguments have another structure"
        unfit = [s for s in arguments.signatures if not known.get(s)]
        part = arguments.leaves(unfit[0]) if unfit else None
        changed = assumptions.find_change() or program.find_change(arguments, part)
        return changed or "optimizer state or sizes are not those of the trace"

    def _observe(self, arguments: StepArguments) -> None:
        """Finds the values that have changed since the last trace: inputs of the next one."""
        varying = self._varying
        varying.observe_arguments(arguments.structure, arguments.columns, arguments.own)
        swaps = [swap for _, program, _ in self._programs for swap in program.trace.swaps]
        for swap in swaps:
            varying.compare_options(swap.optimizer, swap.options_then)
        varying.observe_options(swap.optimizer for swap in swaps)
        varying.observe_options(self._param_sync.optimizers())

    def _join(self, program: Any, results: dict[int, Sequence[Any]], weights: Any) -> Any:
        trace, n = program.trace, self._param_sync.num_replicas
        all_weights = None
        if weights is not None:
            all_weights = [float(weights[r]) if r in results else 0.0 for r in range(n)]
        by_position = zip(*results.values(), strict=True)
        leaves: list[Any] = []
        for is_tensor, leaf in zip(trace.is_tensor, trace.leaves, strict=True):
            if is_tensor or is_number(leaf):
                values = next(by_position) if is_tensor else [leaf] * len(results)
                if isinstance(leaf, type):  # a number that depends on sizes
                    values = [leaf(value.item()) for value in values]
                parts: list[Any] = [ABSENT] * n
                for r, value in zip(results, values, strict=True):
                    parts[r] = value
                leaf = PerReplica(parts, weights=all_weights)
            leaves.append(leaf)
        return rebuild_structure(trace.structure, leaves)


def _name(step: Any) -> str:
    return getattr(step, "__qualname__", type(step).__qualname__)


def _unstable_state_error() -> CompileError:
    return CompileError(
        "the step cannot be compiled: its optimizer makes state of another kind or shape in every "
        "call; pass fallback='eager'"
    )


def _untraceable_error(error: Exception) -> CompileError:
    return CompileError(
        f"the step cannot be compiled: {quoted_line_of(error)} cannot be traced "
        f"({type(error).__name__}: {first_line(error)}); leave that out of the step, or pass "
        f"fallback='eager'{'' if _is_of_tracing(error) else '; this call was made uncompiled'}"
    )


def _is_of_tracing(error: Exception) -> bool:
    """Whether an error is of a type that only torch's tracer and compiler raise."""
    kind = type(error)
    if kind.__name__ == "FakeTensorDeviceMismatchError":  # an uncompiled step has another one
        return False
    return kind.__module__.startswith(TRACERS)
