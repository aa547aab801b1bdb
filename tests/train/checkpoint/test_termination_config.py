"""TerminationConfig: its watcher, exit, save and grace period, over one process and two."""

import math
import os
import signal

import pytest
import torch
from torch import nn

import mirror
from mirror.execution.lifecycle import step_ends
from mirror.train import TerminationConfig
from mirror.train.checkpoint import preemption
from tests.multi_worker import strategy_of
from tests.pairs import each_once

COUNTS = [(1,), (2,), (1, 1)]


@pytest.fixture(autouse=True)
def no_handler_stays_open():
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert (preemption._open, step_ends.listeners, preemption._replaced) == ([], [], {})
    ignored = preemption._ignored.pop(signal.SIGTERM, None)  # after an exit
    assert signal.getsignal(signal.SIGTERM) is (before if ignored is None else signal.SIG_IGN)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(preemption, "_clock", lambda: self.now)


class Program:
    """A model, its optimizer and a manager; the last worker gets the signal in step ``at``.

    Attributes:
        saved: the step and the second of every save.
    """

    def __init__(self, counts, folder, is_scoped, clock):
        self.rank = int(os.environ.get("RANK", 0))
        self.is_last = self.rank == len(counts) - 1
        self.clock = clock
        self.strategy = strategy_of(counts)
        if is_scoped:
            with self.strategy.scope():
                self._make()
        else:
            self._make()
            self.strategy.mirror(self.model)
        checkpoint = mirror.Checkpoint(model=self.model, optimizer=self.optimizer)
        self.manager = mirror.CheckpointManager(checkpoint, folder)
        self.save_seconds = 0.0
        self.saved = []
        save = self.manager.save

        def noting(step, **options):
            self.clock.now += self.save_seconds
            self.saved.append((step, self.clock.now))
            return save(step, **options)

        self.manager.save = noting

    def _make(self):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, config, *, at=2, num_steps=20, asks=True, **options):
        """Trains; returns the exit code (None: it came to the end) and the number of steps."""
        done = 0
        try:
            with mirror.PreemptionCheckpointHandler(
                self.manager, termination_config=config, **options
            ):
                while done < num_steps:
                    if asks and done == at - 1 and self.is_last:
                        os.kill(os.getpid(), signal.SIGTERM)
                    self.clock.now += 1
                    self.strategy.run(self._step)
                    done += 1
        except SystemExit as left:
            return left.code, done + 1
        finally:
            self.strategy.close()
        return None, done

    def _step(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 2)).mean().backward()
        self.optimizer.step()


def on_all(worker_pool, counts, program, *args):
    """Returns what a program returns on every worker."""
    if len(counts) > 1:
        return worker_pool(len(counts)).run(program, counts, *args)
    return [program(counts, *args)]


def train_with_grace(counts, folder, is_scoped, seconds, save_seconds, num_steps):
    with pytest.MonkeyPatch.context() as patch:
        program = Program(counts, folder, is_scoped, Clock(patch))
        program.save_seconds = save_seconds
        config = TerminationConfig(grace_period=seconds)
        code, done = program.train(config, num_steps=num_steps)
        return code, done, program.saved, int(program.manager.latest)


@each_once(
    **{
        "seconds,save_seconds,saved": [
            # The signal comes at second 101, a step takes 1; two steps and two saves must fit.
            (0, 0, [(2, 102)]),
            (None, 0, [(2, 102)]),
            (2, 0, [(2, 102)]),  # the end is at 103: no two steps fit
            (6, 0, [(2, 102), (5, 105)]),  # the end is at 107
            (10, 1, [(2, 103), (6, 108)]),  # the end is at 111
            (4, 2, [(2, 104)]),  # the first save took most of it, and is not repeated
        ]
    },
    is_scoped=[True, False],
    counts=COUNTS,
)
def test_grace_period_saves_at_once_and_again_before_its_end(
    worker_pool, tmp_path, counts, is_scoped, seconds, save_seconds, saved
):
    results = on_all(
        worker_pool, counts, train_with_grace, str(tmp_path), is_scoped, seconds, save_seconds, 20
    )
    last = saved[-1][0]
    assert results == [(42, last, saved, last)] * len(results)


@pytest.mark.parametrize("counts", COUNTS)
def test_the_end_of_the_block_ends_the_grace_period(worker_pool, tmp_path, counts):
    for code, _, saved, latest in on_all(
        worker_pool, counts, train_with_grace, str(tmp_path), True, 1000, 0, 4
    ):
        assert (code, [step for step, _ in saved], latest) == (42, [2, 4], 4)


def train_with_own_grace(counts, folder):
    with pytest.MonkeyPatch.context() as patch:
        program = Program(counts, folder, True, Clock(patch))
        seconds = 6 if program.is_last else 0
        return *program.train(TerminationConfig(grace_period=seconds)), program.saved


def test_the_grace_period_of_the_worker_that_is_asked_counts(worker_pool, tmp_path):
    first, second = worker_pool(2).run(train_with_own_grace, (1, 1), str(tmp_path))
    assert first == second == (42, 5, [(2, 102), (5, 105)])


