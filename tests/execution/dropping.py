"""A model with dropout, and the masks that it drew."""

import torch
from torch import nn


class Drops(nn.Module):
    """Dropout on a vector of ones: the output is the mask."""

    def __init__(self, p=0.5):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.drop(x * self.scale)


def masks(model, rows=12):
    return model(torch.ones(rows, 64)).detach()


def masks_in_run(strategy, model, rows=3):
    result = strategy.run(lambda: model(torch.ones(rows, 64)).detach())
    return torch.stack(strategy.local_results(result))


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
