"""What the tests of this folder share."""

import collections
import dataclasses

import torch
from torch import nn

from tests.toy_models import replica_id

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Box:
    value: object
    note: object = "box"


def ids(strategy):
    return strategy.run(lambda: torch.tensor(float(replica_id())))


def values(strategy, result):
    return [v.item() if isinstance(v, torch.Tensor) else v for v in strategy.local_results(result)]


# Steps of a small model that take some time


def training(strategy):
    """Gives ``step(batch)``, a step in run of a small model, and one outside."""
    model = strategy.mirror(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def in_run(x):
        (part,) = strategy.distribute_dataset([x])
        strategy.run(step, args=(part,))

    return in_run, step
