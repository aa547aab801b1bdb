"""A model with one bucket per layer, and comparisons of its gradients."""

import copy

import torch
from torch import nn

from tests.oracle import assert_same, in_run

SIZE = 8  # a weight of 64 floats is 256 bytes, a bias 32: a layer is a bucket
NUM_LAYERS = 5


class Deep(nn.Module):
    """Layers of one bucket each; with ``skip``, one is left out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(NUM_LAYERS))

    def forward(self, x, skip=None, backwards=False):
        layers = [layer for i, layer in enumerate(self.layers) if i != skip]
        for layer in reversed(layers) if backwards else layers:
            x = layer(x).tanh()
        return x


def chain(num_layers=NUM_LAYERS, size=SIZE):
    """Layers without names, for programs that change them."""
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(num_layers)))


def loss_of(model, batch):
    return model(batch).square().mean()


def batches(count, size=10):
    return [torch.randn(size, SIZE) for _ in range(count)]


def pair(strategy, module=None):
    """A model, and the same mirrored."""
    plain = Deep() if module is None else module
    return plain, strategy.mirror(copy.deepcopy(plain))


def backward_in_run(strategy, model, batch, **options):
    in_run(strategy, lambda x: model(x, **options).square().mean().backward(), batch)


def assert_same_grads(strategy, model, plain, tolerance=None):
    for name, parameter in plain.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) == (parameter.grad is None), name
        assert grad is None or grad.is_sparse == parameter.grad.is_sparse, name
        assert_same(grad, parameter.grad, name, tolerance)

    def grads():
        return [parameter.grad for parameter in model.parameters()]

    first, *others = strategy.local_results(strategy.run(grads))
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a.to_dense(), b.to_dense())


def learn(strategy, model, plain):
    """One step, after which the order is known."""
    batch = torch.randn(10, SIZE)
    for m in (model, plain):
        loss_of(m, batch).backward()
        m.zero_grad()
