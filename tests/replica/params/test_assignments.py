"""Assignments to variables inside run: equal on all replicas, or refused."""

import itertools

import pytest
import torch
from torch import nn

import mirror
from mirror.execution.runner import runner_of
from tests.oracle import assert_same, in_run
from tests.toy_models import ONES, mirrored_layer, ones_layer, replica_id, sgd


@pytest.fixture(params=["lockstep", "staggered"])
def strategy(request):
    with mirror.MirroredStrategy(["cpu"] * 3, schedule=request.param) as strategy:
        yield strategy


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def context():
    return mirror.get_replica_context()


X = torch.linspace(-1, 1, 12).view(6, 2)

SETTERS = {
    "requires_grad_": lambda p, value: p.requires_grad_(value),
    "requires_grad": lambda p, value: setattr(p, "requires_grad", value),
}
SUBSETS = [ids for n in (1, 2, 3) for ids in itertools.combinations(range(3), n)]


@pytest.mark.parametrize("way", SETTERS)
@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("ids", SUBSETS)
def test_requires_grad_set_by_some_replicas_is_refused_and_by_all_is_kept(
    ids, start, way, strategy
):
    model = strategy.mirror(net())
    weight = model[0].weight
    weight.requires_grad_(start)

    def step():
        if replica_id() in ids:
            SETTERS[way](model[0].weight, not start)

    if len(ids) == 3:
        strategy.run(step)
        assert weight.requires_grad is not start
    else:
        with pytest.raises(mirror.StrategyError, match=r"0\.weight.*outside strategy\.run"):
            strategy.run(step)
        # As after any run that failed, the first replica's state is that of all.
        assert weight.requires_grad is (not start if 0 in ids else start)
    seen = strategy.run(lambda: model[0].weight.requires_grad)
    assert set(seen.values) == {weight.requires_grad}


def test_a_parameter_that_one_replica_freezes_for_a_while_is_no_matter(strategy):
    model = strategy.mirror(net())

    def step():
        if replica_id() == 1:
            model.requires_grad_(False)
            model.requires_grad_(True)

    strategy.run(step)
    assert all(p.requires_grad for p in model.parameters())


def test_freezing_on_one_replica_raises_where_replicas_merge(strategy):
    model = strategy.mirror(net())

    def step():
        if replica_id() == 1:
            model.requires_grad_(False)
        context().all_reduce("sum", 1)
        model.requires_grad_(True)

    with pytest.raises(mirror.StrategyError, match=r"set to True on replica 0 and False on"):
        strategy.run(step)


def test_a_run_that_fails_leaves_requires_grad_equal(strategy):
    model = strategy.mirror(net())

    def step():
        if replica_id() == 1:
            model.requires_grad_(False)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        strategy.run(step)
    assert strategy.run(lambda: model[0].weight.requires_grad).values == (True, True, True)


def new_memory(p, _):
    p.data = p.data * 2


def of_all(p, given):
    p.data = given


def other_shape(p, _):
    p.data = torch.ones(5, 2)


def other_dtype(p, _):
    p.data = p.data.double()


@torch.no_grad()
def by_set(p, _):
    p.set_(torch.full((3, 2), 7.0))


KINDS = [new_memory, of_all, other_shape, other_dtype, by_set]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("ids", SUBSETS)
def test_data_assigned_by_some_replicas_is_refused_and_by_all_is_kept(ids, kind, strategy):
    expected, model = net()[0].weight, strategy.mirror(net())
    given = torch.tensor([[1.0, 2.0]] * 3)

    def step():
        if replica_id() in ids:
            kind(model[0].weight, given)

    if len(ids) == 3:
        strategy.run(step)
    else:
        with pytest.raises(mirror.StrategyError, match=r"\.data of parameter '0\.weight'"):
            strategy.run(step)
    if 0 in ids:
        kind(expected, given.clone())
    assert_same(model[0].weight, expected)
    strategy.check_replicas()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("active", [(0, 1), (1, 2), (2,)])
def test_replicas_that_sit_out_take_over_what_the_others_were_assigned(active, kind, strategy):
    expected, model = net()[0].weight, strategy.mirror(net())
    given = torch.tensor([[1.0, 2.0]] * 3)
    runner = runner_of(model[0].weight._mirrored.replicas)
    runner.run(lambda replica_id: kind(model[0].weight, given), active)
    kind(expected, given.clone())
    strategy.check_replicas()
    assert_same(model[0].weight, expected)


