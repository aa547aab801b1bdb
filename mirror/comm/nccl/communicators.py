"""NCCL's communicators of this process, as NCCL hands them out: made, and ended in a thread.

A clique may reach over several processes, each with the ranks of its own devices; what they have
in common is an identifier, which one of them makes (``new_identifier``) and tells the others.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from mirror.comm.nccl.libnccl import IN_PROGRESS, SUCCESS, NcclLibrary, UniqueId, non_blocking
from mirror.devices import using
from mirror.errors import BackendError


class RankRange(NamedTuple):
    """Where this process's devices stand in a clique of several processes.

    Attributes:
        first: the rank of its first device; the others follow.
        size: the number of ranks of all processes.
        identifier: the clique's.
    """

    first: int
    size: int
    identifier: bytes


def new_identifier(library: NcclLibrary) -> bytes:
    """Returns the identifier of a clique that is to be made.

    Raises:
        BackendError: NCCL refuses.
    """
    unique_id = UniqueId()
    result = library.call("ncclGetUniqueId", ctypes.byref(unique_id))
    if result != SUCCESS:
        raise BackendError(f"ncclGetUniqueId returned {library.explain(result)}")
    return bytes(unique_id)


class Communicators:
    """The handles of one communicator per replica.

    Args:
        place: which rank replica 0 is, of how many; ``None``: replica ``i`` is rank ``i``.

    Attributes:
        handles: one that is not there, not yet or no longer, is ``None``.
    """

    def __init__(
        self, library: NcclLibrary, devices: Sequence[torch.device], place: RankRange | None
    ) -> None:
        self._library = library
        self._devices = tuple(devices)
        self._place = place
        self.handles = self._none()

    def identified(self, call: Callable[..., int]) -> tuple[int, int, UniqueId]:
        """Returns the first rank, the number of ranks, and what they have in common.

        Args:
            call: calls a function of NCCL.
        """
        if self._place is not None:
            first, size, identifier = self._place
            return first, size, UniqueId.from_buffer_copy(identifier)
        unique_id = UniqueId()
        call("ncclGetUniqueId", ctypes.byref(unique_id))
        return 0, len(self._devices), unique_id

    def make(self, ranks: tuple[int, int, UniqueId], call: Callable[..., int]) -> None:
        """Begins to make them, as a group.

        Args:
            ranks: as ``identified`` has returned them.
            call: calls a function of NCCL.
        """
        first, size, unique_id = ranks
        config = non_blocking()
        for replica_id, device in enumerate(self._devices):
            handle = ctypes.c_void_p()
            try:
                with using(device):  # the only function that cares for the current device
                    call(
                        "ncclCommInitRankConfig",
                        ctypes.byref(handle),
                        size,
                        unique_id,
                        first + replica_id,
                        ctypes.byref(config),
                    )
            finally:
                self.handles[replica_id] = handle.value

    def end(self, function: str, seconds: float) -> dict[int, int] | None:
        """Forgets them all and calls a function that ends them; see ``end_each``."""
        handles, self.handles = self.handles, self._none()
        return self.end_each(function, handles, seconds)

    def end_each(
        self, function: str, handles: Iterable[int | None], seconds: float
    ) -> dict[int, int] | None:
        """Calls a function on communicators, in a thread of its own, for it may not return.

        Returns:
            What came of those for which it failed; ``None`` if that is not known in time.
        """
        failed: dict[int, int] = {}

        def end() -> None:
            # One after the other: NCCL does the work of all at the last.
            for handle in filter(None, handles):
                result = self._library.call(function, handle)
                if result not in (SUCCESS, IN_PROGRESS):
                    failed[handle] = result

        thread = threading.Thread(target=end, name=f"mirror-{function}", daemon=True)
        thread.start()
        thread.join(min(max(seconds, 0.0), threading.TIMEOUT_MAX))
        return None if thread.is_alive() else failed

    def _none(self) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * len(self._devices))()
