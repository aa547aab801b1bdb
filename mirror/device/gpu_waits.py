"""GpuWaits: how long GPUs wait for the host, and how far it is ahead, sampled in few steps.

In one of 16 steps the host asks each GPU's stream, at the ends of the spans of the timeline,
whether all that was launched there is done: some microseconds a span, and nothing in other steps.
A GPU that is idle at both ends of an interval has waited for all of it if another replica used the
interpreter meanwhile. If its own replica did, it has kept up with the launches: then it worked for
a part of the interval that events cannot tell.

    host     r0 forward | r1 forward | r2 forward | ...
    cuda:0   works      | works      | waits      | waits
    cuda:1   waits      | works      | works      | waits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from mirror.device.cuda_graph import is_capturing

# The first steps, in which memory is allocated and kernels are loaded, are not sampled.
FIRST_STEP, EVERY_STEPS = 4, 16


@dataclass(frozen=True)
class HostLead:
    """How the host and the GPUs keep pace, as means over the GPUs and the sampled steps.

    Attributes:
        num_gpus: the number of GPUs.
        num_steps: the number of sampled steps.
        waiting: the share of the time, 0 to 1, in which a GPU waited while the host launched for
            other replicas, or did other work between spans.
        keeping_up: the share in which a GPU was done with each launch of its own replica before
            the next one, so that the launches take longer than their kernels.
        ahead_seconds: how much later than the host a GPU ended a step. Measured at the next end
            of a span, so it is at most that much too long.
    """

    num_gpus: int
    num_steps: int
    waiting: float
    keeping_up: float
    ahead_seconds: float


class GpuWaits:
    """Samples whether the GPUs of a strategy wait.

    Args:
        devices: of each replica; all are GPUs.

    Attributes:
        is_sampling: whether ``sample`` is to be called in the current step.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)
        self._gpus = tuple(dict.fromkeys(devices))
        self._num_ended = self._num_steps = 0
        self._waiting = self._keeping_up = self._total = self._ahead = 0.0
        self._waited = self._kept_up = self._lead = self._counted = self._began = self._now = 0.0
        self._streams, self._idle = list[Any](), list[bool]()
        self._pending: dict[int, Any] = {}
        self.is_sampling = False

    def end_step(self) -> None:
        """Ends a step, and begins the next one, which may be sampled."""
        if self.is_sampling:
            self.sample(None)
            self._finish()
        self._num_ended += 1
        after_first = self._num_ended - FIRST_STEP
        if after_first >= 0 and after_first % EVERY_STEPS == 0 and not is_capturing():
            self._begin()

    def sample(self, replica_id: int | None, *, counts: bool = True) -> None:
        """Asks all GPUs at an end of a span.

        Args:
            replica_id: whose span it is; ``None``: the caller's, which launches for all GPUs.
            counts: False after a wait for something else than the host's launches, as for input.
        """
        if is_capturing():  # a query would end the capture
            self.is_sampling = False
            return
        now, idle = perf_counter(), [stream.query() for stream in self._streams]
        seconds, self._now = now - self._now, now
        for i, event in tuple(self._pending.items()):
            if event.query():
                self._lead += now - self._began
                self._pending.pop(i, None)  # replicas that run at once may ask at once
        if not counts:
            self._idle = idle
            return
        self._counted += seconds
        own = None if replica_id is None else self._devices[replica_id]
        for gpu, was_idle, is_idle in zip(self._gpus, self._idle, idle, strict=True):
            if was_idle and is_idle and own in (None, gpu):
                self._kept_up += seconds
            elif was_idle and is_idle:
                self._waited += seconds
        self._idle = idle

    def _begin(self) -> None:
        """Begins to sample a step. The sums count only once it has ended."""
        self._streams = [torch.cuda.current_stream(gpu) for gpu in self._gpus]
        self._idle = [stream.query() for stream in self._streams]
        self._began = self._now = perf_counter()
        self._pending = {}
        for i, stream in enumerate(self._streams):
            if not self._idle[i]:
                self._pending[i] = stream.record_event()
        self._waited = self._kept_up = self._lead = self._counted = 0.0
        self.is_sampling = True

    def _finish(self) -> None:
        self.is_sampling = False
        self._num_steps += 1
        self._total += self._counted * len(self._gpus)
        self._waiting += self._waited
        self._keeping_up += self._kept_up
        self._ahead += self._lead + (self._now - self._began) * len(self._pending)

    def result(self) -> HostLead | None:
        """Returns the means so far; ``None`` before the end of the first sampled step."""
        if not self._total:
            return None
        return HostLead(
            num_gpus=len(self._gpus),
            num_steps=self._num_steps,
            waiting=self._waiting / self._total,
            keeping_up=self._keeping_up / self._total,
            ahead_seconds=self._ahead / (self._num_steps * len(self._gpus)),
        )
