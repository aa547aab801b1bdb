"""PreemptionCheckpointHandler: saves between two steps when the machine is taken away.

[Note: Between two steps]
A signal may come at any moment, in a backward pass or in the middle of a save. It is only noted;
what it asks for is done where a step ends, see [Note: Ends of steps]. What a loop does after that,
as ``scheduler.step()``, ``scaler.update()`` and counting, belongs to the step: were it left out of
the checkpoint, a resumed run would lack it once. No code runs at the end of a loop's body; but
where the body takes its batches from a distributed dataset that is in the checkpoint, the next
thing that happens is that it asks for another batch. So

    the checkpoint has                                    it is saved where
    modules that its one optimizer trains, and datasets   the step ends
    anything else, and a dataset that is iterated over    the next batch is asked for, or the
                                                          pass ends, or the handler is closed
    anything else, and none                               the step ends

One of several workers may be asked alone. So with every step they tell each other, and all save
at the same one, and exit.

[Note: Grace period]
A platform may take the machine away long after the signal, and without asking again. So there are
two saves: one at once, which is what remains if the machine goes early, and one near the end. The
last save must be complete in time, and it can begin only where a step ends. So a handler leaves
where another step, and a save, each as long as the longest one seen, might not fit twice into the
seconds that are left. Only a worker that was asked knows its deadline: workers exchange what they
have to do, and all do the most urgent of it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import IntEnum
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mirror.base.migration_hints import call_with_hints
from mirror.base.no_copy import NoCopy
from mirror.data.distributed_dataset import DistributedDataset
from mirror.errors import CheckpointError, StrategyError, short_repr
from mirror.execution.step_ends import step_ends
from mirror.replica.optimizers.step_interceptor import watch_optimizer_steps
from mirror.train.checkpoint.checkpoint_agreement import worker_agreement_of
from mirror.train.checkpoint.manager import CheckpointManager
from mirror.train.checkpoint.termination_config import TerminationConfig

_open: list[PreemptionCheckpointHandler] = []
_replaced: dict[int, Any] = {}  # the signals' handlers that are put back
_ignored: dict[int, Any] = {}  # those of signals that an exit ignores
_clock = time.monotonic
_DEFAULT_EXIT_CODE = 42
_RESERVE = 2.0  # how many steps and saves must still fit before the deadline


class Urgency(IntEnum):
    """What a worker has to do where a step ends. Of several workers, the highest counts."""

    NONE = 0
    SAVE_AND_CONTINUE = 1
    SAVE_AND_EXIT = 2


@call_with_hints
class PreemptionCheckpointHandler(NoCopy):
    """Saves at the next end of a step after a signal has come, and exits.

    ::

        step = manager.restore_latest() or 0
        with mirror.PreemptionCheckpointHandler(manager):
            for batch in batches:
                strategy.run(train_step, args=(batch,))

    The checkpoint gets the number of steps done, counted on from ``restore_latest()``, and from
    the number under which the program saved with the same manager, if that is larger. If the
    directory has a checkpoint with a larger number, of another manager, it gets the next number:
    ``restore_latest()`` finds what was saved last. Steps are outermost runs
    with an optimizer's step in them, and optimizers' steps outside; where the checkpoint has a
    distributed dataset with more than one optimizer, or schedulers and the like, batches with a
    step. Where exactly it is saved: [Note: Between two steps] in
    ``mirror/train/checkpoint/preemption.py``.

    Several may be open: each saves, then the program exits as the first of them says.

    Attributes:
        is_due: whether a signal has come, or the watcher has said so.
    """

    _instead = "make one in the other process"

    def __init__(
        self,
        manager: CheckpointManager,
        signals: Iterable[int] = (signal.SIGTERM,),
        exit_code: int = _DEFAULT_EXIT_CODE,
        watcher: Callable[[], object] | None = None,
        *,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        """Begins to listen; ``close`` ends it and puts the signals' handlers back.

        From the decision to exit, its signals are ignored until the process has ended. A program
        that catches the ``SystemExit`` and goes on sets their handlers itself.

        Args:
            signals: what asks for a checkpoint.
            exit_code: that of the process, as ``SystemExit``; whoever starts it again knows by it
                that there is more to do.
            watcher: called where a step ends; what it returns, if true, asks for a checkpoint.
            termination_config: how the platform takes machines away: its own watcher, exit and
                save, and its grace period.

        Raises:
            StrategyError: there are signals, and this is not the main thread, where Python
                handles them.
            TypeError, ValueError: an argument is of another type, or no signal that can be
                handled; or ``watcher`` or ``exit_code`` is also in ``termination_config``.
        """
        _check(manager, exit_code, watcher)
        config = _checked_config(termination_config, exit_code, watcher)
        self.is_due = False
        self._manager = manager
        self._exit_code = exit_code
        self._watcher = watcher or config.termination_watcher_fn
        self._exit_fn = config.exit_fn
        self._save_fn = config.save_fn
        self._grace_seconds = config.grace_period or 0.0
        self._asked_at: float | None = None
        self._has_saved_early = False  # see [Note: Grace period]
        self._is_ending = False  # the block of the handler ends
        self._step_seconds = self._save_seconds = 0.0
        self._step_began = _clock()
        self._signals = _checked_signals(signals)
        self._known: list[int] = []  # objects of the checkpoint, that _datasets were found in
        self._datasets: list[DistributedDataset] = []
        self._is_simple = True
        self._has_stepped = False  # since the last batch, where that is counted
        self._fellows = worker_agreement_of(manager.checkpoint.objects)
        self._agreed = Urgency.NONE  # by several workers
        self._process = os.getpid()
        for number in self._signals:
            _listen(number)
        watch_optimizer_steps(are_mirrored=False)
        if not _open:
            step_ends.listeners.append(_step_ended)
        _open.append(self)

    def close(self) -> None:
        """Stops listening, puts handlers of signals back; idempotent."""
        if self not in _open:
            return
        _open.remove(self)
        if not _open:
            step_ends.listeners.remove(_step_ended)
        for dataset in self._datasets:
            dataset.before_next.remove(self._is_requested)
        self._datasets = []
        wanted = {number for handler in _open for number in handler._signals}
        for number in set(self._signals) - wanted:
            _stop_listening(number)

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Closes it; saves and exits if a signal has come, grace period or not."""
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
        self._look_for_datasets()
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
        """Notes that a checkpoint is asked for; called by the handler of signals, too."""
        if self._asked_at is None:
            self._asked_at = _clock()
        self.is_due = True

    def _agree(self) -> None:
        """Exchanges with all workers, where there are several, what is to be done."""
        if self._fellows.are_several:
            own = self._own_urgency
            self._agreed = Urgency(self._fellows.agree("the end of a step", own))

    @property
    def _urgency(self) -> Urgency:
        return self._agreed if self._fellows.are_several else self._own_urgency

    @property
    def _own_urgency(self) -> Urgency:
        """What this worker alone would do."""
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
        """Saves at the beginning of the grace period; that may have taken most of it."""
        self._has_saved_early = True
        self.save()
        self._agree()

    def _is_requested(self) -> None:
        """The loop asks for a batch: all that it does in a step is done."""
        if self._has_stepped:
            self._count()
            _leave_if_due()

    def save(self) -> None:
        """Saves under the number of steps done, or with ``save_fn``, asked for or not."""
        began = _clock()
        with suppress(CheckpointError):  # of a save beside the training: it was logged
            self._manager.wait()
        if self._save_fn is None:
            self._manager.save(self._number())
        else:
            self._save_fn()
            # It may have saved beside the training: no worker exits before the chief has written.
            self._fellows.done("the save of save_fn", self._manager.wait)
        self._step_began = _clock()
        self._save_seconds = max(self._save_seconds, self._step_began - began)

    def _number(self) -> int:
        """Returns the number for a checkpoint that is newer than all in the directory."""
        done = self._manager.progress.number

        def number() -> str:
            latest = self._manager.latest
            return str(done if latest is None or latest <= done else latest + 1)

        return int(self._fellows.choose("the number of a checkpoint", number))

    def _exit(self) -> None:
        if self._exit_fn is None:
            raise SystemExit(self._exit_code)
        self._exit_fn()

    def _look_for_datasets(self) -> None:
        objects = self._manager.checkpoint.objects
        if self._fellows.size == 1:  # their strategy may have been made since
            self._fellows = worker_agreement_of(objects)
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


