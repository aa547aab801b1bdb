"""Cause: a loss that is no mean over examples; module: model.0."""

import torch
import torch.nn.functional as F
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        outputs = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = chosen == index
            if rows.any():
                outputs[rows] = expert(x[rows]) * weights[rows, index, None]
        load = F.one_hot(chosen, 4).float().mean(0)
        self.balance = 4 * (load * weights.mean(0)).sum()
        return outputs


torch.manual_seed(0)
experts = Experts()
model = nn.Sequential(experts, nn.Linear(6, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(3):
    x, y = torch.randn(9, 6), torch.randint(3, (9,))
    loss = F.cross_entropy(model(x), y) + 0.1 * experts.balance  # here
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
