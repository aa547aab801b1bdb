"""Activation checkpointing in training scripts."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.oracle import assert_same
from tests.training.programs import Net, Place, features, sgd


class Recomputing(Net):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=self.reentrant)
        inner = torch.utils.checkpoint.checkpoint(
            lambda x: torch.tanh(x) + self.first.bias, x, use_reentrant=self.reentrant
        )
        return self.head(inner)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_inside_forward(reentrant, same):
    def script(place):
        model = place.put(Recomputing(reentrant))
        optimizer = sgd(model)
        data = [(x.requires_grad_(), y) for x, y in features()]
        return place.train(model, optimizer, data=lambda sizes: data), model, optimizer

    same(script)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_around_the_call(reentrant, same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def loss(model, x, y):
            x = x.clone().requires_grad_()  # reentrant checkpoints need an input that does
            out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
            return F.cross_entropy(out, y)

        return place.train(model, optimizer, loss), model, optimizer

    same(script)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments_of_a_sequential(reentrant, same):
    def script(place):
        layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
        model = place.put(nn.Sequential(*layers))
        optimizer = sgd(model)

        def loss(model, x, y):
            x = x.clone().requires_grad_()
            out = torch.utils.checkpoint.checkpoint_sequential(
                model, 2, x, use_reentrant=reentrant
            )
            return F.cross_entropy(out, y)

        return place.train(model, optimizer, loss), model, optimizer

    same(script)


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

    place = Place(make_strategy(3), in_run)
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
