"""PreemptionCheckpointHandler: saves between two steps when the machine is taken away.

A signal may arrive at any moment, in a backward pass or during a save. The signal handler only
records it, and the save happens where a step ends, see [Note: Ends of steps]. The calls of a loop
after that (``scheduler.step()``, ``scaler.update()``, counting) belong to the step: without them
in the checkpoint, a resumed run would lack them once. No code runs at the end of a loop's body.
But if the loop iterates over a distributed dataset in the checkpoint, the next event is the
request for another batch. So

    the checkpoint has                                    it is saved where
    modules that its one optimizer trains, and datasets   the step ends
    anything else, and a dataset that is iterated over    the next batch is requested, or the
                                                          pass ends, or the handler is closed
    anything else, and no such dataset                    the step ends

A signal may reach one worker only. So the workers exchange their states at every step, and all
save and exit at the same step.

A platform may take the machine away long after the signal, without a second signal. So there are
two saves: one at once, which remains if the machine goes early, and one near the end. The last
save must finish in time, and can begin only where a step ends. So the handler exits when two more
steps and two saves, each as long as the longest one seen, might not fit into the seconds left.
Only a worker that got the signal knows its deadline: the workers exchange what they have to do,
and all do the most urgent.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mirror.base.migration_hints import call_with_hints
from mirror.base.process_bound import NoCopy
from mirror.data.distributed_dataset import DistributedDataset
from mirror.errors import CheckpointError, StrategyError, short_repr
from mirror.execution.lifecycle import step_ends
from mirror.replica.optimizers.step_interceptor import watch_optimizer_steps
from mirror.train.checkpoint.checkpoint import worker_agreement_of
from mirror.train.checkpoint.manager import CheckpointManager
from mirror.values import is_int, is_real

_open: list[PreemptionCheckpointHandler] = []
_replaced: dict[int, Any] = {}  # the former handlers of signals
_ignored: dict[int, Any] = {}  # the former handlers of signals that an exit ignores
_clock = time.monotonic
_DEFAULT_EXIT_CODE = 42
_RESERVE = 2.0  # the number of steps and saves that must fit before the deadline


@call_with_hints
@dataclass(frozen=True)
class TerminationConfig:
    """How a platform announces that it takes a machine away, and how a program exits there.

    ::

        config = mirror.train.TerminationConfig(
            termination_watcher_fn=maintenance_is_announced,
            exit_fn=lambda: sys.exit(143),
            grace_period=3600,
        )
        with mirror.PreemptionCheckpointHandler(manager, termination_config=config):
            ...

    Attributes:
        termination_watcher_fn: called without arguments where a step ends, until it returns a
            true value: this machine will be taken away. It must return at once.
        exit_fn: called without arguments on every worker after the last save and after the
            handlers are closed, instead of raising ``SystemExit(42)``. If it returns, the program
            goes on, and no handler listens any more.
        grace_period: the seconds between the announcement and the end of the machine. If it is
            above 0, the handler saves at once, training continues, and the handler saves again
            and exits before the time is over. ``None`` and 0: it saves at once and exits.
        save_fn: called without arguments on every worker instead of ``manager.save(step)``. It
            may save with ``manager`` or with ``manager.checkpoint``; the handler waits for what
            goes on beside.

    Raises:
        TypeError: a function is not callable, or the grace period is not a number.
        ValueError: the grace period is negative or not finite.
    """

    termination_watcher_fn: Callable[[], object] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            fn = getattr(self, name)
            if fn is not None and not callable(fn):
                raise TypeError(
                    f"{name} must be a function without arguments, got {short_repr(fn)}; pass "
                    "the function itself, not what it returns"
                )
        seconds = self.grace_period
        if seconds is None:
            return
        if not is_real(seconds):
            raise TypeError(
                f"grace_period must be a number of seconds, got {short_repr(seconds)}; pass 30 or "
                "0.5, or 0 to exit after the first save"
            )
        if not 0 <= seconds < math.inf:
            raise ValueError(
                f"grace_period must be finite and >= 0 seconds, got {seconds}; pass 0 to exit "
                "after the first save"
            )


class Urgency(IntEnum):
    """The action of a worker at the end of a step; the highest value of all workers counts."""

    NONE = 0
    SAVE_AND_CONTINUE = 1
    SAVE_AND_EXIT = 2


@call_with_hints
class PreemptionCheckpointHandler(NoCopy):
    """Saves and exits at the next end of a step after a signal.

    ::

        step = manager.restore_latest() or 0
        with mirror.PreemptionCheckpointHandler(manager):
            for batch in batches:
                strategy.run(train_step, args=(batch,))

    The checkpoint gets the number of steps done, counted from ``restore_latest()``, or from the
    number under which the program saved with the same manager, if that is larger. If the directory
    has a checkpoint with a larger number, of another manager, it gets the next number, so that
    ``restore_latest()`` finds what was saved last.

    A step is an outermost run with an optimizer's step in it, or an optimizer's step outside run.
    If the checkpoint has a distributed dataset and more than modules and one optimizer, a step is
    a batch with an optimizer's step. The docstring of
    ``mirror/train/checkpoint/preemption.py`` says where exactly it saves.

    Several handlers may be open: each saves, and the first decides how the program exits.

    Attributes:
        is_due: whether a signal has arrived, or the watcher has returned a true value.
    """

    _instead = "create one in the other process"

    def __init__(
        self,
        manager: CheckpointManager,
        signals: Iterable[int] = (signal.SIGTERM,),
        exit_code: int = _DEFAULT_EXIT_CODE,
        watcher: Callable[[], object] | None = None,
        *,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        """Starts to listen for signals; ``close`` restores their former handlers.

        From the decision to exit, its signals are ignored until the process has ended. A program
        that catches the ``SystemExit`` and continues sets their handlers itself.

        Args:
            signals: the signals that request a checkpoint.
            exit_code: the exit code of the process, as ``SystemExit``; it tells a launcher that
                the training is not finished.
            watcher: called where a step ends; a true value requests a checkpoint.
            termination_config: how the platform takes machines away: a watcher, functions for
                the save and the exit, and the grace period.

        Raises:
            StrategyError: there are signals, and this is not the main thread, where Python
                handles them.
            TypeError, ValueError: an argument has another type, or is not a signal that can be
                handled; or ``watcher`` or ``exit_code`` is also in ``termination_config``.
        """
        _check(manager, exit_code, watcher)
        config = _check_config(termination_config, exit_code, watcher)
        self.is_due = False
        self._manager = manager
        self._exit_code = exit_code
        self._watcher = watcher or config.termination_watcher_fn
        self._exit_fn = config.exit_fn
        self._save_fn = config.save_fn
        self._grace_seconds = config.grace_period or 0.0
        self._asked_at: float | None = None
        self._has_saved_early = False  # in the grace period
        self._is_ending = False  # the with block is ending
        self._step_seconds = self._save_seconds = 0.0
        self._step_began = _clock()
        self._signals = _check_signals(signals)
        self._known: list[int] = []  # ids of the objects that _datasets were found in
        self._datasets: list[DistributedDataset] = []
        self._is_simple = True
        self._has_stepped = False  # since the last batch, where that is counted
        self._workers = worker_agreement_of(manager.checkpoint.objects)
        self._agreed = Urgency.NONE  # the workers' highest
        self._process = os.getpid()
        for number in self._signals:
            _listen(number)
        watch_optimizer_steps(are_mirrored=False)
        if not _open:
            step_ends.listeners.append(_end_steps)
        _open.append(self)

    def close(self) -> None:
        """Restores the former handlers of the signals; idempotent."""
        if self not in _open:
            return
        _open.remove(self)
        if not _open:
            step_ends.listeners.remove(_end_steps)
        for dataset in self._datasets:
            dataset.before_next.remove(self._is_requested)
        self._datasets = []
        wanted = {number for handler in _open for number in handler._signals}
        for number in set(self._signals) - wanted:
            _stop_listening(number)

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Closes it; saves and exits if a signal has arrived, also within a grace period."""
        try:
            if kind is None and self in _open:
                self._is_ending = True
                if self._has_stepped:
                    self._count()
                self._agree()
                _leave_if_due()
        finally:
            self.close()

    def _end_step(self) -> None:
        """Counts a step that has ended."""
        self._find_datasets()
        self._has_stepped = self._manager.progress.is_pending = True
        if self._is_simple or not any(dataset.is_iterated for dataset in self._datasets):
            self._count()

    def _count(self) -> None:
        self._has_stepped = False
        self._manager.progress.step()
        now = _clock()
        seconds = now - self._step_began
        self._step_seconds = max(self._step_seconds, seconds) if self.is_due else seconds
        self._step_began = now
        if self._watcher is not None and not self.is_due and self._watcher():
            self._ask()
        self._agree()

    def _ask(self) -> None:
        """Records a request for a checkpoint; safe in a signal handler."""
        if self._asked_at is None:
            self._asked_at = _clock()
        self.is_due = True

    def _agree(self) -> None:
        """Exchanges the urgency with all workers, if there are several."""
        if self._workers.is_multi_worker:
            own = self._own_urgency
            self._agreed = Urgency(self._workers.agree("the end of a step", own))

    @property
    def _urgency(self) -> Urgency:
        return self._agreed if self._workers.is_multi_worker else self._own_urgency

    @property
    def _own_urgency(self) -> Urgency:
        """The urgency of this worker alone."""
        if not self.is_due:
            return Urgency.NONE
        if self._is_ending or not self._grace_seconds:
            return Urgency.SAVE_AND_EXIT
        if self._asked_at is None:  # the program has set is_due
            self._asked_at = _clock()
        left = self._asked_at + self._grace_seconds - _clock()
        fits = left > _RESERVE * (self._step_seconds + self._save_seconds)
        return Urgency.SAVE_AND_CONTINUE if fits else Urgency.SAVE_AND_EXIT

    @property
    def _exits(self) -> bool:
        return self._urgency is Urgency.SAVE_AND_EXIT

    def _save_early(self) -> None:
        """Saves at the beginning of the grace period, and may use up most of it."""
        self._has_saved_early = True
        self.save()
        self._agree()

    def _is_requested(self) -> None:
        """Ends a step: the loop requests a batch, so it has finished the last one."""
        if self._has_stepped:
            self._count()
            _leave_if_due()

    def save(self) -> None:
        """Saves under the number of steps done, or with ``save_fn``."""
        began = _clock()
        with suppress(CheckpointError):  # of a save in flight; it was logged
            self._manager.wait()
        if self._save_fn is None:
            self._manager.save(self._number())
        else:
            self._save_fn()
            # That save may be in flight: no worker exits before the chief has written.
            self._workers.run_on_chief("the save of save_fn", self._manager.wait)
        self._step_began = _clock()
        self._save_seconds = max(self._save_seconds, self._step_began - began)

    def _number(self) -> int:
        """Returns a number for a checkpoint that makes it the newest in the directory."""
        done = self._manager.progress.number

        def number() -> str:
            latest = self._manager.latest
            return str(done if latest is None or latest <= done else latest + 1)

        return int(self._workers.choose("the number of a checkpoint", number))

    def _exit(self) -> None:
        if self._exit_fn is None:
            raise SystemExit(self._exit_code)
        self._exit_fn()

    def _find_datasets(self) -> None:
        objects = self._manager.checkpoint.objects
        if self._workers.size == 1:  # the strategy may be newer than this handler
            self._workers = worker_agreement_of(objects)
        known = [id(obj) for obj in objects.values()]
        if known == self._known:
            return
        self._known = known
        for dataset in self._datasets:
            dataset.before_next.remove(self._is_requested)
        found = list(objects.values())
        self._datasets = [obj for obj in found if isinstance(obj, DistributedDataset)]
        for dataset in self._datasets:
            dataset.before_next.append(self._is_requested)
        optimizers = [obj for obj in found if isinstance(obj, Optimizer)]
        trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        others = [obj for obj in found if not isinstance(obj, (DistributedDataset, Optimizer))]
        self._is_simple = len(optimizers) < 2 and all(_is_trained(o, trained) for o in others)


