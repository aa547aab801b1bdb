"""The serial executor: in order, errors reported, no wait for a thread that has ended."""

import gc
import os
import threading
from contextlib import suppress

import pytest

from mirror.device.streams import SerialExecutor
from mirror.threads.user_frames import throw_into_thread


@pytest.fixture
def side():
    side = SerialExecutor()
    yield side
    side.close()


def test_work_is_done_in_order(side):
    done = []
    waits = [side.start(lambda i=i: done.append(i)) for i in range(5)]
    for wait in waits:
        wait()
    assert done == list(range(5))


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_the_waiting_thread_gets_the_error_and_later_work_is_done(side, kind):
    def fails():
        raise kind("work")

    failing, going = side.start(fails), side.start(lambda: None)
    with pytest.raises(kind, match="work"):
        failing()
    going()


def test_a_thread_that_waits_for_an_interrupted_thread_gets_its_exception(side, leaks):
    side.start(lambda: None)()
    (thread,) = leaks.threads("mirror side")

    def interrupt():
        throw_into_thread(thread, KeyboardInterrupt)  # where it next executes Python
        blocked.acquire()

    blocked = threading.Lock()
    blocked.acquire()
    wait = side.start(interrupt)
    blocked.release()
    with pytest.raises(KeyboardInterrupt):
        wait()
        for _ in range(100):
            side.start(lambda: None)()


def test_there_is_a_new_thread_after_one_that_was_struck(side, leaks):
    side.start(lambda: None)()
    (thread,) = leaks.threads("mirror side")
    throw_into_thread(thread, KeyboardInterrupt)
    with suppress(KeyboardInterrupt):
        side.start(lambda: None)()
    thread.join(60)
    side.start(lambda: None)()
    assert leaks.threads("mirror side") != [thread]


def test_the_thread_ends_with_its_owner_closed_or_gone(leaks):
    for end in (SerialExecutor.close, lambda side: None):
        side = SerialExecutor()
        side.start(lambda: None)()
        (thread,) = leaks.threads("mirror side")
        end(side)
        del side
        gc.collect()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_forked_process_has_a_thread_of_its_own(side):
    side.start(lambda: None)()
    child = os.fork()
    if not child:
        done = []
        side.start(lambda: done.append(1))()
        os._exit(0 if done else 1)
    assert os.waitpid(child, 0)[1] == 0
