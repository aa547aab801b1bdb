"""Cause: takes another branch; module: model."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(10, 16)
        self.outer = nn.Linear(16, 4)

    def forward(self, x):
        h = torch.relu(self.inner(x))
        if len(h) > 16:
            h = torch.tanh(h)  # here
        return self.outer(h)


torch.manual_seed(0)
model = Net()
torch.manual_seed(1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(12):
    x, y = torch.randn(24, 10), torch.randint(4, (24,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
