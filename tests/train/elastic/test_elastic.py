"""Elastic training: killed workers cost no example and no bits."""

import os
import random
import signal
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.train import elastic
from tests.train.elastic.elastic_workers import POINTS, Kill, plan, train

NUM_EXAMPLES, BATCH, NUM_EPOCHS, COMMIT_EVERY = 22, 4, 3, 3
X = torch.arange(NUM_EXAMPLES * 3.0).reshape(NUM_EXAMPLES, 3).sin()
Y = (torch.arange(NUM_EXAMPLES) % 2).long()
IDS = torch.arange(NUM_EXAMPLES)


def training():
    """Trains as docs/workers.md says; returns the parameters and the examples of each epoch."""
    torch.manual_seed(0)
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
    with strategy.scope():
        model = nn.Sequential(
            nn.Linear(3, 5), mirror.nn.SyncBatchNorm(5), nn.Dropout(0.2), nn.Linear(5, 2)
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


def elastic_training(kills):
    plan(kills)
    return elastic.run(training)


@pytest.fixture(scope="module")
def undisturbed():
    return train(elastic_training).results


def check(trained, undisturbed, *, bits=True):
    """Every example was read once in each epoch, and the state is that of no disturbance."""
    assert trained.code == 0
    assert trained.results
    for values, losses, ids, step in trained.results:
        assert step == len(losses) == undisturbed[0][3]
        for epoch in ids:
            assert Counter(epoch) == Counter(range(NUM_EXAMPLES))
        assert ids == undisturbed[0][2]
        for one, other in zip(values, undisturbed[0][0], strict=True):
            if bits:
                assert torch.equal(one, other)
            else:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        if bits:
            assert losses == undisturbed[0][1]


def test_undisturbed(undisturbed):
    assert len(undisturbed) == 2
    assert undisturbed[0][3] == 18


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_costs_no_example_and_no_bits(point, undisturbed):
    for victim in (0, 1):
        kills = [(), ()]
        kills[victim] = [Kill(point, 2 if "sum" in point else 1)]
        check(train(elastic_training, kills=kills), undisturbed)


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
    trained = train(elastic_training, size=size, least=least, kills=kills, timeout_seconds=3.0)
    check(trained, undisturbed, bits=size == least == 2)
