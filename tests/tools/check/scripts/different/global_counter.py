"""Cause: state kept outside the model; module: model."""

import torch
import torch.nn.functional as F
from torch import nn

calls = 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(10, 4)

    def forward(self, x):
        global calls
        calls += 1
        return self.inner(x) * (1 + 0.05 * calls)  # here


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
