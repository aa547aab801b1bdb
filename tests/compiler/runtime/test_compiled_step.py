"""Compiled steps equal the plain loop, for any batches and any changes between them."""

import pytest
import torch
from torch import nn

import mirror
from tests.compiler.training import Beside, batches, usual_step
from tests.pairs import EXHAUSTIVE, quick_of


@pytest.mark.parametrize("num_replicas", quick_of([1, 2, 3], [3]))
def test_batches_of_any_size_equal_the_plain_loop_with_one_trace(num_replicas):
    beside = Beside(num_replicas)
    beside.train(batches([9, 9, 8, 7, 5, 1, 9, 2]))
    assert beside.compiled.num_traces == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, 0.01),
        # test_grad_between_steps.py trains with these.
        pytest.param(lambda p: torch.optim.AdamW(p, 0.01), marks=EXHAUSTIVE),
        pytest.param(lambda p: torch.optim.Adagrad(p, 0.01), marks=EXHAUSTIVE),
    ],
)
def test_optimizers_equal_the_plain_loop(make):
    Beside(2, make_optimizer=make).train(batches([8] * 4))


def test_a_rate_that_changes_needs_no_trace():
    beside = Beside(2)

    def slower(beside):
        for optimizer in (beside.optimizer, beside.plain_optimizer):
            optimizer.param_groups[0]["lr"] *= 0.7

    beside.train(batches([8] * 5), between=slower)
    assert beside.compiled.num_traces == 1


class Scaled(nn.Module):
    """Has a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.scale = torch.ones(())

    def forward(self, x):
        return self.linear(x) * self.scale


@pytest.mark.parametrize("num_replicas", quick_of([1, 2], [2]))
def test_a_tensor_of_a_module_may_be_changed_and_replaced(num_replicas):
    beside = Beside(num_replicas, Scaled)
    beside.train(batches([8, 8]))
    for model in (beside.model, beside.plain):
        model.scale.fill_(0.5)
    beside.train(batches([8, 8]))
    for model in (beside.model, beside.plain):
        model.scale = torch.tensor(2.0)
    beside.train(batches([8, 8]))


def test_steps_that_are_not_compiled_may_come_between():
    beside = Beside(2)
    data = batches([8] * 6)
    loader = list(beside.strategy.distribute_dataset(data))
    for i, (batch, own) in enumerate(zip(data, loader, strict=True)):
        beside.plain_step(*batch)
        if i % 3 == 2:
            beside.strategy.run(beside.step, own)
        else:
            beside.compiled(*own)
        beside.compare()
    assert beside.compiled.num_traces == 1


def test_gradients_are_those_of_one_device_afterwards():
    beside = Beside(2)
    beside.train(batches([8] * 3))
    for mine, theirs in zip(beside.model.parameters(), beside.plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_a_value_that_is_asked_for_is_an_error_with_its_line():
    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            loss = usual(x, y)
            return loss * loss.item()

        return step

    beside = Beside(2, make_step=make_step)
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    with pytest.raises(mirror.CompileError, match=r"test_compiled_step.py:\d+ `return loss"):
        beside.compiled(*second)


def test_what_cannot_be_traced_runs_uncompiled_on_request():
    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            loss = usual(x, y)
            return loss if loss > 0 else -loss

        return step

    Beside(2, make_step=make_step, fallback="eager").train(batches([8, 8, 5]))


@pytest.mark.slow
def test_inductors_programs_equal_the_plain_loop():
    def model():
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))

    beside = Beside(2, make_model=model, mode="inductor")
    beside.train(batches([8, 8, 7, 3, 8]))
    assert beside.compiled.num_traces == 1


def test_two_compiled_steps_of_one_model_leave_all_gradients():
    beside = Beside(2)
    first, second = beside.strategy.compile(beside.step, mode="trace"), beside.compiled
    data = batches([8] * 4)
    for i, (batch, own) in enumerate(
        zip(data * 2, [*beside.strategy.distribute_dataset(data)] * 2, strict=True)
    ):
        beside.plain_step(*batch)
        (first if i % 2 else second)(*own)
    beside.compare()


def test_a_step_that_is_interrupted_leaves_equal_replicas(monkeypatch):
    beside = Beside(2)
    data = batches([8] * 5)
    loader = [*beside.strategy.distribute_dataset(data)]
    for own in loader[:3]:
        beside.compiled(*own)
    param_sync = beside.compiled._param_sync

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(param_sync, "record_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        beside.compiled(*loader[3])
    monkeypatch.undo()
    beside.strategy.check_replicas()
    beside.strategy.run(beside.step, loader[4])
    beside.strategy.check_replicas()
