"""Cause: a forward that mixes examples; module: model."""

import torch
import torch.nn.functional as F
from torch import nn


class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 8)
        self.b = nn.Linear(6, 8)

    def forward(self, x, y):
        a, b = F.normalize(self.a(x), dim=1), F.normalize(self.b(y), dim=1)
        logits = a @ b.T / 0.1  # here
        targets = torch.arange(len(logits))
        return F.cross_entropy(logits, targets)


torch.manual_seed(0)
model = Contrastive()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(8):
    loss = model(torch.randn(16, 12), torch.randn(16, 6))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
