"""CompiledModule: what calls of a module run after ``strategy.compile(module)``.

It is the ``compiled`` of the module's CallInterceptor, in the place of a call that
``module.compile()`` has compiled: every replica calls it, inside ``run``, in a split call, and
where there is one replica only. ``replay`` makes a split call of replicas that all have programs.

    first call with a signature    runs uncompiled; its code, arguments and gradients are noted
    before the next run            one trace for all replicas, in the cross-replica context, if
                                   nothing that the code reads has changed: see ``known_call.py``
    from then on                   guards, and the programs: see ``module_program.py``
    a call whose guards fail       as the first one

What cannot be traced runs uncompiled, and is reported once.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mirror.base.dynamo import is_compiled_module
from mirror.base.torch_private import (
    WHOLE_CALL,
    DisableAutocast,
    current_graph_task_id,
    functions_interpreter,
    has_modes,
    hooks_of,
    is_jit_tracing,
    num_dispatch_modes,
    num_function_modes,
    top_saved_tensors_hooks,
)
from mirror.compiler.call_outputs import distinct_tensors
from mirror.compiler.runtime.call_signature import find_opaque, sign_call
from mirror.compiler.runtime.known_call import KnownCall
from mirror.compiler.step_errors import describe_failure, words_of_forward
from mirror.device.cuda_graph import has_graphs, is_capturing
from mirror.devices import generators_of
from mirror.errors import CompileError, StrategyError
from mirror.execution.lifecycle import LifecycleHooks, WhilePending
from mirror.execution.replicas import Replicas
from mirror.execution.run import Replica, Run, current, push_context, recomputing, save_context
from mirror.execution.runner import Runner
from mirror.execution.swapped_state import SwappedState
from mirror.replica.gradients.parallel_backward import is_separate
from mirror.replica.modules.module_owner import Interceptor, ReplayedCalls, interceptor_of
from mirror.replica.modules.module_registry import layer_libraries
from mirror.replica.modules.split_call import CallInterceptor
from mirror.values import leaves_of, rebuild_structure

logger = logging.getLogger(__name__)

UPDATES = ("captured", "eager")
MAX_SHAPES = 4  # in one mode: of training, or of evaluation
MAX_TRACES = 8
MAX_MISSES = 2  # of an observed call with the values that a trace would find, in a row
_MAX_KNOWN = 1000
_DOUBLE = "a backward pass has create_graph=True, and a program's gradients have no graph"
_IN_PARTS = "its outputs get their gradients in several backward passes"


class ModuleBuilder(Protocol):
    """Traces calls: ``build_module.py``, which is imported when a call is first traced."""

    def build(self, module: nn.Module, pattern: Any, redo: Any) -> tuple[Any, Any]:
        """Returns the guards and the program of a call."""

    def can_observe(self) -> bool:
        """Whether calls can be observed now."""

    def observe(self) -> Any:
        """Returns what observes a call."""

    def values_of(self, module: nn.Module, observed: Any) -> Any:
        """Returns guards of the values that an observed call has left."""

    def record(self, module: nn.Module) -> Any:
        """Returns what notes the functions that a call makes; see [Note: The same way]."""

    def pattern(self, tree: Any, is_training: bool) -> Any:
        """Returns the pattern of a call with these arguments."""


class CompiledCalls:
    """The compiled modules of one strategy, and their calls that wait for a trace.

    Attributes:
        pending: modules, each with a call to be traced before the next run.
        recording: the threads whose calls are noted; they run no programs.
    """

    def __init__(
        self,
        replicas: Replicas,
        runner: Runner,
        make_builder: Callable[[], ModuleBuilder],
        make_capturer: Callable[[], Any],
    ) -> None:
        self.replicas, self.runner, self._make = replicas, runner, make_builder
        self._make_capturer = make_capturer
        self._capturer: Any = None
        self.pending: list[tuple[CompiledModule, KnownCall]] = []
        self.recording: set[int] = set()
        self._builder: ModuleBuilder | None = None

    @property
    def builder(self) -> ModuleBuilder:
        """What traces calls; it imports torch's compiler."""
        if self._builder is None:
            self._builder = self._make()
        return self._builder

    def capture_updates(self, module: nn.Module, update: str, *, fallback: str) -> None:
        """Has updates of a module's optimizers captured, or not: see ``captured_update.py``."""
        if self._capturer is None:
            if update == "eager":
                return
            self._capturer = self._make_capturer()
        if update == "eager":
            self._capturer.discard(module)
        else:
            self._capturer.add(module, falls_back=fallback == "eager")

    def part(self) -> LifecycleHooks:
        """Returns the hook that traces calls before a run. See [Note: Parts]."""
        prepare = WhilePending(self.pending, self.trace_pending)
        return LifecycleHooks(name="compiled modules", prepare=prepare)

    def trace_pending(self) -> None:
        """Traces the calls that wait for it; called in the cross-replica context."""
        if self.runner.running is not None or current.replica is not None:
            return
        if current_graph_task_id() != -1 or top_saved_tensors_hooks() is not None or has_modes():
            return  # activation checkpointing, or a mode, would see the tensors of the trace
        pending = self.pending.copy()
        self.pending.clear()
        for compiled, call in pending:
            compiled.trace(call)


