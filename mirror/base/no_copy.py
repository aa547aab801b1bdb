"""NoCopy: base class of objects that can be neither copied nor pickled."""

from __future__ import annotations

from typing import ClassVar, NoReturn


class NoCopy:
    """Raises TypeError in ``copy.copy``, ``copy.deepcopy`` and ``pickle``, with the alternative.

    Threads, devices and streams cannot be copied, and a partial copy would share them.
    """

    __slots__ = ()
    _instead: ClassVar[str]

    def __reduce__(self) -> NoReturn:  # the copy module calls it, too
        raise TypeError(
            f"a {type(self).__name__} belongs to the process that made it and can be neither "
            f"copied nor pickled; {self._instead}"
        )
