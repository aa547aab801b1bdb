"""Where a thread stands in the user's code."""

from __future__ import annotations

import os
import sys

import torch

import mirror.errors as anchor

_OURS = os.path.dirname(os.path.abspath(anchor.__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def user_line(thread_ident: int | None) -> str:
    """Returns ``file:line in function`` of a thread's innermost frame outside mirror and torch."""
    frame = sys._current_frames().get(thread_ident or -1)
    while frame is not None:
        filename = os.path.abspath(frame.f_code.co_filename)
        if not filename.startswith((_OURS, _TORCH)) and os.path.exists(filename):
            if not filename.endswith(os.sep + "threading.py"):
                return f"{filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "<unknown line>"
