"""Gradients in a trace: hooks, and gradients from before the step."""

import pytest
import torch
from torch.nn import functional as F

from mirror import CompileError
from tests.compiler.training import Beside, batches, linear, usual_step
from tests.pairs import quick_of


@pytest.mark.parametrize("num_replicas", quick_of([1, 2], [2]))
def test_hooks_of_parameters_are_called_with_the_reduced_gradient(num_replicas):
    def hooked():
        model = linear()
        model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return model

    def another(beside):
        for model in (beside.model, beside.plain):
            model[0].bias.register_hook(lambda grad: 2 * grad)

    beside = Beside(num_replicas, make_model=hooked)
    beside.train(batches([8] * 3))
    another(beside)
    beside.train(batches([8] * 3))
    assert beside.compiled.num_traces == 2


@pytest.mark.parametrize("num_replicas", quick_of([1, 2], [2]))
def test_a_hook_is_called_once_for_each_backward_pass(num_replicas):
    def hooked():
        model = linear()
        model[0].weight.register_hook(lambda grad: grad * grad)
        return model

    def make_step(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            for scale in (1, 2):
                loss = F.cross_entropy(scale * model(x), y)
                loss.backward()
            optimizer.step()
            return loss

        return step

    Beside(num_replicas, hooked, make_step=make_step).train(batches([8] * 3))


def test_a_post_accumulate_hook_is_refused_with_the_remedy():
    def clamp(parameter):
        parameter.grad.clamp_(-0.01, 0.01)

    def hooked():
        model = linear()
        model[0].weight.register_post_accumulate_grad_hook(clamp)
        return model

    with pytest.raises(CompileError, match=r"hook of '0.weight'.*fallback='eager'"):
        Beside(1, hooked).train(batches([8] * 3))
    Beside(1, hooked, fallback="eager").train(batches([8] * 3))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_gather_over_calls(set_to_none):
    def make_step(model, optimizer):
        def step(x, y, is_last=False):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            if is_last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad(set_to_none)
            return loss

        return step

    beside = Beside(2, make_model=linear, make_step=make_step)
    data = batches([8] * 8)
    for i, (batch, own) in enumerate(
        zip(data, beside.strategy.distribute_dataset(data), strict=True)
    ):
        beside.plain_step(*batch, is_last=i % 3 == 2)
        beside.compiled(*own, is_last=i % 3 == 2)
        beside.compare()
        for mine, theirs in zip(beside.model.parameters(), beside.plain.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)


def test_gradients_that_nobody_clears_add_up():
    def make_step(model, optimizer):
        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    beside = Beside(3, make_model=linear, make_step=make_step)
    beside.train(batches([9] * 4))
    assert beside.compiled.num_traces == 1


def test_a_hook_comes_before_what_is_done_with_the_gradient():
    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            loss = usual(x, y)
            return loss + model[0].weight.grad.abs().max()

        return step

    def hooked():
        model = linear()
        model[0].weight.register_hook(torch.zeros_like)
        return model

    Beside(2, hooked, make_step=make_step).train(batches([8] * 3))
