"""What an actor prints, passed on line by line with the actor's name before it."""

from __future__ import annotations

import os
import sys

_SIZE = 1 << 16
_MAX_LINE = 1 << 16


class ChildOutput:
    """A pipe from one of an actor's standard streams to this process's of that name.

    Args:
        stream: "stdout" or "stderr": whatever ``sys`` has there when a line comes.
        descriptor: of the pipe's end to read; closed at its end.
    """

    def __init__(self, name: str, stream: str, descriptor: int) -> None:
        self._name, self._stream = name, stream
        self.descriptor: int | None = descriptor
        self._rest = b""
        os.set_blocking(descriptor, False)

    def pass_on(self) -> bool:
        """Passes on what is there; returns whether there may be more."""
        while self.descriptor is not None:
            try:
                data = os.read(self.descriptor, _SIZE)
            except BlockingIOError:
                return True
            except OSError:
                data = b""
            if not data:
                self._close()
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > _MAX_LINE:
                lines, self._rest = [*lines, self._rest], b""
            self._print(lines)
        return False

    def finish(self) -> None:
        """Passes on what its process has left; others may still have the pipe."""
        if self.pass_on():
            self._close()

    def _close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
        if self._rest:
            self._print([self._rest])
            self._rest = b""

    def _print(self, lines: list[bytes]) -> None:
        if not lines:
            return
        text = "".join(f"[{self._name}] {line.decode(errors='replace')}\n" for line in lines)
        try:
            stream = getattr(sys, self._stream)
            stream.write(text)
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # there is nobody any more who would read it
