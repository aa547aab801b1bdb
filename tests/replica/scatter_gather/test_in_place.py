"""A forward that changes its inputs in place trains as on one device, in all three ways."""

import copy

import pytest
import torch
from torch import nn

from tests.oracle import assert_same


def add(x):
    x += torch.arange(4.0)
    return x


def set_column(x):
    x[:, 1] = 0.5
    return x


KINDS = {
    "relu": lambda x: torch.relu_(x),
    "add": add,
    "standardize": lambda x: x.sub_(0.3).div_(1.7),
    "a column": set_column,
    "clamp": lambda x: x.clamp_(-0.4, 0.4),
    "masked_fill": lambda x: x.masked_fill_(x > 0.2, 0.1),
    "none": lambda x: x,
}


class Head(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.first, self.last, self.change = nn.Linear(4, 4), nn.Linear(4, 3), change

    def forward(self, batch):
        x = batch["x"] if isinstance(batch, dict) else batch
        return self.last(self.first(self.change(x)).tanh() * x)


def inputs(size=5):
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(size))


def gradients(model):
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_split_calls(name, n, make_strategy):
    strategy = make_strategy(n)
    plain = nn.ModuleDict({"trunk": nn.Linear(4, 4), "head": Head(KINDS[name])})
    model = strategy.mirror(copy.deepcopy(plain))
    found = []
    for own in (plain, model):
        found.append([])
        for size in (5, 6, 3):
            x = inputs(size)
            own["head"](x).square().mean().backward()  # no gradient at the input
            found[-1] += [x, *(p.grad.clone() for p in own["head"].parameters())]
            h = own["trunk"](inputs(size))
            out = own["head"]({"x": h})
            (out.square().mean() + h.square().mean()).backward()  # the caller's, as it is now
            found[-1] += [h.detach(), *gradients(own)]
    assert_same(found[1], found[0])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("way", [2, 3])
@pytest.mark.parametrize("n", [2, 3])
def test_runs(name, way, n, make_strategy):
    strategy = make_strategy(n)
    plain = Head(KINDS[name])
    model = strategy.mirror(copy.deepcopy(plain))
    for x in strategy.distribute_dataset([inputs(), inputs(6)]):
        plain(strategy.gather(x).clone()).square().mean().backward()

        def step(x):
            loss = model(x).square().mean()
            return loss.backward() if way == 3 else loss

        losses = strategy.run(step, (x,))
        if way == 2:
            strategy.reduce("mean", losses).backward()
    assert_same(gradients(model), gradients(plain))


def test_a_change_of_what_autograd_has_saved_is_an_error_as_on_one_device(make_strategy):
    plain = nn.ModuleDict({"trunk": nn.Linear(4, 4), "head": Head(KINDS["relu"])})
    model = make_strategy(2).mirror(copy.deepcopy(plain))
    for own in (plain, model):
        loss = own["head"](own["trunk"](inputs()).sigmoid()).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