def _end_steps() -> None:
    for handler in tuple(_open):
        handler._end_step()
    _leave_if_due()


def _leave_if_due() -> None:
    """Saves and exits, once all requested handlers have seen the end of the step."""
    due = [handler for handler in _open if handler._urgency]
    if not due or any(handler._has_stepped for handler in due):
        return
    unsaved = due
    if not any(handler._exits for handler in due):
        early = [handler for handler in due if not handler._has_saved_early]
        for handler in early:
            handler._save_early()
        if not any(handler._exits for handler in early):
            return
        unsaved = [handler for handler in due if handler not in early]
    first = next((handler for handler in due if handler._exits), due[0])
    ignored = _ignore_signals()
    is_saved = False
    try:
        for handler in unsaved:
            handler.save()
        is_saved = True
    finally:
        if not is_saved or first._exit_fn is not None:
            for number in ignored:
                signal.signal(number, _on_signal)
            ignored = []
    for number in ignored:
        _ignored[number] = _replaced.pop(number, None)
    for handler in tuple(_open):
        handler.close()
    first._exit()


def _ignore_signals() -> list[int]:
    """Ignores the signals of all handlers from the decision to exit on, and returns them.

    A second signal must not end the process with another code than the handler's, or in the
    middle of the last save. The signals stay ignored after ``SystemExit`` is raised: Python keeps
    ignoring them while it shuts down, which it does not for signals with a function.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    numbers = {number for handler in _open for number in handler._signals}
    ours = [number for number in numbers if signal.getsignal(number) is _on_signal]
    for number in ours:
        signal.signal(number, signal.SIG_IGN)
    return ours


def _is_trained(obj: object, trained: set[int]) -> bool:
    """Returns whether an object is a module with trained parameters."""
    return isinstance(obj, nn.Module) and any(id(p) in trained for p in obj.parameters())


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Records a signal, and does no more: it may arrive anywhere."""
    asked = [handler for handler in _open if number in handler._signals]
    if asked and asked[0]._process != os.getpid():
        # A forked child, such as a loader's worker that is being terminated.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    for handler in asked:
        handler._ask()


