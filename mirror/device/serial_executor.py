"""SerialExecutor: a thread that does work in order, and of whose end those who wait are told."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_LOOK_SECONDS = 0.1  # how often who waits looks whether the thread lives


class _Job:
    """Some work, and what it raised.

    Attributes:
        done: held until it is.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()


class SerialExecutor:
    """One thread, made when first needed; it ends with this object.

    Whatever an exception strikes in it, or in who waits, nobody waits for ever: an executor of
    concurrent.futures has locks that it may leave closed.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._fate: list[BaseException] = []
        weakref.finalize(self, self._jobs.put, None)

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        """Has work done after what was started before; returns what waits for it."""
        thread = self._thread
        if thread is None or not thread.is_alive():  # struck, or left behind by a fork
            self._jobs.put(None)  # to one that lives: an interrupt can make Python think otherwise
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
    """Does all jobs; notes in ``fate`` what has struck this thread between them."""
    try:
        while (job := jobs.get()) is not None:
            try:
                job.work()
            except BaseException as error:
                job.error = error
            finally:
                job.done.release()
                del job  # what it holds is not kept until the next one comes
    except BaseException as error:
        fate.append(error)
