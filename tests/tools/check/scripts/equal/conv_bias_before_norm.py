"""A bias before a normalisation: its gradient is rounding alone."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3),
    nn.InstanceNorm2d(8, affine=True),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(288, 3),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(15):
    x, y = torch.randn(10, 1, 8, 8), torch.randint(3, (10,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
