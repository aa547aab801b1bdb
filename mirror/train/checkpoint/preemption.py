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
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mirror.base.migration_hints import call_with_hints
from mirror.base.no_copy import NoCopy
from mirror.data.distributed_dataset import DistributedDataset
from mirror.errors import CheckpointError, StrategyError, short_repr
from mirror.execution.step_ends import step_ends
from mirror.replica.optimizers.step_hooks import watch_optimizer_steps
from mirror.train.checkpoint.checkpoint_agreement import worker_agreement_of
from mirror.train.checkpoint.manager import CheckpointManager

_open: list[PreemptionCheckpointHandler] = []
_replaced: dict[int, Any] = {}  # the signals' handlers that are put back


@call_with_hints
class PreemptionCheckpointHandler(NoCopy):
    """Saves at the next end of a step after a signal has come, and exits.

    ::

        step = manager.restore_latest() or 0
        with mirror.PreemptionCheckpointHandler(manager):
            for batch in batches:
                strategy.run(train_step, args=(batch,))

    The checkpoint gets the number of steps done, counted on from ``restore_latest()``; if the
    program has saved under a larger number, that and the steps since. Steps are outermost runs
    with an optimizer's step in them, and optimizers' steps outside; where the checkpoint has a
    distributed dataset with more than one optimizer, or schedulers and the like, batches with a
    step. Where exactly it is saved: [Note: Between two steps] in
    ``mirror/train/checkpoint/preemption.py``.

    Several may be open: each saves, then the program exits with the code of the first.

    Attributes:
        is_due: whether a signal has come, or the watcher has said so.
    """

    _instead = "make one in the other process"

    def __init__(
        self,
        manager: CheckpointManager,
        signals: Iterable[int] = (signal.SIGTERM,),
        exit_code: int = 42,
        watcher: Callable[[], object] | None = None,
    ) -> None:
        """Begins to listen; ``close`` ends it and puts the signals' handlers back.

        Args:
            signals: what asks for a checkpoint.
            exit_code: that of the process, as ``SystemExit``; whoever starts it again knows by it
                that there is more to do.
            watcher: called where a step ends; what it returns, if true, asks for a checkpoint.

        Raises:
            StrategyError: there are signals, and this is not the main thread, where Python
                handles them.
            TypeError, ValueError: an argument is of another type, or no signal that can be
                handled.
        """
        _check(manager, exit_code, watcher)
        self.is_due = False
        self._manager = manager
        self._exit_code = exit_code
        self._watcher = watcher
        self._signals = _checked_signals(signals)
        self._known: list[int] = []  # objects of the checkpoint, that _datasets were found in
        self._datasets: list[DistributedDataset] = []
        self._is_simple = True
        self._has_stepped = False  # since the last batch, where that is counted
        self._fellows = worker_agreement_of(manager.checkpoint.objects)
        self._all_leave = False  # several workers have agreed to
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
        """Closes it; saves and exits if a signal has come since the last step ended."""
        try:
            if kind is None and self in _open:
                if self._has_stepped:
                    self._count()
                self._agree()
                _leave_if_due()
        finally:
            self.close()

    def _end_step(self) -> None:
        """Counts a step that has ended."""
        self._look_for_datasets()
        self._has_stepped = True
        if self._is_simple or not any(dataset.is_iterated for dataset in self._datasets):
            self._count()

    def _count(self) -> None:
        self._has_stepped = False
        self._manager.progress.step()
        if self._watcher is not None and not self.is_due and self._watcher():
            self.is_due = True
        self._agree()

    def _agree(self) -> None:
        """Asks all workers, where there are several, whether one is to be left."""
        if self._fellows.are_several:
            self._all_leave = self._fellows.agree("the end of a step", self.is_due)

    @property
    def _leaves(self) -> bool:
        return self._all_leave if self._fellows.are_several else self.is_due

    def _is_requested(self) -> None:
        """The loop asks for a batch: all that it does in a step is done."""
        if self._has_stepped:
            self._count()
            _leave_if_due()

    def save(self) -> None:
        """Saves under the number of steps done, whether or not that was asked for."""
        with suppress(CheckpointError):  # of a save beside the training: it was logged
            self._manager.wait()
        self._manager.save(self._manager.progress.number)

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
    due = [handler for handler in _open if handler._leaves]
    if not due or any(handler._has_stepped for handler in due):
        return
    for handler in due:
        handler.save()
    for handler in tuple(_open):
        handler.close()
    raise SystemExit(due[0]._exit_code)


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
        handler.is_due = True


def _listen(number: int) -> None:
    if signal.getsignal(number) is not _on_signal:
        _replaced[number] = signal.signal(number, _on_signal)


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
