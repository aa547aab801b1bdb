"""Clearing and accumulating gradients, and several losses, as training scripts do."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.training.programs import Net, adam, cross_entropy, features, sgd


def _zero_with(optimizer, model, how):
    if how == "model":
        model.zero_grad()
    elif how == "one by one":
        for p in model.parameters():
            p.grad = None
    else:
        optimizer.zero_grad(set_to_none=how == "none")


@pytest.mark.parametrize("how", ["none", "zeros", "model", "one by one"])
@pytest.mark.parametrize("when", ["first", "before backward", "after step", "outside"])
def test_gradients_may_be_cleared_anywhere(when, how, same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def step(x, y):
            if when == "first":
                _zero_with(optimizer, model, how)
            loss = cross_entropy(model, x, y)
            if when == "before backward":
                _zero_with(optimizer, model, how)
            loss.backward()
            optimizer.step()
            if when == "after step":
                _zero_with(optimizer, model, how)
            return loss.detach()

        losses = []
        for batch in features():
            if when == "outside":
                _zero_with(optimizer, model, how)
            losses.append(place.step(step, *batch))
        return losses, model, optimizer, [p.grad for p in model.parameters()]

    same(script)


def test_clearing_between_backward_passes_drops_the_first(same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def step(x, y):
            cross_entropy(model, x, y).backward()
            optimizer.zero_grad()
            cross_entropy(model, -x, y).backward()
            optimizer.step()
            optimizer.zero_grad()

        place.steps(step)
        return model, optimizer, [p.grad for p in model.parameters()]

    same(script)


def test_zeroed_gradients_let_momentum_and_decay_act_as_on_one_device(same):
    """set_to_none=False leaves a zero, which steps unused parameters; None skips them."""

    def script(place):
        model = place.put(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        seen = []
        for i, (x, y) in enumerate(features()):

            def step(x, y, i=i):
                optimizer.zero_grad(set_to_none=i % 2 == 0)
                out = model(x) if i < 2 else model.first(x)[:, :3]
                F.cross_entropy(out, y).backward()
                optimizer.step()

            place.step(step, x, y)
            seen.append([p.grad is None for p in model.parameters()])
        return seen, model, optimizer

    same(script)


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_accumulate_over_micro_batches(clip, no_sync, same):
    def script(place):
        model = place.put(Net())
        optimizer = adam(model)

        def backward(x, y):
            loss = cross_entropy(model, x, y) / 3
            loss.backward()
            return loss.detach()

        def backward_and_step(x, y):
            loss = backward(x, y)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            return loss

        losses = []
        for _ in range(3):
            first, second, last = features((7, 1, 5))
            optimizer.zero_grad()
            if no_sync and place.strategy is not None:
                with place.strategy.no_sync():
                    losses += [place.step(backward, *first), place.step(backward, *second)]
            else:
                losses += [place.step(backward, *first), place.step(backward, *second)]
            losses.append(place.step(backward_and_step, *last))
        return losses, model, optimizer

    same(script)


def test_gradients_accumulate_over_forward_passes_of_one_step(same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def step(x, y):
            optimizer.zero_grad()
            for scale in (1.0, 0.5, -1.0):
                (cross_entropy(model, x * scale, y) / 3).backward()
            optimizer.step()

        place.steps(step)
        return model, optimizer

    same(script)


@pytest.mark.parametrize("look", [False, True], ids=["unseen", "seen between"])
def test_several_losses_of_one_graph(look, same):
    """backward with retain_graph, also with a look at the gradient in between."""

    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def step(x, y):
            optimizer.zero_grad()
            logits = model(x)
            first, second = F.cross_entropy(logits, y), logits.square().mean()
            first.backward(retain_graph=True)
            before = model.head.weight.grad.norm() if look else torch.zeros(())
            second.backward()
            after = model.head.weight.grad.norm() if look else torch.zeros(())
            optimizer.step()
            return {"before": before, "after": after, "loss": (first + second).detach()}

        seen = place.steps(step)
        return seen, model, optimizer

    same(script)


def test_backward_with_inputs_fills_only_their_gradients(same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def step(x, y):
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward(inputs=list(model.head.parameters()))
            optimizer.step()

        place.steps(step)
        return model, optimizer, [p.grad is None for p in model.parameters()]

    same(script)


def test_inputs_of_backward_are_found_where_torch_does_not_ask_them(same):
    """Older versions of torch call no override of what is passed as ``inputs`` alone."""

    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def step(x, y):
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            inputs = list(model.head.parameters())
            with torch._C.DisableTorchFunctionSubclass():
                loss.backward(inputs=inputs)
            optimizer.step()

        place.steps(step)
        return model, optimizer, [p.grad is None for p in model.parameters()]

    same(script)


def test_changed_gradients_are_what_the_optimizer_sees(same):
    """Gradients scaled, noised and replaced by hand, centred as some scripts do."""

    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def step(x, y):
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            for p in model.parameters():
                if p.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))
                    p.grad = p.grad * 2
                else:
                    p.grad.data.mul_(0.5)
            optimizer.step()

        place.steps(step)
        return model, optimizer

    same(script)
