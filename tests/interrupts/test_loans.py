"""An optimizer that a replica has failed with is not waited for."""

import pytest
import torch
from torch import nn

import mirror
from mirror.replica.optimizers.param_swap import ParamGroupSwap
from tests.oracle import finishes


@pytest.mark.parametrize("which", ["before it notes that", "with it in hand"])
def test_the_others_do_not_wait_for_an_optimizer_that_one_failed_with(
    which, strategy, eager, long_drain, monkeypatch
):
    model = strategy.mirror(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hand_over, struck = ParamGroupSwap._hand_over, []

    def strike(self, *args):
        if len(struck) == 1:
            struck.append(True)
            if which == "with it in hand":
                hand_over(self, *args)
            else:
                self._alone.acquire()
            raise MemoryError("struck")
        hand_over(self, *args)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    strategy.run(step)
    monkeypatch.setattr(ParamGroupSwap, "_hand_over", strike)
    struck.append(mirror)
    _, error, _ = finishes(lambda: strategy.run(step))
    assert type(error) is MemoryError
    strategy.run(step)
    step()
    strategy.check_replicas()
