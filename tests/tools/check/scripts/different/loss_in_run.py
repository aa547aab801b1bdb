"""Cause: a loss that is no mean over examples; module: ."""

import torch
import torch.nn.functional as F
from torch import nn

import mirror

torch.manual_seed(0)
model = nn.Linear(10, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
strategy = mirror.get_strategy()
batches = [(torch.randn(20, 10), torch.randn(20, 3)) for _ in range(6)]


def step(batch):
    x, y = batch
    loss = F.mse_loss(model(x), y).sqrt()
    optimizer.zero_grad()
    loss.backward()  # here
    optimizer.step()
    return loss


for batch in strategy.distribute_dataset(batches):
    strategy.run(step, args=(batch,))
