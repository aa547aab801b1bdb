"""Tensors of the host that a compiled step finds: GPUs have their values, copied when they change.

A copy from the host to a GPU waits for the GPU, so a step makes none while the values are equal.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.compiling import Training, compiling_gpus
from tests.gpu.graphs import graphs_on

CHANGES = {
    "in place": lambda scale: scale.mul_(0.5),
    "data": lambda scale: scale.data.fill_(0.25),
    "numpy": lambda scale: scale.numpy().fill(2.0),
    "not": lambda scale: None,
}


class Copies(TorchDispatchMode):
    """Counts the copies of single tensors."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def train(names, mode, change):
    """Returns losses and parameters, and the numbers of copies that the last steps make."""
    scale = torch.ones((), device="cpu")

    def step_of(module, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(module(x), y) * scale
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    training = Training(names, mode=mode, make_step=step_of)
    found = [training.call(8, seed) for seed in range(4)]
    nums = []
    for seed in range(4):
        if seed % 2 == 0:
            CHANGES[change](scale)
        with Copies() as copies:
            found.append(training.call(8, seed))
        nums.append(copies.num)
    found = [value.detach().cpu().clone() for value in [*found[1:], *training.model.parameters()]]
    training.close()
    return found, nums


@pytest.mark.parametrize("num", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", CHANGES)
def test_gpus_have_the_values_of_the_host(change, num):
    names = [f"cuda:{r}" for r in range(num)]
    expected, _ = train(["cpu"] * num, "trace", change)
    with compiling_gpus(num) as gpus, graphs_on(gpus):
        found, nums = train(names, "auto", change)
    torch.testing.assert_close(found, expected)
    # When it changes first: to each GPU, and to what the host compares with.
    assert nums[0] - nums[1] == (0 if change == "not" else num + 1)
    assert nums[1] == nums[3]
    assert num > 1 or nums[1] == 0  # several copy sums in the reduction
