"""The recorder: notes what happens in a training step, on one device and under a strategy alike.

[Note: What is recorded]
Problem: a call of a mirrored module is split, and each replica sees its part only.
Rule:    the outermost call is noted where the script makes it, with whole inputs and outputs
         what happens inside is noted per replica: its n-th event belongs to the n-th of the others
         at the end of the call the replicas' tensors are joined in every way that fits
Consequence: both runs leave the same sequence of events, and the first one that differs names the
module, and inside it the operation and the line.
"""

from __future__ import annotations

import random
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mirror.base.torch_private import tracing_state
from mirror.execution.current_replica import current
from mirror.threads.user_frames import user_line
from mirror.tools.check.fingerprint import fingerprint
from mirror.tools.check.join_parts import join_parts
from mirror.tools.check.module_description import describe_module, tensors_in
from mirror.tools.check.op_trace import Item, OpTrace, RecordingLane
from mirror.tools.check.perturb import Perturbation
from mirror.tools.check.record import (
    BUFFER,
    ENTER,
    EXIT,
    GRADIENT,
    LOSS,
    OP,
    PARAMETER,
    PART,
    Record,
    RecordedEvent,
)

_MOST_ITEMS = 4000  # events inside one outermost call
_MOST_NUMBERS = 30_000_000  # that are copied inside one outermost call
_SMALL_STEP = 300_000  # numbers inside a step that is recorded deeply all the time


