"""A parameter in a plain list, which the optimizer has and the module has not."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(10, 4)
        self.scales = [nn.Parameter(torch.ones(4))]

    def forward(self, x):
        return self.inner(x) * self.scales[0]


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD([*model.parameters(), *model.scales], lr=0.1)
for _ in range(8):
    x, y = torch.randn(24, 10), torch.randint(4, (24,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
