"""Gradients of a strategy: reduction, no_sync, check_replicas."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.oracle import assert_same, in_run
from tests.toy_models import mirrored_layer, ones_layer, replica_id


def test_inside_run_every_observer_sees_the_reduced_gradient(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(nn.Linear(1, 1, bias=False))
    (batch,) = strategy.distribute_dataset([torch.arange(7.0).view(7, 1)])

    def fn(x):
        model(x).mean().backward()
        return model.weight.grad.clone()

    result = strategy.run(fn, args=(batch,))
    for gradient in result.values:
        assert gradient.item() == pytest.approx(3.0)
        assert torch.equal(gradient, result.values[0])
    assert model.weight.grad.item() == pytest.approx(3.0)


def test_sum_reduction_sums(make_strategy):
    strategy = make_strategy(3, gradient_reduction="sum")
    model = strategy.mirror(nn.Linear(1, 1, bias=False))

    def fn():
        model(torch.tensor([1.0 + replica_id()])).sum().backward()
        return model.weight.grad.item()

    assert strategy.run(fn).values == (6.0, 6.0, 6.0)


def test_under_no_sync_a_replica_sees_its_own_gradient(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Linear(1, 1, bias=False))

    def fn(scale):
        model(torch.tensor([scale * (1.0 + replica_id())])).sum().backward()

    with strategy.no_sync():
        strategy.run(fn, args=(1.0,))
        strategy.run(fn, args=(10.0,))
    strategy.run(fn, args=(100.0,))
    assert model.weight.grad.item() == pytest.approx(111 * 1.5)


def test_check_replicas_counts_parameters_and_names_what_differs(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    assert strategy.check_replicas() == 4

    def poke():
        if replica_id() == 2:
            with torch.no_grad():
                model[1].weight[0, 1] += 1e-7 + model[1].weight[0, 1].abs()

    strategy.run(poke)
    with pytest.raises(mirror.ReplicaMismatchError, match=r"2") as error:
        strategy.check_replicas()
    assert "1.weight" in str(error.value)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert strategy.check_replicas() == 4


class Unfaithful(torch.optim.SGD):
    """Keeps another momentum on the last replica."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"].add_(replica_id() // 2)


@pytest.mark.replicated_state
def test_check_replicas_sees_the_optimizer_state(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(nn.Linear(2, 1))
    optimizer = Unfaithful(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()

    strategy.run(step)
    with pytest.raises(mirror.ReplicaMismatchError, match="2"):
        strategy.check_replicas()


def test_weights_set_between_forward_and_backward_count_in_collectives(make_strategy):
    # A replica read the others' weights in its own turn, before they had set theirs.
    def gradient(is_before):
        strategy = make_strategy(2)
        layer = mirrored_layer(strategy)

        def step(batch):
            context = mirror.get_replica_context()
            weight = 1.0 if context.replica_id_in_sync_group == 0 else 9.0
            if is_before:
                context.weight = weight
            y = layer(batch)
            total = context.all_reduce("sum", y.pow(2).sum())
            if not is_before:
                context.weight = weight
            (y.mean() * total).backward()

        in_run(strategy, step, torch.arange(1.0, 5.0).view(4, 1))
        return layer.weight.grad

    # Weighted mean of y: (1.5 + 9 * 3.5) / 10 = 3.3; total 30; each is of degree 1 and 2 in w.
    assert_same(gradient(is_before=False), torch.tensor([[3 * 3.3 * 30]]))
    assert_same(gradient(is_before=True), torch.tensor([[3 * 3.3 * 30]]))


def test_a_weight_set_after_backward_counts_only_for_later_gradients(make_strategy):
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)

    def step(batch):
        layer(batch).mean().backward()
        mirror.get_replica_context().weight = 1.0

    in_run(strategy, step, torch.tensor([[1.0], [2.0], [6.0]]))
    assert_same(layer.weight.grad, torch.tensor([[3.0]]))  # of the two halves: 3.75


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("in_scope", [False, True])
def test_a_gradient_from_before_mirroring_is_kept(make_strategy, in_scope, n):
    x = torch.arange(6.0).view(6, 1)
    plain, strategy = ones_layer(), make_strategy(n)
    if in_scope:
        with strategy.scope():
            model = ones_layer()
            model.weight.grad = torch.full((1, 1), 5.0)
    else:
        model = ones_layer()
        model.weight.grad = torch.full((1, 1), 5.0)
        strategy.mirror(model)
    plain.weight.grad = torch.full((1, 1), 5.0)
    seen = strategy.run(lambda: model.weight.grad.clone())
    for grad in strategy.local_results(seen):
        assert_same(grad, plain.weight.grad)
    for layer in (plain, model):
        layer(x).mean().backward()
    assert_same(model.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("is_batch_first", [True, False])
def test_values_of_a_run_without_batch_do_not_set_gradient_weights(make_strategy, is_batch_first):
    # The first PerReplica argument gave the weights: a hidden state from an earlier run counted
    # as (1, 1) and won over the batch's (2, 1).
    x = torch.arange(6.0).view(3, 2)
    plain = ones_layer(2)
    plain(x).mean().backward()
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy, 2)
    hidden = strategy.run(lambda: torch.zeros(1))

    def step(*args):
        batch, state = args if is_batch_first else args[::-1]
        (layer(batch) + state).mean().backward()

    (batch,) = strategy.distribute_dataset([x])
    strategy.run(step, args=(batch, hidden) if is_batch_first else (hidden, batch))
    assert_same(layer.weight.grad, plain.weight.grad)


def test_part_of_weight_zero_counts_nothing_even_where_it_is_nan(make_strategy):
    # The mean over no tokens is NaN, and 0 * NaN made the whole gradient and loss NaN.
    x, labels = torch.eye(4), torch.tensor([0, 1, -100, -100])

    def loss_of(layer, x, labels):
        loss = F.cross_entropy(layer(x), labels)
        loss.backward()
        return loss.detach()

    def make():
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    plain = make()
    expected = loss_of(plain, x, labels)
    strategy = make_strategy(2)
    with strategy.scope():
        layer = make()

    def step(batch):
        mirror.get_replica_context().weight = float((batch[1] != -100).sum())
        return loss_of(layer, *batch)

    losses = in_run(strategy, step, (x, labels))
    assert_same(strategy.reduce("mean", losses), expected)
    assert_same(layer.weight.grad, plain.weight.grad)
