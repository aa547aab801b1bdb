"""Forward returns logits and a mean loss over tokens, some of them ignored."""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.out = nn.Linear(16, 30)

    def forward(self, tokens, labels=None):
        logits = self.out(torch.tanh(self.embed(tokens)))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(10):
    tokens = torch.randint(30, (9, 8))
    labels = tokens.masked_fill(torch.rand(9, 8) < 0.4, -100)
    loss = model(tokens, labels)["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
