"""Trace: what happened inside ``strategy.trace``, to be looked at."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mirror.base.atomic_file import replace_atomically
from mirror.errors import StrategyError
from mirror.viewer.html_page import page_of
from mirror.viewer.svg_lanes import svg_of
from mirror.viewer.trace_lanes import Lane, lanes_of, seconds_of


class Trace:
    """What happened inside ``strategy.trace(path)``: spans of time, in a lane for each replica.

    ::

        with strategy.trace("step.json") as trace:
            train_step(batch)
        trace.to_html("step.html")

    In a notebook it shows itself. It begins with the first span.

    Args:
        content: of the file, which has something in it as soon as the trace has ended.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Returns a trace that was taken earlier, from the file it was written to.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no trace of a strategy.
        """
        try:
            trace = cls(json.loads(Path(path).read_text("utf-8")))
            trace._lanes()
        except (ValueError, LookupError, TypeError, AttributeError, StrategyError) as error:
            raise ValueError(
                f"'{os.fspath(path)}' holds no trace of a strategy ({error!r}); take one with: "
                "with strategy.trace(path): ..."
            ) from None
        return trace

    @property
    def seconds(self) -> float:
        """From the beginning of the first span to the end of the last one."""
        return seconds_of(self._lanes())

    @property
    def hidden_share(self) -> float | None:
        """The share of the reductions' time for which nobody waited; ``None``: there was none."""
        self._check_ended()
        share: float | None = self._content["otherData"]["hidden_share_of_communication"]
        return share

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page of its own: lanes to zoom and to move in, names and times to point at.

        It needs no network, and follows what the reader prefers, dark or light. The same trace
        gives the same bytes.

        Raises:
            StrategyError: the trace is being taken still.
            OSError: the file cannot be written.
        """
        summary = self._summary()
        _write(path, page_of(self._lanes(), title=f"mirror: {summary}", summary=summary))

    def to_svg(self, path: str | os.PathLike[str], *, width: int = 880) -> None:
        """Writes the lanes as a picture, for a document; better of a step than of a thousand.

        Args:
            width: of the picture, in pixels.

        Raises:
            StrategyError: the trace is being taken still.
            ValueError: it is too narrow for lanes and their names.
            OSError: the file cannot be written.
        """
        if isinstance(width, bool) or not isinstance(width, int) or width < 300:
            raise ValueError(f"width= is a whole number from 300 on; got {width!r}")
        _write(path, svg_of(self._lanes(), width=width, stand_alone=True))

    def _repr_html_(self) -> str | None:
        if not self._content:
            return None  # notebooks show its repr
        return svg_of(self._lanes(), width=880, stand_alone=False)

    def __repr__(self) -> str:
        return f"Trace({self._summary() if self._content else 'is being taken'})"

    def _summary(self) -> str:
        lanes = self._lanes()
        num_spans = sum(len(row) for lane in lanes for row in lane.rows)
        told = f"{num_spans:,} spans in {len(lanes)} lanes, {1e3 * self.seconds:,.3f} ms"
        hidden = self.hidden_share
        if hidden is None:
            return told
        return f"{told}; {hidden:.0%} of the reductions' time was hidden"

    def _lanes(self) -> tuple[Lane, ...]:
        self._check_ended()
        return lanes_of(self._content["traceEvents"])

    def _check_ended(self) -> None:
        if not self._content:
            raise StrategyError(
                "the trace is being taken still; look at it after the with statement of "
                "strategy.trace has ended"
            )


def _write(path: str | os.PathLike[str], text: str) -> None:
    with replace_atomically(path) as file:
        file.write(text.encode())
