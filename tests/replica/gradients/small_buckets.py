"""A chain of layers larger than a bucket, which changes during training."""

import copy

from torch import nn

from tests.oracle import assert_same

SIZE, NUM_LAYERS = 6, 5


def chain(num_layers=NUM_LAYERS, size=SIZE):
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(num_layers)))


def loss_of(model, batch):
    return model(batch).square().mean()


def pair(strategy, module=None):
    plain = chain() if module is None else module
    return plain, strategy.mirror(copy.deepcopy(plain))


def assert_same_grads(strategy, model, plain):
    for name, parameter in plain.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None:
            assert grad.is_sparse == parameter.grad.is_sparse, name
            assert_same(grad, parameter.grad, name)
    strategy.check_replicas()
