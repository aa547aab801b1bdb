"""ElasticAgent: starts the workers of one machine, starts lost ones again, and may coordinate.

torchrun's agent cannot do this: it ends all workers of its machine if one of them fails, and also
the workers of all other machines, as soon as a worker wants to join.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from types import FrameType
from typing import Protocol, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mirror.device.host import status_of_process
from mirror.devices import count_cuda_devices
from mirror.errors import ClusterError
from mirror.train.elastic.member import call_or_give_up, connect_store
from mirror.train.elastic.membership import (
    ADDRESS_VARIABLE,
    NAME_VARIABLE,
    MembershipCoordinator,
    MembershipOptions,
    MembershipStore,
    Phase,
    View,
)

T = TypeVar("T")

_log = logging.getLogger("mirror")

_POLL_SECONDS = 0.05
_END_SECONDS = 30.0  # how long workers may take to exit, after a signal or an error
_LINGER_SECONDS = 2.0  # how long the agents of other machines may take to read that it has ended
_STORE_SECONDS = 60.0
# A stopped process is lost after this share of the timeout: silence may be load, a stop is not.
_STOPPED_SHARE = 0.3
_AWAKE_SECONDS = 1.0  # a longer time between two looks is a pause of this process
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class AgentOptions:
    """What an agent does.

    Attributes:
        num_local: the number of workers that it starts; 0 only coordinates.
        max_restarts: how often it starts a lost worker again, all of them together.
        join: HOST:PORT of a coordinator elsewhere; None coordinates here.
        port: where to coordinate, for all machines; None for workers of this machine alone.
        membership: the rules for generations.
    """

    num_local: int
    max_restarts: int
    membership: MembershipOptions
    join: str | None = None
    port: int | None = None


class WorkerProcess(Protocol):
    """A process that an agent has started, with the members of ``subprocess.Popen``."""

    @property
    def pid(self) -> int:
        """The number of the process."""

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal; None while the process runs."""

    def send_signal(self, number: int) -> None:
        """Sends a signal."""

    def kill(self) -> None:
        """Sends SIGKILL."""

    def wait(self) -> int:
        """Waits for the process; returns its exit code."""


# Starts a worker with additional environment variables.
Start = Callable[[Mapping[str, str]], WorkerProcess]


def make_start(command: Sequence[str]) -> Start:
    """Returns a function that runs a command line."""
    return lambda variables: subprocess.Popen(
        list(command),
        env={**os.environ, **variables},
        start_new_session=True,  # Ctrl-C reaches the agent alone, which forwards it
    )


