"""Preemption: a signal may arrive at any moment, and takes effect between steps."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import mirror
from mirror.execution.lifecycle import step_ends
from mirror.train.checkpoint import preemption
from tests.pairs import each_once
from tests.train.checkpoint.training import Training, same


@pytest.fixture(autouse=True)
def nobody_is_left():
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert (preemption._open, step_ends.listeners, preemption._replaced) == ([], [], {})
    ignored = preemption._ignored.pop(signal.SIGTERM, None)  # after an exit
    assert signal.getsignal(signal.SIGTERM) is (before if ignored is None else signal.SIG_IGN)


def terminate():
    signal.raise_signal(signal.SIGTERM)


class Small:
    """A model and its optimizer, and the handler of their checkpoint."""

    def __init__(self, directory, n=2, **more):
        self.strategy = mirror.MirroredStrategy(["cpu"] * n) if n else None
        self.model = nn.Linear(2, 1)
        if n:
            self.strategy.mirror(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        checkpoint = mirror.Checkpoint(model=self.model, optimizer=self.optimizer, **more)
        self.manager = mirror.CheckpointManager(checkpoint, directory)

    def handler(self, **options):
        return mirror.PreemptionCheckpointHandler(self.manager, **options)

    def step(self, at=None):
        """A step; calls ``at`` in its backward pass."""
        loss = self.model(torch.ones(4, 2)).mean()
        if at is not None:
            loss.register_hook(lambda grad: at())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def run(self, at=None):
        self.strategy.run(self.step, args=(at,))


def exits(do, code=42):
    with pytest.raises(SystemExit) as caught:
        do()
    assert caught.value.code == code


def test_a_signal_in_a_backward_pass_is_acted_on_when_run_returns(tmp_path):
    small = Small(tmp_path)
    with small.strategy:
        handler = small.handler()
        small.run()
        exits(lambda: small.run(terminate))
        assert small.manager.latest == 2
        assert handler not in preemption._open
        weight = small.model.weight.detach().clone()
        small.run()  # the strategy works on
        assert small.manager.restore_latest() == 2
        assert torch.equal(small.model.weight, weight)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_signal_in_a_loop_is_acted_on_when_the_step_returns(tmp_path, n):
    small = Small(tmp_path, n)
    with small.handler(exit_code=7):
        for _ in range(3):
            small.step()
        exits(lambda: small.step(terminate), 7)
    assert small.manager.latest == 4


def test_steps_are_counted_on_from_what_was_restored(tmp_path):
    Small(tmp_path).manager.save(10)
    small = Small(tmp_path)
    with small.strategy, small.handler():
        assert small.manager.restore_latest() == 10
        small.run()
        small.strategy.run(lambda: small.model(torch.ones(1, 2)))  # no step
        exits(lambda: small.run(terminate))
    assert small.manager.latest == 12


def test_a_number_is_never_below_one_that_the_program_has_saved(tmp_path):
    small = Small(tmp_path)
    with small.strategy, small.handler():
        small.run()
        small.manager.save(100)
        small.run()
        exits(lambda: small.run(terminate))
    assert small.manager.latest == 102


def test_several_optimizers_in_one_run_are_one_step(tmp_path):
    small = Small(tmp_path)
    other = torch.optim.Adam(small.model.parameters())

    def both():
        small.step()
        other.step()

    with small.strategy, small.handler():
        small.strategy.run(both)
        exits(lambda: (terminate(), small.strategy.run(both)))
    assert small.manager.latest == 2


def test_steps_in_a_merge_belong_to_the_run(tmp_path):
    small = Small(tmp_path)

    def step():
        small.model(torch.ones(4, 2)).mean().backward()
        mirror.get_replica_context().merge_call(lambda _: small.optimizer.step())
        seen.append(small.manager.progress.done)

    seen = []
    with small.strategy, small.handler():
        small.strategy.run(step)
        assert seen == [0, 0]
        assert small.manager.progress.done == 1


def test_a_closure_that_runs_the_model_many_times_is_one_step(tmp_path):
    small = Small(tmp_path)
    lbfgs = torch.optim.LBFGS(small.model.parameters(), max_iter=3)

    def closure():
        lbfgs.zero_grad()
        loss = small.model(torch.ones(4, 2)).square().mean()
        loss.backward()
        return loss

    with small.strategy, small.handler():
        exits(lambda: (terminate(), lbfgs.step(closure)))
    assert small.manager.latest == 1


@each_once(stop=[1, 5, 7, 13], n=[1, 2])
def test_what_follows_the_step_in_the_loop_is_in_the_checkpoint(tmp_path, n, stop):
    whole = Training(n)
    whole.train()
    expected = whole.bits()
    whole.close()
    assert train_preempted(tmp_path, n, stop) == 42
    resumed = Training(n, seed=9)
    manager = mirror.CheckpointManager(resumed.checkpoint, tmp_path)
    assert manager.restore_latest() == stop
    assert len(resumed.progress["losses"]) == resumed.schedule.last_epoch == stop
    resumed.train()
    assert same(resumed.bits(), expected)
    resumed.close()


def train_preempted(directory, n, stop):
    """Trains, with a signal in the step of this number; returns the exit code."""
    training = Training(n)
    manager = mirror.CheckpointManager(training.checkpoint, directory)
    step = training._step

    def noting(batch):
        if len(training.progress["losses"]) == stop - 1:
            terminate()
        return step(batch)

    training._step = noting
    try:
        with mirror.PreemptionCheckpointHandler(manager):
            training.train()
    except SystemExit as left:
        return left.code
    finally:
        training.close()


def test_a_signal_in_the_last_step_is_acted_on_when_the_handler_is_closed(tmp_path):
    assert train_preempted(tmp_path, 1, 14) == 42
    assert sorted(os.listdir(tmp_path)) == ["step-000000014"]


def test_a_loop_that_was_left_in_its_step(tmp_path):
    small = Small(tmp_path, 1, notes={})
    batches = small.strategy.distribute_dataset([torch.ones(2, 2)] * 3)
    small.manager.checkpoint.objects["batches"] = batches

    def loop():
        with small.handler():
            for _ in batches:
                terminate()
                small.run()
                small.manager.checkpoint.objects["notes"]["seen"] = 1
                break

    exits(loop)
    assert small.manager.checkpoint.restore(small.manager.latest) == {"notes": {"seen": 1}}


def test_a_watcher_is_asked_where_steps_end(tmp_path):
    small = Small(tmp_path)
    said = iter([False, 0, "now"])
    with small.strategy, small.handler(signals=(), watcher=lambda: next(said)):
        small.run()
        small.run()
        exits(small.run)
    assert small.manager.latest == 3


def test_an_error_of_the_watcher_is_its_own(tmp_path):
    small = Small(tmp_path)
    with small.strategy, pytest.raises(ZeroDivisionError), small.handler(watcher=lambda: 1 / 0):
        small.run()


def test_two_handlers_save_both(tmp_path):
    one, two = Small(tmp_path / "1"), Small(tmp_path / "2")
    with one.strategy, one.handler(), two.handler(exit_code=3):
        one.run()
        exits(lambda: one.run(terminate))
    assert one.manager.latest == two.manager.latest == 2


def test_handlers_are_closed_in_any_order(tmp_path):
    one, two = Small(tmp_path, 0).handler(), Small(tmp_path, 0).handler()
    before = signal.getsignal(signal.SIGTERM)
    one.close()
    assert signal.getsignal(signal.SIGTERM) is before
    two.close()
    two.close()


def test_a_handler_that_the_program_installs_later_stays(tmp_path):
    old = signal.getsignal(signal.SIGTERM)
    handler = Small(tmp_path, 0).handler()
    mine = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGTERM, mine)
    handler.close()
    assert signal.getsignal(signal.SIGTERM) is mine
    signal.signal(signal.SIGTERM, old)


def test_a_second_signal_while_it_saves_is_one_with_the_first(tmp_path, monkeypatch):
    small = Small(tmp_path)
    save = small.manager.save

    def interrupted(step):
        terminate()
        saved = save(step)
        terminate()
        return saved

    monkeypatch.setattr(small.manager, "save", interrupted)
    with small.strategy, small.handler():
        exits(lambda: small.run(terminate))
    assert os.listdir(tmp_path) == ["step-000000001"]


LEAVES = """
import atexit, os, signal, sys, threading, time
import torch
import mirror
from mirror.train.checkpoint import preemption

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
manager = mirror.CheckpointManager(mirror.Checkpoint(model=model, optimizer=optimizer), "steps")


