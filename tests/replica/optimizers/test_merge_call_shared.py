"""Replicas that share a device step once; each sees what its own step would leave."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same, assert_same_training, in_run, train, train_loop
from tests.pairs import each_once
from tests.replica.optimizers.stepping import (
    SIZE,
    adam,
    batches,
    loss_of,
    momentum,
    pair,
    step_in_run,
)


class Counting(torch.optim.SGD):
    """A class of the user's own, which would choke on groups without parameters."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.sizes = []

    def step(self, closure=None):
        sizes = [len(group["params"]) for group in self.param_groups]
        assert all(sizes), "no parameters"
        self.sizes.append(sizes)
        return super().step(closure)


def plain_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


# Step of


def test_a_class_of_the_users_counts_every_step_once(strategy):
    _, (model, optimizer) = pair(strategy, lambda params: Counting(params, lr=0.1))
    for i in range(3):
        step_in_run(strategy, model, optimizer, torch.randn(6, SIZE))
        assert optimizer.sizes == [[4]] * (i + 1)
        strategy.check_replicas()


@pytest.mark.replicated_state
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_the_users_see_the_parameters_of_every_step(strategy, kind):
    _, (model, optimizer) = pair(strategy, adam)
    seen = []

    def hook(optimizer, args, kwargs):
        seen.append([p.shape for p in optimizer.param_groups[0]["params"]])

    getattr(optimizer, f"register_step_{kind}_hook")(hook)
    shapes = [p.shape for p in model.parameters()]
    step_in_run(strategy, model, optimizer, torch.randn(6, SIZE))
    assert seen == [shapes] * 3
    strategy.check_replicas()
    loss_of(model, torch.randn(6, SIZE)).backward()
    optimizer.step()
    assert seen == [shapes] * 4  # outside run there is one step
    strategy.check_replicas()


def test_two_optimizers_and_two_steps_in_one_run(strategy):
    # As a GAN does, with another optimizer of one model's last layer on top.
    (plain_g, plain_og), (g, og) = pair(strategy, adam)
    (plain_d, plain_od), (d, od) = pair(strategy, momentum)

    def step(x, g, d, og, od):
        for _ in range(2):
            od.zero_grad()
            (loss_of(d, x) + d(x + g(x).detach()).mean()).backward()
            od.step()
            og.zero_grad()
            d(x + g(x)).square().mean().backward()
            og.step()

    for batch in batches(3):
        in_run(strategy, lambda x: step(x, g, d, og, od), batch)
        step(batch, plain_g, plain_d, plain_og, plain_od)
        strategy.check_replicas()
    assert_same_training(g, og, plain_g, plain_og)
    assert_same_training(d, od, plain_d, plain_od)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_step_that_raises_leaves_the_optimizer_and_the_replicas_as_they_were(strategy, where):
    (plain, plain_optimizer), (model, optimizer) = pair(strategy, adam)
    batch = torch.randn(6, SIZE)
    for _ in range(2):
        plain_step(plain, plain_optimizer, batch)
        step_in_run(strategy, model, optimizer, batch)
        optimizer.param_groups[0]["betas"] = None
        with pytest.raises(TypeError):
            if where == "inside":
                step_in_run(strategy, model, optimizer, batch)
            else:
                plain_step(model, optimizer, batch)
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        assert [len(group["params"]) for group in optimizer.param_groups] == [4]
        strategy.check_replicas()
        assert_same_training(model, optimizer, plain, plain_optimizer)


# Other kinds of steps


def test_lbfgs_steps_with_its_closure(strategy):
    def lbfgs(params):
        return torch.optim.LBFGS(params, lr=0.3, max_iter=4)

    (plain, plain_optimizer), (model, optimizer) = pair(strategy, lbfgs)
    data = batches(3)
    train(1, strategy, model, optimizer, data, loss_of)
    train_loop(plain, plain_optimizer, data, loss_of)
    assert_same(model.state_dict(), plain.state_dict(), tolerance=1e-4)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_scaler_skips_the_step_of_all(strategy, where):
    (plain, plain_optimizer), (model, optimizer) = pair(strategy, adam)
    scaler = mirror.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    plain_scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def step(x, model, optimizer, scaler):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()

    for i, batch in enumerate(batches(5)):
        if i == 2:
            batch[-1] = torch.inf
        step(batch, plain, plain_optimizer, plain_scaler)
        if where == "inside":
            in_run(strategy, lambda x: step(x, model, optimizer, scaler), batch)
        else:
            step(batch, model, optimizer, scaler)
        strategy.check_replicas()
        assert scaler.get_scale() == plain_scaler.get_scale()
    assert_same_training(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize("size", [7, 2, 1])
def test_replicas_that_sit_out_take_the_step_over(strategy, size):
    (plain, plain_optimizer), (model, optimizer) = pair(strategy, adam)
    for batch in batches(3, size):
        plain_step(plain, plain_optimizer, batch)
        step_in_run(strategy, model, optimizer, batch)
        strategy.check_replicas()
    assert_same_training(model, optimizer, plain, plain_optimizer)


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, foreach=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True),
}


def train_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    with torch.no_grad():  # a change before the next step of the same run
        for parameter in model.parameters():
            parameter.clamp_(-0.4, 0.4)
    return loss.detach()


@each_once(
    n=[2, 3], make=[pytest.param(value, id=key) for key, value in OPTIMIZERS.items()], steps=[1, 2]
)
def test_the_first_replica_is_brought_along(make, n, steps, make_strategy):
    strategy = make_strategy(n)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = strategy.mirror(copy.deepcopy(plain))
    optimizer, plain_optimizer = make(model), make(plain)

    def step(model, optimizer, batch):
        for _ in range(steps):
            loss = train_step(model, optimizer, batch)
        return loss

    batches = [torch.randn(size, 3).double() for size in (1, 1, 4, 1, 2, 1, 1)]
    # Of a single example the replica with the largest weight takes it.
    options = mirror.InputOptions(weights=[1] * (n - 1) + [2])
    distributed = strategy.distribute_dataset(batches, options)
    for whole, batch in zip(batches, distributed, strict=True):
        losses = strategy.run(step, args=(model, optimizer, batch))
        expected = step(plain, plain_optimizer, whole)
        assert_same(strategy.reduce("mean", losses), expected, "loss")
        strategy.check_replicas()
    assert_same_training(model, optimizer, plain, plain_optimizer)
