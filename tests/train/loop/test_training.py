"""The training loop resumes, counts, stops and saves as its hooks ask, on every worker."""

import math
import threading
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.errors import NanLossError, StrategyError
from mirror.train import Hook, SaveEvery, StopAfter, StopAtStep, StopOnNan, Training
from tests.pairs import each_once


class Program:
    """A strategy with a model and data, that trains until it ends, or fails at a step."""

    def __init__(self, directory=None, *, num_batches=10, with_dataset=True):
        torch.manual_seed(1)
        self.strategy = mirror.MirroredStrategy(["cpu"] * 2)
        with self.strategy.scope():
            self.model = nn.Linear(3, 2)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        data = [(torch.randn(4, 3), torch.arange(4) % 2) for _ in range(num_batches)]
        self.dataset = self.strategy.distribute_dataset(data)
        objects = {"model": self.model, "optimizer": self.optimizer}
        if with_dataset:
            objects["dataset"] = self.dataset
        self.manager = directory and mirror.CheckpointManager(
            mirror.Checkpoint(**objects), directory
        )
        self.inputs = []

    def step(self, batch):
        x, y = batch
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, hooks=(), *, epochs=1, fail_at=None):
        with Training(self.strategy, checkpoint=self.manager, hooks=hooks) as training:
            for batch in training.batches(self.dataset, epochs=epochs):
                losses = self.strategy.run(self.step, (batch,))
                training.log(loss=losses, rate=0.1)
                if training.step + 1 == fail_at:
                    raise ZeroDivisionError
        return training


class Told(Hook):
    """Notes what it is called for."""

    def __init__(self):
        self.calls = []

    def begin(self, training):
        self.calls.append(("begin", training.step))

    def before_step(self, training):
        self.calls.append(("before", training.step))

    def after_step(self, training):
        self.calls.append(("after", training.step, sorted(training.logged_now)))

    def saved(self, training):
        self.calls.append(("saved", training.step))

    def end(self, training, error):
        self.calls.append(("end", training.step, type(error).__name__))


def test_hooks_are_called_in_order():
    told = Told()
    training = Program(num_batches=2).train([told])
    assert training.step == 2
    logged = ["loss", "rate"]
    assert told.calls == [
        *(("begin", 0), ("before", 0), ("after", 1, logged)),
        *(("before", 1), ("after", 2, logged), ("end", 2, "NoneType")),
    ]


