"""The first part is frozen, in eval mode, with a BatchNorm."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU())
backbone.requires_grad_(False).eval()
head = nn.Linear(20, 4)
optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
for _ in range(10):
    x, y = torch.randn(13, 10), torch.randint(4, (13,))
    with torch.no_grad():
        features = backbone(x)
    loss = F.cross_entropy(head(features), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
