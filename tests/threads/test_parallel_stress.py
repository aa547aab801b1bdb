"""Parallel replicas under stress: ``python -m tests.threads.test_parallel_stress SECONDS [SEED]``.

The main thread and another one train with a strategy each. Meanwhile a thread collects garbage
without a pause, replicas raise and diverge at random steps, and Ctrl-C hits the main thread at
random moments. After each of these the program goes on from its last whole step. Every training
must end with the bits of lockstep. Prints a line of counts; a hang ends the process with the
stacks of all threads.
"""

import copy
import faulthandler
import gc
import random
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from time import monotonic

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same
from tests.toy_models import meet, replica_id

N, NUM_STEPS, WIDTH = 3, 6, 8
SECONDS = 12  # of a test
HANG_SECONDS = 120
MAIN = threading.main_thread().ident


class Net(nn.Module):
    """Norms, a recurrent layer, an attribute set in forward, a buffer changed in place."""

    def __init__(self):
        super().__init__()
        self.gru, self.norm = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.last = self.norm(self.gru(x.unsqueeze(1).expand(-1, 2, -1))[0].sum(1))
        self.seen += 1
        return self.head(torch.relu(self.last))


MODELS = {
    "net": Net,
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 3)),
}
TEMPLATES = {name: make() for name, make in MODELS.items()}
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
}


class Planted(Exception):
    """Raised by a replica on purpose."""


class Trainer:
    """Trains models on one strategy, and goes on after each error.

    Attributes:
        counts: what has happened.
        steps: whether a step is in progress, which an interrupt may hit.
    """

    def __init__(self, schedule, seed):
        self.strategy = mirror.MirroredStrategy(["cpu"] * N, schedule=schedule)
        # As on N devices: every replica makes the optimizer's step.
        self.strategy._group.replicas.steps_once = seed % 2 == 0
        self.draw, self.counts, self.steps = random.Random(seed), Counter(), False

    def train(self, model_name, optimizer_name, mishaps):
        generator = torch.Generator().manual_seed(5)
        strategy = self.strategy
        with strategy.scope():
            model = strategy.mirror(copy.deepcopy(TEMPLATES[model_name]))  # draws nothing
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
            optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        x = torch.randn(10, WIDTH, generator=generator)
        batches = strategy.distribute_dataset([x] * NUM_STEPS)
        for batch in batches:
            while True:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                if self._step(model, optimizer, batch, self.draw.choice(mishaps)):
                    break
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
        strategy.check_replicas()
        return {name: value.clone() for name, value in model.state_dict().items()}

    def _step(self, model, optimizer, batch, mishap):
        def step(x):
            optimizer.zero_grad()
            if mishap == "error" and replica_id() == 1:
                raise Planted
            if mishap == "divergence" and replica_id() == 2:
                meet()
            model(x).square().mean().backward()
            if mishap == "late error" and replica_id() == 0:
                raise Planted
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            meet()

        try:
            try:
                self.steps = mishap == "interrupt"
                self.strategy.run(step, (batch,))
            finally:
                self.steps = False
        except (Planted, mirror.DivergenceError, KeyboardInterrupt) as error:
            self.counts[type(error).__name__] += 1
            return False
        if mishap in ("error", "divergence", "late error"):
            raise AssertionError(f"no error came of {mishap}")
        return True


def train_until(trainer, deadline, expected, mishaps):
    while monotonic() < deadline:
        name = trainer.draw.choice(list(MODELS)), trainer.draw.choice(list(OPTIMIZERS))
        while True:
            try:
                found = trainer.train(*name, mishaps)
                break
            except KeyboardInterrupt:  # outside run
                trainer.counts["outside run"] += 1
        assert_same(found, expected[name])
        trainer.counts["trainings"] += 1
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)


def main(seconds, seed):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reference = Trainer("lockstep", seed)
    expected = {(m, o): reference.train(m, o, ["none"]) for m in MODELS for o in OPTIMIZERS}
    trainers = [Trainer("parallel", seed), Trainer("parallel", seed + 1)]
    for trainer in trainers:  # the first run takes turns, and so sets the generator of both
        trainer.train("mlp", "sgd", ["none"])
    deadline, is_over, errors = monotonic() + seconds, threading.Event(), []
    mishaps = ["none"] * 8 + ["error", "divergence", "late error"]

    def train_beside():
        try:
            train_until(trainers[1], deadline, expected, mishaps)
        except BaseException as error:
            errors.append(error)
            raise

    def collect():
        while not is_over.wait(0.002):
            gc.collect()

    def interrupt():
        draw = random.Random(seed)
        while not is_over.wait(draw.random() / 10):
            if trainers[0].steps:
                # Once: a second one, while Python's Condition handles the first, breaks that.
                trainers[0].steps = False
                signal.pthread_kill(MAIN, signal.SIGINT)

    threads = [threading.Thread(target=t) for t in (train_beside, collect, interrupt)]
    for thread in threads:
        thread.start()
    try:
        train_until(trainers[0], deadline, expected, [*mishaps, "interrupt", "interrupt"])
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        is_over.set()
        for thread in threads:
            thread.join()
    assert not errors, errors
    for trainer in trainers:
        assert not trainer.strategy._group.runner.parallel_runs._takes_turns
    for trainer in (*trainers, reference):
        trainer.strategy.close()
    print(" ".join(f"{dict(trainer.counts)}" for trainer in trainers), "done", flush=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1], ids=["each replica steps", "one replica steps"])
def test_stress_ends_without_a_hang_or_a_difference(seed):
    done = subprocess.run(
        [sys.executable, "-m", "tests.threads.test_parallel_stress", str(SECONDS), str(seed)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=SECONDS + 300,
    )
    assert done.stdout.endswith("done\n"), done.stderr


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
