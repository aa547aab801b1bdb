"""The frames of other threads, which run on meanwhile."""

import gc
import threading

from mirror.threads.user_frames import frame_of


def test_the_callers_of_a_frame_have_their_frame_objects():
    depth, waits, ends = 50, threading.Event(), threading.Event()

    def recurse(levels):
        if levels:
            return recurse(levels - 1)
        waits.set()
        return ends.wait(60)

    thread = threading.Thread(target=recurse, args=(depth,))
    thread.start()
    assert waits.wait(60)
    threshold, collections = gc.get_threshold(), []
    record = lambda phase, info: collections.append(phase)  # noqa: E731
    gc.callbacks.append(record)
    try:
        gc.set_threshold(1)  # an object that is created collects garbage
        frame, num_callers = frame_of(thread), 0
        collections.clear()
        while frame is not None:
            frame, num_callers = frame.f_back, num_callers + 1
        assert collections == []
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(record)
        ends.set()
        thread.join()
    assert num_callers > depth
