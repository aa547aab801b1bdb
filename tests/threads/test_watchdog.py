"""The watchdog: what it aborts, what it reports, and that it ends."""

import gc
import logging
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from functools import partial

import pytest

import mirror
from mirror.threads import watchdog
from mirror.threads.watchdog import WatchedCall


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(watchdog, "_watchdog", watchdog._Watchdog())


class Waiting:
    """Work that waits until it is broken off, and then ends in one of several ways."""

    def __init__(self, error=None):
        self.is_over, self.error = threading.Event(), error

    def __call__(self):
        assert self.is_over.wait(20)
        if self.error is not None:
            raise self.error
        return "done"

    def abort(self):
        self.is_over.set()


def call(work, seconds=0.05, abort=None):
    return WatchedCall(work, seconds, abort or work.abort, lambda: "the work").make()


@pytest.mark.parametrize("error", [None, ValueError("broken off")])
def test_what_takes_too_long_is_broken_off_however_it_ends_then(error):
    with pytest.raises(mirror.CollectiveTimeoutError) as caught:
        call(Waiting(error))
    text = str(caught.value)
    assert text.startswith("the work did not end within timeout_seconds=0.05")
    assert 'thread "MainThread":' in text
    assert "in __call__" in text
    assert caught.value.__cause__ is error


def test_what_ends_in_time_ends_as_it_is():
    assert call(lambda: 3, seconds=20, abort=bool) == 3
    with pytest.raises(ValueError, match="mine"):
        WatchedCall(lambda: int("mine"), 20, bool, str).make()


def test_all_that_break_off_ends_are_late():
    shared, errors = Waiting(), []

    def wait():
        try:
            WatchedCall(shared, 60, shared.abort, lambda: "the other").make()
        except mirror.CollectiveTimeoutError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while len(watchdog._watchdog._calls) == 0:
        time.sleep(0.001)
    with pytest.raises(mirror.CollectiveTimeoutError, match="the work did not end"):
        call(shared)
    thread.join(20)
    assert [error.partition(" did")[0] for error in errors] == ["the work"]


@contextmanager
def heard_from(then):
    """Gives the messages logged inside, and calls something after each."""
    heard, handler = [], logging.Handler()
    handler.emit = lambda record: (heard.append(record.getMessage()), then())
    logging.getLogger("mirror").addHandler(handler)
    try:
        yield heard
    finally:
        logging.getLogger("mirror").removeHandler(handler)


def test_work_that_continues_after_its_abort_is_reported_once(monkeypatch):
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.02)
    work = Waiting()
    with heard_from(then=work.abort) as heard, pytest.raises(mirror.CollectiveTimeoutError):
        call(work, abort=bool)
    (message,) = heard
    assert "the work was broken off, and still goes on 0.02 s later" in message
    assert 'thread "MainThread":' in message


def test_an_abort_that_raises_is_reported():
    work = Waiting()

    def fail():
        raise RuntimeError("no")

    with heard_from(then=work.abort) as heard, pytest.raises(mirror.CollectiveTimeoutError):
        call(work, abort=fail)
    assert heard == ["mirror: breaking off the work failed"]


def test_a_call_that_an_interrupt_has_left_behind_breaks_nothing_off():
    broken = threading.Event()
    left = WatchedCall(bool, 0, broken.set, str)
    watchdog._watchdog.begin(left)
    with pytest.raises(mirror.CollectiveTimeoutError):
        call(Waiting())
    assert not broken.is_set()
    assert not watchdog._watchdog._calls


def test_a_call_that_has_returned_is_not_kept(monkeypatch):
    monkeypatch.setattr(watchdog, "IDLE_SECONDS", 60)
    for seconds in (20, 0.05):
        work = Waiting()
        reference = weakref.ref(work)
        with suppress(mirror.CollectiveTimeoutError):
            call(work if seconds < 20 else partial(int, 3), seconds, work.abort)
        del work
        gc.collect()
        deadline = time.monotonic() + 20  # who broke it off may not be back yet
        while reference() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert reference() is None


def test_one_thread_that_ends_when_nothing_is_called(monkeypatch, leaks):
    for _ in range(2):  # it begins again
        monkeypatch.setattr(watchdog, "IDLE_SECONDS", 20)  # longer than these calls take
        for _ in range(3):
            call(lambda: 3, seconds=60, abort=bool)
        (thread,) = leaks.threads("mirror watchdog")
        assert thread.daemon
        monkeypatch.setattr(watchdog, "IDLE_SECONDS", 0.02)
        call(lambda: 3, seconds=1, abort=bool)  # it checks again
        thread.join(60)
        assert not thread.is_alive()
