"""Interrupts a program's step, trains on, and describes in words what is wrong then."""

import os
import sys
import threading
from collections import Counter
from time import monotonic, sleep

import torch

from mirror.execution.run import current

MAIN = "main"
EVENTS = ("call", "return", "c_return")  # where Python, between instructions, looks for signals

# An interrupt that comes just after the ``__enter__`` of a ``with`` statement skips its
# ``__exit__`` and leaves a lock held: https://github.com/python/cpython/issues/148874
_LOSES_LOCKS = sys.version_info >= (3, 14)


class Injector:
    """Counts the entries and returns of functions by thread, and raises at one of them.

    Where a function in C has returned, too: there Python runs the handlers of signals.

    Attributes:
        counts: of the last stretch that was watched, by thread: ``"main"``, or its name.
        where: the function and the event at which it has raised; ``None`` if it has not.
    """

    def __init__(self):
        self.counts = Counter()
        self.where = self._target = self._error = None
        self._is_watching = False
        threading.setprofile(self._record)  # of threads that start from now on
        self.install()

    def install(self):
        """Has the calling thread watched, which ends when it raises there."""
        sys.setprofile(self._record)

    def watch(self, target=None, error=None):
        """Begins to count, and to look for the k-th event of a thread."""
        self.counts, self.where = Counter(), None
        self._target, self._error = target, error
        self._is_watching = True

    def stop(self):
        """Ends that."""
        self._is_watching = False

    def _record(self, frame, event, arg):
        if not self._is_watching or event not in EVENTS or frame.f_code in _OWN:
            return
        if _LOSES_LOCKS and event == "c_return" and arg.__name__ == "__enter__":
            return
        thread = threading.current_thread()
        name = MAIN if thread is threading.main_thread() else thread.name
        self.counts[name] += 1
        if self._target == (name, self.counts[name]):
            error, self._target = self._error, None
            of = f" of {arg.__name__}" if event == "c_return" else ""
            code = frame.f_code
            self.where = f"{event}{of} at {code.co_filename}:{frame.f_lineno} {code.co_name}"
            raise error


_OWN = {Injector.watch.__code__, Injector.stop.__code__}


SECONDS = 4.0  # that an interrupted step may take on a busy machine; a stalled thread waits 5 s
AFFINITY, THREADS = os.sched_getaffinity(0), torch.get_num_threads()


def _same(a, b):
    return all(map(torch.equal, a, b))


class Trial:
    """One program, and what it gives undisturbed.

    Attributes:
        counts: how many events one step has, by thread.
    """

    def __init__(self, program, injector):
        self.program, self.injector = program, injector
        self._expect()

    def _expect(self):
        program = self.program
        for number in (0, 1):
            program.seed(number)
            program.step(number)
        self._start = program.save()
        program.load(self._start)
        self._states = [program.state()]  # after so many steps
        for number in (1, 2, 3):
            self._begin(number)
            self.injector.watch()
            program.step(number)
            self.injector.stop()
            self._states.append(program.state())
            if number == 1:
                self.counts = self.injector.counts
        program.load(self._start)

    def _begin(self, number):
        self.program.strategy.run(self.injector.install)  # a thread that has raised is not watched
        self.injector.install()
        self.program.seed(number)

    def points(self):
        """Returns all events of a step."""
        return [(name, k + 1) for name in sorted(self.counts) for k in range(self.counts[name])]

    def interrupt(self, point, error):
        """Interrupts a step, at a point, with an error; returns where that was, and what is wrong.

        Without a point the caller has prepared the interrupt.
        """
        raised, notes, wrong = None, [], []
        self._begin(1)
        began = monotonic()
        try:
            self.injector.watch(point, error)
            self.program.step(1)
            self.injector.stop()
        except BaseException as caught:
            self.injector.stop()
            raised, notes = type(caught), getattr(caught, "__notes__", [])
            if raised is not type(error):
                wrong.append(f"raised {raised.__name__}: {str(caught)[:200]}")
        error.__traceback__ = error.__context__ = None
        error.__notes__ = []
        if monotonic() - began > SECONDS:
            wrong.append(f"took {monotonic() - began:.1f} s")
        where = self.injector.where
        is_ours = where is None or f"{os.sep}mirror{os.sep}" in where
        try:
            wrong += self._left_behind(is_ours)
            wrong += self._train_on(notes)
        except BaseException as later:
            wrong.append(f"then {type(later).__name__}: {str(later)[:300]}")
        wrong += self._strays()
        if wrong:
            self.program.strategy.close()
            self.program.make()
            self._expect()
        return where, wrong

    def _left_behind(self, is_ours):
        """Returns what of the run has stayed, and takes it away."""
        if (current.replica, current.strategy, current.below) != (None, None, None):
            yield "a context is still entered"
            current.replica = current.strategy = current.below = None
        if current.in_whole_call:
            yield "a call is still whole"
            current.in_whole_call = False
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
            if is_ours:  # what torch's own contexts leave, they leave without mirror, too
                yield "gradients are disabled"
        if os.sched_getaffinity(0) != AFFINITY:
            yield "the thread is kept on some CPUs"
            os.sched_setaffinity(0, AFFINITY)
        if torch.get_num_threads() != THREADS:
            yield "another number of threads"
            torch.set_num_threads(THREADS)
        held = [p for group in self.program.optimizer.param_groups for p in group["params"]]
        if list(map(id, held)) != list(map(id, self.program.model.parameters())):
            yield "the optimizer is lent"

    def _train_on(self, notes):
        """Returns what is wrong with parameters, and with the steps that follow."""
        program = self.program
        program.strategy.check_replicas()
        state = program.state()
        done = [i for i in (0, 1) if _same(state, self._states[i])]
        if not done:
            if not any("partly updated" in note for note in notes):
                yield "neither as before nor as after the step, and not said"
            program.load(self._start)
        program.optimizer.zero_grad()
        at = done[0] if done else 0
        for number in range(at + 1, min(at + 3, len(self._states))):
            program.seed(number)
            program.step(number)
            if not _same(program.state(), self._states[number]):
                yield f"other numbers in step {number} after {at}"
                break
        program.strategy.check_replicas()
        program.load(self._start)

    def _strays(self):
        """Returns whether there are more threads than replicas, after a moment."""
        limit = monotonic() + 1.0
        while True:
            names = [t.name for t in threading.enumerate() if "mirror" in t.name]
            if len(names) == len(set(names)):
                return
            if monotonic() > limit:
                yield f"threads {names}"
                return
            sleep(0.005)
