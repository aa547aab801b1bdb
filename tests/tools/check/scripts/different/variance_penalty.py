"""Cause: a loss that is no mean over examples; module: model."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x, y):
        p = torch.sigmoid(self.net(x))
        return F.mse_loss(p, y) + 0.1 * p.var(0).mean()  # here


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(10):
    loss = model(torch.randn(20, 10), (torch.rand(20, 3) > 0.5).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
