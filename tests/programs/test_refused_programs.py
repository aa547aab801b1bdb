"""Programs that no replicas can train as one device does, and programs of several threads."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import mirror
from tests.oracle import assert_same, finishes
from tests.programs.catalogue import Net, Place, features, sgd


@pytest.mark.filterwarnings("ignore:the loss of this backward pass")  # a sum
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("in_run", [False, True])
def test_recomputed_dropout_masks_are_those_of_forward(in_run, reentrant, make_strategy):
    """out = w * kept, so the gradient of its sum by w is the sum of out over w."""

    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Dropout(0.5))
            self.inner[0].weight.data = 2 * torch.eye(50)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=reentrant)

    place = Place(make_strategy(3), "run" if in_run else "loop")
    model = place.put(Drops())
    weight = model.inner[0].weight

    def step(x):
        out = model(x.requires_grad_())
        out.sum().backward()
        return out.detach().sum(0)

    x = torch.rand(20, 50)
    if in_run:
        (parts,) = place.strategy.distribute_dataset([(x,)])
        sums = place.strategy.run(step, args=parts).values
        shares = (7, 7, 6)
        total = sum(s * (n / 20) for s, n in zip(sums, shares, strict=True))
    else:
        total = step(x)
    assert_same(weight.grad.diagonal(), total / 2)


def test_a_parameter_outside_any_module_is_refused_inside_run(make_strategy):
    """No replica has a copy of its own: stepping it would use a part of the gradient."""
    place = Place(make_strategy(2), "run")
    model = place.put(Net())
    temperature = nn.Parameter(torch.tensor(1.5))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)

    def loss(model, x, y):
        return F.cross_entropy(model(x) * temperature, y)

    with pytest.raises(mirror.StrategyError, match="mirror"):
        place.train(model, optimizer, loss)


def test_a_hooked_parameter_that_some_replicas_skip_in_run_is_refused(make_strategy):
    """Its hook is to see the gradient of the whole backward pass, for which all must wait."""
    strategy = make_strategy(2)
    model = strategy.mirror(Net())
    model.head.bias.register_hook(lambda grad: grad * 2)

    def step():
        first = mirror.get_replica_context().replica_id_in_sync_group == 0
        out = model(torch.ones(2, 6))
        (out.sum() if first else model.first.weight.sum()).backward()

    with pytest.raises(mirror.DivergenceError, match="gradients"):
        strategy.run(step)


def test_a_post_accumulate_hook_says_that_it_would_see_a_part(make_strategy):
    model = make_strategy(2).mirror(Net())
    with pytest.raises(mirror.StrategyError, match="post-accumulate"):
        model.head.weight.register_post_accumulate_grad_hook(lambda p: None)


def test_a_post_accumulate_hook_made_before_mirroring_is_not_lost(make_strategy):
    """An optimizer in backward: it would see a part of the gradient, so mirroring says no."""
    model = Net()
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(mirror.StrategyError, match="post-accumulate"):
        make_strategy(2).mirror(model)


@pytest.mark.parametrize("in_run", [False, True])
def test_two_strategies_train_in_two_threads(in_run, make_strategy):
    batches = [features(), features()]
    models = [Net(), Net()]
    expected = []
    for model, data in zip(copy.deepcopy(models), batches, strict=True):
        losses = Place().train(model, sgd(model), data=lambda sizes, data=data: data)
        expected.append((losses, model.state_dict()))

    def train(i):
        place = Place(make_strategy(2), "run" if in_run else "loop")
        model = place.put(models[i])
        losses = place.train(model, sgd(model), data=lambda sizes: batches[i])
        return losses, model.state_dict()

    outcomes = [None, None]
    start = threading.Barrier(2)

    def target(i):
        start.wait()
        outcomes[i] = finishes(lambda: train(i))

    threads = [threading.Thread(target=target, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for outcome, want in zip(outcomes, expected, strict=True):
        result, error, _ = outcome
        assert error is None, error
        assert_same(result, want)
