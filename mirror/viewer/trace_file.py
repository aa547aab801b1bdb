"""Trace: the recorded spans of ``strategy.trace``, as pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mirror.base.safe_files import replace_atomically
from mirror.errors import StrategyError
from mirror.viewer.pictures import Lane, lanes_of, page_of, seconds_of, svg_of


class Trace:
    """The spans recorded by ``strategy.trace(path)``, in a lane for each replica.

    ::

        with strategy.trace("step.json") as trace:
            train_step(batch)
        trace.to_html("step.html")

    A notebook shows the lanes. Times count from the first span. https://ui.perfetto.dev opens the
    file, to zoom and to search.

    Args:
        content: the content of the file; empty until the trace has ended.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Returns the trace in a file.

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
        """The seconds from the beginning of the first span to the end of the last one."""
        return seconds_of(self._lanes())

    @property
    def hidden_share(self) -> float | None:
        """The hidden share of the reductions' time; ``None`` without reductions."""
        self._check_ended()
        share: float | None = self._content["otherData"]["hidden_share_of_communication"]
        return share

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with the lanes, and a table of the time of each kind.

        The name and time of a span appear when the mouse points at it. The page needs no network,
        and has dark or light colours as the reader prefers. The same trace gives the same bytes.

        Raises:
            StrategyError: the trace has not ended.
            OSError: the file cannot be written.
        """
        summary = self._summary()
        _write(path, page_of(self._lanes(), title=f"mirror: {summary}", summary=summary))

    def to_svg(self, path: str | os.PathLike[str], *, width: int = 880) -> None:
        """Writes the lanes of a few steps as a picture for a document.

        Args:
            width: the width of the picture, in pixels.

        Raises:
            StrategyError: the trace has not ended.
            ValueError: the width is too small for lanes and their names.
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
        summary = f"{num_spans:,} spans in {len(lanes)} lanes, {1e3 * self.seconds:,.3f} ms"
        hidden = self.hidden_share
        if hidden is None:
            return summary
        return f"{summary}; {hidden:.0%} of the reductions' time was hidden"

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
