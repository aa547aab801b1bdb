"""Tensors in the memory of a parameter: a program may read one before it writes the other."""

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import CompileError
from tests.compiler.training import Beside, batches, usual_step
from tests.pairs import each_once


def tied_in_memory():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight.data = model[0].weight.data
    return model


class WithAlias(nn.Module):
    """A buffer in the memory of a parameter."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("seen", self.inner.weight.detach()[:2])

    def forward(self, x):
        return self.inner(x) + self.seen.sum()


def in_one_buffer():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    sizes = [parameter.numel() for parameter in model.parameters()]
    parts = torch.zeros(sum(sizes)).split(sizes)
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.data = part.view_as(parameter).copy_(parameter.data)
    return model


def compiled_twice(model, step, num_replicas):
    strategy = mirror.MirroredStrategy(["cpu"] * num_replicas)
    with strategy.scope():
        strategy.mirror(model)
        compiled = strategy.compile(step, mode="trace")
        for parts in strategy.distribute_dataset(batches([8, 8])):
            compiled(*parts)
    return compiled


@pytest.mark.parametrize(
    ("make_model", "num_replicas"), [(tied_in_memory, 1), (tied_in_memory, 3), (WithAlias, 1)]
)
def test_parameters_and_buffers_in_one_memory_are_refused_with_their_names(
    make_model, num_replicas
):
    model = make_model()
    step = usual_step(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(CompileError, match=r"'\S+' and '\S*weight' lie in the same memory"):
        compiled_twice(model, step, num_replicas)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_view_from_outside_is_refused_with_its_line_where_the_step_writes(num_replicas):
    model = nn.Linear(6, 3)
    flat = model.weight.data.view(-1)
    usual = usual_step(model, torch.optim.SGD(model.parameters(), 0.1))

    def step(x, y):
        return usual(x, y), flat.sum()

    with pytest.raises(CompileError, match=r"flat\.sum\(\)`: .*shape \(18,\).* same memory"):
        compiled_twice(model, step, num_replicas)


def test_a_view_from_outside_may_be_read_where_the_step_writes_nothing():
    model = nn.Linear(6, 3)
    flat = model.weight.data.view(-1)
    step = torch.no_grad()(lambda x, y: model(x).sum() + flat.sum())
    assert compiled_twice(model, step, 2).num_traces == 1


@each_once(num_replicas=[1, 2, 3])
def test_parts_of_one_buffer_that_do_not_overlap_are_trained(num_replicas):
    beside = Beside(num_replicas, in_one_buffer, lambda p: torch.optim.AdamW(p, 0.01))
    beside.train(batches([8, 8, 7, 8]))
    assert beside.compiled.num_traces == 1