def again():
    for _ in range(20):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.001)


class Late:
    def __del__(self):
        again()


atexit.register(again)
late = Late()
thread = threading.Thread(target=lambda: (leaving.wait(), again()))
leaving = threading.Event()
thread.start()
try:
    with mirror.PreemptionCheckpointHandler(manager):
        os.kill(os.getpid(), signal.SIGTERM)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
finally:
    again()
    leaving.set()
"""


def test_no_later_signal_changes_how_the_process_ends(tmp_path):
    """Signals come while it unwinds, joins threads, runs exit handlers and shuts down."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVES],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(mirror.__file__).parents[1])},
    )
    assert (done.returncode, done.stderr) == (42, "")
    assert os.listdir(tmp_path / "steps") == ["step-000000001"]


def test_a_handler_after_an_exit_puts_back_what_was_there_before_both(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    small = Small(tmp_path)
    with small.strategy:
        with small.handler():
            exits(lambda: small.run(terminate))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        with small.handler():
            small.run()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_save_in_the_loop_does_not_move_the_number(tmp_path):
    """It comes before the handler has counted the step, where a dataset is in the checkpoint."""
    for saves_at in (None, 1, 2, 3):
        directory = tmp_path / str(saves_at)
        strategy = mirror.MirroredStrategy(["cpu"] * 2)
        with strategy.scope():
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = strategy.distribute_dataset(mirror.data.from_arrays((torch.ones(16, 2),), 2))
        averages = nn.Linear(1, 1)
        manager = mirror.CheckpointManager(
            mirror.Checkpoint(model=model, optimizer=optimizer, data=data, other=averages),
            directory,
            max_to_keep=None,
        )

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

        def loop(strategy=strategy, data=data, manager=manager, saves_at=saves_at, step=step):
            with mirror.PreemptionCheckpointHandler(manager):
                for number, (x,) in enumerate(data, 1):
                    strategy.run(step, args=(x,))
                    if number == saves_at:
                        manager.save(number)
                    if number == 4:
                        terminate()

        exits(loop)
        assert manager.latest == 4, saves_at


def test_later_steps_count_on_from_a_larger_number_of_the_program(tmp_path):
    small = Small(tmp_path)
    with small.strategy, small.handler():
        small.run()
        small.manager.save(3)
        for _ in range(5):
            small.run()
        exits(lambda: small.run(terminate))
    assert small.manager.latest == 9


@pytest.mark.parametrize(("other", "number"), [(1, 3), (3, 3), (100, 101)])
def test_the_newest_state_is_saved_after_any_earlier_save(tmp_path, other, number):
    """Another manager saved there, or an earlier run, and its checkpoints were not restored."""
    small = Small(tmp_path)
    with small.strategy, small.handler():
        small.run()
        mirror.CheckpointManager(small.manager.checkpoint, tmp_path).save(other)
        small.run()
        exits(lambda: small.run(terminate))
        weight = small.model.weight.detach().clone()
        small.run()
        assert small.manager.restore_latest() == number
    assert torch.equal(small.model.weight, weight)


def test_a_failed_background_save_does_not_prevent_the_last_save(tmp_path):
    small = Small(tmp_path / "d")
    (tmp_path / "d").write_text("in the way")
    with small.strategy, small.handler():
        small.manager.save(1, wait=False)
        small.manager.checkpoint._in_flight._thread.join()
        (tmp_path / "d").unlink()
        exits(lambda: small.run(terminate))
    assert small.manager.latest == 2


def test_a_save_that_fails_is_an_error(tmp_path):
    small = Small(tmp_path / "d")
    (tmp_path / "d").write_text("in the way")
    with small.strategy, pytest.raises(mirror.CheckpointError), small.handler():
        small.run(terminate)


def test_a_forked_child_dies_of_the_signal(tmp_path):
    with Small(tmp_path, 0).handler():
        child = os.fork()
        if child == 0:
            terminate()
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_signals_are_for_the_main_thread(tmp_path):
    caught = []

    def make(**options):
        try:
            Small(tmp_path, 0).handler(**options).close()
        except mirror.StrategyError as error:
            caught.append(str(error))

    for options in ({}, {"signals": ()}):
        thread = threading.Thread(target=make, kwargs=options)
        thread.start()
        thread.join()
    assert len(caught) == 1
    assert "handled in the main thread" in caught[0]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"signals": signal.SIGTERM}, TypeError),
        ({"signals": (signal.SIGKILL,)}, ValueError),
        ({"signals": (12345,)}, ValueError),
        ({"exit_code": 256}, ValueError),
        ({"exit_code": "42"}, ValueError),
        ({"watcher": 3}, TypeError),
    ],
)
def test_what_is_no_option_is_refused(tmp_path, options, error):
    with pytest.raises(error):
        Small(tmp_path, 0).handler(**options)
    with pytest.raises(TypeError, match=r"a handler takes a mirror.CheckpointManager"):
        mirror.PreemptionCheckpointHandler(mirror.Checkpoint())