class _Slot:
    """The place of one local worker; its process may be replaced.

    Attributes:
        process: None once the worker has exited and is not started again.
        why_killed: the reason for which the agent has killed it, or "".
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = ""
        self.process: WorkerProcess | None = None
        self.why_killed = ""
        self._stopped_seconds = self._looked_at = 0.0
        self._num_switches: int | None = None  # while it is stopped, at the last look

    def stopped_seconds(self) -> float:
        """Returns for how long the process has been stopped by a signal while this one ran.

        A system that suspends all processes of a job may continue this one first. A process that
        is stopped at every look may have run between them: then its thread was switched.
        """
        now = monotonic()
        seconds, self._looked_at = min(now - self._looked_at, _AWAKE_SECONDS), now
        before, self._num_switches = self._num_switches, None
        if self.process is not None:
            self._num_switches = _switches_if_stopped(self.process.pid)
        has_stayed = self._num_switches is not None and self._num_switches == before
        self._stopped_seconds = self._stopped_seconds + seconds if has_stayed else 0.0
        return self._stopped_seconds


class ElasticAgent:
    """Runs elastic workers.

    Args:
        start: starts one worker.

    Raises:
        ClusterError: the port is in use, or no coordinator answers.
    """

    def __init__(self, start: Start, options: AgentOptions) -> None:
        self._start_process, self._options = start, options
        self._num_restarts = self._num_started = 0
        self._name = f"{socket.gethostname()}.{secrets.token_hex(2)}"
        self._signal: int | None = None
        self._exit_code = 0  # the highest of the workers that ended after the training
        self._coordinator: MembershipCoordinator | None = None
        self._is_alone = False  # the training is over, and the coordinator is gone
        if options.join is not None:
            self._address = options.join
            self._store = MembershipStore(connect_store(options.join), is_coordinator=False)
        else:
            server = _serve(options.port)
            self._address = f"127.0.0.1:{server.port}"
            self._store = MembershipStore(server, is_coordinator=True)
            self._coordinator = MembershipCoordinator(self._store, options.membership)
        self._slots = [_Slot(number) for number in range(options.num_local)]

    @property
    def address(self) -> str:
        """HOST:PORT of the coordinator, as the workers of this machine reach it."""
        return self._address

    def run(self) -> int:
        """Runs the workers until the training has ended; returns the exit code.

        Raises:
            ClusterError: the coordinator is gone, or the training has ended with an error.
        """
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            for slot in self._slots:
                self._start(slot)
            return self._watch()
        finally:
            self._kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self) -> int:
        while True:
            view = self._view()
            if view.phase is not Phase.ENDED and self._signal is None:
                self._replace_lost()
                self._check_enough(view)
            if self._signal is not None:
                self._end_workers()
                return self._exit_code
            if view.phase is Phase.ENDED and view.why:
                self._wait_for_workers(_END_SECONDS)
                raise ClusterError(f"the elastic training has ended: {view.why}")
            if view.phase is Phase.ENDED:
                self._wait_after_success(view)
                return self._exit_code
            sleep(_POLL_SECONDS)

    def _view(self) -> View:
        if self._coordinator is not None:
            return self._coordinator.step()
        return self._ask(self._store.read_view) or View()

    def _ask(self, call: Callable[[], T]) -> T | None:
        """Returns what a call of the store returns; None after a signal.

        Raises:
            ClusterError: the coordinator is gone.
        """
        if self._coordinator is not None:
            return call()
        try:
            return call_or_give_up(call, lambda: self._signal is not None)
        except (RuntimeError, TimeoutError) as error:
            raise ClusterError(
                f"the coordinator at {self._address} is gone: {error}; start the training again"
            ) from error

    def _replace_lost(self) -> None:
        """Reports workers that have ended, and starts them again."""
        for slot in self._slots:
            if slot.process is None:
                continue
            stopped = slot.stopped_seconds()
            # A stopped process must not continue.
            if stopped > _STOPPED_SHARE * self._options.membership.timeout_seconds:
                slot.why_killed = f"its process was stopped for {stopped:.1f} s, and was killed"
                slot.process.kill()
            elif self._ask(partial(self._store.is_lost, slot.name)):
                slot.process.kill()
            code = slot.process.poll()
            if code is None:
                continue
            if self._view().phase is Phase.ENDED:
                return
            slot.process = None
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            why = slot.why_killed or f"its process has ended with {how}"
            self._ask(partial(self._store.write_death, slot.name, why))
            if code and self._num_restarts < self._options.max_restarts:
                self._num_restarts += 1
                self._start(slot)

    def _check_enough(self, view: View) -> None:
        """Ends the training if too few workers are left, and no other machine can help."""
        coordinator = self._coordinator
        if coordinator is None:
            if self._slots and all(slot.process is None for slot in self._slots):
                raise ClusterError(
                    f"all workers of this machine have exited, after {self._num_restarts} restarts"
                )
            return
        if self._options.port is not None:
            return
        num_running = sum(slot.process is not None for slot in self._slots)
        if num_running < self._options.membership.min_workers:
            coordinator.end(
                f"{num_running} workers are left after {self._num_restarts} restarts, and at "
                f"least {self._options.membership.min_workers} are needed: {view.why}"
            )

    def _start(self, slot: _Slot) -> None:
        self._num_started += 1
        slot.name = f"{self._name}.{slot.number}.{self._num_started}"
        slot.why_killed = ""
        variables = {ADDRESS_VARIABLE: self._address, NAME_VARIABLE: slot.name}
        variables |= _share_of_gpus(slot.number, len(self._slots))
        slot.process = self._start_process(variables)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def _end_workers(self) -> None:
        """Forwards the signal, and waits for the workers."""
        assert self._signal is not None
        for slot in self._slots:
            if slot.process is not None:
                slot.process.send_signal(self._signal)
        self._wait_for_workers(_END_SECONDS)

    def _wait_for_workers(self, seconds: float) -> None:
        deadline, number = monotonic() + seconds, self._signal
        while monotonic() < deadline:
            if not self._poll_workers():
                return
            if self._signal != number:
                self._end_workers()
                return
            sleep(_POLL_SECONDS)

    def _poll_workers(self) -> list[_Slot]:
        """Takes the exit codes of workers that have ended; returns the slots of the others."""
        for slot in self._slots:
            code = None if slot.process is None else slot.process.poll()
            if code is not None:
                slot.process = None
                self._exit_code = max(self._exit_code, code if code >= 0 else 128 - code)
        return [slot for slot in self._slots if slot.process is not None]

    def _wait_after_success(self, view: View) -> None:
        """Waits for the workers, which may save what they have trained, unless they stall.

        A coordinator waits for the workers of all machines: it detects which of them stall.
        """
        deadline, coordinator = monotonic() + _END_SECONDS, self._coordinator
        while self._signal is None:
            running = self._poll_workers()
            if coordinator is not None:
                coordinator.step()
            if not running and (coordinator is None or self._options.port is None):
                return
            if not running and coordinator is not None and not coordinator.has_live_members:
                sleep(_LINGER_SECONDS)
                return
            for slot in running:
                assert slot.process is not None
                if slot.name in view.members:
                    if self._is_lost(slot):
                        slot.process.kill()
                elif monotonic() > deadline:  # it has trained nothing that it could save
                    slot.process.kill()
                    slot.process.wait()
                    slot.process = None
            sleep(_POLL_SECONDS)
        self._end_workers()

    def _is_lost(self, slot: _Slot) -> bool:
        """Returns whether a worker makes no progress after the training.

        A coordinator detects that. Without one, a worker counts as lost once it has been stopped
        for the timeout; the others may still save.
        """
        assert slot.process is not None
        if not self._is_alone:
            try:
                return bool(self._ask(partial(self._store.is_lost, slot.name)))
            except ClusterError as error:
                _log.warning("%s; the workers of this machine may end their programs", error)
                self._is_alone = True
        return slot.stopped_seconds() > self._options.membership.timeout_seconds

    def _kill(self) -> None:
        for slot in self._slots:
            if slot.process is not None:
                slot.process.kill()
                slot.process.wait()


def _serve(port: int | None) -> TCPStore:
    """Returns a new store at a port of all networks, or, without a port, of loopback alone."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", 0) if port is None else ("", port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        raise ClusterError(f"port {port} cannot be used: {error}; pass another --port") from error
    timeout = timedelta(seconds=_STORE_SECONDS)
    number = listener.getsockname()[1]
    # The store closes the descriptor.
    return TCPStore(
        "127.0.0.1",
        number,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _share_of_gpus(number: int, count: int) -> dict[str, str]:
    """Returns the variable that gives a worker its share of this machine's GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    num_gpus = count_cuda_devices()
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(num_gpus)]
    if count < 2 or len(gpus) < count:
        return {}
    share = gpus[number * len(gpus) // count : (number + 1) * len(gpus) // count]
    return {"CUDA_VISIBLE_DEVICES": ",".join(share)}


def _switches_if_stopped(pid: int) -> int | None:
    """Returns the number of switches of the main thread of a process that a signal has stopped.

    Every stop is a switch. Returns ``None`` if the process runs, if a debugger has stopped it, and
    if there is no ``/proc``.
    """
    try:
        status = status_of_process(pid)
    except OSError:
        return None
    if status["State"] != "T (stopped)":
        return None
    return sum(int(count) for name, count in status.items() if name.endswith("ctxt_switches"))
