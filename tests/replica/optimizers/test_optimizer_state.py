"""Changes of an optimizer outside run reach every replica."""

import copy
import gc

import pytest
import torch
from torch import nn

from tests.oracle import assert_same, in_run
from tests.pairs import each_once
from tests.replica.params.coherence import N, Net, momentum, train_a_step, values_seen
from tests.toy_models import ONES, collect, mirrored_layer, ones_layer, sgd


@pytest.fixture
def strategy(make_strategy):
    return make_strategy(N)


@pytest.fixture
def model(strategy):
    return strategy.mirror(Net())


def trained_pair(strategy, make):
    """The model and optimizer of one device and of the strategy, after one equal step."""
    plain = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    optimizers = [make(m.parameters()) for m in (plain, model)]
    x = torch.randn(10, 2)
    for m, optimizer in zip((plain, model), optimizers, strict=True):
        train_a_step(strategy, m, optimizer, x)
    return plain, model, optimizers


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def load_other_state(optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        for value in entry.values():
            value.mul_(2.0)
    state["param_groups"][0]["lr"] = 0.03
    optimizer.load_state_dict(state)


def edit_state(optimizer):
    for entry in optimizer.state.values():
        for value in entry.values():
            value.mul_(3.0)


def replace_state(optimizer):
    for entry in optimizer.state.values():
        for key in list(entry):
            entry[key] = entry[key] * 5.0


def clear_state(optimizer):
    optimizer.state.clear()


def set_lr(optimizer):
    optimizer.param_groups[0]["lr"] = 0.7


def set_weight_decay(optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.5


OPTIMIZER_CHANGES = [
    load_other_state,
    edit_state,
    replace_state,
    clear_state,
    set_lr,
    set_weight_decay,
]


@each_once(make=[momentum, adam], inside=[False, True])
@pytest.mark.parametrize("change", OPTIMIZER_CHANGES, ids=lambda fn: fn.__name__)
def test_a_changed_optimizer_reaches_every_replica(change, make, inside, strategy):
    plain, model, optimizers = trained_pair(strategy, make)
    x = torch.randn(10, 2)
    for optimizer in optimizers:
        change(optimizer)
    for _ in range(2):
        train_a_step(strategy, plain, optimizers[0], x)
        if inside:
            (batch,) = strategy.distribute_dataset([x])
            strategy.run(
                lambda part: train_a_step(strategy, model, optimizers[1], part), args=(batch,)
            )
        else:
            train_a_step(strategy, model, optimizers[1], x)
        strategy.check_replicas()
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())


def test_optimizer_state_can_be_looked_at_in_run(strategy):
    _, model, (plain_optimizer, optimizer) = trained_pair(strategy, momentum)
    (expected, _) = [entry["momentum_buffer"] for entry in plain_optimizer.state.values()]
    keys = set(optimizer.state)

    def read_momentum():
        held = optimizer.param_groups[0]["params"][0]
        return (
            optimizer.state[held]["momentum_buffer"].clone(),
            optimizer.state[model.weight]["momentum_buffer"].clone(),
        )

    for result in strategy.local_results(strategy.run(read_momentum)):
        assert_same(result, (expected, expected))
    assert set(optimizer.state) == keys
    assert_same(optimizer.state_dict(), plain_optimizer.state_dict())


def test_looking_for_state_in_run_leaves_none_behind(strategy):
    """``optimizer.state`` is a defaultdict: asking for another key would add one."""
    _, model, (plain_optimizer, optimizer) = trained_pair(strategy, momentum)
    strategy.run(lambda: optimizer.state.get(model.weight) is None)
    strategy.run(lambda: len(optimizer.state[model.weight]))
    assert_same(optimizer.state_dict(), plain_optimizer.state_dict())


@each_once(name=["SGD", "Adam", "AdamW", "Adagrad"], way=["inside", "outside"])
def test_fused_optimizers_update_every_replica(name, way, strategy):
    """They do not bump version counters."""
    plain = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    make = getattr(torch.optim, name)
    optimizers = [make(m.parameters(), lr=0.1, fused=True) for m in (plain, model)]
    for _ in range(3):
        x = torch.randn(10, 2)
        train_a_step(strategy, plain, optimizers[0], x)
        if way == "inside":
            (batch,) = strategy.distribute_dataset([x])
            strategy.run(
                lambda part: train_a_step(strategy, model, optimizers[1], part), args=(batch,)
            )
        else:
            train_a_step(strategy, model, optimizers[1], x)
        strategy.check_replicas()
    assert_same(model.state_dict(), plain.state_dict())
    for value in values_seen(strategy, lambda: model.weight):
        assert_same(value, plain.weight)


# Values and identity of parameters and buffers


@pytest.mark.parametrize("n", [1, 2, 4])
def test_state_written_in_run_is_kept_for_parameters_that_had_none(make_strategy, n):
    # `optimizer.state[p]` inside run gave a detached dict, and what was written there was lost.
    strategy = make_strategy(n)
    layer = strategy.mirror(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(batch):
        layer(batch).mean().backward()
        optimizer.step()
        state = optimizer.state[layer.weight]
        state["steps"] = state.get("steps", 0) + 1
        optimizer.state.setdefault(layer.bias, {})["sum"] = layer.bias.detach().clone()
        return optimizer.state[layer.weight]["steps"]

    for _ in range(3):
        in_run(strategy, step, ONES)
    strategy.check_replicas()
    assert optimizer.state[layer.weight] == {"steps": 3}
    assert_same(optimizer.state_dict()["state"][1]["sum"], layer.bias.detach())


@pytest.mark.parametrize("n", [1, 2, 4])
def test_sharpness_aware_step_in_run_restores_weights_of_its_own(make_strategy, n):
    # SAM restores `p.data = state[p]["old"]`: replicas that shared it took N steps at once.
    class SAM(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            self.base = torch.optim.SGD(self.param_groups, lr=0.1)
            self.param_groups = self.base.param_groups

        @torch.no_grad()
        def climb(self):
            for p in self.param_groups[0]["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * 0.05)
            self.zero_grad()

        @torch.no_grad()
        def descend(self):
            for p in self.param_groups[0]["params"]:
                p.data = self.state[p]["old"]
            self.base.step()
            self.zero_grad()

    def train(layer, each):
        optimizer = SAM(layer.parameters())

        def step(batch):
            layer(batch).pow(2).mean().backward()
            optimizer.climb()
            layer(batch).pow(2).mean().backward()
            optimizer.descend()

        for _ in range(2):
            each(step, torch.arange(8.0).view(4, 2) / 4)

    plain = ones_layer(2)
    train(plain, lambda step, batch: step(batch))
    strategy = make_strategy(n)
    layer = mirrored_layer(strategy, 2)
    train(layer, lambda step, batch: in_run(strategy, step, batch))
    assert_same(layer.state_dict(), plain.state_dict())
    strategy.check_replicas()


# Optimizers


def test_state_that_a_step_replaces_is_the_optimizers_state(make_strategy):
    # Only new entries were noticed, so optimizer.state stayed that of the first step, and a look
    # at state_dict() between steps set the training back to it.
    class Growing(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                k = self.state[p].get("k", 0) + 1
                self.state[p] = {"k": k}
                p.sub_(k)

    def train(layer):
        optimizer = Growing(layer.parameters())
        for _ in range(3):
            layer(ONES).sum().backward()
            optimizer.step()
            state = optimizer.state_dict()["state"]
        return state, layer.state_dict()

    strategy = make_strategy(2)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()


# Optimizers and their state


@pytest.mark.replicated_state
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_replicas_on_one_device_keep_one_state(make_strategy, where):
    # Outside run every step copied the state to all replicas, without use.
    strategy = make_strategy(3)
    layer = mirrored_layer(strategy, in_features=37)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)

    def step(batch):
        layer(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        batch = torch.ones(3, 37)
        step(batch) if where == "outside" else in_run(strategy, step, batch)
    collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    assert sum(t.shape == (1, 37) for t in tensors) == 2  # the two moments


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_state_changed_in_run_is_the_same_on_all_replicas(make_strategy, schedule):
    # A replica's state was copied from the first one's when the replica looked at it: after the
    # first one had changed its own, so that the others changed it twice.
    strategy = make_strategy(3, schedule=schedule)
    layer = mirrored_layer(strategy)
    optimizer = sgd(layer, momentum=0.9)
    layer(ONES).mean().backward()
    optimizer.step()

    def halve():
        buffer = optimizer.state[layer.weight]["momentum_buffer"]
        buffer.mul_(0.5)
        return buffer.clone()

    for expected in (0.5, 0.25):
        halved = strategy.run(halve)
        assert strategy.local_results(halved) == (expected,) * 3
        strategy.check_replicas()
        assert optimizer.state[layer.weight]["momentum_buffer"] == expected
