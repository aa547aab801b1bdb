"""What elastic.run and ElasticState do beside kills: errors, joins, callbacks, memory."""

import gc
import os
import signal
import weakref

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import CheckpointError, ClusterError, StrategyError
from mirror.train import elastic
from mirror.train.elastic import elastic_agent, elastic_run
from mirror.train.elastic.elastic_run import ElasticState
from tests.pairs import quick_of
from tests.toy_models import ones_layer
from tests.train.elastic.elastic_workers import Kill, agent_of, plan, train


@pytest.fixture(autouse=True)
def no_commit(monkeypatch):
    """Each test begins without a commit of this process."""
    monkeypatch.setattr(elastic_run, "_memory", elastic_run._Memory())


def test_without_an_agent_the_function_is_called_once():
    calls = []
    assert elastic.run(lambda: calls.append(1) or 5) == 5
    assert calls == [1]


@pytest.mark.parametrize("num_replicas", quick_of([1, 2, 3], [2]))
def test_restore_brings_back_what_commit_has_kept(num_replicas):
    def begin():
        strategy = mirror.MirroredStrategy(["cpu"] * num_replicas)
        with strategy.scope():
            model = ones_layer()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        return strategy, model, optimizer, {"step": 0}

    def step(strategy, model, optimizer, progress):
        optimizer.zero_grad()
        strategy.run(lambda: (model(torch.ones(2, 1)).mean().backward(), optimizer.step()))
        progress["step"] += 1

    made = begin()
    state = ElasticState(model=made[1], optimizer=made[2], progress=made[3])
    assert state.restore() is False
    step(*made)
    state.commit()
    draws = torch.rand(2)
    step(*made)
    values = []
    for _ in range(2):  # the commit is not changed by training after it
        strategy, model, optimizer, progress = again = begin()
        state = ElasticState(model=model, optimizer=optimizer, progress=progress)
        assert state.restore() is True
        assert (progress["step"], model.weight.item()) == (1, 0.5)
        assert torch.equal(torch.rand(2), draws)
        step(*again)
        values.append(model.weight.item())
        strategy.close()
    assert values == [made[1].weight.item()] * 2
    made[0].close()


def test_the_first_start_calls_otherwise_and_commits_what_it_brings():
    value = {"step": 0}
    state = ElasticState(value=value)
    assert state.restore(lambda: value.update(step=7)) is False
    value["step"] = 8
    assert state.restore() is True
    assert value == {"step": 7}


def test_commit_needs_restore_and_no_run():
    state = ElasticState(step=1)
    with pytest.raises(StrategyError, match="call it once before the first commit"):
        state.commit()
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        with pytest.raises(StrategyError, match=r"ElasticState\.restore was called inside run"):
            strategy.run(state.restore)
        state.restore()
        with pytest.raises(StrategyError, match=r"ElasticState\.commit was called inside run"):
            strategy.run(state.commit)


