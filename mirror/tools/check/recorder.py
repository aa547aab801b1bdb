"""The recorder of what happens in a training step, on one device or under a strategy.

Problem: a call of a mirrored module is split, and each replica sees its part only.
Rule:    the outermost call is recorded where the script makes it, with whole inputs and outputs
         inside it each replica records events; the n-th events of all replicas belong together
         at the end of the call the replicas' tensors are joined in every way that fits
Consequence: both runs leave the same sequence of events, and the first one that differs names the
module, and inside it the operation and the line.

``ModuleNames`` gives the modules of a script the names that its reader knows. ``OpTrace`` records
the functions of tensors that the forward of a user's module calls, with their lines. Functions
inside torch's own layers are left out: the layer is their name. So are those that change shapes
alone: their results are compared where something is computed of them.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mirror.base.torch_private import functions_interpreter, is_jit_tracing
from mirror.execution.run import current
from mirror.replica.params.mirrored_tensor import resolve_copies
from mirror.threads.user_frames import user_line
from mirror.tools.check.fingerprint import dense, fingerprint, join_parts
from mirror.tools.check.record import (
    BUFFER,
    GRADIENT,
    INPUT,
    LOSS,
    OP,
    OUTPUT,
    OUTSIDE,
    PARAMETER,
    PART,
    PendingEvent,
    Record,
    RecordedEvent,
    ReplicaLog,
    join_events,
    tensors_in,
    tensors_or_parts_in,
)
from mirror.tools.check.rounding_noise import RoundingNoise
from mirror.values import PerReplica

_TORCH = f"{torch.__path__[0]}{os.sep}"
_MIRROR = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_LIBRARIES = (_TORCH, _MIRROR)
_LAYERS = (f"{_TORCH}nn{os.sep}modules{os.sep}", _MIRROR)

DROPOUT_LAYERS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


class ModuleNames:
    """Names each module at its first call from the script, and all modules inside it."""

    def __init__(self) -> None:
        self._modules: dict[int, tuple[Any, str]] = {}  # by id: a weak reference and the name
        self._params: dict[int, tuple[Any, str]] = {}
        self._roots: dict[str, weakref.ref[nn.Module]] = {}

    def name_of(self, module: nn.Module, frame: FrameType | None = None) -> str:
        """Returns the name of a module.

        Args:
            frame: where it is called; the variable there names a module that is not known yet.
        """
        known = self._modules.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        variable = _variable_of(module, frame) or type(module).__name__
        label, number = variable, 1
        while label in self._roots:
            number += 1
            label = f"{variable}#{number}"
        self._roots[label] = weakref.ref(module)
        for name, child in module.named_modules():
            path = f"{label}.{name}" if name else label
            self._modules[id(child)] = weakref.ref(child), path
        for name, param in module.named_parameters():
            self._params.setdefault(id(param), (weakref.ref(param), f"{label}.{name}"))
        return label

    def parameters_of(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, str]]:
        """Yields the parameters of an optimizer with their names."""
        for g, group in enumerate(optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                known = self._params.get(id(param))
                is_known = known is not None and known[0]() is param
                yield param, known[1] if known and is_known else f"parameter {i} of group {g}"

    def buffers(self) -> Iterator[tuple[Any, str]]:
        """Yields the buffers of all modules that the script has called, with their names."""
        for label, reference in list(self._roots.items()):
            module = reference()
            if module is not None:
                yield from ((buffer, f"{label}.{name}") for name, buffer in module.named_buffers())


def describe_module(module: nn.Module) -> dict[str, Any]:
    """Returns the facts of a module that tell the cause of a difference."""
    info: dict[str, Any] = {"class": type(module).__name__}
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        info["norm"] = bool(module.training or module.running_mean is None)
    if isinstance(module, DROPOUT_LAYERS):
        info["dropout"] = bool(module.training and module.p > 0)
    elif module.training and isinstance(getattr(module, "dropout", None), float):
        info["dropout"] = bool(module.dropout)
    return info


def is_torch_module(module: nn.Module) -> bool:
    """Whether a module's class is one of torch's own."""
    return type(module).__module__.startswith("torch.")


def _variable_of(module: nn.Module, frame: FrameType | None) -> str:
    """Returns the name of the variable that holds a module where the script calls it."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return ""
    for names in (frame.f_locals, frame.f_globals):
        for name, value in list(names.items()):
            if value is module:
                return str(name)
    for name, value in list(frame.f_locals.items()):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            for key, inner in list(attributes.items()):
                if inner is module:
                    return f"{name}.{key}"
    return ""