@each_once(save_steps=[1, 2, 3], fail_at=[1, 3, 4, 6, 7, 11, 12])
def test_a_training_that_failed_goes_on_to_the_same_end(tmp_path, fail_at, save_steps):
    """Four epochs of three batches; what was done after the last checkpoint is done again."""
    undisturbed = Program(num_batches=3)
    undisturbed.train(epochs=4)
    failing = Program(tmp_path, num_batches=3)
    with pytest.raises(ZeroDivisionError):
        failing.train([SaveEvery(save_steps)], epochs=4, fail_at=fail_at)
    failing.manager.wait()
    going_on = Program(tmp_path, num_batches=3)
    training = going_on.train([SaveEvery(save_steps)], epochs=4)
    assert training.first_step == (fail_at - 1) // save_steps * save_steps
    assert training.step == 12 == going_on.manager.latest
    for p, q in zip(going_on.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert p.equal(q)


def test_a_training_that_is_over_does_no_more(tmp_path):
    for _ in range(2):
        assert Program(tmp_path, num_batches=3).train(epochs=2).step == 6
    assert Program(tmp_path, num_batches=3).train([StopAtStep(5)], epochs=9).step == 6


def test_batches_that_never_end_are_trained_on_up_to_a_step_and_go_on(tmp_path):
    def program(directory):
        made = Program(directory, with_dataset=False)
        arrays = (torch.randn(10, 3), torch.arange(10) % 2)
        loader = mirror.data.from_arrays(arrays, 4, shuffle=True, repeat=True)
        made.dataset = made.strategy.distribute_dataset(loader)
        made.manager = mirror.CheckpointManager(
            mirror.Checkpoint(model=made.model, optimizer=made.optimizer, data=made.dataset),
            directory,
        )
        return made

    undisturbed = program(tmp_path / "one")
    assert undisturbed.train([StopAtStep(8)]).num_steps is None
    program(tmp_path / "two").train([StopAtStep(4)])
    going_on = program(tmp_path / "two")
    assert going_on.train([StopAtStep(8)]).first_step == 4
    for p, q in zip(going_on.model.parameters(), undisturbed.model.parameters(), strict=True):
        assert p.equal(q)


def test_a_dataset_outside_the_checkpoint_starts_again_with_a_warning(tmp_path):
    Program(tmp_path, num_batches=3, with_dataset=False).train([StopAtStep(2)])
    with pytest.warns(UserWarning, match="goes on after step 2, and its dataset starts again"):
        training = Program(tmp_path, num_batches=3, with_dataset=False).train()
    assert training.step == 5


def test_epochs_of_a_dataset_without_a_length_cannot_go_on(tmp_path):
    program = Program(tmp_path)
    program.train([StopAtStep(2)])
    with (
        pytest.warns(UserWarning, match="starts again"),
        pytest.raises(StrategyError, match="no length; end it by StopAtStep"),
        Training(program.strategy, checkpoint=program.manager) as training,
    ):
        training.batches(iter([1, 2]), epochs=2)


@pytest.mark.parametrize(
    ("hook", "steps", "again"),
    [(StopAtStep(4), 4, 4), (lambda: StopAtStep(num_steps=4), 4, 8)],
)
def test_stops_at_a_step(tmp_path, hook, steps, again):
    for expected in (steps, again):
        made = hook() if callable(hook) else hook
        training = Program(tmp_path).train([made], epochs=5)
        assert training.step == expected == training.last_step
        assert training.reason == f"step {expected} was the last one"


def test_stops_after_a_time():
    training = Program().train([StopAfter(1e-9)])
    assert (training.step, training.reason) == (1, "1e-09 s are over")


class BadLoss(Hook):
    """Logs a loss that is no number, at a step."""

    def before_step(self, training):
        training.log(bad=math.nan if training.step == 2 else 1.0)


def test_a_failed_training_waits_for_a_checkpoint_that_is_being_written(tmp_path, monkeypatch):
    write = mirror.CheckpointManager._write

    def write_slowly(self, *args):
        threading.Event().wait(0.3)
        write(self, *args)

    monkeypatch.setattr(mirror.CheckpointManager, "_write", write_slowly)
    program = Program(tmp_path)
    with pytest.raises(ZeroDivisionError):
        program.train([SaveEvery(4)], fail_at=5)
    assert program.manager.latest == 4


def test_a_loss_that_is_no_number_is_an_error_and_nothing_is_saved(tmp_path):
    program, told = Program(tmp_path), Told()
    with pytest.raises(NanLossError, match="'bad' is nan after step 3"):
        program.train([BadLoss(), StopOnNan("bad"), told])
    assert program.manager.latest is None
    assert told.calls[-1] == ("end", 3, "NanLossError")
    training = Program(tmp_path).train([BadLoss(), StopOnNan("bad", raises=False)])
    assert (training.step, training.reason) == (3, "'bad' is nan after step 3")


def test_saves_every_so_many_steps_and_at_the_end(tmp_path):
    program, told = Program(tmp_path), Told()
    program.train([SaveEvery(4), told])
    assert program.manager.steps == (4, 8, 10)
    assert [call for call in told.calls if call[0] == "saved"] == [
        ("saved", s) for s in (4, 8, 10)
    ]


def test_saves_every_so_many_seconds(tmp_path):
    program = Program(tmp_path, num_batches=3)
    program.train([SaveEvery(seconds=1e-9)])
    assert program.manager.steps == (1, 2, 3)


def test_a_step_that_is_left_by_break_counts(tmp_path):
    program = Program(tmp_path)
    with Training(program.strategy, checkpoint=program.manager) as training:
        for i, batch in enumerate(training.batches(program.dataset)):
            program.strategy.run(program.step, (batch,))
            if i == 2:
                break
        assert training.step == 2
        for _ in training.batches([1]):
            assert training.step == 3
            training.stop()
    assert training.step == 4 == program.manager.latest


def test_values_are_those_of_their_step():
    program = Program(num_batches=3)
    found, losses = [], []

    class Look(Hook):
        def after_step(self, training):
            found.append(training.value("loss"))
            with pytest.raises(KeyError):
                training.value("other")

    with Training(program.strategy, hooks=[Look()]) as training:
        for batch in training.batches(program.dataset):
            per_replica = program.strategy.run(program.step, (batch,))
            total = program.strategy.reduce("mean", per_replica)
            losses.append(float(total))
            training.log(loss=per_replica, step=training.step)
            total.zero_()  # a value is of the moment when it was logged
    assert found == losses
    assert training.value("step") == 2.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s: Training(cast(Any, 1)), "takes a strategy first"),
        (
            lambda s: Training(s, checkpoint=cast(Any, "here")),
            "checkpoint= takes a mirror.CheckpointManager",
        ),
        (lambda s: Training(s, hooks=[cast(Any, print)]), "hooks are objects of"),
        (lambda s: StopAtStep(), "last_step or num_steps"),
        (lambda s: StopAtStep(3, num_steps=3), "last_step or num_steps"),
        (lambda s: StopAtStep(0), r"StopAtStep\(last_step=\) is a whole number above 0; got 0"),
        (lambda s: StopAfter(0), r"StopAfter\(seconds=\) is a number above 0"),
        (lambda s: StopAfter(cast(Any, "1")), r"StopAfter\(seconds=\) is a number above 0"),
        (lambda s: SaveEvery(), "give one of them"),
        (lambda s: SaveEvery(3, seconds=3), "give one of them"),
        (lambda s: Training(s, hooks=[SaveEvery(3)]).__enter__(), "something to save with"),
        (lambda s: Training(s).batches([]), "inside its with statement"),
        (lambda s: Training(s).log(loss=1), "inside its with statement"),
        (lambda s: Training(s).save(), "nothing to save with"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises((TypeError, ValueError, StrategyError), match=message):
        make(mirror.MirroredStrategy(["cpu"]))


@pytest.mark.parametrize("value", ["1", None, torch.ones(2), [1.0], 1j])
def test_what_is_no_number_is_not_logged(value):
    with (
        Training(mirror.MirroredStrategy(["cpu"])) as training,
        pytest.raises(TypeError, match=r"log\(\) takes numbers.*'loss' is"),
    ):
        training.log(loss=value)


def over_workers(directory):
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
    with strategy.scope():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workers = strategy._group.replicas.workers
    manager = mirror.CheckpointManager(
        mirror.Checkpoint(model=model, optimizer=optimizer), directory
    )

    class AskOnOne(Hook):
        """Asks on the second worker alone."""

        def after_step(self, training):
            if workers.rank == 1 and training.step == 2:
                training.save()
            if workers.rank == 1 and training.step == 5:
                training.stop("enough")

    class Chiefs(Told):
        chief_only = True

    told, chiefs = Told(), Chiefs()
    with Training(strategy, checkpoint=manager, hooks=[AskOnOne(), told, chiefs]) as training:
        for x in training.batches(strategy.distribute_dataset([torch.ones(4, 3)] * 9)):
            optimizer.zero_grad()
            training.log(loss=model(x).sum())
            training.strategy.run(lambda x: model(x).sum().backward(), (x,))
            optimizer.step()
    saved = [call for call in told.calls if call[0] == "saved"]
    strategy.close()
    return training.step, training.reason, saved, len(chiefs.calls)


@pytest.mark.slow
def test_what_one_worker_asks_for_all_do(worker_pool, tmp_path):
    first, second = worker_pool(2).run(over_workers, str(tmp_path))
    saved = [("saved", 2), ("saved", 5)]
    assert first == (5, "worker 1: enough", saved, 14)
    assert second == (5, "enough", saved, 0)
