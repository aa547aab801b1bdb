"""What is gone is gone: strategies, runs, results, copies, and optimizers whose step raised."""

import gc
import sys
import traceback
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mirror
from mirror.execution.run_state import Run
from tests.profiled import profiled


class Result:
    """What a weak reference can tell of."""


def collected(reference):
    gc.collect()
    gc.collect()
    return reference() is None


@pytest.mark.parametrize(("n", "active"), [(1, 1), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_a_strategy_and_what_its_last_run_returned_go_with_their_owner(n, active, schedule):
    def use():
        strategy = mirror.MirroredStrategy(["cpu"] * n, schedule=schedule)
        model = strategy.mirror(nn.Linear(2, 2))
        model(torch.ones(active, 2)).sum().backward()
        result = Result()
        strategy.run(lambda: result)
        model(torch.ones(active, 2))
        return weakref.ref(strategy), weakref.ref(result), weakref.ref(model)

    assert all(map(collected, use()))


def test_a_strategy_keeps_nothing_of_a_run_of_one_replica():
    with mirror.MirroredStrategy(["cpu"]) as strategy:
        references = []

        def fn():
            result = Result()
            references.append(weakref.ref(result))
            return result

        strategy.run(fn)
        assert collected(references[0])


def test_backward_passes_go_on_when_the_parameters_are_gone():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    model = strategy.mirror(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    loss = model(torch.ones(4, 3)).sum()
    del model
    gc.collect()
    for _ in range(6):
        loss.backward(retain_graph=True)
        strategy.run(lambda: None)


@pytest.mark.slow
def test_gradients_arrive_at_parameters_made_where_others_were():
    """A copy may lie where one was that has gone: nothing is remembered by its address."""
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    for _ in range(12):
        model = strategy.mirror(nn.Linear(3, 2))
        copies = model.weight._mirrored.copies
        del model
        gc.collect()
        for copy in copies:
            copy.requires_grad_(False)
            copy.requires_grad_(True)
        del copies, copy
        gc.collect()
        for fresh in [strategy.mirror(nn.Linear(3, 2)) for _ in range(5)]:
            fresh(torch.ones(4, 3)).sum().backward()
            torch.testing.assert_close(fresh.weight.grad, torch.full((2, 3), 4.0))


class Remembers(nn.Module):
    """Sets an attribute in every forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        self.seen = x.detach().sum()
        return self.inner(x)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Remembers()

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def test_recomputations_leave_no_runs():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    model = strategy.mirror(Checkpointed())

    def num_runs():
        gc.collect()
        return sum(type(one) is Run for one in gc.get_objects())

    def train(steps):
        for _ in range(steps):
            model(torch.ones(4, 2, requires_grad=True)).sum().backward()

    train(3)
    before = num_runs()
    train(10)
    assert num_runs() <= before


def test_an_optimizer_that_raised_and_is_gone_keeps_no_other_from_training():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    model = strategy.mirror(nn.Linear(2, 1))

    def fail(frame, event, argument):
        """Raises in the step that was called, which has nothing to do: one was made for all."""
        is_step = event == "call" and frame.f_code.co_name == "step"
        if is_step and frame.f_locals["self"].param_groups == []:
            sys.setprofile(None)
            raise RuntimeError("within the step")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="within") as caught, profiled(fail):
        optimizer.step()
    traceback.clear_frames(caught.tb)  # as unittest's assertRaises does
    del optimizer, caught
    gc.collect()
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        before = model.weight.detach().clone()
        fresh.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        fresh.step()
        assert not torch.equal(before, model.weight.detach())