_DEEP_STEPS = 3  # in which operations inside modules are recorded
_SMALL_STEP = 300_000  # numbers inside a step whose modules are always recorded


class Recorder:
    """Records the events of one run.

    Args:
        steps: the number of optimizer steps after which ``on_enough`` is called.
        on_step: called after each step with its number.
        on_enough: called after the last step, with the record.
        noise: what adds rounding errors, if anything does.
    """

    def __init__(
        self,
        steps: int,
        *,
        on_step: Callable[[int], None],
        on_enough: Callable[[Record], None],
        noise: RoundingNoise | None = None,
    ) -> None:
        self.record = Record()
        self.is_on = True
        self.in_backward = 0
        self.noise = noise
        self._steps = steps
        self._on_step, self._on_enough = on_step, on_enough
        self._thread = threading.get_ident()
        self._logs: dict[int, ReplicaLog] = {}
        self._counts: dict[int, float] = {}
        self._names = ModuleNames()
        self._optimizers: dict[int, tuple[Any, int]] = {}
        self._stepped: dict[int, torch.optim.Optimizer] = {}  # in this step, by number
        self._numbers_in_step = 0
        self._is_small = True

    # Whether and where something is recorded

    @property
    def step(self) -> int:
        """The number of the current step, from 1."""
        return self.record.num_steps + 1

    @property
    def is_deep(self) -> bool:
        """Whether what happens inside modules is recorded."""
        return self.step <= _DEEP_STEPS or self._is_small

    def has_ops(self) -> bool:
        """Whether operations inside modules are recorded."""
        return self.is_on and self.step <= _DEEP_STEPS

    def log(self) -> ReplicaLog | None:
        """Returns the log of the calling code; ``None`` if it is not recorded.

        Tensors inside ``torch.func``'s transforms have no memory, so nothing is recorded there.
        """
        if not self.is_on or self.in_backward or functions_interpreter() is not None:
            return None
        replica = current.replica
        if replica is None:
            if threading.get_ident() != self._thread:
                return None
            return self._logs.setdefault(OUTSIDE, ReplicaLog())
        if replica.run.is_trial:
            return None
        if replica.run.is_default:
            return self._logs.setdefault(OUTSIDE, ReplicaLog())
        return self._logs.setdefault(replica.replica_id, ReplicaLog())

    def _is_inside(self) -> bool:
        """Whether the calling code is that of a replica."""
        replica = current.replica
        return replica is not None and not replica.run.is_default

    # Modules

    def call(self, module: nn.Module, forward: Callable[[], Any], inputs: Any) -> Any:
        """Calls a module and records what goes in and comes out.

        Args:
            forward: makes the call with ``inputs``.
        """
        log = self.log()
        if log is None or torch.compiler.is_compiling() or is_jit_tracing():
            return forward()
        is_inside = self._is_inside()
        if not is_inside and not log.path:
            return self._call_outermost(log, module, forward, inputs)
        if is_inside and not log.path:
            self._record_counts(inputs)
            if self.has_ops():
                with self._tracing(log, module, inputs):
                    return self._call_inner(log, module, forward, inputs)
        return self._call_inner(log, module, forward, inputs)

    def _call_inner(
        self, log: ReplicaLog, module: nn.Module, forward: Callable[[], Any], inputs: Any
    ) -> Any:
        """Calls a module inside an outermost call."""
        if not self.is_deep:
            return self._call_in_path(log, module, forward)
        is_inside = self._is_inside()
        name = self._names.name_of(module, sys._getframe(3))
        depth = len(log.path) + is_inside
        info = describe_module(module)
        where = user_line(sys._getframe(3)) if not is_torch_module(module) or depth <= 2 else ""
        events = log.events
        is_part = is_inside and not log.path and self._is_split()
        if not is_part:
            log.add(PendingEvent(INPUT, name, where, depth, info), inputs)
        result = self._call_in_path(log, module, forward)
        if log.events is events:
            kind = PART if is_part else OUTPUT
            log.add(PendingEvent(kind, name, where, depth, dict(info)), result)
        log.add_known(tensors_in(result))
        return result

    @contextmanager
    def _tracing(self, log: ReplicaLog, module: nn.Module, inputs: Any) -> Iterator[None]:
        """Records the operations that modules call inside."""
        log.known = {}
        buffers = list(module.buffers())  # and what a replica's code has in their place
        log.add_known([*tensors_in(inputs), *buffers, *map(resolve_copies, buffers)])
        try:
            with OpTrace(log, current.replica, self._is_recording_ops, self._record_op):
                yield
        finally:
            log.known = None

    def _is_split(self) -> bool:
        """Whether the calling replica has a part of a call that the script makes."""
        outside = self._logs.get(OUTSIDE)
        return outside is not None and bool(outside.path)

    def _call_in_path(self, log: ReplicaLog, module: nn.Module, forward: Callable[[], Any]) -> Any:
        log.path.append(module)
        try:
            result = forward()
        finally:
            log.path.pop()
        return self._add_noise(log, module, result, is_root=False)

    def _add_noise(self, log: ReplicaLog, module: nn.Module, result: Any, *, is_root: bool) -> Any:
        if self.noise is None:
            return result
        log.is_busy = True
        try:
            return self.noise.change_output(module, result, is_root=is_root)
        finally:
            log.is_busy = False

    def _call_outermost(
        self, log: ReplicaLog, module: nn.Module, forward: Callable[[], Any], inputs: Any
    ) -> Any:
        """Calls a module that the script itself calls."""
        self.flush()
        name = self._names.name_of(module, sys._getframe(3))
        where = user_line(sys._getframe(3))
        info = {**describe_module(module), "rng": self._rng()}
        self._record(INPUT, name, tensors_or_parts_in(inputs), where=where, info=info)
        if self.noise is not None:
            self.noise.change_parameters(module)
        log.path.append(module)
        try:
            with ExitStack() as stack:
                if self.has_ops():
                    stack.enter_context(self._tracing(log, module, inputs))
                result = forward()
            result = self._add_noise(log, module, result, is_root=True)
        except BaseException:
            self._clear_logs()
            raise
        finally:
            log.path.pop()
        if self.is_on:
            self.flush()
            info = {**info, "rng": self._rng()}
            self._record(OUTPUT, name, tensors_or_parts_in(result), where=where, info=info)
        return result

    # Operations inside modules: see OpTrace

    def _is_recording_ops(self) -> bool:
        return self.has_ops() and not self.in_backward and functions_interpreter() is None

    def _record_op(self, log: ReplicaLog, result: Any, info: dict[str, Any], where: str) -> None:
        """Records a function of tensors that a module's forward has called."""
        name = self._names.name_of(log.path[-1]) if log.path else "the function in run"
        depth = len(log.path) + 1
        log.add(PendingEvent(OP, name, where, depth, info), result)

    # Losses, optimizers

    def record_loss(self, tensors: Sequence[Any], frame: Any) -> None:
        """Records where a backward pass begins."""
        log = self.log()
        if log is None:
            return
        where = user_line(frame)
        if self._is_inside():
            log.add(PendingEvent(LOSS, "loss", where, 0, {}), list(tensors))
            return
        self.flush()
        self._record(LOSS, "loss", tensors_in(list(tensors)), where=where)

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Records the gradients that an optimizer is about to use."""
        log = self.log()
        if log is None:
            return
        if not self._is_inside():
            self.flush()
        params = list(self._names.parameters_of(optimizer))
        if self.noise is not None:
            self.noise.change_gradients([p for p, _ in params])
        number = self._number_of(optimizer)
        self._stepped[number] = optimizer
        # Inside run all replicas read the gradients, which they reduce together.
        found = [(name, p.grad) for p, name in params]
        replica = current.replica
        if replica is not None and self._is_inside():
            if replica.replica_id != min(replica.run.active):
                return
            logs = [self._logs.get(r, ReplicaLog()) for r in replica.run.active]
            if len({len(log.events) for log in logs}) == 1:  # the read has stopped them all here
                self.flush()
        for name, grad in found:
            if grad is not None:
                self._record(GRADIENT, name, [grad], info={"optimizer": number})

    def end_step(self) -> None:
        """Records parameters and buffers at the end of a step, and ends the script after enough.

        See [Note: Ends of steps].
        """
        if self.log() is None:
            return
        self.flush()
        for number, optimizer in self._stepped.items():
            for param, name in self._names.parameters_of(optimizer):
                self._record(PARAMETER, name, [param], info={"optimizer": number})
        self._stepped.clear()
        for buffer, name in self._names.buffers():
            self._record(BUFFER, name, tensors_in([buffer]))
        self.record.num_steps += 1
        self._is_small = self._is_small and self._numbers_in_step <= _SMALL_STEP
        self._numbers_in_step = 0
        self._on_step(self.record.num_steps)
        if self.record.num_steps >= self._steps:
            self.record.ending = "steps"
            self.is_on = False
            self._on_enough(self.record)

    def _number_of(self, optimizer: torch.optim.Optimizer) -> int:
        number = len(self._optimizers) + 1
        return self._optimizers.setdefault(id(optimizer), (optimizer, number))[1]

    # Joining what replicas have recorded

    def _record_counts(self, inputs: Any) -> None:
        """Records how many examples the current replica has."""
        replica = current.replica
        assert replica is not None
        counts = replica.run.counts
        first = next((t for t in tensors_in(inputs) if t.dim()), None)
        if counts is not None:
            self._counts[replica.replica_id] = counts[replica.replica_id]
        elif first is not None:
            self._counts[replica.replica_id] = first.shape[0]

    def flush(self) -> None:
        """Joins what the replicas have recorded since, and takes it into the record."""
        for event in join_events(self._logs, self._counts, self.step):
            self._numbers_in_step += sum(int(np.prod(f.shape)) for f in event.prints[:1])
            self.record.events.append(event)
        self._clear_logs()

    def _clear_logs(self) -> None:
        for log in self._logs.values():
            log.clear()

    def _record(
        self,
        kind: str,
        name: str,
        values: Sequence[Tensor | PerReplica[Any]],
        *,
        where: str = "",
        info: dict[str, Any] | None = None,
    ) -> None:
        """Records an event outside replicas, one for each tensor or PerReplica of tensors."""
        for k, value in enumerate(values):
            event = RecordedEvent(self.step, kind, name, where=where)
            event.info = {**(info or {}), "part": k}
            if isinstance(value, Tensor):
                event.prints, event.ways = [fingerprint(value)], ["whole"]
            else:  # a split call has returned it
                counts = value.weights or [1.0] * len(value.values)
                parts = dict(value.parts())
                event.prints, event.ways = join_parts(
                    list(parts.values()), [counts[r] for r in parts]
                )
                event.info["is_apart"] = True
            for dtype in {f.dtype for f in event.prints if f.is_float}:
                if dtype not in self.record.dtypes:
                    self.record.dtypes.append(dtype)
            self.record.events.append(event)

    def _rng(self) -> list[int]:
        """Returns checksums of the generators: torch's, Python's, NumPy's."""
        if self.step > _DEEP_STEPS:
            return []
        states = (
            torch.get_rng_state().numpy().tobytes(),
            repr(random.getstate()).encode(),
            repr(np.random.get_state()).encode(),
        )
        return [zlib.crc32(state) for state in states]


