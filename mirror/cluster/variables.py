"""Variables: what a launcher has told this process, by environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from mirror.errors import ClusterError, short_repr

MAX_PROCESSES = 2**20
MAX_PORT = 65535

_NUMBER = re.compile("[0-9]{1,20}")


class EnvironmentVariables:
    """The environment of this process, or one that is given, read with errors that name names.

    A variable that is empty counts as one that is not set: shells and manifests make such ones.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._given = environ

    @property
    def environ(self) -> Mapping[str, str]:
        """All of them, as they are now."""
        return os.environ if self._given is None else self._given

    def text(self, *names: str) -> str | None:
        """Returns the first of several variables that is set; ``None`` where none is."""
        name = self.first(*names)
        return None if name is None else self.environ[name].strip()

    def first(self, *names: str) -> str | None:
        """Returns the name of the first that is set."""
        return next((name for name in names if self.environ.get(name, "").strip()), None)

    def needed(self, *names: str, why: str) -> str:
        """Returns the first of several that is set.

        Raises:
            ClusterError: none of them is; says ``why`` one has to be.
        """
        text = self.text(*names)
        if text is None:
            raise missing(names, why)
        return text

    def integer(self, *names: str, least: int = 0, most: int = MAX_PROCESSES) -> int | None:
        """Returns the first that is set as a number; ClusterError for what is none in range."""
        name = self.first(*names)
        return None if name is None else integer(self.environ[name], name, least=least, most=most)

    def needed_integer(
        self, *names: str, why: str, least: int = 0, most: int = MAX_PROCESSES
    ) -> int:
        """Returns the first that is set as a number; ClusterError also where none is set."""
        number = self.integer(*names, least=least, most=most)
        if number is None:
            raise missing(names, why)
        return number


def missing(names: tuple[str, ...], why: str) -> ClusterError:
    """Returns the error that says none of the variables is set."""
    return ClusterError(f"{' or '.join(names)} is not set; {why}")


def integer(text: str, name: str, *, least: int = 0, most: int = MAX_PROCESSES) -> int:
    """Returns the number that a text is; ClusterError, with its name, if it is none in range."""
    digits = text.strip()
    number = int(digits) if _NUMBER.fullmatch(digits) else -1
    if not least <= number <= most:
        raise ClusterError(f"{name} is a number from {least} to {most}; got {short_repr(text)}")
    return number