class Recorder:
    """Notes the events of one run.

    Args:
        steps: after so many optimizer steps ``on_enough`` is called.
        deep_steps: so many steps are recorded with the operations inside modules.
        on_step: called after each step with its number.
        on_enough: ends the script.
        perturbation: what adds rounding errors, if anything does.
    """

    def __init__(
        self,
        steps: int,
        *,
        deep_steps: int,
        on_step: Callable[[int], None],
        on_enough: Callable[[], None],
        perturbation: Perturbation | None = None,
    ) -> None:
        self.record = Record()
        self.is_on = True
        self.in_backward = 0
        self.perturbation = perturbation
        self._steps, self._deep_steps = steps, deep_steps
        self._on_step, self._on_enough = on_step, on_enough
        self._thread = threading.get_ident()
        self._lanes: dict[int, RecordingLane] = {}
        self._counts: dict[int, float] = {}
        self._names: dict[int, tuple[Any, str]] = {}  # of modules, by id
        self._params: dict[int, tuple[Any, str]] = {}  # of parameters, by id
        self._roots: dict[str, Any] = {}
        self._optimizers: dict[int, tuple[Any, int]] = {}
        self._stepping: set[tuple[int, int]] = set()
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
        return self.step <= self._deep_steps or self._is_small

    def has_ops(self) -> bool:
        """Whether operations inside modules are recorded."""
        return self.is_on and self.step <= self._deep_steps

    def lane(self) -> RecordingLane | None:
        """Returns the lane of the calling code; ``None`` for what is not recorded."""
        if not self.is_on or self.in_backward:
            return None
        replica = current.replica
        if replica is None:
            if threading.get_ident() != self._thread:
                return None
            return self._lanes.setdefault(-1, RecordingLane())
        if replica.run.is_default:
            return self._lanes.setdefault(-1, RecordingLane())
        return self._lanes.setdefault(replica.replica_id, RecordingLane())

    def _is_inside(self) -> bool:
        """Whether the calling code is that of a replica."""
        replica = current.replica
        return replica is not None and not replica.run.is_default

    # Modules

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Calls a module and notes what goes in and comes out."""
        lane = self.lane()
        if lane is None or torch.compiler.is_compiling() or tracing_state() is not None:
            return forward(*args, **kwargs)
        is_inside = self._is_inside()
        is_outermost = not is_inside and not lane.path
        if is_outermost:
            return self._call_outermost(lane, module, forward, args, kwargs)
        if is_inside and not lane.path:
            self._note_counts(args, kwargs)
            if self.has_ops():
                with self._tracing(lane, module, args, kwargs):
                    return self._call_inner(lane, module, forward, args, kwargs)
        return self._call_inner(lane, module, forward, args, kwargs)

    def _call_inner(
        self,
        lane: RecordingLane,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Calls a module inside an outermost call."""
        if not self.is_deep:
            return self._in_path(lane, module, forward, args, kwargs)
        is_inside = self._is_inside()
        name = self._name_of(module)
        depth = len(lane.path) + is_inside
        info = describe_module(module)
        where = user_line(sys._getframe(3)) if not _is_of_torch(module) or depth <= 2 else ""
        lane_items = lane.items
        is_part = is_inside and not lane.path and self._is_split()
        if not is_part:
            self._add(lane, Item(ENTER, name, where, depth, [], info), (args, kwargs))
        result = self._in_path(lane, module, forward, args, kwargs)
        if lane.items is lane_items:
            kind = PART if is_part else EXIT
            self._add(lane, Item(kind, name, where, depth, [], dict(info)), result)
        if lane.trace is not None:
            lane.trace.know(tensors_in(result))
        return result

    @contextmanager
    def _tracing(
        self, lane: RecordingLane, module: nn.Module, args: Any, kwargs: Any
    ) -> Iterator[None]:
        """Notes the operations that modules call inside."""
        trace = OpTrace(self, lane, current.replica)
        trace.know([*tensors_in((args, kwargs)), *module.buffers()])
        lane.trace = trace
        try:
            with trace:
                yield
        finally:
            lane.trace = None

    def _is_split(self) -> bool:
        """Whether the calling replica has a part of a call that the script makes."""
        outside = self._lanes.get(-1)
        return outside is not None and bool(outside.path)

    def _in_path(
        self,
        lane: RecordingLane,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        lane.path.append(module)
        try:
            result = forward(*args, **kwargs)
        finally:
            lane.path.pop()
        return self._perturbed(lane, module, result, is_root=False)

    def _perturbed(
        self, lane: RecordingLane, module: nn.Module, result: Any, *, is_root: bool
    ) -> Any:
        if self.perturbation is None:
            return result
        lane.is_busy = True
        try:
            return self.perturbation.perturb_output(module, result, is_root=is_root)
        finally:
            lane.is_busy = False

    def _call_outermost(
        self,
        lane: RecordingLane,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Calls a module that the script itself calls."""
        self.flush()
        name = self._name_of(module, sys._getframe(3))
        where = user_line(sys._getframe(3))
        info = {**describe_module(module), "rng": self._rng()}
        self._note(ENTER, name, tensors_in((args, kwargs)), where=where, info=info)
        if self.perturbation is not None:
            self.perturbation.perturb_parameters(module)
        lane.path.append(module)
        try:
            with ExitStack() as stack:
                if self.has_ops():
                    stack.enter_context(self._tracing(lane, module, args, kwargs))
                result = forward(*args, **kwargs)
            result = self._perturbed(lane, module, result, is_root=True)
        except BaseException:
            self._drop_items()
            raise
        finally:
            lane.path.pop()
        if self.is_on:
            self.flush()
            info = {**info, "rng": self._rng()}
            self._note(EXIT, name, tensors_in(result), where=where, info=info)
        return result

    def _add(self, lane: RecordingLane, item: Item, values: Any) -> None:
        """Notes an event inside an outermost call, with copies of its tensors."""
        if len(lane.items) >= _MOST_ITEMS:
            return
        lane.is_busy = True
        for tensor in tensors_in(values):
            lane.numbers += tensor.numel()
            if lane.numbers > _MOST_NUMBERS:
                break
            item.tensors.append(tensor.detach().clone())
        lane.items.append(item)
        lane.is_busy = False

    # Operations inside modules: see op_trace.py

    def note_op(self, lane: RecordingLane, result: Any, info: dict[str, Any], where: str) -> None:
        """Notes a function of tensors that a module's forward has called."""
        name = self._name_of(lane.path[-1]) if lane.path else "the function in run"
        depth = len(lane.path) + 1
        self._add(lane, Item(OP, name, where, depth, [], info), result)

    # Losses, optimizers

    def call_step(
        self, optimizer: torch.optim.Optimizer, step: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Calls an optimizer's step, and notes gradients before and parameters after it.

        A strategy may step it once more inside, for a replica; that is not noted.
        """
        replica = current.replica if self._is_inside() else None
        key = id(optimizer), -1 if replica is None else replica.replica_id
        is_within = key in self._stepping
        if replica is None:
            is_within = is_within or any(number == key[0] for number, _ in self._stepping)
        if is_within or self.lane() is None:
            return step(*args, **kwargs)
        self.before_step(optimizer)
        self._stepping.add(key)
        try:
            result = step(*args, **kwargs)
        finally:
            self._stepping.discard(key)
        self.after_step(optimizer)
        return result

    def note_loss(self, tensors: Sequence[Any], frame: Any) -> None:
        """Notes where a backward pass begins."""
        lane = self.lane()
        if lane is None:
            return
        where = user_line(frame)
        if self._is_inside():
            self._add(lane, Item(LOSS, "loss", where, 0, [], {}), list(tensors))
            return
        self.flush()
        self._note(LOSS, "loss", tensors_in(list(tensors)), where=where)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes the gradients that an optimizer is about to use."""
        lane = self.lane()
        if lane is None:
            return
        if not self._is_inside():
            self.flush()
        params = list(self._params_of(optimizer))
        if self.perturbation is not None:
            self.perturbation.perturb_gradients([p for p, _ in params])
        number = self._number_of(optimizer)
        # Inside run all replicas read the gradients, which they reduce together.
        found = [(name, p.grad) for p, name in params]
        if self._is_inside() and not self._is_first():
            return
        for name, grad in found:
            if grad is not None:
                self._note(GRADIENT, name, [grad], info={"optimizer": number})

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes the parameters and buffers after an optimizer's step."""
        lane = self.lane()
        if lane is None:
            return
        is_inside = self._is_inside()
        if is_inside and not self._is_last():
            return
        if is_inside:
            self.flush()
        number = self._number_of(optimizer)
        for param, name in self._params_of(optimizer):
            self._note(PARAMETER, name, [param], info={"optimizer": number})
        if not is_inside:
            for root in list(self._roots.values()):
                module = root()
                if module is not None:
                    for name, buffer in module.named_buffers():
                        label = f"{self._name_of(module)}.{name}"
                        self._note(BUFFER, label, tensors_in([buffer]))
        self.end_step()

    def end_step(self) -> None:
        """Counts a step, and ends the script after enough."""
        self.record.num_steps += 1
        self._is_small = self._is_small and self._numbers_in_step <= _SMALL_STEP
        self._numbers_in_step = 0
        self._on_step(self.record.num_steps)
        if self.record.num_steps >= self._steps:
            self.record.ending = "steps"
            self.is_on = False
            self._on_enough()

    def _is_first(self) -> bool:
        replica = current.replica
        return replica is None or replica.replica_id == min(replica.run.active)

    def _is_last(self) -> bool:
        """Whether all replicas of a run have arrived, this one as the last."""
        replica = current.replica
        assert replica is not None
        lanes = [self._lanes.setdefault(r, RecordingLane()) for r in replica.run.active]
        self._lanes[replica.replica_id].arrived += 1
        return len({lane.arrived for lane in lanes}) == 1

    def _params_of(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, str]]:
        for g, group in enumerate(optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                known = self._params.get(id(param))
                yield param, known[1] if known is not None else f"parameter {i} of group {g}"

    def _number_of(self, optimizer: torch.optim.Optimizer) -> int:
        number = len(self._optimizers) + 1
        return self._optimizers.setdefault(id(optimizer), (optimizer, number))[1]

    # Joining what replicas have noted

    def _note_counts(self, args: Any, kwargs: Any) -> None:
        """Notes how many examples the current replica has."""
        replica = current.replica
        assert replica is not None
        counts = replica.run.counts
        first = next((t for t in tensors_in((args, kwargs)) if t.dim()), None)
        if counts is not None:
            self._counts[replica.replica_id] = counts[replica.replica_id]
        elif first is not None:
            self._counts[replica.replica_id] = first.shape[0]

    def flush(self) -> None:
        """Joins what the replicas have noted since, and takes it into the record."""
        lanes = {r: lane for r, lane in self._lanes.items() if lane.items}
        if len(lanes) > 1:
            lanes.pop(-1, None)  # what splits the call and joins its outputs
        rows = [lanes[r].items for r in sorted(lanes)]
        ids = sorted(lanes)
        for lane in self._lanes.values():
            lane.items, lane.numbers = [], 0
        if not rows:
            return
        counts = [self._counts.get(r, 1.0) for r in ids]
        parted = None
        for i in range(max(map(len, rows))):
            items = [row[i] for row in rows if i < len(row)]
            keys = {(item.kind, item.name, item.info.get("op")) for item in items}
            if len(keys) > 1 or len(items) < len(rows):
                parted = items
                break
            self._join(items, counts, ids)
        if parted is not None:  # the replicas have gone different ways
            event = RecordedEvent(self.step, OP, parted[0].name, where=parted[0].where, depth=1)
            event.info = {"op": "parted", "ways": [f"{i.name} at {i.where}" for i in parted]}
            self.record.events.append(event)

    def _join(self, items: Sequence[Item], counts: Sequence[float], ids: Sequence[int]) -> None:
        first = items[0]
        info = dict(first.info)
        if len(items) > 1:
            numbers = [item.info.get("numbers") for item in items]
            if any(numbers):
                info["numbers_of_replicas"] = numbers
            if first.kind in (LOSS, EXIT, PART) and first.tensors and first.tensors[0].dim() == 0:
                info["values_of_replicas"] = [float(item.tensors[0].detach()) for item in items]
        if ids != [-1]:
            info["counts"] = [float(c) for c in counts]
        num = min(len(item.tensors) for item in items)
        for k in range(num):
            parts = [item.tensors[k] for item in items]
            prints, ways = join_parts(parts, counts) if ids != [-1] else ([], [])
            if ids == [-1]:
                prints, ways = [fingerprint(parts[0])], ["whole"]
            event = RecordedEvent(self.step, first.kind, first.name, prints, ways, first.where)
            event.depth = first.depth
            event.info = {**info, "part": k}
            self._numbers_in_step += sum(part.numel() for part in parts)
            self.record.events.append(event)
        if not num:
            event = RecordedEvent(
                self.step, first.kind, first.name, [], [], first.where, first.depth
            )
            event.info = info
            self.record.events.append(event)

    def _drop_items(self) -> None:
        for lane in self._lanes.values():
            lane.items, lane.numbers = [], 0

    def _note(
        self,
        kind: str,
        name: str,
        tensors: Sequence[Tensor],
        *,
        where: str = "",
        info: dict[str, Any] | None = None,
    ) -> None:
        """Notes an event outside of replicas, one for each tensor."""
        for k, tensor in enumerate(tensors):
            event = RecordedEvent(self.step, kind, name, [fingerprint(tensor)], ["whole"], where)
            event.info = {**(info or {}), "part": k}
            dtype = event.prints[0].dtype
            if "float" in dtype and dtype not in self.record.dtypes:
                self.record.dtypes.append(dtype)
            self.record.events.append(event)

    # Names

    def _name_of(self, module: nn.Module, frame: Any = None) -> str:
        known = self._names.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        label = _variable(module, frame) or type(module).__name__
        base, number = label, 1
        while label in self._roots:
            number += 1
            label = f"{base}#{number}"
        self._roots[label] = weakref.ref(module)
        for name, child in module.named_modules():
            path = f"{label}.{name}" if name else label
            self._names[id(child)] = weakref.ref(child), path
        for name, param in module.named_parameters():
            self._params.setdefault(id(param), (weakref.ref(param), f"{label}.{name}"))
        return label

    def _rng(self) -> list[int]:
        """Returns checksums of the generators: torch's, Python's, NumPy's."""
        if self.step > self._deep_steps:
            return []
        states = (
            torch.get_rng_state().numpy().tobytes(),
            repr(random.getstate()).encode(),
            repr(np.random.get_state()).encode(),
        )
        return [zlib.crc32(state) for state in states]


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _variable(module: nn.Module, frame: Any) -> str:
    """Returns the name of the variable that holds a module, where the script calls it."""
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    for names in (frame.f_locals, frame.f_globals):
        for name, value in list(names.items()):
            if value is module:
                return str(name)
    for name, value in list(frame.f_locals.items()):
        if isinstance(getattr(value, "__dict__", None), dict):
            for key, inner in list(value.__dict__.items()):
                if inner is module:
                    return f"{name}.{key}"
    return ""


def _is_library(filename: str) -> bool:
    return f"{torch.__path__[0]}/" in filename or "/mirror/" in filename


@contextmanager
def quiet(recorder: Recorder) -> Iterator[None]:
    """Records nothing inside."""
    before, recorder.is_on = recorder.is_on, False
    try:
        yield
    finally:
        recorder.is_on = before
