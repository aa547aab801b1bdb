"""Pairs of normalizing layers, and the number of their collectives."""

import copy

import torch
from torch import nn

import mirror
from mirror.nn import convert_sync_batchnorm

REPLICAS = [1, 2, 3, 4]
WAYS = [1, 2, 3]


def randomize(layer):
    """Gives a new batch normalisation a weight and a bias that matter."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def pair(strategy, plain):
    """Returns the mirrored, converted copy of a plain model."""
    return strategy.mirror(convert_sync_batchnorm(copy.deepcopy(plain)))


def batches(sizes, shape, dtype=torch.float32):
    """Batches with a mean far from zero, with targets."""
    return [
        (torch.randn(n, *shape, dtype=dtype) * 2 + 3, torch.randn(n, *shape, dtype=dtype))
        for n in sizes
    ]


def weighted_loss(model, batch):
    x, target = batch
    return (model(x) * target).mean()


class CountingCommunicator(mirror.comm.Communicator):
    """Sums in replica order and counts what it is asked for."""

    def __init__(self, devices):
        super().__init__(devices)
        self.inner = mirror.comm.create("host", devices)
        self.sizes = []

    @classmethod
    def unavailable_reason(cls, devices):
        return None

    def all_reduce(self, tensors, op="sum", scale=1.0):
        self.sizes.append(tensors[0].numel())
        self.inner.all_reduce(tensors, op, scale)

    def broadcast(self, tensors, root=0):
        self.inner.broadcast(tensors, root)

    def reduce_scatter(self, tensors, op="sum"):
        self.inner.reduce_scatter(tensors, op)

    def all_gather(self, tensors):
        self.inner.all_gather(tensors)
