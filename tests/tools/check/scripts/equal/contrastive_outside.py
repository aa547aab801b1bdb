"""CLIP's loss of joined outputs, outside of the models."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
images = nn.Linear(12, 8)
texts = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
scale = nn.Parameter(torch.tensor(2.0))
optimizer = torch.optim.Adam([*images.parameters(), *texts.parameters(), scale], lr=1e-2)
for _ in range(10):
    a = F.normalize(images(torch.randn(14, 12)), dim=1)
    b = F.normalize(texts(torch.randn(14, 6)), dim=1)
    logits = scale.exp() * a @ b.T
    targets = torch.arange(14)
    loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
