"""Optimizers and groups created inside run: one for all replicas, or refused."""

import gc
import weakref

import pytest
import torch
from torch import nn

import mirror
from mirror.replica.optimizers.optimizer_registry import optimizers_of
from tests.oracle import assert_same, in_run
from tests.pairs import each_once
from tests.toy_models import ONES, mirrored_layer


class Own(torch.optim.SGD):
    """Steps by turns, as every class that is not torch's own."""

    def step(self, closure=None):
        return super().step(closure)


class Counting(torch.optim.SGD):
    """Steps once for all, because it changes what it keeps."""

    num_steps = 0

    def step(self, closure=None):
        self.num_steps = self.num_steps + 1
        return super().step(closure)


KINDS = [torch.optim.SGD, torch.optim.Adam, Own, Counting, torch.optim.LBFGS]
X = torch.linspace(-1, 1, 12).view(6, 2)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


@pytest.fixture(params=["lockstep", "staggered"])
def strategy(request):
    with mirror.MirroredStrategy(["cpu"] * 2, schedule=request.param) as strategy:
        yield strategy


def run(strategy, step, times=1):
    for batch in strategy.distribute_dataset([X] * times):
        strategy.run(step, args=(batch,))


@each_once(
    kind=[pytest.param(kind, id=kind.__name__) for kind in KINDS],
    held=["the model's", "a list of before"],
)
def test_an_optimizer_that_every_replica_makes_is_refused_with_the_remedy(kind, held, strategy):
    model = strategy.mirror(net())
    before = list(model.parameters())

    def step(x):
        optimizer = kind(before if held == "a list of before" else model.parameters(), lr=0.1)

        def closure():
            loss = model(x).square().mean()
            loss.backward()
            return loss

        closure()
        optimizer.step(*[closure] * (kind is torch.optim.LBFGS))

    with pytest.raises(mirror.StrategyError, match=r"make (optimizers|it) outside"):
        run(strategy, step)
    strategy.check_replicas()
    assert_same(model.state_dict(), net().state_dict())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, Own, Counting])
def test_an_optimizer_that_one_replica_makes_for_all_is_right(kind, make_strategy):
    strategy = make_strategy(2)
    plain, model = net(), strategy.mirror(net())
    held, made = list(model.parameters()), []

    def step(x):
        if not made:
            made.append(kind(held, lr=0.1))
        made[0].zero_grad()
        model(x).square().mean().backward()
        made[0].step()

    run(strategy, step, 3)
    optimizer = kind(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        plain(X).square().mean().backward()
        optimizer.step()
    strategy.check_replicas()
    assert_same(model.state_dict(), plain.state_dict())


def test_an_optimizer_of_a_replicas_own_tensors_is_its_own(strategy):
    def step(x):
        offset, scale = (torch.zeros(2, requires_grad=True) for _ in range(2))
        optimizer = torch.optim.SGD([offset], lr=0.1)
        optimizer.add_param_group({"params": [scale]})
        (x * scale + offset).sum().backward()
        optimizer.step()
        return len(optimizer.param_groups), offset.detach()

    (batch,) = strategy.distribute_dataset([X])
    num_groups, offsets = strategy.run(step, args=(batch,))
    assert num_groups.values == (2, 2)
    for offset in offsets.values:
        assert_same(offset, torch.full((2,), -0.3))


GROUPS = {
    "list": lambda layer: {"params": list(layer.parameters()), "lr": 0.2},
    "generator": lambda layer: {"params": layer.parameters(), "lr": 0.2},
    "tensor": lambda layer: {"params": layer.weight},
}


@each_once(
    kind=[torch.optim.SGD, torch.optim.Adam, Own, Counting],
    form=GROUPS,
    where=["before the step", "after it"],
)
def test_a_group_that_every_replica_adds_is_added_once(kind, form, where, strategy):
    def train(model, optimizer, i, x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if i == 1 and where == "before the step":
            optimizer.add_param_group(GROUPS[form](model[1]))
        optimizer.step()
        if i == 1 and where == "after it":
            optimizer.add_param_group(param_group=GROUPS[form](model[1]))

    plain, model = net(), strategy.mirror(net())
    of_plain, of_model = (kind(m[0].parameters(), lr=0.1) for m in (plain, model))
    for i in range(4):
        train(plain, of_plain, i, X)
        run(strategy, lambda x, i=i: train(model, of_model, i, x))
        strategy.check_replicas()
    assert [len(o.param_groups) for o in (of_plain, of_model)] == [2, 2]
    assert {id(p) for p in of_model.param_groups[1]["params"]} <= {
        id(p) for p in model.parameters()
    }
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("add", "told"),
    [
        (lambda o, m, r: o.add_param_group({"params": m[1].weight, "lr": 0.1 + r}), "0.1, 1.1"),
        (lambda o, m, r: o.add_param_group({"params": m[1 + r].weight}), "different values"),
        (lambda o, m, r: o.add_param_group({"params": [torch.rand(2)]}), "float32 tensor of"),
        (lambda o, m, r: r or o.add_param_group({"params": m[1].weight}), "add_param_group"),
    ],
    ids=["other options", "other parameters", "each its own tensor", "one replica alone"],
)
def test_groups_that_replicas_add_differently_are_refused(add, told, make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)]))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)

    def step():
        add(optimizer, model, mirror.get_replica_context().replica_id_in_sync_group)

    with pytest.raises((mirror.StrategyError, mirror.DivergenceError), match=told):
        strategy.run(step)
    assert len(optimizer.param_groups) == 1


