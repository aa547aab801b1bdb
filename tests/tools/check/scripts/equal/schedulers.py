"""Two schedulers in a chain, and warm-up."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 24), nn.SiLU(), nn.Linear(24, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, nesterov=True, momentum=0.9)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [4])
for _ in range(14):
    x, y = torch.randn(17, 10), torch.randint(4, (17,))
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
