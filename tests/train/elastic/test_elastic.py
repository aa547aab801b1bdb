"""Elastic training: killed workers cost no example and no bits."""

import contextlib
import functools
import random
import signal
import threading
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.train import elastic
from mirror.train.elastic.membership import Phase
from tests.pairs import each_once, every, quick_of
from tests.train.elastic.elastic_workers import POINTS, Kill, Trained, agent_of, plan, train

NUM_EXAMPLES, BATCH, NUM_EPOCHS, COMMIT_EVERY = 22, 4, 3, 3
X = torch.arange(NUM_EXAMPLES * 3.0).reshape(NUM_EXAMPLES, 3).sin()
Y = (torch.arange(NUM_EXAMPLES) % 2).long()
IDS = torch.arange(NUM_EXAMPLES)


def training(dropout, num_replicas=1, **options):
    """Trains as docs/workers.md says; returns the parameters and the examples of each epoch."""
    torch.manual_seed(0)
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"] * num_replicas, **options)
    with strategy.scope():
        # No bias: normalized, it would have no gradient but rounding, which Adam scales up.
        model = nn.Sequential(
            nn.Linear(3, 5, bias=False),
            mirror.nn.SyncBatchNorm(5),
            nn.Dropout(dropout),
            nn.Linear(5, 2),
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = mirror.data.from_arrays((IDS, X, Y), BATCH, shuffle=True)
    batches = strategy.distribute_dataset(loader)
    progress = {"epoch": 0, "step": 0, "losses": [], "ids": [[] for _ in range(NUM_EPOCHS)]}
    state = elastic.ElasticState(
        model=model, optimizer=optimizer, batches=batches, progress=progress
    )
    state.restore()

    def step(ids, x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    while progress["epoch"] < NUM_EPOCHS:
        for batch in batches:
            losses = strategy.run(step, args=batch)
            progress["losses"].append(float(strategy.reduce("mean", losses)))
            progress["ids"][progress["epoch"]] += strategy.gather(batch[0]).tolist()
            progress["step"] += 1
            if progress["step"] % COMMIT_EVERY == 0:
                state.commit()
        progress["epoch"] += 1
    values = [tensor.clone() for tensor in model.state_dict().values()]
    return values, progress["losses"], progress["ids"], progress["step"]


def elastic_training(kills, dropout=0.2, num_replicas=1, state="replicated"):
    plan(kills)
    return elastic.run(lambda: training(dropout, num_replicas, optimizer_state=state))


@pytest.fixture(scope="module")
def undisturbed():
    """Gives ``undisturbed(size, dropout)``: what a worker of an undisturbed training returns."""

    @functools.cache
    def undisturbed(size=2, dropout=0.2, *args):
        return train(elastic_training, dropout, *args, size=size).results[0]

    return undisturbed


def check(trained, undisturbed, *, bits=True):
    """Every example was read once in each epoch, and the state is that of no disturbance."""
    assert trained.code == 0
    assert trained.results
    right_values, right_losses, right_ids, right_step = undisturbed
    for values, losses, ids, step in trained.results:
        assert step == len(losses) == right_step
        for epoch in ids:
            assert Counter(epoch) == Counter(range(NUM_EXAMPLES))
        assert ids == right_ids
        for one, other in zip(values, right_values, strict=True):
            if bits:
                assert torch.equal(one, other)
            else:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        if bits:
            assert losses == right_losses


def test_killed_workers_cost_no_example_and_no_bits(undisturbed):
    kills = [
        [Kill("a sum is in flight", 9)],
        [Kill("a commit was exchanged", 3)],
        [Kill("a state is sent")],
    ]
    trained = train(elastic_training, kills=kills)
    check(trained, undisturbed())
    assert len(trained.workers) >= 5


def test_all_but_one_are_lost_at_once_and_new_ones_join(undisturbed):
    kills = [[], [Kill("a sum starts", 9)], [Kill("a sum starts", 9)]]
    trained = train(elastic_training, 0.0, size=3, least=1, kills=kills)
    check(trained, undisturbed(3, 0.0), bits=False)
    assert len(trained.workers) >= 5
    members = [view.members for view in trained.views if view.phase is Phase.TRAINING]
    # The survivor is worker 0: it has the commit. A busy machine may lose the others in turn.
    assert any(names[0].endswith(".0.1") for names in members[1:])


def test_a_stopped_worker_is_replaced_before_the_timeout(undisturbed):
    kills = [[Kill("a sum starts", 9, signal.SIGSTOP)]]
    trained = train(elastic_training, kills=kills, timeout_seconds=2.5)
    check(trained, undisturbed())
    assert len(trained.workers) >= 3
    assert any("its process was stopped for 0.8 s" in view.why for view in trained.views)


@pytest.mark.slow
def test_a_worker_at_a_tenth_of_the_speed_is_not_lost(undisturbed):
    has_ended = threading.Event()

    def slow_down(workers):
        while not has_ended.wait(0.02):
            for number in (signal.SIGSTOP, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    workers[0].send_signal(number)
                if number == signal.SIGSTOP:
                    has_ended.wait(0.18)

    with agent_of(elastic_training, 0.2, timeout_seconds=2.5) as (agent, workers, views):
        start = agent._start_process
        thread = threading.Thread(target=slow_down, args=(workers,))

        def start_slow(variables):
            process = start(variables)
            if len(workers) == 1:
                thread.start()
            return process

        agent._start_process = start_slow
        try:
            code = agent.run()
        finally:
            has_ended.set()
            thread.join()
        results = [worker.outcome[0] for worker in workers if worker.wait() == 0]
    check(Trained(code, results, views, workers), undisturbed())
    assert max(view.generation for view in views) == 1


@pytest.mark.parametrize("least", quick_of([1, 2], [1]))
def test_the_parts_of_sharded_optimizer_state_survive_their_workers(least, undisturbed):
    """Each replica holds a half of the state; a commit has the whole one."""
    kills = [[], [Kill("a sum starts", 9)]]
    args = (0.0, 2, "sharded")
    restarts = 0 if least == 1 else 1
    trained = train(elastic_training, *args, least=least, kills=kills, max_restarts=restarts)
    check(trained, undisturbed(2, *args), bits=least == 2)
    assert len(trained.workers) == 2 + restarts


def batch_of_each(kills):
    """Trains with a batch that depends on the number of workers; returns the ids of the epochs."""
    plan(kills)

    def training():
        torch.manual_seed(0)
        strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
        model = strategy.mirror(nn.Linear(3, 2))
        loader = mirror.data.from_arrays((IDS, X), 3 * strategy.num_replicas_in_sync, shuffle=True)
        batches = strategy.distribute_dataset(loader)
        progress = {"epoch": 0, "sizes": [], "ids": [[] for _ in range(NUM_EPOCHS)]}
        state = elastic.ElasticState(model=model, batches=batches, progress=progress)
        state.restore()
        while progress["epoch"] < NUM_EPOCHS:
            for ids, x in batches:
                strategy.run(lambda x: model(x).sum().backward(), args=(x,))
                model.zero_grad()
                read = strategy.gather(ids).tolist()
                progress["ids"][progress["epoch"]] += read
                progress["sizes"].append(len(read))
                state.commit()
            progress["epoch"] += 1
        return progress["ids"], progress["sizes"]

    return elastic.run(training)


def test_a_batch_that_follows_the_number_of_workers_costs_no_example():
    (right, _), *_ = train(batch_of_each).results
    kills = [[], [Kill("a sum starts", 2)]]
    ((ids, sizes),) = train(batch_of_each, least=1, kills=kills, max_restarts=0).results
    assert ids == right
    assert sizes[0] == 6
    assert set(sizes[1:]) <= {3, 1}


def loop_of_training(kills, folder):
    """Trains with ``mirror.train.Training``, and saves at its end if there is a folder."""
    plan(kills)

    def training():
        torch.manual_seed(0)
        strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
        with strategy.scope():
            model = nn.Linear(3, 2)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        loader = mirror.data.from_arrays((IDS, X, Y), BATCH, shuffle=True)
        batches = strategy.distribute_dataset(loader)
        objects = {"model": model, "optimizer": optimizer, "batches": batches}
        manager, read = None, {"ids": []}
        if folder:
            manager = mirror.CheckpointManager(mirror.Checkpoint(**objects), folder)
        hooks = [mirror.train.SaveEvery(4)] if folder else []

        def step(x, y):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        with mirror.train.Training(strategy, checkpoint=manager, hooks=hooks) as loop:
            state = elastic.ElasticState(**objects, training=loop, read=read)
            state.restore()
            for ids, x, y in loop.batches(batches, epochs=NUM_EPOCHS):
                strategy.run(step, args=(x, y))
                read["ids"] += strategy.gather(ids).tolist()
                if (loop.step + 1) % COMMIT_EVERY == 0:
                    state.commit()
        return [p.detach().clone() for p in model.parameters()], read["ids"], loop.step

    return elastic.run(training)


@pytest.mark.parametrize("saves", quick_of([False, True], [True]))
def test_a_training_counts_its_steps_and_epochs_on(saves, tmp_path):
    values, ids, num_steps = train(loop_of_training, None).results[0]
    assert num_steps == NUM_EPOCHS * -(-NUM_EXAMPLES // BATCH)
    folder = str(tmp_path) if saves else None
    kills = [[Kill("a sum starts", 9)], [Kill("a commit was exchanged", 3)]]
    trained = train(loop_of_training, folder, kills=kills)
    assert trained.code == 0
    assert len(trained.workers) >= 4
    for mine, read, steps in trained.results:
        assert (read, steps) == (ids, num_steps)
        assert all(map(torch.equal, mine, values))


@pytest.mark.slow
@each_once(point=every(3, POINTS), victim=[0, 1])
def test_a_kill_costs_no_example_and_no_bits(point, victim, undisturbed):
    kills = [[Kill("a sum starts", 4)]] if point == "a state is sent" else []
    kills += [()] * (2 - len(kills) + victim)
    kills[-1] = [Kill(point, 2 if "sum" in point else 1)]
    check(train(elastic_training, kills=kills), undisturbed())


def drawn(seed):
    """Returns the number of workers, the fewest, and the kills of each started worker."""
    draw = random.Random(seed)
    size = draw.choice([2, 2, 3])
    least = draw.choice([size, 1])
    kills = []
    for _ in range(2 * size):
        number = draw.choice([signal.SIGKILL] * 4 + [signal.SIGSTOP])
        kill = Kill(draw.choice(list(POINTS)), draw.randint(1, 5), number)
        kills.append([kill] if draw.random() < 0.6 else [])
    return size, least, kills


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(30))
def test_random_kills_cost_no_example(seed, undisturbed):
    size, least, kills = drawn(seed)
    dropout = 0.2 if size == least else 0.0  # other numbers of workers draw other masks
    trained = train(
        elastic_training, dropout, size=size, least=least, kills=kills, timeout_seconds=3.0
    )
    check(trained, undisturbed(size, dropout), bits=size == least)
