"""Trials: one fault of a communicator in one training step, and the state afterwards."""

import copy
import itertools
import threading
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.faults.communicators import FAULTS, Faulty
from tests.oracle import train

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
TIMEOUT_SECONDS = 0.3


@dataclass(frozen=True)
class Setup:
    """What is trained, and how."""

    way: int
    schedule: str
    num_replicas: int = 3
    bytes_per_pack: int = 64
    optimizer: str = "sgd"

    def start(self, timeout_seconds=None):
        """Returns communicator, strategy, model and optimizer."""
        devices = ["cpu"] * self.num_replicas
        communicator = Faulty(devices)
        options = mirror.CommunicationOptions(
            bytes_per_pack=self.bytes_per_pack, timeout_seconds=timeout_seconds
        )
        strategy = mirror.MirroredStrategy(
            devices, communicator, schedule=self.schedule, communication_options=options
        )
        with strategy.scope():
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
            model = mirror.nn.convert_sync_batchnorm(model)
            optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        return communicator, strategy, model, optimizer


@dataclass(frozen=True)
class Outcome:
    """What a fault has left.

    Attributes:
        error: the type of what the step has raised.
        text: what it says.
        are_equal: whether the replicas were equal afterwards.
        state: "before" or "after" the step, bit for bit, or "neither".
        goes_on: whether the next step had the bits of a run without a fault.
        num_threads: that were left after ``close``.
        seconds: what the step has taken.
    """

    error: type | None
    text: str
    are_equal: bool
    state: str
    goes_on: bool
    num_threads: int
    seconds: float


def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(7, 4, generator=generator), torch.arange(7) % 2) for _ in range(3)]


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def state_of(model, optimizer):
    """Returns what a step changes. Running statistics are the forward pass's, as on one device."""
    states = optimizer.state_dict()["state"]
    leaves = [*model.parameters(), *(v for s in states.values() for v in s.values())]
    return [copy.deepcopy(torch.as_tensor(v.detach() if v is not None else 0)) for v in leaves]


def are_same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


class Trials:
    """All faults in the second step of one setup."""

    def __init__(self, setup):
        self.setup = setup
        communicator, *made = setup.start()
        self.states = []  # before the second step, after it, and after the third
        for batch in batches():
            communicator.arm(None, -1)
            self._step(*made, batch)
            self.states.append(state_of(*made[1:]))
            if len(self.states) == 2:
                self.num_calls = communicator.num_calls
        made[0].close()

    def try_fault(self, fault, at):
        """Has one call of the second step go wrong; returns the Outcome."""
        threads = set(threading.enumerate())
        hangs = fault == "hangs"
        communicator, *made = self.setup.start(TIMEOUT_SECONDS if hangs else None)
        first, second, third = batches()
        self._step(*made, first)
        communicator.arm(fault, at)
        error, begin = None, time.monotonic()
        try:
            self._step(*made, second)
        except Exception as caught:
            error = caught
        seconds = time.monotonic() - begin
        assert communicator.was_reached
        communicator.arm(None, -1)
        are_equal = True
        try:
            made[0].check_replicas()
        except mirror.ReplicaMismatchError:
            are_equal = False
        state = state_of(*made[1:])
        is_before = are_same(state, self.states[0])
        self._step(*made, second if is_before else third)
        after = self.states[1 if is_before else 2]
        goes_on = are_same(state_of(*made[1:]), after)
        made[0].close()
        left = [t for t in set(threading.enumerate()) - threads if t.name != "mirror watchdog"]
        where = "before" if is_before else "after"
        return Outcome(
            type(error) if error is not None else None,
            str(error),
            are_equal,
            where if is_before or are_same(state, self.states[1]) else "neither",
            goes_on,
            len(left),
            seconds,
        )

    def _step(self, strategy, model, optimizer, batch):
        train(self.setup.way, strategy, model, optimizer, [batch], loss_fn)


def setups(**choices):
    """Returns every Setup of some ways, schedules and so on; all ways and schedules by default."""
    choices = {"way": (1, 2, 3), "schedule": ("lockstep", "staggered")} | choices
    return [
        Setup(**dict(zip(choices, c, strict=True))) for c in itertools.product(*choices.values())
    ]


def all_trials(setup, faults=FAULTS):
    """Yields every fault at every call of a step: ``(fault, at, outcome)``."""
    trials = Trials(setup)
    for fault in faults:
        for at in range(trials.num_calls):
            yield fault, at, trials.try_fault(fault, at)
