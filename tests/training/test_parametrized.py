"""Parametrized and pruned layers in training scripts."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrize, prune

from tests.training.programs import Net, sgd


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


class Gain(nn.Module):
    """A parametrization that has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.gain

    def right_inverse(self, x):
        return x / self.gain


PARAMETRIZATIONS = {
    "custom": lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
    "custom with parameter": lambda m: parametrize.register_parametrization(m, "weight", Gain()),
    "orthogonal": lambda m: nn.utils.parametrizations.orthogonal(m),
    "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m),
    "spectral_norm": lambda m: nn.utils.parametrizations.spectral_norm(m),
    "old weight_norm": lambda m: nn.utils.weight_norm(m),
    "old spectral_norm": lambda m: nn.utils.spectral_norm(m),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
def test_parametrized_layers(kind, when, same):
    def script(place):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        if when == "after":
            place.put(model)
        PARAMETRIZATIONS[kind](model[0])
        if when == "before":
            place.put(model)
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        with torch.no_grad():
            model.eval()
            out = model(torch.ones(5, 6))
            model.train()
        losses += place.train(model, optimizer)
        return losses, out, model, optimizer

    same(script)


def test_a_parameter_made_of_a_mirrored_one_is_mirrored(same):
    def script(place):
        model = place.put(Net())
        model.head.weight = nn.Parameter(model.head.weight)
        model.head.bias = nn.Parameter(model.head.bias, requires_grad=False)
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        return losses, [p.requires_grad for p in model.parameters()], model, optimizer

    same(script)


def test_a_parametrization_is_removed_and_cached(same):
    def script(place):
        model = place.put(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)))
        parametrize.register_parametrization(model[0], "weight", Symmetric())
        optimizer = sgd(model)

        def loss(model, x, y):
            with parametrize.cached():
                return F.cross_entropy(model(x) + model(-x), y)

        losses = place.train(model, optimizer, loss)
        weight = model[0].weight
        parametrize.remove_parametrizations(model[0], "weight")
        optimizer = sgd(model)
        return losses, weight, place.train(model, optimizer), model, optimizer

    same(script)


def test_pruned_layers(same):
    """torch.nn.utils.prune: a mask as buffer, the weight a plain attribute set before forward."""

    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        prune.l1_unstructured(model.first, "weight", 0.5)
        optimizer = sgd(model)
        losses += place.train(model, optimizer)
        prune.remove(model.first, "weight")
        return losses, model, optimizer, (model.first.weight == 0).sum().item()

    same(script)
