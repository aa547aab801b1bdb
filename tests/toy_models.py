"""A layer of ones and its optimizer: values that a reader can check in the head."""

import gc

import torch
from torch import nn

ONES = torch.ones(4, 1)


def ones_layer(in_features=1):
    layer = nn.Linear(in_features, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def mirrored_layer(strategy, in_features=1):
    with strategy.scope():
        return ones_layer(in_features)


def sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def collect():
    # A finalizer may release objects that only the next collection finds.
    for _ in range(3):
        gc.collect()
