"""Models of the workers' programs, and the values that are compared."""

import torch
from torch import nn

import mirror


def strategy_of(num_local=1, **options):
    """Returns the strategy of a worker with so many simulated devices."""
    return mirror.MultiWorkerMirroredStrategy(["cpu"] * num_local, **options)


def rank():
    """Returns this worker's."""
    return torch.distributed.get_rank()


class Net(nn.Module):
    """Two layers with a BatchNorm between."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def values_of(model):
    """Returns the state of a model, as lists."""
    return {name: value.tolist() for name, value in model.state_dict().items()}
