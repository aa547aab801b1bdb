"""Hooks of modules, parameters, activations and optimizers in training scripts."""

import threading

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import mirror
from tests.training.programs import Net, cross_entropy, sgd


def test_forward_hooks_change_inputs_and_outputs(same):
    def script(place):
        model = Net()
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        place.put(model)
        model.first.register_forward_hook(lambda module, args, out: out + args[0].sum(1, True))
        handle = model.head.register_forward_hook(lambda module, args, out: out * 3)
        model.register_forward_hook(
            lambda module, args, kwargs, out: out - kwargs.get("shift", 0.5), with_kwargs=True
        )
        optimizer = sgd(model, lr=0.02)
        losses = place.train(model, optimizer)
        handle.remove()
        return losses, place.train(model, optimizer), model, optimizer

    same(script)


def test_backward_hooks_change_gradients(same):
    def through_input(model, x, y):
        return cross_entropy(model, x.clone().requires_grad_(), y)

    def script(place):
        model = Net()
        model.head.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 2,))
        place.put(model)
        model.first.register_full_backward_pre_hook(lambda module, outs: (outs[0] * -0.5,))
        handle = model.register_full_backward_pre_hook(lambda module, outs: (outs[0] * 3,))
        optimizer = sgd(model, lr=0.02)
        losses = place.train(model, optimizer, through_input)
        handle.remove()
        return losses, place.train(model, optimizer, through_input), model, optimizer

    same(script)


def test_features_caught_by_a_hook_enter_the_loss(same_run):
    """Perceptual losses and distillation: inside run a hook sees its replica's features."""

    def script(place):
        model = place.put(Net())
        caught = threading.local()
        model.first.register_forward_hook(lambda m, args, out: setattr(caught, "value", out))
        optimizer = sgd(model)

        def loss(model, x, y):
            return cross_entropy(model, x, y) + caught.value.square().mean()

        return place.train(model, optimizer, loss), model, optimizer

    same_run(script)


def test_global_module_hooks_act(same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def double(module, args, out):
            return out * 2 if isinstance(module, nn.Linear) else None

        handle = nn.modules.module.register_module_forward_hook(double)
        try:
            return place.train(model, optimizer), model, optimizer
        finally:
            handle.remove()

    same(script)


@pytest.mark.parametrize("where", ["before mirroring", "after mirroring"])
def test_gradient_hooks_of_parameters_scale_and_mask(where, same):
    """Linear hooks: the same on every part of the gradient as on the whole."""

    def script(place):
        model = Net()
        if where == "after mirroring":
            place.put(model)
        model.head.weight.register_hook(lambda grad: grad * 2)
        handle = model.head.bias.register_hook(lambda grad: grad * torch.tensor([1.0, 0.0, 1.0]))
        if where == "before mirroring":
            place.put(model)
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        handle.remove()
        return losses, place.train(model, optimizer), model, optimizer

    same(script)


def test_gradient_hooks_of_parameters_clamp_the_whole_gradient(same):
    """A popular way to clip: what is clamped is the gradient of the batch, not of a part."""

    def script(place):
        model = place.put(Net())
        for p in model.parameters():
            p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        optimizer = sgd(model)
        return place.train(model, optimizer), model, optimizer

    same(script)


def test_a_hooked_parameter_that_some_replicas_skip_in_run_is_refused(make_strategy):
    """Its hook is to see the gradient of the whole backward pass, for which all must wait."""
    strategy = make_strategy(2)
    model = strategy.mirror(Net())
    model.head.bias.register_hook(lambda grad: grad * 2)

    def step():
        first = mirror.get_replica_context().replica_id_in_sync_group == 0
        out = model(torch.ones(2, 6))
        (out.sum() if first else model.first.weight.sum()).backward()

    with pytest.raises(mirror.DivergenceError, match="gradients"):
        strategy.run(step)


def test_a_post_accumulate_hook_says_that_it_would_see_a_part(make_strategy):
    model = make_strategy(2).mirror(Net())
    with pytest.raises(mirror.StrategyError, match="post-accumulate"):
        model.head.weight.register_post_accumulate_grad_hook(lambda p: None)


def test_a_post_accumulate_hook_made_before_mirroring_is_not_lost(make_strategy):
    """An optimizer in backward: it would see a part of the gradient, so mirroring says no."""
    model = Net()
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(mirror.StrategyError, match="post-accumulate"):
        make_strategy(2).mirror(model)


def test_gradient_hooks_of_activations(same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def loss(model, x, y):
            hidden = torch.tanh(model.first(x))
            hidden.register_hook(lambda grad: grad * 0.5)
            return F.cross_entropy(model.head(hidden), y)

        return place.train(model, optimizer, loss), model, optimizer

    same(script)


def test_optimizer_hooks_see_one_step(same_loop):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        place.train(model, optimizer)
        return seen, model, optimizer

    same_loop(script)
