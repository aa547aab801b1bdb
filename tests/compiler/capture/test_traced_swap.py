"""Optimizers in a trace: their state, their options, and options that must be numbers."""

import pytest
import torch

import mirror
from tests.compiler.training import Beside, batches, linear, usual_step
from tests.pairs import each_once, quick_of


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
    """Takes its learning rate as a number, and recreates its state in every step."""

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


@pytest.mark.parametrize("num_replicas", quick_of([1, 2], [2]))
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


@pytest.mark.parametrize("num_replicas", quick_of([1, 2], [2]))
def test_a_rate_that_must_be_a_number_is_an_input_too(num_replicas):
    beside = Beside(num_replicas, make_model=linear, make_optimizer=FloatRate)
    beside.train(batches([8, 8, 7]))
    slower(beside)
    beside.train(batches([8, 8]))
    assert beside.compiled.num_traces == 1


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Rprop(p, 0.01),  # its state is made of the rate's number
    ],
)
def test_state_that_is_not_there_yet_is_made_uncompiled(make_optimizer):
    def thaw(beside):
        for model in (beside.model, beside.plain):
            model[0].bias.requires_grad_(True)

    def frozen():
        model = linear()
        model[0].bias.requires_grad_(False)
        return model

    beside = Beside(2, frozen, make_optimizer)
    beside.train(batches([8] * 3))
    thaw(beside)
    beside.train(batches([8] * 4))
    assert beside.compiled.num_traces == 2


@pytest.mark.parametrize("num_replicas", quick_of([1, 2], [2]))
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


def halve(optimizer, args, kwargs):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(0.5)


def negate(optimizer, args, kwargs):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.neg_()


HOOKS = {
    "before": lambda optimizer: optimizer.register_step_pre_hook(halve),
    "after": lambda optimizer: optimizer.register_step_post_hook(halve),
}


@each_once(first=[1, 3], when=HOOKS, num_replicas=quick_of([1, 2, 3], [1, 3]))
def test_hooks_of_optimizers_change_the_gradients_themselves(num_replicas, when, first):
    """Registered before the trace, or after it; taken away; another one put in its place."""
    beside = Beside(num_replicas, make_optimizer=lambda p: torch.optim.SGD(p, 0.1, 0.9))
    optimizers = beside.plain_optimizer, beside.optimizer
    handles, calls = [], []

    def between(beside):
        theirs = dict(beside.plain.named_parameters())
        for name, parameter in beside.model.named_parameters():
            torch.testing.assert_close(parameter.grad, theirs[name].grad)
        calls.append(None)
        if len(calls) == first:
            handles.extend(map(HOOKS[when], optimizers))
        elif len(calls) == first + 2:  # as many as before
            for handle, optimizer in zip(handles, optimizers, strict=True):
                handle.remove()
                optimizer.register_step_pre_hook(negate)

    beside.train(batches([6] * 8), between)


@pytest.mark.parametrize("num_replicas", quick_of([1, 2], [2]))
def test_a_hook_of_a_module_in_the_place_of_another_is_traced(num_replicas):
    beside = Beside(num_replicas)
    handles, calls = [], []

    def between(beside):
        calls.append(None)
        factor = {2: 0.5, 4: 2.0}.get(len(calls))
        if factor is not None:
            for handle in handles:
                handle.remove()
            handles[:] = [
                model[-1].register_forward_hook(lambda module, args, out: out * factor)
                for model in (beside.plain, beside.model)
            ]

    beside.train(batches([6] * 7), between)
