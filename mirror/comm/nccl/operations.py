"""Operations: what a caller has NCCL do, until the devices are known to have done it.

[Note: One witness]
To record an event on each of 8 devices takes longer than NCCL's calls. Where no replica's part can
end before all the others' have begun (``are_joint``), the last device's event stands for all: once
it has happened nobody is late any more, and the next operation is for all devices again. If it has
not happened in time, the other streams are asked whether they have work left, to say whose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mirror.accelerator.events import Event, is_stream_idle


@dataclass
class Work:
    """One collective, or the making or ending of communicators.

    Attributes:
        seconds: how long it may take, which is until the deadline.
        streams: the addresses of those it was enqueued on, one per replica.
        events: what happens when it is done: one per replica, or the last replica's alone.
    """

    what: str
    seconds: float
    deadline: float
    streams: Sequence[int] = ()
    events: list[Event] = field(default_factory=list)

    def is_done(self) -> bool:
        """Whether the devices are done with it; does not wait."""
        return all(event.query() for event in self.events)

    def timeout_message(self, devices: Sequence[torch.device]) -> str:
        """Returns who is not known to be done."""
        unasked = len(devices) - len(self.events)
        who = []
        for i, device in enumerate(devices):
            if i < unasked:
                is_done = is_stream_idle(device, self.streams[i])
            else:
                is_done = self.events[i - unasked].query()
            if not is_done:
                who.append(f"replica {i} ({device})")
        return ", ".join(who)
