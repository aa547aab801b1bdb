"""NCCL's communicators of this process, as NCCL hands them out: made, and ended in a thread."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from mirror.comm.nccl.libnccl import IN_PROGRESS, SUCCESS, NcclLibrary, UniqueId, non_blocking
from mirror.devices import using


class Communicators:
    """The handles of one communicator per replica; replica ``i`` is rank ``i``.

    Attributes:
        handles: one that is not there, not yet or no longer, is ``None``.
    """

    def __init__(self, library: NcclLibrary, devices: Sequence[torch.device]) -> None:
        self._library = library
        self._devices = tuple(devices)
        self.handles = self._none()

    def make(self, unique_id: UniqueId, call: Callable[..., int]) -> None:
        """Begins to make them, as a group.

        Args:
            call: calls a function of NCCL.
        """
        config = non_blocking()
        for rank, device in enumerate(self._devices):
            handle = ctypes.c_void_p()
            try:
                with using(device):  # the only function that cares for the current device
                    call(
                        "ncclCommInitRankConfig",
                        ctypes.byref(handle),
                        len(self._devices),
                        unique_id,
                        rank,
                        ctypes.byref(config),
                    )
            finally:
                self.handles[rank] = handle.value

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
