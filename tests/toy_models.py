"""What most tests share: a layer of ones, its optimizer, a replica's number, a meeting of all.

A reader can check the values of the layer in the head.
"""

import gc

import torch
from torch import nn

import mirror

ONES = torch.ones(4, 1)


def ones_layer(in_features=1):
    layer = nn.Linear(in_features, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def mirrored_layer(strategy, in_features=1):
    with strategy.scope():
        return ones_layer(in_features)


class ConvertedNet(nn.Module):
    """What conversions treat differently: memory formats, flat weights, floats and an integer."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4)
        self.last, self.recurrent = nn.Linear(16, 3), nn.GRU(3, 3, batch_first=True)
        self.register_buffer("count", torch.tensor(2))

    def forward(self, x):
        y = self.last(self.norm(torch.tanh(self.first(x))).flatten(1))
        return self.recurrent(y[:, None])[0][:, 0]


def replica_id():
    """Returns the current replica's number, inside run."""
    return mirror.get_replica_context().replica_id_in_sync_group


def meet():
    """Returns the number of replicas, which all of them wait for, inside run."""
    return mirror.get_replica_context().all_reduce("sum", torch.ones(1))


def sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def collect():
    # A finalizer may release objects that only the next collection finds.
    for _ in range(3):
        gc.collect()
