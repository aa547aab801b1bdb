"""Two models, two optimizers, one on the other's detached output."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
for _ in range(10):
    real = torch.randn(20, 8) + 2
    fake = generator(torch.randn(20, 4))
    ones, zeros = torch.ones(20, 1), torch.zeros(20, 1)
    loss = F.binary_cross_entropy_with_logits(critic(real), ones)
    loss = loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()
    loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
    of_generator.zero_grad()
    loss.backward()
    of_generator.step()
