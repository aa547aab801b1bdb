"""A model with layers on two devices, and the devices of its replicas."""

import torch
from torch import nn

A, B, C, D = (torch.device("cuda", i) for i in range(4))
ROWS = [[A, B], [C, D]]


class Net(nn.Module):
    """Written for one replica, on two devices."""

    def __init__(self, bottom=A, top=B):
        super().__init__()
        self.of_top = top
        self.bottom = nn.Linear(4, 8).to(bottom)
        self.top = nn.Linear(8, 2).to(top)

    def forward(self, x):
        return self.top(self.bottom(x).relu().to(self.of_top))


def on_cpu(module):
    """Returns the same model on one device."""
    plain = Net("cpu", "cpu")
    plain.load_state_dict({k: v.cpu() for k, v in module.state_dict().items()})
    return plain
