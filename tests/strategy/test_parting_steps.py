"""Training programs of two workers that part ways: always an error on who waits, never a hang."""

import random
import signal
import time

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import MirrorError
from tests.comm.workers.programs import Program
from tests.comm.workers.test_parting import quick

STEPS = (
    "run one",
    "run other",
    "call",
    "step",
    "sum in run",
    "reduce",
    "gather",
    "check",
    "scope",
)
MANNERS = ("another", "skip", "twice", "order", "raise", "raise in run", "close")


def _two_programs(seed):
    """Two lists of steps, which are equal up to where one worker goes its own way."""
    draw = random.Random(seed)
    one = [draw.choice(STEPS) for _ in range(draw.randint(2, 6))]
    other, at, manner = list(one), draw.randrange(len(one)), draw.choice(MANNERS)
    if manner == "another":
        other[at] = draw.choice([step for step in STEPS if step != one[at]])
    elif manner == "skip":
        del other[at]
    elif manner == "twice":
        other.insert(at, other[at])
    elif manner == "order":
        other.insert(draw.randrange(len(one)), other.pop(at))
    else:
        other[at:] = [manner]
    both = [one, other]
    draw.shuffle(both)
    return both


class Trained:
    """Two models of a strategy, and what a program may do with them."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.one, self.other = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
            parameters = [*self.one.parameters(), *self.other.parameters()]
            self.optimizer = torch.optim.SGD(parameters, lr=0.1)

    def do(self, step):
        strategy = self.strategy
        if step in ("run one", "run other"):
            model = self.one if step == "run one" else self.other
            strategy.run(lambda: model(torch.ones(2, 3)).sum().backward())
        elif step == "call":
            with strategy.scope():
                self.one(torch.ones(4, 3)).sum().backward()
        elif step == "step":
            self.optimizer.step()
        elif step == "sum in run":
            strategy.run(lambda: mirror.get_replica_context().all_reduce("sum", torch.ones(2)))
        elif step == "reduce":
            strategy.reduce("mean", strategy.run(lambda: torch.ones(())), axis=None)
        elif step == "gather":
            strategy.gather(strategy.run(lambda: torch.ones(1)))
        elif step == "check":
            strategy.check_replicas()
        elif step == "scope":
            with strategy.scope():
                nn.Linear(1, 1)(torch.ones(2, 1))
        elif step == "raise in run":
            strategy.run(self._raise)
        else:
            raise ValueError("my own")

    def _raise(self):
        raise ValueError("my own")


def part(seeds, num_devices):
    quick()
    told = []
    for seed in [None, *seeds]:
        strategy = mirror.MultiWorkerMirroredStrategy(
            ["cpu"] * num_devices,
            communication_options=mirror.CommunicationOptions(timeout_seconds=30.0),
        )
        rank = strategy._group.replicas.workers.rank
        kind, words = "ended", ""
        begun = time.monotonic()
        try:
            with strategy:
                trained = Trained(strategy)
                # First all steps, by both: torch makes and imports much when it needs it.
                for step in STEPS if seed is None else _two_programs(seed)[rank]:
                    begun = time.monotonic()
                    if step == "close":
                        break
                    trained.do(step)
                    if step != "step":
                        _ = [p.grad for p in trained.one.parameters()]
        except (ValueError, MirrorError) as error:
            kind, words = type(error).__name__, str(error)
        told.append((kind, words, time.monotonic() - begun))
    assert told.pop(0)[0] == "ended"
    return told


def _check(seeds, told_by_both):
    for seed, *told in zip(seeds, *told_by_both, strict=True):
        one, other = _two_programs(seed)
        lost = [kind for kind, _, _ in told if kind in ("DivergenceError", "WorkerLostError")]
        # Programs that differ need not meet again: a model of its own waits for nobody.
        assert not lost or one != other, (seed, told)
        for kind, words, seconds in told:
            assert seconds < 30, (seed, told)  # 10 where nothing else runs
            if kind in ("DivergenceError", "WorkerLostError"):
                assert "worker 0 of 2: " in words, (seed, words)
                assert "worker 1 of 2: " in words, (seed, words)
                assert "test_parting_steps.py:" in words, (seed, words)


def test_who_parts_ways_is_told(worker_pool):
    seeds = list(range(8))
    _check(seeds, worker_pool(2).run(part, seeds, 1))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("first", "num_devices"), [(100, 1), (160, 1), (220, 2), (260, 2)])
def test_who_parts_ways_is_told_in_many_programs(worker_pool, first, num_devices):
    seeds = list(range(first, first + 40))
    _check(seeds, worker_pool(2).run(part, seeds, num_devices))


TRAINS = """
import mirror
strategy = mirror.MultiWorkerMirroredStrategy(
    ["cpu"] * {devices},
    communication_options=mirror.CommunicationOptions(timeout_seconds={seconds}),
)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.ones(8, 8)).square().mean()
    loss.backward()
    optimizer.step()
    ready()
    while True:
        optimizer.zero_grad()
        {step}
        optimizer.step()
"""
CALLS = "model(torch.ones(8, 8)).square().mean().backward()"
RUNS = "strategy.run(lambda: model(torch.ones(4, 8)).square().mean().backward())"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("step", "devices", "number", "lost"),
    [
        (CALLS, 1, signal.SIGKILL, 0),
        (CALLS, 2, signal.SIGKILL, 1),
        (RUNS, 2, signal.SIGKILL, 0),
        (RUNS, 1, signal.SIGSTOP, 0),
        (CALLS, 2, signal.SIGSTOP, 1),
    ],
)
def test_a_training_whose_other_worker_is_gone_ends(step, devices, number, lost):
    seconds = 60.0 if number == signal.SIGKILL else 3.0
    with Program(TRAINS.format(step=step, devices=devices, seconds=seconds)) as program:
        program.ready()
        time.sleep(0.5)
        program.signal(lost, number)
        (ended,) = program.ended(1 - lost, within=60.0)
    assert ended.code == 1, ended
    assert f"mirror.errors.WorkerLostError: worker {lost} of 2 is lost" in ended.err
    assert ended.seconds < (10.0 if number == signal.SIGKILL else 25.0)
