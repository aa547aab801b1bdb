"""The programs that README prints run as printed, also where there are GPUs."""

import re
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mirror
from tests.gpu.fake import FakeGpus

README = (Path(__file__).parents[2] / "README.md").read_text()


def programs(text):
    """Returns the programs that are printed in a text and in docstrings."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(program):
    """Runs a program over names that it takes for granted; returns the last loss."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(10, 4), torch.randint(3, (10,)))
    given = {
        "mirror": mirror,
        "torch": torch,
        "F": F,
        "Net": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        "loader": DataLoader(data, batch_size=4),
    }
    exec(program, given)
    loss = given["loss"]
    given["strategy"].close()
    return loss


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
@pytest.mark.parametrize("where", ["README", "docstring"])
def test_the_first_program_runs_as_printed(where, num_gpus):
    # On GPUs the labels stayed on the CPU while the outputs are on the first GPU.
    if where == "README":
        program = programs(README)[0]
    else:
        (program,) = re.findall(r"::\n\n(.*?)\n\n", mirror.MirroredStrategy.__doc__, re.DOTALL)
        program = textwrap.dedent(program)
    assert "mirror.MirroredStrategy()" in program
    with FakeGpus(num_gpus) if num_gpus else nullcontext():
        loss = run(program)
        assert str(loss.device) == ("cuda:0" if num_gpus else "cpu")
        assert loss.requires_grad


def test_the_error_is_printed_as_it_is():
    printed = re.search(r"```text\n(DivergenceError: .*?)\n```", README, re.DOTALL)[1]
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    model = strategy.mirror(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        if mirror.get_replica_context().replica_id_in_sync_group == 0:
            return
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    with strategy, pytest.raises(mirror.DivergenceError) as info:
        strategy.run(step)
    raised = re.sub(r" at \S+:\d+ in step", " at train.py:19 in step", str(info.value))
    assert f"{type(info.value).__name__}: {raised}" == printed
