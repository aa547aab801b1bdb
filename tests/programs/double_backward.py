"""torch.autograd.grad, double backward, activation checkpointing, and GANs."""

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import mirror
from tests.programs.catalogue import (
    ON_HOST,
    SIZES,
    Net,
    adam,
    cross_entropy,
    features,
    program,
    sgd,
)


@program(apart=ON_HOST, ways=["run"])
def autograd_grad_inside_run_gives_the_replicas_own_gradient(place):
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


@program(ways=["loop"])
def autograd_grad_outside_run_gives_the_whole_gradient(place):
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


@program(create=[False])
@program(
    ignore="Using backward\\(\\) with create_graph",
    apart={"workers": "gradients of several workers carry no graph"},
    create=[True],
)
def a_penalty_on_the_gradient_of_the_input(place, create):
    """Double backward: WGAN-GP."""

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


@program(ways=["loop"])
def a_penalty_on_the_gradients_of_the_parameters(place):
    """The gradient of the whole batch's loss, differentiated once more, in an unchanged loop."""

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


@program(ways=["loop"])
def gradients_of_the_input_flow(place):
    """An adversarial example: the input is what is trained."""

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


class Recomputing(Net):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=self.reentrant)
        inner = torch.utils.checkpoint.checkpoint(
            lambda x: torch.tanh(x) + self.first.bias, x, use_reentrant=self.reentrant
        )
        return self.head(inner)


@program(reentrant=[False, True])
def activation_checkpointing_inside_forward(place, reentrant):
    model = place.put(Recomputing(reentrant))
    optimizer = sgd(model)
    data = [(x.requires_grad_(), y) for x, y in features()]
    return place.train(model, optimizer, data=lambda sizes: data), model, optimizer


@program(reentrant=[False, True])
def activation_checkpointing_around_the_call(place, reentrant):
    model = place.put(Net())
    optimizer = sgd(model)

    def loss(model, x, y):
        x = x.clone().requires_grad_()  # reentrant checkpoints need an input that does
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        return F.cross_entropy(out, y)

    return place.train(model, optimizer, loss), model, optimizer


@program(reentrant=[False, True])
def checkpointed_segments_of_a_sequential(place, reentrant):
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
    model = place.put(nn.Sequential(*layers))
    optimizer = sgd(model)

    def loss(model, x, y):
        x = x.clone().requires_grad_()
        out = torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=reentrant)
        return F.cross_entropy(out, y)

    return place.train(model, optimizer, loss), model, optimizer


@program(detach=[True, False])
def a_gan_with_two_models_and_two_optimizers(place, detach):
    generator = place.put(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)))
    critic = place.put(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.02, betas=(0.5, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.02, betas=(0.5, 0.9))

    def bce(logits, target):
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))

    def step(real, noise):
        fake = generator(noise)
        of_critic.zero_grad()
        judged = critic(fake.detach() if detach else fake)
        critic_loss = bce(critic(real), 1.0) + bce(judged, 0.0)
        critic_loss.backward(retain_graph=not detach)
        of_critic.step()
        # Without detach the critic's loss has filled the generator's gradients, too.
        of_generator.zero_grad()
        generator_loss = bce(critic(generator(noise)), 1.0)
        generator_loss.backward()
        of_generator.step()
        return {"critic": critic_loss.detach(), "generator": generator_loss.detach()}

    losses = [place.step(step, torch.randn(n, 6), torch.randn(n, 4)) for n in SIZES]
    return losses, generator, critic, of_generator, of_critic


@program
def a_gan_whose_critic_is_frozen_while_the_generator_learns(place):
    generator, critic = place.put(nn.Linear(4, 6)), place.put(Net(classes=1))
    optimizers = adam(generator), adam(critic)

    def critic_step(real, noise):
        with torch.no_grad():
            fake = generator(noise)
        optimizers[1].zero_grad()
        (critic(fake).mean() - critic(real).mean()).backward()
        optimizers[1].step()
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.1, 0.1)

    def generator_step(real, noise):
        optimizers[0].zero_grad()
        (-critic(generator(noise)).mean()).backward()
        optimizers[0].step()

    for n in SIZES:
        batch = torch.randn(n, 6), torch.randn(n, 4)
        critic.requires_grad_(True)
        place.step(critic_step, *batch)
        critic.requires_grad_(False)
        place.step(generator_step, *batch)
    return generator, critic, *optimizers
