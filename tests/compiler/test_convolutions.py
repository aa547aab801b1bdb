"""Compiled networks of convolutions equal one device, with collectives, in all memory formats."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.compiler.training import batches
from tests.pairs import EXHAUSTIVE, each_once

SIZES = [6, 6, 5]


def conv(num_in, num_out, norm=nn.BatchNorm2d, **options):
    """A convolution and what follows it; a norm cuts the step into more programs for g++."""
    convolution = nn.Conv2d(num_in, num_out, 3, padding=1, bias=False, **options)
    return nn.Sequential(convolution, norm(num_out), nn.ReLU())


class Residual(nn.Module):
    """The blocks of a ResNet."""

    def __init__(self):
        super().__init__()
        self.stem, self.block = conv(3, 4), nn.Sequential(conv(4, 4), conv(4, 4, nn.Identity))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = F.max_pool2d(self.stem(x), 2)
        return self.head((x + self.block(x)).mean((2, 3)))


class Depthwise(nn.Module):
    """The blocks of a MobileNet, with the squeeze and excitation of an EfficientNet."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(conv(3, 6, nn.Identity), conv(6, 6, groups=6, stride=2))
        self.squeeze, self.head = nn.Conv2d(6, 6, 1), nn.Linear(6, 3)

    def forward(self, x):
        x = self.block(x)
        x = x * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(x, 1)))
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Down, up by interpolation, and a skip connection."""

    def __init__(self):
        super().__init__()
        self.down, self.middle = conv(3, 4), conv(4, 4, nn.Identity)
        self.up = conv(8, 4, nn.Identity)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        a = self.down(x)
        b = self.middle(F.max_pool2d(a, 2))
        b = F.interpolate(b, scale_factor=2, mode="bilinear")
        return self.head(self.up(torch.cat([a, b], 1))).mean((2, 3))


def build(kind, layout):
    torch.manual_seed(1)
    model = mirror.nn.convert_sync_batchnorm(kind().double()).to(memory_format=layout)
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def step_of(model, optimizer, layout):
    def step(x, y):
        optimizer.zero_grad()
        x = x.view(-1, 3, 8, 8).double().contiguous(memory_format=layout)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.slow
@each_once(
    kind=[UNet, Residual, pytest.param(Depthwise, marks=EXHAUSTIVE)],
    num_replicas=[2, 3],
    layout=[torch.contiguous_format, torch.channels_last],
)
def test_a_compiled_network_equals_one_device(kind, num_replicas, layout):
    data = batches(SIZES, features=3 * 8 * 8, classes=3)
    plain = step_of(*build(kind, layout), layout)
    strategy = mirror.MirroredStrategy(["cpu"] * num_replicas)
    with strategy.scope():
        model, optimizer = build(kind, layout)
        compiled = strategy.compile(step_of(model, optimizer, layout), mode="inductor")
        for (x, y), batch in zip(data, strategy.distribute_dataset(data), strict=True):
            loss = strategy.reduce("mean", compiled(*batch))
            torch.testing.assert_close(loss, plain(x, y).detach(), rtol=1e-9, atol=1e-12)
    strategy.check_replicas()