def _listen(number: int) -> None:
    if signal.getsignal(number) is not _on_signal:
        before = signal.signal(number, _on_signal)
        _replaced[number] = _ignored.pop(number, before) if before is signal.SIG_IGN else before


def _stop_listening(number: int) -> None:
    before = _replaced.pop(number, None)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(number) is _on_signal:
        # None: Python did not install that handler, and cannot restore it.
        signal.signal(number, signal.SIG_DFL if before is None else before)


def _check_signals(signals: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(signals, Iterable):
        raise TypeError(f"signals must be a sequence, got {short_repr(signals)}; pass (signals,)")
    numbers = tuple(signals)
    fixed = {signal.SIGKILL, signal.SIGSTOP}
    for number in numbers:
        if not is_int(number) or number not in signal.valid_signals() or number in fixed:
            raise ValueError(
                f"signals are those that a program can handle; got {short_repr(number)}; pass "
                "signal.SIGTERM or signal.SIGUSR1"
            )
    if numbers and threading.current_thread() is not threading.main_thread():
        raise StrategyError(
            "signals are handled in the main thread; create the PreemptionCheckpointHandler "
            "there, or pass signals=() and a watcher"
        )
    return numbers


def _check(manager: object, exit_code: object, watcher: object) -> None:
    if not isinstance(manager, CheckpointManager):
        raise TypeError(
            f"a handler takes a mirror.CheckpointManager, got {short_repr(manager)}; pass "
            "mirror.CheckpointManager(checkpoint, directory)"
        )
    if type(exit_code) is not int or not 0 <= exit_code <= 255:
        raise ValueError(f"exit_code is an int from 0 to 255, got {short_repr(exit_code)}")
    if watcher is not None and not callable(watcher):
        raise TypeError(f"watcher is a function without arguments, got {short_repr(watcher)}")


def _check_config(config: object, exit_code: int, watcher: object) -> TerminationConfig:
    """Returns the config, or an empty one for None."""
    if config is None:
        return TerminationConfig()
    if not isinstance(config, TerminationConfig):
        raise TypeError(
            "termination_config must be a mirror.train.TerminationConfig, got "
            f"{short_repr(config)}; pass mirror.train.TerminationConfig(grace_period=30), say"
        )
    if watcher is not None and config.termination_watcher_fn is not None:
        raise ValueError(
            "watcher and termination_config.termination_watcher_fn are the same option; pass one"
        )
    if exit_code != _DEFAULT_EXIT_CODE and config.exit_fn is not None:
        raise ValueError(
            f"exit_code={exit_code} would be ignored, as termination_config.exit_fn ends the "
            "program; pass one of them"
        )
    return config
