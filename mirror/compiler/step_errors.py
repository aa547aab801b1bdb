"""Errors of steps: the user's line where something happens, remedies, and internal exceptions."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from types import FrameType, TracebackType

import torch
from torch import nn
from torch.optim import Adafactor

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    os.path.join(path, "")
    for path in (
        _HERE,
        os.path.dirname(torch.__file__),
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
        sysconfig.get_paths()["platlib"],
    )
)
_OURS_AND_TORCHS = _LIBRARIES[:2]
_PASSED_OVER = (*_LIBRARIES, "<frozen")
_TRACERS = os.path.join(_HERE, "compiler", "lowering", "")  # they call the step
GENERATED_CODE = "<string>"  # code that dataclasses, namedtuples and wrappers of mirror make
Place = tuple[str, int]  # a file and a line


def current_line() -> str:
    """Returns the innermost line of the user's code that is being run, ``file:line `code` ``."""
    return quote(current_place())


def current_place() -> Place | None:
    """Returns the file and the number of that line; ``None`` if only torch and mirror are run.

    A library's line counts as the user's if no other code is being run. Code that calls the step
    does not count.
    """
    of_library: Place | None = None
    generated: Place | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if of_library is not None and name.startswith(_TRACERS):
            return of_library
        if name == GENERATED_CODE:
            generated = generated or (name, frame.f_lineno)
        elif not name.startswith(_PASSED_OVER):
            return name, frame.f_lineno
        elif of_library is None and not name.startswith((*_OURS_AND_TORCHS, "<frozen")):
            of_library = name, frame.f_lineno
        frame = frame.f_back
    return of_library or generated


def quote(place: Place | None) -> str:
    """Returns a line of code with its place, ``file:line `code` ``."""
    if place is None:
        return "an unknown line"
    code = linecache.getline(*place).strip()
    return f"{place[0]}:{place[1]}" + (f" `{code}`" if code else "")


def is_called_by(*files: str) -> bool:
    """Whether code of one of these files of torch is being run, named by how their paths end."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(files) and is_torchs(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def quoted_line_of(error: BaseException) -> str:
    """Returns the innermost line of the user's code that an error came through."""
    places: list[Place] = []
    step: TracebackType | None = error.__traceback__
    while step is not None:
        places.insert(0, (step.tb_frame.f_code.co_filename, step.tb_lineno))
        step = step.tb_next
    users = [place for place in places if not place[0].startswith(_PASSED_OVER)]
    others = [place for place in places if not place[0].startswith((*_OURS_AND_TORCHS, "<frozen"))]
    return quote(next(iter(users + others), None))


def describe_failure(error: BaseException) -> str:
    """Returns the first line of an error's text, with the user's line that it came through."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    place = quoted_line_of(error)
    return text if place.startswith(("an unknown line", "<")) else f"{place}: {text}"


def words_of_forward(why: str, *, falls_back: bool) -> str:
    """Returns why a step cannot be compiled, in words about a module's ``forward``.

    Args:
        falls_back: whether it runs uncompiled, so that this is no remedy.
    """
    parts = why.removeprefix("the step cannot be compiled: ").split("`")
    for i in range(0, len(parts), 2):  # the others are code
        parts[i] = parts[i].replace("a compiled step", "a program").replace("the step", "forward")
        if falls_back:
            parts[i] = re.sub(r",? or (pass )?fallback='eager'", "", parts[i])
    return "`".join(parts)


def is_users(path: str) -> bool:
    """Whether a file is not a library's, torch's or ours."""
    return not path.startswith(_PASSED_OVER)


def is_mirrors(path: str) -> bool:
    """Whether a file is ours."""
    return path.startswith(_HERE)


def is_torchs(path: str) -> bool:
    """Whether a file is torch's."""
    return path.startswith(_OURS_AND_TORCHS[1])


def is_librarys(path: str) -> bool:
    """Whether a file is of an installed library, and not of torch, mirror or Python."""
    return path.startswith(_LIBRARIES[3:]) and not path.startswith(_OURS_AND_TORCHS)


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def find_asking_layer() -> tuple[str, str, str] | None:
    """Returns the layer or optimizer of torch that asks for a value, why that fails, and a remedy.

    ``None`` if neither is running.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, _NORMS) and owner.momentum is None:
            return (
                f"{type(owner).__name__}(momentum=None)",
                "divides by a count of its calls that is known only while the step runs",
                "set momentum to a number, such as 0.1, or pass fallback='eager'",
            )
        if isinstance(owner, Adafactor):
            return (
                "Adafactor.step",
                "decides by norms of the parameters that are known only while the step runs",
                "use another optimizer, or pass fallback='eager'",
            )
        frame = frame.f_back
    return None


class ProgramFailed(Exception):
    """A compiled program has raised the error that is this one's cause.

    Attributes:
        has_changed: whether the step may have changed parameters, state or buffers.
    """

    def __init__(self, *, has_changed: bool) -> None:
        super().__init__(has_changed)
        self.has_changed = has_changed


class RunsUncompiled(Exception):
    """A step checks a value if its arguments have these sizes: such a call runs uncompiled."""


class StateMissing(Exception):
    """A step needs optimizer state that does not exist yet: an uncompiled call creates it."""


class Uncapturable(Exception):
    """A CUDA graph would read or write other values than the piece that it is captured of.

    Attributes:
        line: the user's line for which it does; empty if that is not known.
    """

    def __init__(self, why: str, line: str) -> None:
        super().__init__(why)
        self.line = line
