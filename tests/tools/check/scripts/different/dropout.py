"""Cause: random numbers; module: model.1."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4))
torch.manual_seed(1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(12):
    x, y = torch.randn(24, 10), torch.randint(4, (24,))
    loss = F.cross_entropy(model(x), y)  # here
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
