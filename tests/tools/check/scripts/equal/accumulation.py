"""Gradients of several batches of unlike sizes are added up."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 24), nn.GELU(), nn.Linear(24, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(24):
    x, y = torch.randn(7 + step % 3, 10), torch.randint(4, (7 + step % 3,))
    loss = F.cross_entropy(model(x), y) / 4
    loss.backward()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
