"""torch.autograd.grad and double backward in training scripts."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import mirror
from tests.training.programs import SIZES, Net, adam, cross_entropy, features, sgd


def test_autograd_grad_inside_run_gives_the_replicas_own_gradient(same_run):
    def script(place):
        model = place.put(Net())

        def step(x, y):
            grads = torch.autograd.grad(cross_entropy(model, x, y), list(model.parameters()))
            replica = mirror.get_replica_context()
            total = replica.all_reduce("sum", torch.tensor(float(len(y))))
            grads = replica.all_reduce("sum", [g * (len(y) / total) for g in grads])
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p -= 0.1 * g
            assert all(p.grad is None for p in model.parameters())

        place.steps(step)
        return model

    same_run(script)


def test_autograd_grad_outside_run_gives_the_whole_gradient(same_loop):
    def script(place):
        model = place.put(Net())
        seen = []
        for x, y in features():
            x.requires_grad_()
            grads = torch.autograd.grad(
                cross_entropy(model, x, y), [x, *model.parameters()], create_graph=True
            )
            penalty = sum(g.square().sum() for g in grads)
            second = torch.autograd.grad(penalty, [x, *model.parameters()], allow_unused=True)
            seen.append((grads, second))
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads[1:], strict=True):
                    p.sub_(g, alpha=0.1)
        return seen, model

    same_loop(script)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.parametrize("create", [False, True])
def test_a_penalty_on_the_gradient_of_the_input(create, same):
    """Double backward: WGAN-GP."""

    def script(place):
        model = place.put(Net(classes=1))
        optimizer = adam(model)

        def step(x):
            optimizer.zero_grad()
            x = x.clone().requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = out.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
            loss.backward(create_graph=create)
            if create:
                for p in model.parameters():
                    p.grad = p.grad.detach()
            optimizer.step()
            return loss.detach()

        losses = [place.step(step, torch.randn(n, 6)) for n in SIZES]
        return losses, model, optimizer

    same(script)


def test_a_penalty_on_the_gradients_of_the_parameters(same_loop):
    """The gradient of the whole batch's loss, differentiated once more, in an unchanged loop."""

    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def step(x, y):
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            total = loss + 0.1 * sum(g.square().sum() for g in grads)
            total.backward()
            optimizer.step()
            return total.detach()

        losses = place.steps(step)
        return losses, model, optimizer

    same_loop(script)


def test_gradients_of_the_input_flow(same_loop):
    """An adversarial example: the input is what is trained."""

    def script(place):
        model = place.put(Net())
        model.requires_grad_(False)
        seen = []
        for x, y in features():
            x = nn.Parameter(x)
            optimizer = torch.optim.Adam([x], lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                cross_entropy(model, x, y).backward()
                optimizer.step()
            seen.append(x)
        return seen

    same_loop(script)