if TYPE_CHECKING:
    from mirror.execution.run import Replica

_RANDOM = frozenset(
    "bernoulli bernoulli_ cauchy_ dropout exponential_ geometric_ log_normal_ multinomial normal "
    "normal_ poisson rand rand_like randint randint_like randn randn_like random_ randperm "
    "rrelu uniform_ gumbel_softmax alpha_dropout feature_dropout dropout1d dropout2d dropout3d "
    "feature_alpha_dropout dropout_ native_dropout".split()
)
_UNSEEN = frozenset(
    "__get__ __set__ size dim numel is_floating_point device shape is_contiguous __repr__ "
    "requires_grad_ register_hook __len__ data_ptr stride __hash__ element_size storage_offset "
    "is_complex type __format__ __bool__ item tolist numpy "
    "empty empty_like empty_strided new_empty".split()  # the last four: memory as it was
)


class OpTrace(TorchFunctionMode):
    """Records functions on one log while it is entered.

    Args:
        log: of the replica, or of code outside replicas.
        replica: its functions are recorded; another replica may run on the same thread.
        is_on: whether functions are recorded now.
        note: called with the log, the result, the facts of the call, and the user's line.
    """

    def __init__(
        self,
        log: ReplicaLog,
        replica: Replica | None,
        is_on: Callable[[], bool],
        note: Callable[[ReplicaLog, Any, dict[str, Any], str], None],
    ) -> None:
        super().__init__()
        self._log, self._replica, self._is_on, self._note = log, replica, is_on, note

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls a function and records its result."""
        result = func(*args, **(kwargs or {}))
        log = self._log
        if log.is_busy or not self._is_on():
            return result
        if current.replica is not self._replica or torch.compiler.is_compiling():
            return result
        name = getattr(func, "__name__", "")
        outside = [a for a in args if isinstance(a, Tensor) and self._is_outside(a)]
        if not outside:
            log.add_known(result if isinstance(result, (tuple, list)) else (result,))
        caller = sys._getframe(1)
        if name in _UNSEEN or not log.path or _is_in_layer(caller):
            return result
        values = args[0] if name == "__setitem__" else result
        if not isinstance(values, (Tensor, tuple, list)):
            return result
        info: dict[str, Any] = {"op": name}
        if name in _RANDOM:
            info["random"] = True
        numbers = [
            float(value)
            for value in (*args, *(kwargs or {}).values())
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        if numbers:
            info["numbers"] = numbers
        if outside:
            info["outside"] = [_checksum(tensor) for tensor in outside]
            is_write = name == "__setitem__" or (name.endswith("_") and name[-2:] != "__")
            info["writes_outside"] = is_write and any(args[0] is tensor for tensor in outside)
        self._note(log, values, info, user_line(caller))
        log.add_known(values if isinstance(values, (tuple, list)) else (values,))
        return result

    def _is_outside(self, tensor: Tensor) -> bool:
        """Whether a tensor is neither made inside the call nor a parameter, buffer or input."""
        known = self._log.known or {}
        return id(tensor) not in known and not isinstance(tensor, torch.nn.Parameter)


def _is_in_layer(frame: FrameType | None) -> bool:
    """Whether the code of torch's own layers, or of mirror, has called a function."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_code.co_filename.startswith(_LAYERS):
            return True
        frame = frame.f_back
    return False


def _checksum(tensor: Tensor) -> float:
    with torch.no_grad():
        return float(dense(tensor).double().sum()) if not tensor.is_complex() else 0.0
