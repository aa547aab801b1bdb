"""SerialExecutor: one thread that runs host work in order, for devices that have no streams."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_LOOK_SECONDS = 0.1  # how often a waiting thread checks that the executor's thread is alive


class _Job:
    """A job and its error.

    Attributes:
        done: locked until the job is done.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()


class SerialExecutor:
    """One thread, started when first needed; it ends with this object.

    An interrupt in any thread never makes another one wait forever. An executor of
    concurrent.futures has locks that an interrupt may leave locked.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._fate: list[BaseException] = []
        weakref.finalize(self, self._jobs.put, None)

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        """Enqueues work after all earlier work; returns a function that waits for it."""
        thread = self._thread
        if thread is None or not thread.is_alive():  # interrupted, or lost in a fork
            self._jobs.put(None)  # after an interrupt, is_alive() may be wrong: end that thread
            self._jobs, self._fate = SimpleQueue(), []
            weakref.finalize(self, self._jobs.put, None)
            thread = threading.Thread(
                target=_do, args=(self._jobs, self._fate), name="mirror side", daemon=True
            )
            self._thread = thread
            thread.start()
        job, fate = _Job(work), self._fate
        self._jobs.put(job)

        def wait() -> None:
            while not job.done.acquire(timeout=_LOOK_SECONDS):
                if not thread.is_alive() and not job.done.acquire(timeout=0):
                    raise fate[0] if fate else RuntimeError("mirror's side thread is gone")
            if job.error is not None:
                raise job.error

        return wait

    def close(self) -> None:
        """Ends the thread when its work is done, and waits for that; idempotent."""
        thread, self._thread = self._thread, None
        self._jobs.put(None)
        if thread is not None and thread.is_alive():
            thread.join()


def _do(jobs: SimpleQueue[_Job | None], fate: list[BaseException]) -> None:
    """Runs all jobs; stores an exception that hits this thread between jobs in ``fate``."""
    try:
        while (job := jobs.get()) is not None:
            try:
                job.work()
            except BaseException as error:
                job.error = error
            finally:
                job.done.release()
                del job  # so that its references end before the next job comes
    except BaseException as error:
        fate.append(error)