def resized(kills, steps, size=1, leaves_at=()):
    """Trains for so many steps, and until there are so many workers.

    Args:
        leaves_at: the change of the number of workers at which the last worker kills itself.
    """
    plan(kills)
    models, calls, live = [], [], []

    def training():
        gc.collect()
        live.append(sum(reference() is not None for reference in models))
        strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        models.append(weakref.ref(model))
        progress = {"step": 0}
        state = ElasticState(model=model, optimizer=optimizer, progress=progress)

        def rescale(before, now):
            calls.append((before, now))
            if tuple(leaves_at) == (before, now) and os.environ["RANK"] == str(now - 1):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.param_groups[0]["lr"] *= now / before

        state.restore(on_resize=rescale)
        while progress["step"] < steps or int(os.environ["WORLD_SIZE"]) < size:
            loss = model(torch.ones(2, 1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress["step"] += 1
            state.commit()
        return os.getpid(), calls, live, optimizer.param_groups[0]["lr"]

    return elastic.run(training)


def test_a_survivor_keeps_its_process_and_frees_its_last_model():
    trained = train(resized, 8, least=1, kills=[[], [Kill("a sum starts", 4)]], max_restarts=0)
    (pid, calls, live, rate), *others = trained.results
    assert not others
    assert pid == trained.workers[0].pid
    assert calls == [(2, 1)]
    assert live == [0, 0]
    assert rate == pytest.approx(0.05)


def test_a_new_worker_joins_at_a_commit_with_the_state_of_the_others():
    trained = train(resized, 8, 2, least=1, joins_at=1)
    (pid, calls, *_, rate), (_, joined, *_, same) = trained.results
    assert pid == trained.workers[0].pid
    assert (calls, joined) == ([(1, 2)], [(1, 2)])
    assert rate == same == pytest.approx(0.2)


def test_a_worker_lost_in_on_resize_changes_nothing_twice():
    """The others restore the same commit again, and their change begins from it."""
    kills = [[], [], [Kill("a sum starts", 4)]]
    trained = train(resized, 8, 1, (3, 2), size=3, least=1, kills=kills, max_restarts=0)
    ((_, calls, _, rate),) = trained.results
    assert calls == [(3, 2), (3, 1)]
    assert rate == pytest.approx(0.1 / 3)


def draws(kills, victim=None):
    """Draws from a generator of each worker's own; returns the rank, and the next number.

    Args:
        victim: the rank that is killed in the first generation.
    """

    def training():
        strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
        model = strategy.mirror(ones_layer())
        rank = int(os.environ["RANK"])
        generator, progress = torch.Generator().manual_seed(rank), {"step": 0}
        state = ElasticState(model=model, generator=generator, progress=progress)
        is_first = not state.restore()
        while progress["step"] < 6:
            if is_first and (rank, progress["step"]) == (victim, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(2, 1)).sum().backward()
            assert model.weight.grad is not None
            torch.rand(rank + 1, generator=generator)
            progress["step"] += 1
            if progress["step"] % 2 == 0:
                state.commit()
        return rank, torch.rand(1, generator=generator).item()

    return elastic.run(training)


def test_each_rank_goes_on_with_its_own_generator():
    undisturbed = dict(train(draws).results)
    assert undisturbed[0] != undisturbed[1]
    for victim in (0, 1):
        trained = train(draws, victim)
        assert dict(trained.results) == undisturbed
        assert len(trained.workers) == 3


def fails(kills, error):
    def training():
        strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
        if os.environ["RANK"] == "1":
            if error is not None:
                raise error
            strategy.check_replicas()
        strategy.reduce("mean", strategy.run(lambda: torch.ones(1)))

    elastic.run(training)


def failed(words, program, *args, **options):
    """Returns how many workers were started until the training failed with an error."""
    with agent_of(program, *args, **options) as (agent, workers, _):
        with pytest.raises(ClusterError, match=words):
            agent.run()
        return len(workers)


@pytest.mark.parametrize("kind", quick_of([ValueError, CheckpointError], [CheckpointError]))
def test_an_error_of_a_program_ends_the_training_after_the_restarts(kind):
    """It counts as a lost worker, also one of mirror: the disk is full, say."""
    assert failed(f"{kind.__name__}: my own", fails, kind("my own"), max_restarts=1) == 3


def test_workers_that_diverge_are_not_started_again():
    assert failed("DivergenceError: all workers must reach the same", fails, None) == 2


def stops(kills, when):
    """Trains two steps, and is stopped after them; a worker that comes later is stopped before."""
    if when == "before" and kills == "late":
        os.kill(os.getpid(), signal.SIGSTOP)
    plan(kills)

    def training():
        strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
        model = strategy.mirror(ones_layer())
        state = ElasticState(model=model)
        state.restore()
        for _ in range(2):
            model(torch.ones(2, 1)).sum().backward()
            assert model.weight.grad is not None

    elastic.run(training)
    if when == "after":
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_worker_that_stands_still_after_the_training_is_killed():
    with agent_of(stops, "after", size=1, timeout_seconds=2.0) as (agent, _, _):
        assert agent.run() == 128 + signal.SIGKILL


def test_a_worker_that_stands_still_and_has_not_trained_is_killed(monkeypatch):
    monkeypatch.setattr(elastic_agent, "_END_SECONDS", 0.2)
    kills = [[], [Kill("a sum starts", 2)], "late"]
    with agent_of(stops, "before", least=1, kills=kills, max_restarts=1) as (agent, workers, _):
        assert agent.run() == 0
        assert len(workers) == 3


def nested(kills):
    return elastic.run(lambda: elastic.run(lambda: 5))


def test_run_inside_the_training_function_is_refused():
    assert failed(r"elastic\.run was called inside", nested, size=1, max_restarts=0) == 1
