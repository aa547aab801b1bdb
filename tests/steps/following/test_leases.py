"""Optimizers in a trace: their state, their options, and those that want numbers."""

import logging

import pytest
import torch

import mirror
from tests.steps.training import Beside, batches, linear, usual_step


class Counted(torch.optim.Optimizer):
    """Counts its steps in a number, as optimizers of third parties do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                p.sub_(state["mean"] / (1 - 0.9 ** state["step"]), alpha=group["lr"])


class FloatRate(torch.optim.Optimizer):
    """Takes its learning rate as a number, and makes its state anew in every step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["mean"] = p.grad.lerp(state.get("mean", p.grad), 0.9)
                p.add_(state["mean"], alpha=-group["lr"])


def slower(beside):
    for optimizer in (beside.optimizer, beside.plain_optimizer):
        optimizer.param_groups[0]["lr"] *= 0.9


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_count_that_is_a_number_is_refused_by_its_name(num_replicas):
    beside = Beside(num_replicas, make_model=linear, make_optimizer=Counted)
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    with pytest.raises(mirror.CompileError, match=r"Counted keeps 'step' .* number"):
        beside.compiled(*second)
    assert {s["step"] for s in beside.optimizer.state.values()} == {1}


def test_a_count_that_is_a_number_runs_uncompiled_on_request():
    beside = Beside(2, make_model=linear, make_optimizer=Counted, fallback="eager")
    beside.train(batches([8] * 4))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_rate_that_must_be_a_number_is_one(num_replicas):
    beside = Beside(num_replicas, make_model=linear, make_optimizer=FloatRate)
    beside.train(batches([8, 8, 7]))
    slower(beside)
    beside.train(batches([8, 8]))
    assert beside.compiled.num_traces == 2


@pytest.mark.slow
def test_a_number_that_changes_in_every_call_ends_in_uncompiled_steps(caplog):
    beside = Beside(2, make_model=linear, make_optimizer=FloatRate)
    with caplog.at_level(logging.WARNING, "mirror"):
        beside.train(batches([8] * 12), between=slower)
    assert beside.compiled.num_traces == 8
    assert "as it is from now on" in caplog.text


def test_state_that_is_not_there_yet_is_made_uncompiled():
    def thaw(beside):
        for model in (beside.model, beside.plain):
            model[0].bias.requires_grad_(True)

    def frozen():
        model = linear()
        model[0].bias.requires_grad_(False)
        return model

    beside = Beside(2, make_model=frozen)
    beside.train(batches([8] * 3))
    thaw(beside)
    beside.train(batches([8] * 4))
    assert beside.compiled.num_traces == 2


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_groups_that_ask_for_single_tensors_are_followed(num_replicas):
    def make(parameters):
        return torch.optim.RMSprop(parameters, 0.01, momentum=0.9, foreach=False)

    beside = Beside(num_replicas, make_model=linear, make_optimizer=make)
    beside.train(batches([8] * 4), between=slower)
    assert beside.compiled.num_traces == 1


def test_groups_that_are_not_all_cleared_gather_gradients():
    def some(parameters):
        return torch.optim.SGD(list(parameters)[:1], 0.1, momentum=0.9)

    Beside(2, make_model=linear, make_optimizer=some, make_step=usual_step).train(batches([8] * 4))
