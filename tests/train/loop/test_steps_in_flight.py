"""Trainings over parameter servers: hooks see each step once; checkpoints hold whole steps."""

import gc
import itertools
import math
import re
import sys
import weakref
from io import StringIO

import pytest
import torch

import mirror
from mirror.errors import NanLossError, StrategyError
from mirror.train import Hook, LogEvery, ProgressBar, SaveEvery, StopAtStep, StopOnNan, Training
from tests.pairs import each_once
from tests.train.loop.counting import Counting, Seen, weights_saved


@each_once(sync=[False, True], num_workers=[1, 2, 3])
def test_every_step_counts_once_and_checkpoints_have_whole_steps(tmp_path, num_workers, sync):
    save, last = 2 * num_workers, 7 * num_workers
    share = num_workers if sync else 1  # steps of an update
    with Counting(tmp_path, num_servers=2, num_workers=num_workers, sync=sync) as program:
        seen = Seen()
        training = program.train([seen, SaveEvery(save), StopAtStep(last)])
        assert (training.step, training.reason) == (last, f"step {last} was the last one")
        assert program.weight == last / share
        assert program.strategy.report().num_steps == last
    assert seen.after == list(range(1, last + 1))
    assert seen.values == list(range(last))
    assert seen.saves == [*range(save, last, save), last]
    assert weights_saved(tmp_path) == {step: step / share for step in seen.saves}


@pytest.mark.filterwarnings("ignore:the training goes on after step")
@pytest.mark.parametrize("asks", ["save", "stop"])
def test_what_a_hook_asks_for_is_done_when_the_steps_in_flight_have_ended(tmp_path, asks):
    def ask(training):
        training.save() if asks == "save" else training.stop("enough")

    with Counting(tmp_path, num_workers=2) as program:
        seen = Seen(5, ask)
        training = program.train([seen, StopAtStep(30)])
        asked = seen.saves[0]
        assert 5 <= asked < 5 + 2 * 2
        assert training.step == (30 if asks == "save" else asked)
        assert program.weight == training.step
        assert training.reason == ("step 30 was the last one" if asks == "save" else "enough")
    assert all(step == weight for step, weight in weights_saved(tmp_path).items())


def test_a_hook_that_waits_for_a_step_is_exact():
    class Exact(Seen):
        def waits_for(self, step):
            return step == self.at

    with Counting(num_workers=3) as program:
        training = program.train([Exact(5, lambda training: training.stop("enough"))])
        assert (training.step, program.weight) == (5, 5)


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_loss_that_is_no_number_stops_at_its_step(tmp_path, num_workers, raises):
    with Counting(tmp_path, num_workers=num_workers) as program:
        own = program.step
        seen = Seen()
        hooks = [seen, StopOnNan("k", raises=raises), SaveEvery(4)]

        def step(k):
            own(k)
            return math.nan if k == 6 else torch.tensor(float(k))

        if raises:
            with pytest.raises(
                NanLossError, match=r"'k' is nan after step 7; nothing was.*anomaly"
            ):
                program.train(hooks, step)
            assert (seen.after[-1], seen.saves, seen.errors) == (7, [4], [NanLossError])
        else:
            training = program.train(hooks, step)
            assert training.reason == "'k' is nan after step 7"
            assert 7 <= training.step < 7 + 2 * num_workers
            assert program.weight == training.step == seen.saves[-1]
    assert all(step == weight for step, weight in weights_saved(tmp_path).items())


@pytest.mark.parametrize("where", ["loop", "logged", "end"])
def test_an_error_of_a_step_is_raised_as_itself_and_its_step_never_counted(tmp_path, where):
    with Counting(tmp_path, num_workers=2) as program:
        own = program.step

        def step(k):
            if k == 5:
                raise KeyError("lost key")
            return own(k)

        seen = Seen()
        with (
            pytest.raises(KeyError, match="lost key"),
            Training(program.strategy, checkpoint=program.manager, hooks=[seen]) as training,
        ):
            coordinator = mirror.ClusterCoordinator(program.strategy)
            for k in training.batches(range(6 if where == "end" else 50)):
                value = coordinator.schedule(step, args=(k,))
                if where == "logged":
                    training.log(k=value)
        assert seen.errors == [KeyError]
        assert seen.after == list(range(1, training.step + 1))
        assert training.step <= 5
        assert program.manager.latest is None
        coordinator.join()  # where the error is not raised again
        assert coordinator.fetch(coordinator.schedule(own, args=(1,))) == 1


def test_steps_that_did_not_run_do_not_count_even_if_the_program_catches_errors():
    with Counting() as program:
        own = program.step

        def step(k):
            if k == 0:
                raise KeyError("lost key")
            return own(k)

        with (
            pytest.raises(KeyError),
            Training(program.strategy, hooks=[StopAtStep(5)]) as training,
        ):
            coordinator = mirror.ClusterCoordinator(program.strategy)
            for k in training.batches(range(9)):
                value = coordinator.schedule(step, args=(k,))
                with pytest.raises(KeyError):
                    coordinator.fetch(value)
        assert training.step == 0


def make_four(context):
    return iter(range(4))