def compile_module(
    calls: CompiledCalls,
    module: nn.Module,
    route: Interceptor | None,
    *,
    fallback: str,
    update: str = "captured",
) -> None:
    """Makes calls of a mirrored module run compiled; idempotent.

    Args:
        route: its interceptor; ``None`` if the strategy does not mirror it.
        update: whether updates by its optimizers are "captured", or run as they do ("eager").

    Raises:
        CompileError: such modules or strategies cannot be compiled, and ``fallback`` is "error".
        StrategyError: the module is not mirrored by this strategy.
    """
    name = type(module).__name__
    if not isinstance(route, CallInterceptor):
        raise StrategyError(
            f"compile was called with a {name} that this strategy does not mirror; create it in "
            "strategy.scope(), or call strategy.mirror(module) first"
        )
    if isinstance(route.compiled, CompiledModule):
        route.compiled.set_fallback(fallback)
        calls.capture_updates(module, update, fallback=fallback)
        return
    replicas = calls.replicas
    why = None
    if replicas.mesh.is_model_parallel:
        why = "a replica of this strategy has several devices, and a program has one"
    elif replicas.has_parameter_device:
        why = "this strategy keeps parameters on the parameter device"
    elif route.compiled is not None:
        why = "module.compile() has compiled it already"
    elif is_compiled_module(module):
        why = "torch.compile has compiled it already"
    elif any(library.has_made(module) for library in layer_libraries):
        why = (
            "its library (Keras) keeps masks, losses and variables of each call; pass "
            "jit_compile=True to the model's compile, for torch.compile of the step"
        )
    elif route.is_metric or route.renormalizes:
        why = "the replicas communicate in it"
    if why is None:
        route.compiled = CompiledModule(module, calls, fallback=fallback)
        calls.capture_updates(module, update, fallback=fallback)
        return
    what = f"calls of {name} cannot be compiled: {why}"
    if fallback == "error":
        raise CompileError(what)
    logger.warning("%s; they run uncompiled", what)


class CompilingInterceptor(CallInterceptor):
    """Compiles its module at the first call in training that comes from outside of modules."""

    __slots__ = ("_calls", "_is_considered")

    def __init__(self, calls: CompiledCalls, *args: Any) -> None:
        super().__init__(*args)
        self._calls, self._is_considered = calls, False

    def _call_outside(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self._is_considered or current.in_whole_call) and module.training:
            self._is_considered = True
            if not self.replicas.mirrors:  # no split call shows which calls come from inside
                for layer in module.modules():
                    if isinstance(route := interceptor_of(layer), CompilingInterceptor):
                        route._is_considered = True
            has_parameters = next(module.parameters(), None) is not None
            if self.is_plain and has_parameters and self.compiled is None:
                compile_module(self._calls, module, self, fallback="eager")
        return super()._call_outside(module, *args, **kwargs)


