"""Cause: batch statistics per replica; module: model.1."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3, bias=False),
    nn.BatchNorm2d(4),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(144, 3),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    loss = F.cross_entropy(model(torch.randn(12, 1, 8, 8)), torch.randint(3, (12,)))  # here
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
