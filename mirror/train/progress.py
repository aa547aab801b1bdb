"""A progress bar on a terminal; elsewhere only the line that is left when it ends."""

from __future__ import annotations

import os
import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

_CLEAR_LINE = "\r\x1b[K"
_REDRAW_SECONDS = 0.1
_BAR_WIDTH = 24


class ProgressLine:
    """Use as a context manager; whatever happens, the cursor ends at the start of an empty line.

    Attributes:
        live: whether there is a terminal that shows a bar.
    """

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.live = (
            self.stream.isatty()
            and not os.environ.get("CI")
            and os.environ.get("TERM", "dumb") != "dumb"
        )
        self._label = label
        self._total = total
        self._drawn = 0.0

    def due(self) -> bool:
        """Whether a call of ``show`` would be worth its cost now."""
        return self.live and time.perf_counter() - self._drawn >= _REDRAW_SECONDS

    def show(self, done: int, text: str) -> None:
        """Draws the bar with ``done`` of the total, followed by ``text``, cut to one line."""
        if not self.live:
            return
        filled = _BAR_WIDTH * done // self._total
        bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
        # A line as wide as the terminal makes some wrap, and what wraps cannot be cleared.
        width = shutil.get_terminal_size().columns - 1
        # Noted first: Ctrl-C may come at the end of the write.
        self._drawn = time.perf_counter()
        self._write(_CLEAR_LINE + f"{self._label} [{bar}] {text}"[:width])

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.live and self._drawn:
            self._write(_CLEAR_LINE)

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