class CompiledModule(ReplayedCalls):
    """Calls a module on a replica, by programs where there are some.

    Args:
        calls: the compiled modules of the strategy.
        fallback: ``"eager"``, or ``"error"`` to raise where a call cannot be traced.

    Attributes:
        num_traces: how often a call has been traced.
    """

    def __init__(self, module: nn.Module, calls: CompiledCalls, *, fallback: str) -> None:
        self._module = weakref.ref(module)
        self._calls, self._falls_back = calls, fallback == "eager"
        self._replicas = calls.replicas
        self._has_graphs = any(map(has_graphs, self._replicas.devices))
        self._known: dict[Any, KnownCall] = {}
        self._uncompiled: set[tuple[bool, bool]] = set()  # modes: of training, and grad mode
        self._warned: set[str] = set()  # the reasons
        self.num_traces = 0

    def set_fallback(self, fallback: str) -> None:
        """Sets what happens with a call that cannot be traced."""
        self._falls_back = fallback == "eager"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, replica = self._module(), current.replica
        assert module is not None
        mode = module.training, torch.is_grad_enabled()
        if mode in self._uncompiled or not self._can_replay(replica):
            return getattr(module, WHOLE_CALL)(*args, **kwargs)
        tensors: list[Tensor] = []
        signature = sign_call(mode, args, kwargs, tensors)
        if signature is None:
            if why := find_opaque(args, kwargs):
                self._tell(mode, why)
            return getattr(module, WHOLE_CALL)(*args, **kwargs)
        call = self._known.get(signature)
        program = None if call is None else call.find_valid()
        if program is None:
            program = self._note(module, signature, call, (args, kwargs))
            if program is None:
                return self._call_noting(module, self._known.get(signature), args, kwargs)
        return self._run(program, 0 if replica is None else replica.replica_id, tensors)

    def replay(
        self, run: Run, parts: dict[int, Any], make_part: Callable[[int], Any]
    ) -> dict[int, Callable[[], Any]] | None:
        """Returns the replicas' calls as programs, whose guards are compared once for all.

        ``None``: the replicas call the module, and run programs where there are some.
        """
        module, first = self._module(), run.members[run.active[0]]
        assert module is not None
        mode = module.training, torch.is_grad_enabled()
        # A mode of torch in the caller's thread does not see what replicas do in their threads.
        if num_function_modes() or num_dispatch_modes():
            return None
        if mode in self._uncompiled or not self._can_replay(first):
            return None
        valid: dict[Any, Any] = {}
        calls: dict[int, Callable[[], Any]] = {}
        run.is_split = True
        before = save_context()
        for r in run.active:
            part, tensors = make_part(r), list[Tensor]()
            parts[r] = part
            signature = sign_call(mode, part.args, part.kwargs, tensors)
            if signature not in valid:
                call = None if signature is None else self._known.get(signature)
                try:
                    push_context(self._replicas.strategy, first)
                    valid[signature] = None if call is None else call.find_valid()
                finally:
                    current.replica, current.strategy, current.below = before
            program = valid[signature]
            if program is None:
                return None
            calls[r] = partial(self._run, program, r, tensors, run.swapped)
        return calls

    def _run(
        self,
        program: Any,
        replica_id: int,
        tensors: list[Tensor],
        swapped: SwappedState | None = None,
    ) -> Any:
        """Runs a program on a replica.

        Args:
            swapped: has the replica's random stream, if that is not in the generators yet.
        """
        state = None
        if program.draws:
            if swapped is not None and swapped.inside != replica_id:
                swapped.enter(replica_id)
            state = self._generators(replica_id)
        if program.pattern.autocast:  # its casts are in the program
            with DisableAutocast():
                return program.call(replica_id, tensors, state)
        return program.call(replica_id, tensors, state)

    def _can_replay(self, replica: Replica | None) -> bool:
        """Whether the calling code is one that programs may stand in for."""
        if replica is None:
            if self._replicas.mirrors:  # a call that is not split
                return False
        elif replica.tracing is not None or replica.run.is_trial:
            return False
        return not (
            current_graph_task_id() != -1
            or top_saved_tensors_hooks() is not None
            or torch.is_inference_mode_enabled()
            or has_modes()
            or is_jit_tracing()
            or torch.compiler.is_compiling()
            or functions_interpreter() is not None
            or (self._has_graphs and is_capturing())  # by the caller
            or (self._calls.recording and threading.get_ident() in self._calls.recording)
        )

    # Calls without a program

    def _note(self, module: nn.Module, signature: Any, call: KnownCall | None, tree: Any) -> Any:
        """Notes a call to be traced, or traces it; returns its program, if it has one now."""
        if call is None:
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            if any(map(is_lazy, chain(module.parameters(), module.buffers()))):
                return None  # this call makes its tensors
            pattern = self._calls.builder.pattern(tree, module.training)
            self._known[signature] = call = KnownCall(pattern)
            self._wait(call)
            return None
        now = self._calls.builder.pattern(tree, module.training)
        if (now.autocast, now.caches) != (call.pattern.autocast, call.pattern.caches):
            now.tangents = call.pattern.tangents
            now.passes_through = call.pattern.passes_through
            call.pattern = now
        if self._replicas.mirrors:
            if not call.is_pending:
                call.is_unseen = call.find_observation() is None
                self._wait(call)
            return None
        self.trace(call)
        return call.find_valid()

    def _wait(self, call: KnownCall) -> None:
        """Has a call traced before the next run; the only replica traces in its next call."""
        if self._replicas.mirrors and not call.is_pending:
            call.is_pending = True
            self._calls.pending.append((self, call))

    def _call_noting(
        self, module: nn.Module, call: KnownCall | None, args: Any, kwargs: Any
    ) -> Any:
        """Makes an uncompiled call; notes its code, and which of its outputs get gradients."""
        if call is None:
            return getattr(module, WHOLE_CALL)(*args, **kwargs)
        if call.is_unseen and self._calls.builder.can_observe():
            result = self._observe(module, call, args, kwargs)
        else:
            result = getattr(module, WHOLE_CALL)(*args, **kwargs)
        if not torch.is_grad_enabled():
            return result
        outputs, _ = distinct_tensors(result)
        pattern, replica = call.pattern, current.replica
        if replica is not None and self._replicas.are_simulated:
            pattern.is_separate = is_separate(self._calls.runner, replica.replica_id, outputs)

        def note(number: int, output: weakref.ref[Tensor]) -> Callable[[Tensor], None]:
            def hook(grad: Tensor | None) -> None:
                if grad is None:  # of one of several outputs that one node makes
                    return
                pattern.has_double_backward |= torch.is_grad_enabled()
                pattern.tangents = {**(pattern.tangents or {}), number: grad.stride()}
                tensor = None if self._replicas.mirrors else output()
                if tensor is not None and (tensor.retains_grad or len(hooks_of(tensor) or ()) > 1):
                    pattern.hooked.add(number)

            return hook

        for number, tensor in enumerate(outputs):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(note(number, weakref.ref(tensor)))
        return result

    def _observe(self, module: nn.Module, call: KnownCall, args: Any, kwargs: Any) -> Any:
        """Makes an uncompiled call, and notes its code; one that raises is not traced."""
        builder, recording = self._calls.builder, self._calls.recording
        observed, record = builder.observe(), builder.record(module)
        recording.add(thread := threading.get_ident())
        try:
            with observed, record or nullcontext():
                result = getattr(module, WHOLE_CALL)(*args, **kwargs)
        finally:
            recording.discard(thread)
        if record is not None:
            record.note_result(result)
        try:
            values = builder.values_of(module, observed)
        except Exception as error:
            self._refuse(call.mode, f"{type(error).__name__}: {error}", error)
        else:
            call.add_observation(values, observed, record)
        return result

    def trace(self, call: KnownCall) -> None:
        """Traces a call, if its module is in the mode of that call."""
        module, call.is_pending = self._module(), False
        pattern = call.pattern
        mode = call.mode
        if module is None or mode in self._uncompiled:
            return
        if pattern.has_double_backward:
            self._refuse(mode, _DOUBLE)
            return
        builder = self._calls.builder
        if module.training != mode[0] or call.is_unseen or not builder.can_observe():
            self._wait(call)
            return
        seen = call.find_observation()
        if seen is None and call.note_miss() <= MAX_MISSES:
            self._wait(call)
            return
        pattern.observed, pattern.record = seen or call.last_observation()
        if not call.programs and self._num_shapes(mode) >= MAX_SHAPES:
            self._refuse(mode, f"it was called with more than {MAX_SHAPES} shapes or values")
            return
        if self.num_traces - len(self._known) >= MAX_TRACES:
            self._refuse(mode, f"it was traced {self.num_traces} times, as {self._change(call)}")
            return
        try:
            guards, program = builder.build(module, pattern, self._redo)
        except CompileError as error:
            self._refuse(mode, str(error), error)
            return
        except Exception as error:
            self._refuse(mode, describe_failure(error), error)
            return
        why: str | None = None
        if seen is None:
            why = f"in each call it finds other values: {call.find_change()}"
        elif pattern.record is not None:
            why = pattern.record.find_difference(program.record)
            if why is not None and not call.has_differed:  # it may have set what it reads itself
                call.observe_again()
                self._wait(call)
                return
        if why is not None:
            self._refuse(mode, why)
            return
        call.programs.insert(0, (guards, program))
        del call.programs[MAX_SHAPES:]
        self.num_traces += 1
        call.num_misses, call.has_differed = 0, False

    def _num_shapes(self, mode: tuple[bool, bool]) -> int:
        return sum(1 for key, call in self._known.items() if key[0] == mode and call.programs)

    def _change(self, call: KnownCall) -> str:
        changes = [guards.find_change() for guards, _ in call.programs]
        return next(filter(None, changes), "other outputs get gradients")

    def _refuse(
        self, mode: tuple[bool, bool], why: str, cause: BaseException | None = None
    ) -> None:
        """Makes calls in a mode run uncompiled from now on; see ``_tell``."""
        self._tell(mode, why, cause)
        self._uncompiled.add(mode)

    def _tell(self, mode: tuple[bool, bool], why: str, cause: BaseException | None = None) -> None:
        """Warns that calls run uncompiled, once for each reason, or raises CompileError."""
        why = words_of_forward(why, falls_back=self._falls_back)
        what = f"calls of {type(self._module()).__name__}"
        if not mode[0]:
            what += " in evaluation"
        if not self._falls_back:
            raise CompileError(f"{what} cannot be compiled: {why}") from cause
        if why not in self._warned:
            self._warned.add(why)
            logger.warning("%s cannot be compiled: %s; they run uncompiled", what, why)

    # Backward passes that no trace has

    def _redo(
        self, replica_id: int, call: Any, grads: Sequence[Tensor | None], has_graph: bool
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of a call, by another, uncompiled call of ``forward``."""
        module, program = self._module(), call.program
        assert module is not None
        pattern = program.pattern
        mode = pattern.is_training, pattern.grad_enabled
        at_once = self._calls.runner.parallel_pass
        if at_once is not None:
            at_once.go_alone()
        change = None if program.later is None else program.later.find_change()
        if has_graph or call.is_freed:
            self._refuse(mode, _DOUBLE if has_graph else _IN_PARTS)
        elif change is not None:
            self._refuse(mode, f"{change}, since the call; its backward pass reads it")
        elif call.is_there():
            self._trace_again(program, grads)
        program.check_redo(call)
        given = iter(call.leaves)
        leaves = [
            next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves_of(pattern.tree)
        ]
        args, kwargs = rebuild_structure(pattern.tree, leaves)
        arguments, parameters = program.inputs_of(call)
        before = save_context()
        with ExitStack() as stack:
            stack.enter_context(program.as_then(call))
            stack.enter_context(self._restoring(replica_id, call.state))
            stack.enter_context(pattern.in_its_modes())
            try:
                if self._replicas.mirrors:
                    push_context(self._replicas.strategy, recomputing(self._replicas, replica_id))
                result = getattr(module, WHOLE_CALL)(*args, **kwargs)
            finally:
                current.replica, current.strategy, current.below = before
        outputs, _ = distinct_tensors(result)
        defined = [i for i, grad in enumerate(grads) if grad is not None]
        return torch.autograd.grad(
            [outputs[i] for i in defined],
            [*[call.leaves[i] for i in arguments], *parameters],
            [grads[i] for i in defined],
            allow_unused=True,
            create_graph=has_graph,
        )

    def _trace_again(self, program: Any, grads: Sequence[Tensor | None]) -> None:
        """Has the call traced for these gradients of its outputs."""
        for known in self._known.values():
            if any(one is program for _, one in known.programs):
                known.pattern.tangents = {
                    i: grad.stride() for i, grad in enumerate(grads) if grad is not None
                }
                known.pattern.passes_through = False
                known.programs.clear()

    def _generators(self, replica_id: int) -> list[Tensor]:
        """Returns the states of the generators that a replica draws from."""
        return [generator.get_state() for generator in self._of_replica(replica_id)]

    def _of_replica(self, replica_id: int) -> list[torch.Generator]:
        device = self._replicas.devices[replica_id]
        own = [] if device.type == "cpu" else list(generators_of([device]))
        return [torch.default_generator, *own]

    def _restoring(self, replica_id: int, states: Sequence[Tensor] | None) -> Any:
        return _Restoring([] if states is None else self._of_replica(replica_id), states or ())


class _Restoring:
    """Within the block, generators have former states."""

    def __init__(self, generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
        self._generators, self._states = generators, states

    def __enter__(self) -> None:
        self._now = [generator.get_state() for generator in self._generators]
        self._set(self._states)

    def __exit__(self, *exception: object) -> None:
        self._set(self._now)

    def _set(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