def test_random_values_are_each_replicas_own_so_refused(strategy):
    model = strategy.mirror(net())

    def step():
        model[0].weight.data = torch.randn(3, 2)

    with pytest.raises(mirror.StrategyError, match="random tensor"):
        strategy.run(step)
    strategy.check_replicas()


def test_values_set_aside_and_back_on_one_replica_are_no_matter(strategy):
    model = strategy.mirror(net())

    def step():
        if replica_id() == 2:
            aside = model[0].weight.data
            model[0].weight.data = torch.zeros(3, 2)
            model[0].weight.data = aside

    strategy.run(step)
    strategy.check_replicas()
    assert_same(model.state_dict(), net().state_dict())


def test_a_write_in_place_on_one_replica_is_for_check_replicas(strategy):
    model = strategy.mirror(net())

    def step():
        model[0].weight.data[0, 0] += replica_id()

    strategy.run(step)
    with pytest.raises(mirror.ReplicaMismatchError, match=r"0\.weight"):
        strategy.check_replicas()


def test_a_step_that_freezes_and_assigns_on_every_replica_trains_as_one_device(strategy):
    """As in sharpness-aware minimization: up along the gradient, and back."""

    def train(model, optimizer, x, shared):
        for frozen in (0, 1):
            model[frozen].requires_grad_(False)
            model(x).square().mean().backward()
            before = {p: p.data for p in shared if p.requires_grad}
            for p in before:
                p.data = p.data + 0.1 * p.grad
            optimizer.zero_grad()
            model(x).square().mean().backward()
            for p, data in before.items():
                p.data = data
            optimizer.step()
            optimizer.zero_grad()
            model[frozen].requires_grad_(True)

    plain, model = net(), strategy.mirror(net())
    of_plain, of_model = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model))
    shared = list(model.parameters())
    for batch in strategy.distribute_dataset([X] * 3):
        train(plain, of_plain, X, list(plain.parameters()))
        strategy.run(lambda x: train(model, of_model, x, shared), args=(batch,))
        strategy.check_replicas()
    assert_same(model.state_dict(), plain.state_dict())


def test_data_of_a_parameter_assigned_in_run_keeps_training(make_strategy):
    # `layer.weight.data = t` in run moved the copy that forward reads, not the one the optimizer
    # steps: nothing trained any more, and no check saw it.
    def train(layer, each):
        optimizer = sgd(layer)

        def step(batch, first):
            if first:
                layer.weight.data = torch.full((1, 1), 2.0)
            optimizer.zero_grad()
            layer(batch).mean().backward()
            optimizer.step()

        for i in range(3):
            each(step, ONES, i == 0)

    plain = ones_layer()
    train(plain, lambda step, *args: step(*args))
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)
    train(layer, lambda step, *args: in_run(strategy, step, *args))
    assert_same(layer(ONES), plain(ONES))
    assert_same(layer.state_dict(), plain.state_dict())
    strategy.check_replicas()


@pytest.mark.parametrize("how", ["method", "attribute"])
def test_parameter_unfrozen_in_run_gets_its_gradient_reduced(make_strategy, how):
    # The copy got no arrival hook when `requires_grad` was set on it in run, so each replica
    # stepped with the gradient of its own part, or with none.
    def train(layer, each):
        optimizer = sgd(layer)

        def step(batch):
            if how == "method":
                layer.weight.requires_grad_(True)
            else:
                layer.weight.requires_grad = True
            layer(batch).mean().backward()
            optimizer.step()

        each(step, torch.tensor([[1.0], [5.0]]))

    plain = ones_layer()
    plain.weight.requires_grad_(False)
    train(plain, lambda step, batch: step(batch))
    strategy = make_strategy(2)
    with strategy.scope():
        layer = ones_layer()
        layer.weight.requires_grad_(False)
    train(layer, lambda step, batch: in_run(strategy, step, batch))
    assert layer.weight.requires_grad
    assert_same(layer.state_dict(), plain.state_dict())
    strategy.check_replicas()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_one_tensor_given_to_all_parameters_data_in_run_is_not_shared(make_strategy, n):
    # `p.data = t` with a t from outside left all replicas on t's storage: N updates per step.
    strategy = make_strategy(n)
    layer = mirrored_layer(strategy)
    optimizer = sgd(layer)
    start = torch.full((1, 1), 2.0)

    def step(batch):
        for p in layer.parameters():
            p.data = start
        optimizer.zero_grad()
        layer(batch).mean().backward()
        optimizer.step()

    in_run(strategy, step, ONES)
    assert_same(layer.weight.detach(), torch.full((1, 1), 1.9))
    strategy.check_replicas()
