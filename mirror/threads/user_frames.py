"""Frames of the user's code: positions of threads, warnings and notes on errors."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic, sleep
from types import FrameType
from typing import Any

import torch

import mirror.errors as anchor
from mirror.base.mutex import call_without_collection

_OURS = os.path.dirname(os.path.abspath(anchor.__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STARTING_SECONDS = 0.1  # how long a thread may take to start another one


def frame_of(thread: threading.Thread) -> FrameType | None:
    """Returns the current frame of another thread, and creates the frames of its callers.

    CPython 3.11 creates a frame object when it is first asked for. A garbage collection at that
    point lets the thread go on, and ``f_back`` may then return memory that is used otherwise.
    """
    return call_without_collection(partial(_frame_of, thread.ident or -1))


def _frame_of(ident: int) -> FrameType | None:
    frame = caller = sys._current_frames().get(ident)
    while caller is not None:
        caller = caller.f_back
    return frame


_calls_seen: dict[int, int] = {}  # by thread identifier: the number of its frames marked so far


def positions(threads: Iterable[threading.Thread]) -> list[tuple[int, int, int]]:
    """Returns a value that changes while any of these threads executes Python.

    It is equal only if each thread is at the same instruction of the same call. The next call of
    a function often has its frame at the same address. To hold frames would tell them apart, but
    would keep their tensors, so frames that have been seen are marked: ``f_trace_lines`` has an
    effect only in a frame that a debugger traces, and such a frame is not marked.
    """
    by_ident, found = _frames(), []
    for thread in threads:
        ident = thread.ident or -1
        frame, num_calls = by_ident.get(ident), _calls_seen.get(ident, 0)
        if frame is not None and frame.f_trace_lines and frame.f_trace is None:
            frame.f_trace_lines = False
            _calls_seen[ident] = num_calls = num_calls + 1
        found.append((id(frame), -1 if frame is None else frame.f_lasti, num_calls))
    return found


def _frames() -> dict[int, FrameType]:
    """Returns the frames of all threads by thread identifier.

    A garbage collection inside ``sys._current_frames`` can freeze CPython 3.11 if a finalizer
    lets another thread call it, too (gh-106883).
    """
    frames: dict[int, FrameType] = call_without_collection(sys._current_frames)
    return frames


def stacks() -> str:
    """Returns the stacks of the main thread and of all threads inside mirror, as text.

    The innermost call of a stack is last. The calling thread is left out.
    """
    frames, lines = _frames(), []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or -1)
        calls = traceback.extract_stack(frame)
        while calls and calls[0].filename == threading.__file__:
            del calls[0]
        is_ours = any(call.filename.startswith(_OURS) for call in calls)
        is_relevant = thread is threading.main_thread() or is_ours
        if frame is not None and is_relevant and thread is not threading.current_thread():
            lines += [f'thread "{thread.name}":\n', *traceback.format_list(calls)]
    return "".join(lines).rstrip()


def active_calls_of(thread: threading.Thread, method: Callable[..., object]) -> list[Any]:
    """Returns the ``self`` of each active call of ``method`` in a thread, innermost first."""
    return calls(thread.ident or -1, method)


def calls(ident: int, method: Callable[..., object]) -> list[Any]:
    """Returns the same for a thread identifier; an empty list if that thread has ended."""
    callees, frame = [], _frames().get(ident)
    while frame is not None:
        if frame.f_code is method.__code__:
            callees.append(frame.f_locals["self"])
        frame = frame.f_back
    return callees


def throw_into_thread(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raises an exception in another thread, before its next Python instruction.

    Waits while that thread starts a child thread. Until the child runs, CPython 3.11 and older
    would raise the exception in the child, which then never starts, and its parent waits forever.
    """
    deadline = monotonic() + _STARTING_SECONDS
    while thread.ident is not None and monotonic() < deadline:
        if not active_calls_of(thread, threading.Thread.start):
            _send(thread.ident, ctypes.py_object(error))
            if not active_calls_of(thread, threading.Thread.start):
                return
            _send(thread.ident, None)
        sleep(0.0005)


def _send(ident: int, error: Any) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), error)


def user_line(frame: FrameType | None) -> str:
    """Returns ``file:line in function`` of the innermost frame outside mirror and torch."""
    while frame is not None:
        if (line := _line_of_user(frame, frame.f_lineno)) is not None:
            return line
        frame = frame.f_back
    return "<unknown line>"


def line_of(error: BaseException | None) -> str:
    """Returns the user's line of an error, or the main thread's line if ``error`` is None."""
    if error is None:
        return user_line(frame_of(threading.main_thread()))
    lines = [_line_of_user(*entry) for entry in traceback.walk_tb(error.__traceback__)]
    return next(filter(None, reversed(lines)), "<unknown line>")


def _line_of_user(frame: FrameType, number: int) -> str | None:
    filename = os.path.abspath(frame.f_code.co_filename)
    if filename.startswith((_OURS, _TORCH)) or not os.path.exists(filename):
        return None
    if filename.endswith(os.sep + "threading.py"):
        return None
    return f"{filename}:{number} in {frame.f_code.co_name}"


_num_warned = 0


def num_warned() -> int:
    """Returns how often ``warn_user`` has been called."""
    return _num_warned


def warn_user(message: str) -> None:
    """Issues a UserWarning that points at the innermost line outside mirror and torch."""
    global _num_warned
    _num_warned += 1
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


# Texts in errors of torch, each with its remedy under a strategy.
_REMEDIES = (
    (
        "Default process group has not been initialized",
        "mirror is one process and needs no process group: inside run, "
        "mirror.get_replica_context() has all_reduce, all_gather, merge_call, "
        "replica_id_in_sync_group (for a rank) and num_replicas_in_sync (for a world size)",
    ),
    (
        "Expected more than 1 value per channel when training",
        "this replica's part of the batch has one example, of which BatchNorm has no statistics; "
        "mirror.nn.convert_sync_batchnorm(model) uses the whole batch, and drop_last=True leaves "
        "a small last batch out",
    ),
    (
        "has been modified by an inplace operation",
        "the replicas' parts of a batch are views of one tensor, so to autograd a write to one "
        "part is a write to all; if the model or the step writes in place to its batch (x += y, "
        "nn.ReLU(inplace=True) as the first layer), let it write to x.clone()",
    ),
)


def annotate_error(error: BaseException, name: str) -> None:
    """Adds notes to an error: the replica that raised it, and the remedy if one is known."""
    add_note(error, f"in {name}")
    if remedy := find_remedy(error):
        add_note(error, remedy)


def find_remedy(error: BaseException) -> str:
    """Returns the remedy of an error of torch; "" if none is known."""
    text = str(error)
    return next((remedy for part, remedy in _REMEDIES if part in text), "")


def call_with_note(task: Callable[[], Any], replica: str) -> Any:
    """Calls a replica's task; adds a note with the replica's name to any error."""
    try:
        return task()
    except BaseException as error:
        annotate_error(error, replica)
        raise


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception, once; ``BaseException.add_note``, which Python 3.10 lacks."""
    notes = getattr(error, "__notes__", [])
    if note not in notes:
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]
