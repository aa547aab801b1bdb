"""Groups of parameters with rates of their own, frozen layers, accumulated gradients."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x)))


def parse():
    return {"lr": 1e-2, "accumulate": 2, "steps": 6}


def run(config):
    net = Classifier()
    for parameter in net.backbone[0].parameters():
        parameter.requires_grad = False
    print(sum(p.numel() for p in net.parameters() if p.requires_grad), "trained")
    optimizer = torch.optim.AdamW(
        [
            {"params": net.backbone.parameters(), "lr": config["lr"] / 10},
            {"params": net.head.parameters()},
        ],
        lr=config["lr"],
    )
    for step in range(config["steps"]):
        x = torch.randn(5, 6)
        y = x.sum(1).long() % 3
        loss = nn.functional.cross_entropy(net(x), y) / config["accumulate"]
        loss.backward()
        print(f"{loss.item():.9f}")
        if (step + 1) % config["accumulate"] == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    torch.manual_seed(7)
    run(parse())
