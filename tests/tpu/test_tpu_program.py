"""Whole steps on four simulated devices equal one device, for any batch size."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.oracle import assert_same

pytestmark = pytest.mark.slow  # jax compiles


def batches(*sizes):
    draws = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 6, generator=draws), torch.randint(3, (n,), generator=draws))
        for n in sizes
    ]


UNEVEN = batches(8, 6, 8, 3, 1)  # parts of different sizes, and idle replicas


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


def loop(model, optimizer, data, run=None, reduce=None):
    """Trains with a schedule and clipping; returns the losses."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    losses = []
    for batch in data:
        loss = step(batch) if run is None else reduce("mean", run(step, args=(batch,)))
        losses.append(float(loss))
        scheduler.step()
    return losses


def sgd(p):
    return torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(p):
    return torch.optim.AdamW(p, lr=0.02, eps=1e-4)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_training_is_that_of_one_device(make, tpus):
    plain = net()
    expected = make(plain.parameters())
    losses = loop(plain, expected, UNEVEN)
    with tpus.scope():
        model = net()
        optimizer = make(model.parameters())
    data = tpus.distribute_dataset(UNEVEN)
    assert_same(loop(model, optimizer, data, tpus.run, tpus.reduce), losses)
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(optimizer.state_dict()["state"], expected.state_dict()["state"])
    assert tpus.check_replicas() >= 6
    # 8, 6 = 2+2+1+1, 3 = 1+1+1+0 and 1 = 1+0+0+0 examples: the last two are one program.
    assert len(tpus._programs.kept) == 3


def test_a_step_on_eight_examples_is_one_program_with_one_reduction_of_gradients(tpus):
    with tpus.scope():
        model = net()
        optimizer = sgd(model.parameters())
    loop(model, optimizer, tpus.distribute_dataset(batches(8, 8, 8)), tpus.run, tpus.reduce)
    (program,) = tpus._programs.kept.values()
    assert program.traces <= 5  # of three steps: nothing runs in Python after the first
    assert tpus._programs.copies.sent == 12  # parameters and momenta once, and never again


def test_buffers_are_those_of_mirrored_replicas(tpus, make_strategy):
    found = []
    for strategy in (tpus, make_strategy(4)):
        with strategy.scope():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop(
            model,
            optimizer,
            strategy.distribute_dataset(batches(12, 10)),
            strategy.run,
            strategy.reduce,
        )
        found.append({k: v.clone() for k, v in model.state_dict().items()})
    assert found[0]["1.num_batches_tracked"] == 2
    assert found[0]["1.running_mean"].any()
    assert_same(found[0], found[1], tolerance=1e-5)


def test_one_replica_normalizes_as_one_device(four):
    plain = nn.BatchNorm1d(6)
    with four(1) as strategy:
        model = strategy.mirror(copy.deepcopy(plain))
        ((x, _),) = batches(5)
        (out,) = strategy.local_results(strategy.run(lambda x: model(x), args=(x,)))
        assert_same(out.detach(), plain(x).detach())
    assert_same(model.state_dict(), plain.state_dict())


def test_masks_are_reproducible_and_different_on_each_replica(tpus):
    drop = tpus.mirror(nn.Dropout(0.5))

    def step(x):
        return drop(x)

    (batch,) = tpus.distribute_dataset([torch.ones(8, 32)])
    runs = []
    for seed in (3, None, 3):
        if seed is not None:
            torch.manual_seed(seed)
        runs.append(tpus.run(step, args=(batch,)).values)
    first, second, again = runs
    assert all(map(torch.equal, first, again))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(first[0], other) for other in first[1:])
    assert set(first[0].unique().tolist()) == {0.0, 2.0}


def test_results_are_each_replicas_own(tpus):
    def step(x):
        return {"rows": x * 2, "count": len(x), "name": "a"}

    (batch,) = tpus.distribute_dataset([torch.arange(6.0)])
    found = tpus.run(step, args=(batch,))
    assert [part.tolist() for part in tpus.local_results(found["rows"])] == [
        [0.0, 2.0],
        [4.0, 6.0],
        [8.0],
        [10.0],
    ]
    assert found["count"].values == (2, 2, 1, 1)
    assert found["name"] == "a"
    assert tpus.gather(found["rows"]).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert tpus.reduce("sum", found["count"]) == 6


def test_parameters_that_the_loss_does_not_reach_stay(tpus):
    with tpus.scope():
        used, free = nn.Linear(6, 3), nn.Linear(6, 3)
        optimizer = torch.optim.SGD(
            [*used.parameters(), *free.parameters()], lr=0.1, weight_decay=1.0
        )
    before = copy.deepcopy(free.state_dict())
    with torch.no_grad():
        teacher = copy.deepcopy(used)

    def step(x, y):
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = used(x) + 1
        F.mse_loss(used(x), wanted).backward()
        optimizer.step()

    ((x, y),) = batches(8)
    ((own, _),) = tpus.distribute_dataset([(x, y)])
    tpus.run(step, args=(own, y))
    assert_same(free.state_dict(), before, tolerance=0)
    F.mse_loss(teacher(x), teacher(x).detach() + 1).backward()
    assert_same(used.weight.detach(), 0.9 * teacher.weight.detach() - 0.1 * teacher.weight.grad)


def test_plain_values_that_change_are_followed(tpus):
    scale = 2.0

    def step(x, shift):
        return x.sum() * scale + shift

    assert tpus.run(step, args=(torch.ones(2), 1.0)).values[0] == 5
    assert tpus.run(step, args=(torch.ones(2), 3.0)).values[0] == 7
    scale = 4.0
    assert tpus.run(step, args=(torch.ones(2), 1.0)).values[3] == 9


def test_weights_of_batches_count(tpus):
    with tpus.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)

    def step(x):
        optimizer.zero_grad()
        (model(x).mean()).backward()
        optimizer.step()

    options = mirror.InputOptions(weight_of=lambda x: 3.0 if x[0, 0] == 1 else 0.0)
    (batch,) = tpus.distribute_dataset([torch.tensor([[1.0], [9.0], [9.0], [9.0]])], options)
    tpus.run(step, args=(batch,))
    assert model.weight.item() == -1.0
