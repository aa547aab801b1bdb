"""Batches smaller than the replicas, and last ones that do not divide."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 2))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
for size in (1, 4, 3, 1, 2, 5, 7, 1):
    loss = F.mse_loss(model(torch.randn(size, 5)), torch.ones(size, 2), reduction="sum")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
