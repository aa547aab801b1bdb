"""Numbers and sizes that change from call to call are inputs, and equal the plain loop."""

import gc
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirror
from tests.compiler.training import Beside, batches, linear
from tests.pairs import each_once, quick_of

OPTIONS = {
    "momentum": (
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        lambda i: {"momentum": 0.9 - 0.03 * i},
    ),
    "adam": (
        lambda p: torch.optim.AdamW(p, 0.01),
        lambda i: {"betas": (0.9 - 0.02 * i, 0.99), "eps": 1e-8 * i, "weight_decay": 0.01 * i},
    ),
    "rprop": (
        lambda p: torch.optim.Rprop(p, 0.01),
        lambda i: {"etas": (0.5 - 0.01 * i, 1.2 + 0.01 * i)},
    ),
}


@each_once(name=OPTIONS, num_replicas=[1, 2, 3])
def test_options_that_change_need_at_most_one_retrace(name, num_replicas):
    make_optimizer, options = OPTIONS[name]
    beside = Beside(num_replicas, linear, make_optimizer)
    count = iter(range(1, 100))

    def change(beside):
        now = options(next(count))
        for optimizer in (beside.optimizer, beside.plain_optimizer):
            optimizer.param_groups[0].update(now)

    beside.train(batches([6] * 6), between=change)
    assert beside.compiled.num_traces <= 2


def test_arguments_that_change_need_one_trace_and_one_for_each_outcome_of_a_comparison():
    def make_step(model, optimizer):
        def step(x, y, temperature, number):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x) / temperature, y)
            if number % 2 == 0:
                loss = 2 * loss
            loss.backward()
            optimizer.step()
            return loss

        return step

    beside = Beside(2, linear, make_step=make_step)
    data = batches([6] * 8)
    for i, own in enumerate(beside.strategy.distribute_dataset(data)):
        expected = beside.plain_step(*data[i], 1 + 0.1 * i, i)
        found = beside.strategy.reduce("mean", beside.compiled(*own, 1 + 0.1 * i, i))
        torch.testing.assert_close(found, expected.detach())
    assert beside.compiled.num_traces == 2


def test_fifty_lengths_need_one_trace_and_the_first_new_one_is_named(caplog):
    def make_step(model, optimizer):
        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    beside = Beside(2, linear, make_step=make_step)
    data = [torch.randn(4, length, 6) for length in (5, 5, *range(2, 52))]
    with caplog.at_level(logging.INFO, "mirror.compiler"):
        for x, own in zip(data, beside.strategy.distribute_dataset(data), strict=True):
            expected = beside.plain_step(x)
            found = beside.strategy.reduce("mean", beside.compiled(own))
            torch.testing.assert_close(found, expected.detach())
    assert beside.compiled.num_traces == 2
    assert "argument 0 was float32[2, 5, 6] and is float32[2, 2, 6]" in caplog.text


def test_batches_with_other_keys_have_traces_of_their_own():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    compiled = strategy.compile(lambda batch: batch["a"] - batch["b"], mode="trace")
    one, two = mirror.PerReplica([torch.ones(2)] * 2), mirror.PerReplica([torch.zeros(2)] * 2)
    for batch in [{"a": one, "b": two}] * 3 + [{"b": two, "a": one}] * 2:
        assert strategy.local_results(compiled(batch))[0].tolist() == [1.0, 1.0]
    strategy.close()


def test_an_optimizer_that_the_program_has_dropped_is_freed():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    with strategy.scope():
        model = linear()
        optimizers = [torch.optim.SGD(model.parameters(), 0.1)]

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            return loss

        compiled = strategy.compile(step, mode="trace")
        (x,) = strategy.distribute_dataset([torch.randn(4, 6)])
        compiled(x)  # uncompiled: no trace keeps the optimizer
        dropped = weakref.ref(optimizers[0])
        optimizers[0] = torch.optim.SGD(model.parameters(), 0.1)
        gc.collect()
        assert dropped() is None
        compiled(x)
    strategy.close()


@pytest.mark.parametrize("num_replicas", quick_of([1, 3], [3]))
def test_updates_of_a_half_type_are_added_in_single_precision(num_replicas):
    """Muon computes its updates in bfloat16, and multiplies them by the rate in float32."""

    def model():
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))

    beside = Beside(num_replicas, model, lambda p: torch.optim.Muon(p, 0.01))
    beside.train(batches([8] * 4), rtol=1e-6, atol=1e-7)
    assert beside.compiled.num_traces == 1
