"""A penalty on the gradient by the input: backward of a backward pass."""

import torch
from torch import nn

torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
for _ in range(8):
    x = torch.randn(12, 6, requires_grad=True)
    out = critic(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = out.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