@pytest.mark.parametrize("fetches", [False, True])
def test_a_workers_dataset_that_ends_is_said(fetches):
    with Counting(num_workers=1) as program:
        rule = "a worker's dataset has ended.*while True.*StopAtStep"
        with (
            pytest.raises(StrategyError, match=rule),
            Training(program.strategy, hooks=[StopAtStep(8)]) as training,
        ):
            coordinator = mirror.ClusterCoordinator(program.strategy)
            data = coordinator.create_per_worker_dataset(make_four)
            for batch in training.batches(data):
                value = coordinator.schedule(program.step, args=(batch,))
                if fetches:
                    value.fetch()
        assert training.step == 4


def test_a_step_is_one_pass_of_the_loop_for_any_number_of_scheduled_steps():
    with Counting(num_workers=2) as program:
        counts = [0, 3, 1, 0, 2, 1, 1]
        seen = Seen()
        with Training(program.strategy, hooks=[seen]) as training:
            coordinator = mirror.ClusterCoordinator(program.strategy)
            for count in training.batches(counts):
                for _ in range(count):
                    coordinator.schedule(program.step, args=(1,))
                training.log(k=count)
                assert training.value("k") == count
        assert (training.step, program.weight, seen.values) == (7, 8, counts)


def test_a_loop_that_fetches_knows_its_step_and_one_left_by_break_counts():
    with Counting(num_workers=2) as program:
        with Training(program.strategy) as training:
            coordinator = mirror.ClusterCoordinator(program.strategy)
            for k in training.batches(range(9)):
                assert training.step == k
                training.log(k=coordinator.fetch(coordinator.schedule(program.step, args=(k,))))
            for k in training.batches(range(9)):
                value = coordinator.schedule(program.step, args=(k,))
                training.log(k=value)
                assert training.value("k") == k == training.peek("k")
                if k == 3:
                    break
            assert training.step in range(9, 13)
            for k in training.batches(range(2)):
                assert training.step == 13 + k
        assert (training.step, program.weight) == (15, 13)


def test_values_and_steps_of_hooks_outside_the_loop_are_no_steps(tmp_path):
    class Beside(Hook):
        def begin(self, training):
            self.coordinator = mirror.ClusterCoordinator(training.strategy)

        def before_step(self, training):
            training.log(rate=0.5)

        def after_step(self, training):
            assert training.value("rate") == 0.5
            assert {"k", "rate"} <= training.logged_now
            training.log(beside=self.coordinator.schedule(lambda: 7))

    with Counting(tmp_path, num_workers=2) as program:
        training = program.train([Beside(), SaveEvery(4), StopAtStep(6)])
        assert (training.step, program.weight, training.value("beside")) == (6, 6, 7)
    assert weights_saved(tmp_path) == {4: 4, 6: 6}


def test_a_schedulers_rate_reaches_the_steps_scheduled_next():
    with Counting() as program:
        schedule = torch.optim.lr_scheduler.StepLR(program.optimizer, 1, gamma=0.5)

        class Halve(Hook):
            def waits_for(self, step):
                return True

            def after_step(self, training):
                schedule.step()

        program.train([Halve(), StopAtStep(3)])
        assert program.weight == 1 + 0.5 + 0.25


def test_values_that_are_no_numbers_are_refused():
    with Counting() as program:
        for fetches in (True, False):
            rule = r"log\(\) takes numbers, tensors of one element, and RemoteValues.*'k' is 'one'"
            with pytest.raises(TypeError, match=rule), Training(program.strategy) as training:
                coordinator = mirror.ClusterCoordinator(program.strategy)
                for _ in training.batches(range(3)):
                    value = coordinator.schedule(lambda: "one")
                    training.log(k=value.fetch() if fetches else value)
        with (
            pytest.raises(TypeError, match="'k' is a PerReplica"),
            Training(program.strategy) as training,
        ):
            training.log(k=mirror.PerReplica([1.0]))


def test_what_is_shown_speaks_of_workers(monkeypatch):
    lines, shown = [], StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(shown, "isatty", lambda: True)
    for name in ("tqdm", "tqdm.auto", "rich", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    bar = ProgressBar()
    with Counting(num_workers=2) as program:
        coordinator = mirror.ClusterCoordinator(program.strategy)
        data = coordinator.create_per_worker_dataset(lambda: itertools.count())
        bar._every.is_due = lambda step: True
        program.train([LogEvery(2, to=lines.append), bar, StopAtStep(4)], batches=data)
        program.train([LogEvery(2, to=lines.append), StopAtStep(2)])
    pattern = r"step \d: k \d+, [\d.e+]+ steps/s"
    assert [bool(re.fullmatch(pattern, line)) for line in lines] == [True, True, False]
    assert lines[2].endswith("% waiting for input")
    assert "2 workers" in shown.getvalue()
    assert "input" not in shown.getvalue()


def test_a_training_keeps_no_strategy_alive():
    def train():
        program = Counting()
        with pytest.raises(ZeroDivisionError), Training(program.strategy) as training:
            for k in training.batches(range(9)):
                mirror.ClusterCoordinator(program.strategy).schedule(program.step, args=(k,))
                if k == 3:
                    raise ZeroDivisionError
        return weakref.ref(program.strategy)

    gone = train()
    gc.collect()
    assert gone() is None