def _step_ended() -> None:
    for handler in tuple(_open):
        handler._end_step()
    _leave_if_due()


def _leave_if_due() -> None:
    """Saves and exits, once all handlers that are asked to have seen the end of the step."""
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
    """Ignores the signals of all handlers, from the decision to leave on; returns them.

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
    """Whether it is a module that changes in optimizers' steps, not one of averages, say."""
    return isinstance(obj, nn.Module) and any(id(p) in trained for p in obj.parameters())


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Notes a signal, and no more: it may come anywhere."""
    asked = [handler for handler in _open if number in handler._signals]
    if asked and asked[0]._process != os.getpid():
        # A child that was forked: a loader's worker that is to end, for one.
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
        # None: a handler that Python did not install, and cannot.
        signal.signal(number, signal.SIG_DFL if before is None else before)


def _checked_signals(signals: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(signals, Iterable):
        raise TypeError(
            f"signals is a sequence of them, got {short_repr(signals)}; pass (signals,)"
        )
    numbers = tuple(signals)
    fixed = {signal.SIGKILL, signal.SIGSTOP}
    if wrong := [n for n in numbers if n not in signal.valid_signals() or n in fixed]:
        raise ValueError(
            f"{short_repr(wrong[0])} is no signal that a program can handle; pass signal.SIGTERM, "
            "signal.SIGUSR1 and the like"
        )
    if numbers and threading.current_thread() is not threading.main_thread():
        raise StrategyError(
            "signals are handled in the main thread; make the PreemptionCheckpointHandler there, "
            "or pass signals=() and a watcher"
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


def _checked_config(config: object, exit_code: int, watcher: object) -> TerminationConfig:
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
