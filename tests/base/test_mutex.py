"""A mutex is free after an exception that hits the thread at any point of a call."""

import gc
import sys
import threading

import pytest

from mirror.base.mutex import Mutex, call_without_collection, collecting


class Hit(BaseException):
    """Raised between two calls, as Ctrl-C is."""


def hit_at(number, call):
    """Calls, and raises at the k-th entry or return of a function; returns whether it raised."""
    seen = 0

    def profile(frame, event, arg):
        nonlocal seen
        # Where Python, between instructions, looks for signals.
        is_point = event in ("call", "return", "c_return")
        is_mutex = is_point and frame.f_globals["__name__"] == Mutex.__module__
        seen += is_mutex
        if is_mutex and seen == number:
            sys.setprofile(None)
            raise Hit

    sys.setprofile(profile)
    try:
        call()
    except Hit:
        return True
    finally:
        sys.setprofile(None)
    return False


def is_free(lock):
    """Returns whether another thread gets the lock."""
    found = []

    def acquire():
        found.append(lock.acquire(timeout=5))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=acquire)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("is_global", [False, True], ids=["mutex", "without collection"])
def test_no_point_of_a_call_leaves_the_lock_held(is_global):
    mutex = Mutex()
    lock = collecting if is_global else mutex.lock
    call = (lambda: call_without_collection(list)) if is_global else (lambda: mutex.call(list))
    number = 1
    while hit_at(number, call):
        assert is_free(lock), f"held after a hit at event {number}"
        assert gc.isenabled(), f"no garbage is collected after a hit at event {number}"
        number += 1
    assert number > 3  # entry, acquire, release


def test_a_call_returns_the_result_and_may_call_again():
    mutex = Mutex()
    assert mutex.call(lambda a, *, b: mutex.call(max, a, b), 2, b=3) == 3
    assert is_free(mutex.lock)


def test_threads_call_one_at_a_time():
    mutex, running, most = Mutex(), [], []

    def work():
        running.append(1)
        most.append(len(running))
        running.pop()

    def repeat():
        for _ in range(2000):
            mutex.call(work)

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert len(most) == 6000
