"""Steps of a small model that take some time."""

import torch
from torch import nn


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
