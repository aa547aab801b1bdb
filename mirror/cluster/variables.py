"""Reading and checking of the environment variables that a launcher sets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from mirror.errors import ClusterError, short_repr

MAX_PROCESSES = 2**20
MAX_PORT = 65535

_NUMBER = re.compile("[0-9]{1,20}")


class EnvironmentVariables:
    """Reads environment variables; errors have the names of the variables.

    An empty variable counts as not set, since shells and manifests create empty ones.

    Args:
        environ: read in place of this process's environment.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = environ

    @property
    def environ(self) -> Mapping[str, str]:
        """The current variables."""
        return os.environ if self._environ is None else self._environ

    def text(self, *names: str) -> str | None:
        """Returns the value of the first variable that is set, or None."""
        name = self.first(*names)
        return None if name is None else self.environ[name].strip()

    def first(self, *names: str) -> str | None:
        """Returns the name of the first variable that is set, or None."""
        return next((name for name in names if self.environ.get(name, "").strip()), None)

    def needed(self, *names: str, why: str) -> str:
        """Returns the value of the first variable that is set.

        Raises:
            ClusterError: none is set; the message has the reason ``why`` one is needed.
        """
        text = self.text(*names)
        if text is None:
            raise missing(names, why)
        return text

    def integer(self, *names: str, least: int = 0, most: int = MAX_PROCESSES) -> int | None:
        """Returns the first variable that is set as a number, or None; checks the range."""
        name = self.first(*names)
        return None if name is None else integer(self.environ[name], name, least=least, most=most)

    def needed_integer(
        self, *names: str, why: str, least: int = 0, most: int = MAX_PROCESSES
    ) -> int:
        """Returns the first variable that is set as a number; raises ClusterError if none is."""
        number = self.integer(*names, least=least, most=most)
        if number is None:
            raise missing(names, why)
        return number


def missing(names: tuple[str, ...], why: str) -> ClusterError:
    """Returns the error that none of the variables is set."""
    return ClusterError(f"{' or '.join(names)} is not set; {why}")


def integer(text: str, name: str, *, least: int = 0, most: int = MAX_PROCESSES) -> int:
    """Returns a text as a number; raises ClusterError with ``name`` if it is not in the range."""
    digits = text.strip()
    number = int(digits) if _NUMBER.fullmatch(digits) else -1
    if not least <= number <= most:
        raise ClusterError(f"{name} is a number from {least} to {most}; got {short_repr(text)}")
    return number
