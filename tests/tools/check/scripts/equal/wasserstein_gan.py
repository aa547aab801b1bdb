"""The gradient of the critic's last bias is nothing but rounding."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
of_generator = torch.optim.RMSprop(generator.parameters(), lr=5e-3)
of_critic = torch.optim.Adam(critic.parameters(), lr=5e-3)
for step in range(12):
    loss = (
        critic(generator(torch.randn(21, 4)).detach()).mean() - critic(torch.randn(21, 8)).mean()
    )
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()
    with torch.no_grad():
        for p in critic.parameters():
            p.clamp_(-0.05, 0.05)
    if step % 3 == 2:
        loss = -critic(generator(torch.randn(21, 4))).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
