"""Tensors and submodules that a compiled module gets later are those that its calls use."""

import pytest
import torch
from torch import nn

import mirror
from mirror.replica.modules.module_owner import interceptor_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x):
        h = self.layers(x) * self.mask
        if hasattr(self, "scale"):
            h = h * self.scale
        for layer in self.layers[0].children():
            h = layer(h)
        return h * getattr(self.layers[-1], "factor", 1.0)


def replace_buffer(model):
    model.mask = torch.tensor([0.0, 1.0, 2.0, 3.0])


def convert_and_back(model):
    model.double()
    model.float()


def add_parameter(model):
    model.scale = nn.Parameter(torch.full((4,), 2.0))


def add_buffer(model):
    model.layers[2].register_buffer("factor", torch.full((4,), 2.0))


def add_submodule(model):
    model.layers[0].add_module("act", nn.Tanh())


def remove_submodule(model):
    del model.layers[1]


CHANGES = [
    *(replace_buffer, convert_and_back, add_parameter, add_buffer),
    *(add_submodule, remove_submodule),
]


def train(change, n, compiles):
    torch.manual_seed(0)
    found = []
    with mirror.MirroredStrategy(["cpu"] * n, verify="off") as strategy:
        model = strategy.mirror(Net())
        if compiles:
            strategy.compile(model, fallback="error")
        for i in range(7):
            if i == 3:
                change(model)
            model.zero_grad()
            model(torch.randn(6, 6)).square().sum().backward()
            found += [*[p.grad.clone() for p in model.parameters()]]
            found += [buffer.clone() for buffer in model.buffers()]
        if compiles:
            assert interceptor_of(model).compiled.num_traces <= 2
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("n", [1, 2])
def test_a_later_change_counts_from_the_next_call(change, n):
    expected, found = train(change, n, False), train(change, n, True)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("n", [1, 2])
def test_a_lazy_module_may_be_compiled_before_its_first_call(n):
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        with mirror.MirroredStrategy(["cpu"] * n) as strategy:
            with strategy.scope():
                model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(4))
            if compiles:
                strategy.compile(model, fallback="error")
            model(torch.randn(6, 6))
            for _ in range(4):
                model.zero_grad()
                model(torch.randn(6, 6)).square().sum().backward()
            found.append([*[p.grad for p in model.parameters()], *model.buffers()])
            if compiles:
                assert interceptor_of(model).compiled.num_traces == 1
    assert all(map(torch.equal, *found))
