"""Uncopied: what belongs to this process and is neither copied nor pickled."""

from __future__ import annotations

from typing import ClassVar, NoReturn


class NoCopy:
    """Refuses ``copy.copy``, ``copy.deepcopy`` and ``pickle``, and says what to do instead.

    Threads, devices and streams cannot be copied, and half a copy would share them.
    """

    __slots__ = ()
    _instead: ClassVar[str]

    def __reduce__(self) -> NoReturn:  # copy asks for it, too
        raise TypeError(
            f"a {type(self).__name__} belongs to the process that made it and can be neither "
            f"copied nor pickled; {self._instead}"
        )