def test_optimizers_stepped_in_another_order_still_diverge(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(net())
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]

    def step(x):
        model(x).mean().backward()
        optimizers[mirror.get_replica_context().replica_id_in_sync_group].step()

    with pytest.raises(mirror.DivergenceError, match=r"optimizer\.step"):
        run(strategy, step)


def test_classes_that_come_later_are_watched_in_all_their_methods(make_strategy):
    """Watching a second method of a class must not end the watching of the first."""

    class Late(torch.optim.Optimizer):
        num_calls = 0

        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            type(self).num_calls += 1

        def add_param_group(self, param_group):
            type(self).num_calls += 1
            super().add_param_group(param_group)

    strategy = make_strategy(2)
    model = strategy.mirror(net())
    optimizer = Late(model[0].parameters())
    Late.num_calls = 0
    strategy.run(optimizer.step)
    assert Late.num_calls == 1
    strategy.run(lambda: optimizer.add_param_group({"params": model[1].weight}))
    assert Late.num_calls == 2


def test_optimizer_over_two_strategies_is_refused(make_strategy):
    # The gradients of the second strategy's model were never reduced, its weights never moved.
    layers = [mirrored_layer(make_strategy(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    sum(layer(ONES).sum() for layer in layers).backward()
    with pytest.raises(mirror.StrategyError, match="two strategies"):
        optimizer.step()


def test_optimizer_made_in_run_over_one_replicas_parameter_is_refused(make_strategy):
    # `SGD([layer.weight])` in run holds one replica's copy: one replica trained, the others not.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)

    def step(batch):
        optimizer = torch.optim.SGD([layer.weight], lr=0.1)
        layer(batch).mean().backward()
        optimizer.step()

    with pytest.raises(mirror.StrategyError, match="made inside"):
        in_run(strategy, step, ONES)
    strategy.check_replicas()


# All those of a strategy: how they are found, and for how long.


def stepped(strategy):
    """Returns a model and an optimizer that has stepped once."""
    model = strategy.mirror(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_each_strategy_has_optimizers_of_its_own(make_strategy):
    one, other = make_strategy(2), make_strategy(2)
    kept = [stepped(strategy) for strategy in (one, other)]
    of_one, of_other = (optimizers_of(model.weight._mirrored.replicas) for model, _ in kept)
    assert of_one is not of_other
    assert of_one is optimizers_of(kept[0][0].bias._mirrored.replicas)
    assert kept[0][1]._mirror.replicas is of_one.replicas


def test_no_optimizer_is_lent_between_steps(make_strategy):
    model, optimizer = stepped(make_strategy(3))
    assert not optimizers_of(model.weight._mirrored.replicas).lent
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_nothing_keeps_an_optimizer_alive(make_strategy):
    model, optimizer = stepped(make_strategy(2))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert model.weight.shape == (2, 3)
