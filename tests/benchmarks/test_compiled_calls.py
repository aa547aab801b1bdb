"""The number of Python calls that one more replica adds to a compiled step does not rise.

Counted are mirror's own: without inductor torch calls some for every operation, which compiled
programs do not.
"""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import mirror
from tests.benchmarks.test_calls import TIMES
from tests.profiled import profiled

PACKAGE = str(Path(mirror.__file__).parent)
FEW, MANY = 2, 6


class Scalars(nn.Module):
    """So many parameters, and few operations, which are what takes long to trace."""

    def __init__(self, count):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))

    def forward(self, x):
        return x * torch.cat(list(self.weights)).sum()


def calls_of(call):
    """Returns how many functions of the package one call calls.

    The least of several, without garbage collections: as of tests/benchmarks/test_calls.py.
    """
    count, counts = 0, []

    def count_call(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    gc.collect()
    gc.disable()
    try:
        for _ in range(TIMES):
            count = 0
            with profiled(count_call):
                call()
            counts.append(count)
    finally:
        gc.enable()
    return min(counts)


def step_calls(n, num_parameters):
    with mirror.MirroredStrategy(["cpu"] * n) as strategy:
        model = strategy.mirror(Scalars(num_parameters))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = strategy.compile(step, mode="trace")
        (batch,) = strategy.distribute_dataset([torch.ones(2 * n, 2)])
        for _ in range(4):
            compiled(batch)
        assert compiled.num_traces == 1
        return calls_of(lambda: compiled(batch))


def test_what_a_replica_and_a_parameter_add_to_a_compiled_step():
    few = step_calls(FEW, 4)
    assert (step_calls(MANY, 4) - few) / (MANY - FEW) <= 10
    assert step_calls(FEW, 12) == few


@pytest.mark.slow
def test_what_a_replica_adds_with_161_parameters():
    assert (step_calls(MANY, 161) - step_calls(FEW, 161)) / (MANY - FEW) <= 10