def train_with_watcher(counts, folder, signals):
    with pytest.MonkeyPatch.context() as patch:
        program = Program(counts, folder, True, Clock(patch))
        calls = []

        def is_announced():
            calls.append(program.clock.now)
            return program.is_last and len(calls) == 3

        config = TerminationConfig(termination_watcher_fn=is_announced, grace_period=4)
        code, done = program.train(config, asks=False, signals=signals)
        return program.is_last, code, done, program.saved, len(calls)


@each_once(signals=[(), (signal.SIGTERM,)], counts=COUNTS)
def test_watcher_is_called_at_steps_until_it_announces_the_end(
    worker_pool, tmp_path, counts, signals
):
    for is_last, *result, calls in on_all(
        worker_pool, counts, train_with_watcher, str(tmp_path), signals
    ):
        assert result == [42, 5, [(3, 103), (5, 105)]]
        assert calls == (3 if is_last else 5)


def train_with_functions(counts, folder, exits, wait):
    with pytest.MonkeyPatch.context() as patch:
        program = Program(counts, folder, True, Clock(patch))
        manager, events = program.manager, []

        def save():
            events.append("save")
            manager.save(manager.progress.number + 100, wait=wait)

        def leave():
            events.append(f"exit after {int(manager.latest)}")
            assert preemption._open == []
            if exits:
                raise SystemExit(7)

        code, done = program.train(TerminationConfig(save_fn=save, exit_fn=leave), num_steps=5)
        return code, done, events, [int(step) for step in manager.steps]


@each_once(
    **{"exits,result": [(True, (7, 2)), (False, (None, 5))]}, wait=[True, False], counts=COUNTS
)
def test_functions_replace_save_and_exit_on_every_worker(
    worker_pool, tmp_path, counts, wait, exits, result
):
    results = on_all(worker_pool, counts, train_with_functions, str(tmp_path), exits, wait)
    assert results == [(*result, ["save", "exit after 102"], [102])] * len(results)


@pytest.mark.parametrize("name", ["save_fn", "exit_fn", "termination_watcher_fn"])
def test_an_error_of_a_function_reaches_the_loop(tmp_path, monkeypatch, name):
    program = Program((2,), tmp_path, True, Clock(monkeypatch))
    with pytest.raises(ZeroDivisionError):
        program.train(TerminationConfig(**{name: lambda: 1 / 0}))


def test_a_signal_in_the_grace_period_does_not_end_it(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    program = Program((2,), tmp_path, True, clock)
    early = program._step

    def step():
        if clock.now == 104 and mirror.get_replica_context().replica_id_in_sync_group == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        early()

    program._step = step
    assert program.train(TerminationConfig(grace_period=6)) == (42, 5)
    assert program.saved == [(2, 102), (5, 105)]


def test_two_handlers_leave_with_the_one_whose_time_is_over(tmp_path, monkeypatch):
    program = Program((2,), tmp_path / "one", True, Clock(monkeypatch))
    other = mirror.CheckpointManager(program.manager.checkpoint, tmp_path / "two")
    patient = TerminationConfig(grace_period=1000, exit_fn=lambda: pytest.fail("is not due"))
    with mirror.PreemptionCheckpointHandler(other, termination_config=patient):
        assert program.train(TerminationConfig(grace_period=6), exit_code=9) == (9, 5)
    assert [int(step) for step in other.steps] == [2, 5]


def test_arguments_have_the_order_of_tensorflow():
    config = TerminationConfig(int, exit, 3.5, str)
    assert config.termination_watcher_fn is int
    assert (config.exit_fn, config.grace_period, config.save_fn) == (exit, 3.5, str)


@pytest.mark.parametrize(
    ("options", "error", "rule"),
    [
        *(
            ({name: value}, TypeError, f"{name} must be a function without arguments, got")
            for name in ("termination_watcher_fn", "exit_fn", "save_fn")
            for value in (42, "exit", True)
        ),
        *(
            ({"grace_period": value}, TypeError, "grace_period must be a number of seconds, got")
            for value in ("30", True, (1,), torch.ones(2))
        ),
        *(
            ({"grace_period": value}, ValueError, "grace_period must be finite and >= 0 seconds")
            for value in (-1, -0.5, math.inf, math.nan)
        ),
    ],
)
def test_a_bad_option_is_refused_with_its_rule(options, error, rule):
    with pytest.raises(error, match=rule):
        TerminationConfig(**options)


@pytest.mark.parametrize(
    ("options", "error", "rule"),
    [
        ({"termination_config": 30}, TypeError, r"must be a mirror\.train\.TerminationConfig"),
        ({"termination_config": {"grace_period": 1}}, TypeError, "got"),
        (
            {"termination_config": TerminationConfig(bool), "watcher": bool},
            ValueError,
            "are the same option; pass one",
        ),
        (
            {"termination_config": TerminationConfig(exit_fn=exit), "exit_code": 7},
            ValueError,
            "exit_code=7 would be ignored",
        ),
    ],
)
def test_what_contradicts_the_config_is_refused(tmp_path, options, error, rule):
    checkpoint = mirror.Checkpoint(seen=1)
    manager = mirror.CheckpointManager(checkpoint, tmp_path)
    with pytest.raises(error, match=rule):
        mirror.PreemptionCheckpointHandler(manager, **options)
