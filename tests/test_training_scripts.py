"""What real training scripts do beside forward, backward and step: as on one device.

Every script is one function. It runs on one device, then on replicas, in an unchanged loop and
with its steps inside run, and what it returns must agree.
"""

import copy
import io
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.optim import lr_scheduler, swa_utils

import mirror
from tests.oracle import assert_same, finishes

# For three replicas: 3 + 3 + 2, 3 + 2 + 2, 2 + 2 + 1, two with one example, one with one.
SIZES = (8, 7, 5, 2, 1)


class Place:
    """Where a script runs: on one device, or on replicas, which the script need not know.

    Attributes:
        strategy: ``None`` on one device.
        in_run: whether ``step`` runs its function once per replica.
    """

    def __init__(self, strategy=None, in_run=False):
        self.strategy = strategy
        self.in_run = in_run

    def put(self, module):
        return module if self.strategy is None else self.strategy.mirror(module)

    def step(self, fn, *batch):
        """One step on a batch; returns the mean of what ``fn`` returns."""
        if self.in_run:
            (parts,) = self.strategy.distribute_dataset([batch])
            result = self.strategy.run(fn, args=parts)
            result = None if result is None else self.strategy.reduce("mean", result)
        else:
            result = fn(*batch)
        if self.strategy is not None and not torch.is_inference_mode_enabled():
            self.strategy.check_replicas()
        return result

    def train(self, model, optimizer, loss_fn=None, *, sizes=SIZES, data=None, after=None):
        """Plain steps over fresh batches; returns the losses."""
        loss_fn = loss_fn or cross_entropy

        def step(*batch):
            optimizer.zero_grad()
            loss = loss_fn(model, *batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = []
        for batch in (data or features)(sizes):
            losses.append(self.step(step, *batch))
            if after is not None:
                after()
        return losses


PLACES = {
    f"{name}-x{n}": (n, in_run)
    for name, in_run in (("loop", False), ("run", True))
    for n in (2, 3)
}


@pytest.fixture(params=PLACES.values(), ids=list(PLACES))
def same(request, make_strategy):
    """Gives ``same(script)``: runs a script on one device and on replicas and compares."""
    n, in_run = request.param

    def check(script, tolerance=None):
        return _compare(script, Place(make_strategy(n), in_run), tolerance)

    return check


@pytest.fixture(params=[2, 3], ids=["loop-x2", "loop-x3"])
def same_loop(request, make_strategy):
    """The same for what belongs outside run only."""

    def check(script, tolerance=None):
        return _compare(script, Place(make_strategy(request.param)), tolerance)

    return check


@pytest.fixture(params=[2, 3], ids=["run-x2", "run-x3"])
def same_run(request, make_strategy):
    """The same for what belongs inside run only."""

    def check(script, tolerance=None):
        return _compare(script, Place(make_strategy(request.param), True), tolerance)

    return check


def _compare(script, place, tolerance):
    torch.manual_seed(7)
    expected = _seen(script(Place()))
    torch.manual_seed(7)
    actual = _seen(script(place))
    assert_same(actual, expected, "script", tolerance)


def _seen(value):
    """What a script returns, with modules and optimizers as copies of their state."""
    if isinstance(value, nn.Module | torch.optim.Optimizer | lr_scheduler.LRScheduler):
        return _seen(value.state_dict())
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _seen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_seen(item) for item in value]
    return value


class Net(nn.Module):
    """Two layers with names to change them by."""

    def __init__(self, hidden=8, classes=3):
        super().__init__()
        self.first = nn.Linear(6, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))


def features(sizes=SIZES):
    return [(torch.randn(size, 6), torch.randint(3, (size,))) for size in sizes]


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def sgd(model, lr=0.2):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adam(model, lr=0.02):
    return torch.optim.AdamW(model.parameters(), lr=lr)


# Gradients: clearing, accumulating, several losses


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

        for batch in features():
            place.step(step, *batch)
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

        for batch in features():
            place.step(step, *batch)
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

        seen = [place.step(step, *batch) for batch in features()]
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

        for batch in features():
            place.step(step, *batch)
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

        for batch in features():
            place.step(step, *batch)
        return model, optimizer

    same(script)


# GANs


@pytest.mark.parametrize("detach", [True, False], ids=["detached", "through both"])
def test_a_gan_with_two_models_and_two_optimizers(detach, same):
    def script(place):
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

    same(script)


def test_a_gan_whose_critic_is_frozen_while_the_generator_learns(same):
    def script(place):
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

    same(script)


# torch.autograd.grad and double backward


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

        for batch in features():
            place.step(step, *batch)
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

        losses = [place.step(step, *batch) for batch in features()]
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


# Activation checkpointing


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_inside_forward(reentrant, same):
    def script(place):
        model = place.put(Recomputing(reentrant))
        optimizer = sgd(model)
        data = [(x.requires_grad_(), y) for x, y in features()]
        return place.train(model, optimizer, data=lambda sizes: data), model, optimizer

    same(script)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_around_the_call(reentrant, same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def loss(model, x, y):
            x = x.clone().requires_grad_()  # reentrant checkpoints need an input that does
            out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
            return F.cross_entropy(out, y)

        return place.train(model, optimizer, loss), model, optimizer

    same(script)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments_of_a_sequential(reentrant, same):
    def script(place):
        layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
        model = place.put(nn.Sequential(*layers))
        optimizer = sgd(model)

        def loss(model, x, y):
            x = x.clone().requires_grad_()
            out = torch.utils.checkpoint.checkpoint_sequential(
                model, 2, x, use_reentrant=reentrant
            )
            return F.cross_entropy(out, y)

        return place.train(model, optimizer, loss), model, optimizer

    same(script)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("in_run", [False, True])
def test_recomputed_dropout_masks_are_those_of_forward(in_run, reentrant, make_strategy):
    """out = w * kept, so the gradient of its sum by w is the sum of out over w."""

    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Dropout(0.5))
            self.inner[0].weight.data = 2 * torch.eye(50)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=reentrant)

    place = Place(make_strategy(3), in_run)
    model = place.put(Drops())
    weight = model.inner[0].weight

    def step(x):
        out = model(x.requires_grad_())
        out.sum().backward()
        return out.detach().sum(0)

    x = torch.rand(20, 50)
    if in_run:
        (parts,) = place.strategy.distribute_dataset([(x,)])
        sums = place.strategy.run(step, args=parts).values
        shares = (7, 7, 6)
        total = sum(s * (n / 20) for s, n in zip(sums, shares, strict=True))
    else:
        total = step(x)
    assert_same(weight.grad.diagonal(), total / 2)


# Hooks


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


# Frozen layers, parameters added later, surgery


@pytest.mark.parametrize("how", ["module", "parameter"])
def test_layers_are_frozen_and_thawed_in_mid_training(how, same):
    def freeze(model, frozen):
        if how == "module":
            model.first.requires_grad_(not frozen)
        else:
            for p in model.first.parameters():
                p.requires_grad = not frozen

    def script(place):
        model = Net()
        freeze(model, True)
        place.put(model)
        optimizer = sgd(model)
        losses, flags = [], []
        for frozen in (True, False, True, False):
            freeze(model, frozen)
            losses += place.train(model, optimizer, sizes=(5, 2))
            flags.append([(p.requires_grad, p.grad is None) for p in model.parameters()])
        return losses, flags, model, optimizer

    same(script)


def test_a_frozen_layer_keeps_its_gradient_until_it_is_cleared(same):
    """Frozen after backward: the stale gradient still steps, as on one device."""

    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def backward(x, y):
            cross_entropy(model, x, y).backward()

        batches = features()
        place.step(backward, *batches[0])
        model.first.requires_grad_(False)
        place.step(backward, *batches[1])
        optimizer.step()
        grads = [p.grad for p in model.parameters()]
        return model, optimizer, grads

    same(script)


class LoRA(nn.Module):
    """A frozen linear layer with a trained low-rank change."""

    def __init__(self, linear, rank=2):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + x @ self.down.T @ self.up.T


def test_parameters_added_later_train(same):
    def script(place):
        model = place.put(Net())
        optimizer = adam(model)
        losses = place.train(model, optimizer)
        model.first = LoRA(model.first)
        optimizer.add_param_group({"params": [model.first.down, model.first.up], "lr": 0.05})
        losses += place.train(model, optimizer)
        model.scale = nn.Parameter(torch.ones(3))
        model.register_parameter("shift", nn.Parameter(torch.zeros(3)))
        optimizer.add_param_group({"params": [model.scale, model.shift]})

        def scaled(model, x, y):
            return F.cross_entropy(model(x) * model.scale + model.shift, y)

        losses += place.train(model, optimizer, scaled)
        with torch.no_grad():  # merged back into an ordinary layer
            lora = model.first
            lora.linear.weight += lora.up @ lora.down
            model.first = lora.linear
        return losses, place.train(model, optimizer), model, optimizer

    same(script)


def test_a_head_is_replaced(same):
    def script(place):
        model = place.put(Net(classes=5))
        losses = place.train(model, sgd(model))
        model.head = nn.Linear(8, 3)
        optimizer = sgd(model)
        losses += place.train(model, optimizer)
        del model.head.bias
        model.head.register_parameter("bias", None)
        optimizer = sgd(model)
        return losses, place.train(model, optimizer), model, optimizer

    same(script)


def test_layers_are_inserted_and_removed(same):
    def script(place):
        model = place.put(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)))
        losses = place.train(model, sgd(model))
        model.insert(1, nn.Linear(6, 6))
        losses += place.train(model, sgd(model))
        del model[0]
        model[0] = nn.Sequential(model[0], nn.LayerNorm(6))
        model.append(nn.Linear(3, 3))
        optimizer = sgd(model)
        losses += place.train(model, optimizer)
        short = model[:3]  # a new Sequential over the same layers
        return losses, place.train(short, sgd(short)), model, optimizer

    same(script)


def test_a_parameter_is_replaced_by_a_new_one(same):
    def script(place):
        model = place.put(Net())
        losses = place.train(model, sgd(model))
        old = model.head.weight
        model.head.weight = nn.Parameter(old.detach().clone() * 0.5)
        optimizer = sgd(model)
        losses += place.train(model, optimizer)
        return losses, model, optimizer, old

    same(script)


def test_weights_are_tied_and_untied_after_mirroring(same):
    def script(place):
        model = place.put(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
        model[2].weight = model[0].weight
        losses = place.train(model, sgd(model))
        assert model[2].weight is model[0].weight
        model[2].weight = nn.Parameter(model[0].weight.detach().clone())
        optimizer = sgd(model)
        return losses, place.train(model, optimizer), model, optimizer

    same(script)


def test_layers_are_initialised_anew_after_mirroring(same):
    def script(place):
        model = place.put(Net())
        model.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)
        nn.init.orthogonal_(model.first.weight)
        nn.init.constant_(model.head.bias, 0.25)
        optimizer = sgd(model)
        return place.train(model, optimizer), model, optimizer

    same(script)


# Parametrized layers


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


class Gain(nn.Module):
    """A parametrization that has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.gain

    def right_inverse(self, x):
        return x / self.gain


PARAMETRIZATIONS = {
    "custom": lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
    "custom with parameter": lambda m: parametrize.register_parametrization(m, "weight", Gain()),
    "orthogonal": lambda m: nn.utils.parametrizations.orthogonal(m),
    "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m),
    "spectral_norm": lambda m: nn.utils.parametrizations.spectral_norm(m),
    "old weight_norm": lambda m: nn.utils.weight_norm(m),
    "old spectral_norm": lambda m: nn.utils.spectral_norm(m),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
def test_parametrized_layers(kind, when, same):
    def script(place):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        if when == "after":
            place.put(model)
        PARAMETRIZATIONS[kind](model[0])
        if when == "before":
            place.put(model)
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        with torch.no_grad():
            model.eval()
            out = model(torch.ones(5, 6))
            model.train()
        losses += place.train(model, optimizer)
        return losses, out, model, optimizer

    same(script)


def test_a_parameter_made_of_a_mirrored_one_is_mirrored(same):
    def script(place):
        model = place.put(Net())
        model.head.weight = nn.Parameter(model.head.weight)
        model.head.bias = nn.Parameter(model.head.bias, requires_grad=False)
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        return losses, [p.requires_grad for p in model.parameters()], model, optimizer

    same(script)


def test_a_parametrization_is_removed_and_cached(same):
    def script(place):
        model = place.put(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)))
        parametrize.register_parametrization(model[0], "weight", Symmetric())
        optimizer = sgd(model)

        def loss(model, x, y):
            with parametrize.cached():
                return F.cross_entropy(model(x) + model(-x), y)

        losses = place.train(model, optimizer, loss)
        weight = model[0].weight
        parametrize.remove_parametrizations(model[0], "weight")
        optimizer = sgd(model)
        return losses, weight, place.train(model, optimizer), model, optimizer

    same(script)


def test_pruned_layers(same):
    """torch.nn.utils.prune: a mask as buffer, the weight a plain attribute set before forward."""

    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        prune.l1_unstructured(model.first, "weight", 0.5)
        optimizer = sgd(model)
        losses += place.train(model, optimizer)
        prune.remove(model.first, "weight")
        return losses, model, optimizer, (model.first.weight == 0).sum().item()

    same(script)


# Kinds of parameters and containers


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", ["SparseAdam", "SGD", "Adagrad"])
def test_sparse_embeddings(kind, same):
    def script(place):
        model = nn.Sequential(nn.EmbeddingBag(11, 6, sparse=True, mode="mean"), nn.Linear(6, 3))
        place.put(model)
        sparse = getattr(torch.optim, kind)(model[0].parameters(), lr=0.1)
        dense = sgd(model[1])

        def step(tokens, y):
            sparse.zero_grad()
            dense.zero_grad()
            loss = cross_entropy(model, tokens, y)
            loss.backward()
            is_sparse = torch.tensor(float(model[0].weight.grad.is_sparse))
            sparse.step()
            dense.step()
            return {"loss": loss.detach(), "is sparse": is_sparse}

        batches = [(torch.randint(11, (n, 4)), torch.randint(3, (n,))) for n in SIZES]
        return [place.step(step, *b) for b in batches], model, sparse, dense

    same(script)


@pytest.mark.parametrize("make", [sgd, lambda m: torch.optim.Adam(m.parameters(), lr=0.02)])
def test_complex_parameters(make, same):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))

    def script(place):
        model = place.put(Spectral())
        optimizer = make(model)
        return place.train(model, optimizer), model, optimizer

    same(script, tolerance=1e-5)


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.gains = nn.ParameterList([torch.ones(6), torch.full((6,), 0.5)])
        self.shifts = nn.ParameterDict({"a": torch.zeros(6), "b": nn.Parameter(torch.ones(6))})
        self.heads = nn.ModuleDict({"small": nn.Linear(6, 3), "large": nn.Linear(6, 3)})
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x, name="small"):
        for gain, block in zip(self.gains, self.blocks, strict=False):
            x = torch.tanh(block(x * gain))
        for key, shift in self.shifts.items():
            x = x + shift if key == "a" else x * shift
        return self.heads[name](x + self.gains[-1])


def test_lists_and_dicts_of_parameters_and_modules(same):
    def script(place):
        model = place.put(Containers())
        optimizer = sgd(model)
        losses = place.train(model, optimizer)

        def other(model, x, y):
            return F.cross_entropy(model(x, name="large"), y)

        losses += place.train(model, optimizer, other)
        model.gains.append(nn.Parameter(torch.full((6,), 0.1)))
        model.shifts["c"] = nn.Parameter(torch.full((6,), 0.9))
        model.heads["large"] = nn.Linear(6, 3)
        model.gains[0] = nn.Parameter(torch.full((6,), 0.7))
        optimizer = sgd(model)
        return losses, place.train(model, optimizer, other), model, optimizer

    same(script)


class Reads(nn.Module):
    """Packs its padded input inside forward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.rnn = nn.GRU(6, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, tokens, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        output, hidden = self.rnn(packed)
        output, _ = nn.utils.rnn.pad_packed_sequence(
            output, batch_first=True, total_length=tokens.shape[1]
        )
        return self.head(output.sum(1) + hidden.transpose(0, 1).flatten(1))


def test_packed_sequences_inside_forward(same):
    def script(place):
        model = place.put(Reads())
        optimizer = adam(model)

        def data(sizes):
            for n in sizes:
                lengths = torch.randint(1, 5, (n,))
                tokens = torch.randint(1, 11, (n, 4)) * (torch.arange(4) < lengths[:, None])
                yield tokens, lengths, torch.randint(3, (n,))

        def loss(model, tokens, lengths, y):
            return F.cross_entropy(model(tokens, lengths), y)

        return place.train(model, optimizer, loss, data=data), model, optimizer

    same(script)


# Plain tensors as attributes of modules


def test_a_constant_tensor_kept_as_attribute(same):
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.mean = torch.arange(6.0)
            self.stats = [torch.full((6,), 2.0)]

        def forward(self, x):
            return super().forward((x - self.mean) / self.stats[0])

    def script(place):
        model = place.put(Scaled())
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        model.mean = torch.ones(6)
        model.stats[0].fill_(3.0)
        return losses, place.train(model, optimizer), model, optimizer

    same(script)


class Counts(Net):
    """Counts its calls, as schedules inside layers do, in a tensor that is no buffer."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.calls = torch.zeros(())

    def forward(self, x):
        if self.training:
            if self.in_place:
                self.calls += 1
            else:
                self.calls = self.calls + 1
        return super().forward(x) * (1 + 0.1 * self.calls)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_tensor_attribute_updated_in_forward_is_each_replicas_own(in_place, same):
    def script(place):
        model = place.put(Counts(in_place))
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        return losses, float(model.calls), model, optimizer

    same(script)


def test_a_buffer_updated_in_forward(same):
    class CountsInBuffer(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("scale", torch.ones(()), persistent=False)

        def forward(self, x):
            if self.training:
                self.calls += 1
                self.scale = self.scale * 1.1
            return super().forward(x) * self.scale + self.calls

    def script(place):
        model = place.put(CountsInBuffer())
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        with torch.no_grad():
            out = model.eval()(torch.ones(5, 6))
        return losses, out, model.scale, model, optimizer

    same(script)


def test_a_parameter_outside_any_module_learns_in_an_unchanged_loop(same_loop):
    def script(place):
        model = place.put(Net())
        temperature = nn.Parameter(torch.tensor(1.5))
        optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1, momentum=0.9)

        def loss(model, x, y):
            return F.cross_entropy(model(x) * temperature, y)

        return place.train(model, optimizer, loss), temperature, model

    same_loop(script)


def test_a_parameter_outside_any_module_is_refused_inside_run(make_strategy):
    """No replica has a copy of its own: stepping it would use a part of the gradient."""
    place = Place(make_strategy(2), True)
    model = place.put(Net())
    temperature = nn.Parameter(torch.tensor(1.5))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)

    def loss(model, x, y):
        return F.cross_entropy(model(x) * temperature, y)

    with pytest.raises(mirror.StrategyError, match="mirror"):
        place.train(model, optimizer, loss)


def test_reading_grad_of_buffers_and_parameters(same):
    """As gradient loggers and torch's own tracing do."""

    def script(place):
        model = place.put(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
        return [b.grad for b in model.buffers()], [b.requires_grad for b in model.buffers()]

    same(script)


# Clipping


CLIPS = {
    "norm": lambda ps: nn.utils.clip_grad_norm_(ps, 0.05),
    "norm, foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 0.05, foreach=True),
    "infinity norm": lambda ps: nn.utils.clip_grad_norm_(ps, 0.05, norm_type=float("inf")),
    "value": lambda ps: nn.utils.clip_grad_value_(ps, 0.01),
    "value, foreach": lambda ps: nn.utils.clip_grad_value_(ps, 0.01, foreach=True),
    "total norm": lambda ps: nn.utils.clip_grads_with_norm_(
        ps, 0.05, nn.utils.get_total_norm([p.grad for p in ps if p.grad is not None])
    ),
    "by hand": lambda ps: [p.grad.mul_(0.05 / torch.stack([q.grad.norm() for q in ps]).norm())
                           for p in ps[:1]],
}  # fmt: skip


@pytest.mark.parametrize("kind", CLIPS)
def test_clipping_sees_the_whole_gradient(kind, same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def step(x, y):
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            CLIPS[kind](list(model.parameters()))
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            optimizer.step()
            return norm

        return [place.step(step, *batch) for batch in features()], model, optimizer

    same(script)


# Averages of the weights


@pytest.mark.parametrize("scoped", [False, True])
@pytest.mark.parametrize("kind", ["equal", "ema", "ema with buffers"])
def test_an_averaged_model(kind, scoped, same):
    def script(place):
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        place.put(model)
        model[1].eval()  # in training its statistics are those of a replica's part
        options = {} if kind == "equal" else {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)}
        if scoped and place.strategy is not None:
            with place.strategy.scope():
                average = swa_utils.AveragedModel(model, use_buffers="buffers" in kind, **options)
        else:
            average = swa_utils.AveragedModel(model, use_buffers="buffers" in kind, **options)
        optimizer = sgd(model)
        scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)

        def after():
            average.update_parameters(model)
            scheduler.step()

        losses = place.train(model, optimizer, after=after)
        if not scoped:
            swa_utils.update_bn([x for x, _ in features((6, 8))], average)
        with torch.no_grad():
            out = average.eval()(torch.ones(5, 6))
        return losses, out, average, model, optimizer, scheduler

    same(script)


@pytest.mark.parametrize("how", ["lerp", "data", "foreach", "state_dict"])
def test_an_ema_by_deepcopy(how, same):
    """The average is updated, evaluated, and its weights put into the model and out again."""

    def script(place):
        model = place.put(Net())
        optimizer = adam(model)
        ema = copy.deepcopy(model).requires_grad_(False).eval()

        @torch.no_grad()
        def update():
            averages, values = list(ema.parameters()), list(model.parameters())
            if how == "lerp":
                for a, p in zip(averages, values, strict=True):
                    a.lerp_(p, 0.1)
            elif how == "data":
                for a, p in zip(averages, values, strict=True):
                    a.data.mul_(0.9).add_(p.data, alpha=0.1)
            elif how == "foreach":
                torch._foreach_lerp_(averages, values, 0.1)
            else:
                fresh = model.state_dict()
                for name, a in ema.state_dict().items():
                    a.copy_(0.9 * a + 0.1 * fresh[name])

        losses = place.train(model, optimizer, after=update)
        x = torch.ones(5, 6)
        with torch.no_grad():
            kept = [p.clone() for p in model.parameters()]
            outputs = [ema(x), model(x)]
            for p, a in zip(model.parameters(), ema.parameters(), strict=True):
                p.data.copy_(a.data) if how == "data" else p.copy_(a)
            outputs.append(model(x))
            for p, old in zip(model.parameters(), kept, strict=True):
                p.copy_(old)
        losses += place.train(model, optimizer, after=update)
        return losses, outputs, ema, model, optimizer

    same(script)


# Evaluation


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps(mode, same):
    def script(place):
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.LayerNorm(6), nn.Linear(6, 3))
        place.put(model)
        model[1].p = 0.0
        optimizer = sgd(model)
        losses, metrics = [], []

        def evaluate(x, y):
            with mode():
                out = model(x)
                return {
                    "loss": F.cross_entropy(out, y),
                    "right": (out.argmax(1) == y).float().mean(),
                    "grad": torch.tensor(float(out.requires_grad)),
                }

        for _ in range(3):
            losses += place.train(model, optimizer, sizes=(7, 1))
            model[1].p = 0.5
            model.eval()
            metrics += [place.step(evaluate, *batch) for batch in features((5, 2, 1))]
            with mode():
                metrics += [place.step(evaluate, *batch) for batch in features((5, 2, 1))]
            model.train()
            model[1].p = 0.0
        return losses, metrics, model, optimizer

    same(script)


def test_checking_replicas_in_inference_mode_leaves_training_as_it_was(same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        if place.strategy is not None:
            with torch.inference_mode():
                place.strategy.check_replicas()
        return losses, place.train(model, optimizer), model, optimizer

    same(script)


def test_outputs_of_inference_mode_are_what_one_device_gives(same_loop):
    def script(place):
        model = place.put(Net())
        with torch.inference_mode():
            out = model(torch.ones(5, 6))
        return out, out.is_inference(), place.train(model, sgd(model)), model

    same_loop(script)


# Precision


BF16 = 3e-2


@pytest.mark.parametrize("where", ["around", "inside", "around, step outside"])
def test_autocast(where, same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model, lr=0.05)
        dtypes = []

        def forward(x, y):
            out = model(x)
            return F.cross_entropy(out, y), out.dtype

        def step(x, y):
            optimizer.zero_grad()
            if where == "inside":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss, dtype = forward(x, y)
            else:
                loss, dtype = forward(x, y)
            dtypes.append(str(dtype))
            loss.backward()
            if where != "around, step outside":
                optimizer.step()
            return loss.detach()

        losses = []
        for batch in features():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where != "inside"):
                losses.append(place.step(step, *batch))
            if where == "around, step outside":
                optimizer.step()
        assert set(dtypes) == {"torch.bfloat16"}
        return losses, model, optimizer

    same(script, tolerance=BF16)


def test_autocast_can_be_left_inside(same):
    """A layer that must be exact leaves autocast; gradients stay in the parameters' dtype."""

    class Partly(Net):
        def forward(self, x):
            hidden = torch.tanh(self.first(x))
            with torch.autocast("cpu", enabled=False):
                return self.head(hidden.float())

    def script(place):
        model = place.put(Partly())
        optimizer = sgd(model, lr=0.05)

        def loss(model, x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
                assert out.dtype == torch.float32
                return F.cross_entropy(out, y)

        losses = place.train(model, optimizer, loss)
        return losses, model, optimizer, [str(p.grad.dtype) for p in model.parameters()]

    same(script, tolerance=BF16)


def test_autocast_sees_new_weights_after_each_step(same):
    """Its cache of cast weights does not outlive the step."""

    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)
        x, y = torch.randn(6, 6), torch.randint(3, (6,))
        outputs = []
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs.append(place.step(lambda x: model(x).float().mean(), x))
            place.train(model, optimizer, data=lambda sizes: [(x, y)])
        return outputs

    same(script, tolerance=BF16)


@pytest.mark.parametrize("convert", ["double", "to", "bfloat16"])
def test_the_dtype_is_converted_after_mirroring(convert, same):
    dtype = torch.bfloat16 if convert == "bfloat16" else torch.float64

    def script(place):
        model = place.put(Net())
        place.train(model, sgd(model, lr=0.01))
        model.to(dtype=dtype) if convert == "to" else getattr(model, convert)()
        optimizer = sgd(model, lr=0.01)
        data = [(x.to(dtype), y) for x, y in features()]
        losses = place.train(model, optimizer, data=lambda sizes: data)
        grads = [str(p.grad.dtype) for p in model.parameters()]
        model.float()
        return losses, grads, place.train(model, sgd(model, lr=0.01)), model, optimizer

    same(script, tolerance=BF16 if dtype == torch.bfloat16 else 1e-5)


def test_a_double_model_is_exact_to_its_own_precision(same):
    def script(place):
        model = place.put(Net())
        optimizer = adam(model)
        model.double()
        data = [(x.double(), y) for x, y in features()]
        return place.train(model, optimizer, data=lambda sizes: data), model, optimizer

    same(script, tolerance=1e-10)


def test_channels_last_after_mirroring(same):
    def script(place):
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
        place.put(model).to(memory_format=torch.channels_last)
        optimizer = sgd(model, lr=0.05)
        data = [(torch.randn(n, 2, 4, 4), torch.randint(3, (n,))) for n in SIZES]
        losses = place.train(model, optimizer, data=lambda sizes: data)
        stays = model[0].weight.is_contiguous(memory_format=torch.channels_last)
        return losses, stays, model, optimizer

    same(script)


# Saving, loading, copying


def _through_file(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def test_state_goes_to_a_plain_model_and_back_in_mid_training(same):
    def script(place):
        model = place.put(Net())
        optimizer = adam(model)
        losses = place.train(model, optimizer)
        state = _through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        assert {type(t) for t in state["model"].values()} == {torch.Tensor}

        plain = Net()
        plain.load_state_dict(state["model"])
        plain_optimizer = adam(plain)
        plain_optimizer.load_state_dict(state["optimizer"])
        losses += Place().train(plain, plain_optimizer)
        # What the plain copy learned goes back into the same model and optimizer.
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(plain_optimizer.state_dict())
        losses += place.train(model, optimizer)
        return losses, plain, plain_optimizer, model, optimizer

    same(script)


def test_training_goes_back_to_an_earlier_state(same):
    """The best state so far, kept by deepcopy, is loaded again."""

    def script(place):
        model = place.put(Net())
        optimizer = adam(model)
        place.train(model, optimizer)
        best = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        losses = place.train(model, optimizer)
        model.load_state_dict(best[0])
        optimizer.load_state_dict(best[1])
        return losses, place.train(model, optimizer), model, optimizer

    same(script)


@pytest.mark.parametrize("how", ["pickle", "torch.save", "deepcopy"])
def test_a_model_and_its_optimizer_are_copied_in_mid_training(how, same):
    """One copy of both: the copied optimizer steps the copied parameters."""

    def script(place):
        model = place.put(Net())
        optimizer = adam(model)
        losses = place.train(model, optimizer)
        both = {"model": model, "optimizer": optimizer}
        if how == "pickle":
            copied = pickle.loads(pickle.dumps(both))
        elif how == "torch.save":
            copied = _through_file(both, weights_only=False)
        else:
            copied = copy.deepcopy(both)
        assert not mirror.is_mirrored(copied["model"])
        losses += place.train(model, optimizer)
        losses += Place().train(copied["model"], copied["optimizer"])
        return losses, model, optimizer, copied["model"], copied["optimizer"]

    same(script)


def test_a_pickled_model_is_mirrored_again(same):
    def script(place):
        model = place.put(Net())
        place.train(model, sgd(model))
        model = place.put(pickle.loads(pickle.dumps(model)))
        optimizer = sgd(model)
        return place.train(model, optimizer), model, optimizer

    same(script)


# Optimizers' options and schedulers


def test_learning_rates_per_group_and_by_hand(same):
    def script(place):
        model = place.put(Net())
        optimizer = torch.optim.AdamW(
            [
                {"params": model.first.parameters(), "lr": 0.05, "weight_decay": 0.0},
                {"params": [model.head.weight], "betas": (0.5, 0.9)},
                {"params": [model.head.bias]},
            ],
            lr=0.01,
        )
        losses = []
        for i in range(3):
            losses += place.train(model, optimizer, sizes=(5, 2))
            optimizer.param_groups[i]["lr"] *= 3
            for group in optimizer.param_groups:
                group["weight_decay"] += 0.1
        return losses, model, optimizer

    same(script)


SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "warm-up then cosine": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(o, 3)],
        milestones=[2],
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers(kind, same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)
        scheduler = SCHEDULERS[kind](optimizer)
        rates = []

        def after():
            scheduler.step()
            rates.append(list(scheduler.get_last_lr()))

        return place.train(model, optimizer, after=after), rates, model, optimizer

    same(script)


def test_reduce_on_plateau(same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        rates = []
        for _ in range(5):
            losses = place.train(model, optimizer, sizes=(7, 1))
            scheduler.step(sum(losses))
            rates.append(optimizer.param_groups[0]["lr"])
        assert len(set(rates)) > 1
        return rates, model, optimizer

    same(script)


# torch.func, export, tracing


def test_functional_call_with_other_parameters(same):
    """The given tensors get the gradients; the model keeps its own parameters."""

    def script(place):
        model = place.put(Net())
        given = {k: (p.detach() * 0.5).requires_grad_() for k, p in model.named_parameters()}
        before = {k: p.detach().clone() for k, p in model.named_parameters()}
        seen = []

        def step(x, y):
            out = torch.func.functional_call(model, given, (x,))
            return F.cross_entropy(out, y)

        for batch in features():
            loss = place.step(step, *batch)
            grads = torch.autograd.grad(loss, list(given.values()))
            seen.append((loss, grads))
        assert_same(dict(model.named_parameters()), before)
        assert all(type(p) is torch.Tensor for p in given.values())
        return seen, place.train(model, sgd(model)), model

    same(script)


def test_an_unrolled_update_through_functional_call(same_loop):
    """MAML: one step on the support set, the loss after it differentiated through the step."""

    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)

        def step(x, y):
            optimizer.zero_grad()
            names, params = zip(*model.named_parameters(), strict=True)
            grads = torch.autograd.grad(cross_entropy(model, x, y), params, create_graph=True)
            fast = {k: p - 0.1 * g for k, p, g in zip(names, params, grads, strict=True)}
            loss = F.cross_entropy(torch.func.functional_call(model, fast, (-x,)), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return [place.step(step, *b) for b in features()], model, optimizer

    same_loop(script)


def test_gradients_of_torch_func(same_loop):
    def script(place):
        model = place.put(Net())
        params = {k: p.detach() for k, p in model.named_parameters()}
        seen = []
        for x, y in features((5, 2)):

            def loss(params, x, y):
                return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

            seen.append(torch.func.grad(loss)(params, x, y))
            seen.append(
                torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(
                    params, x[:, None], y[:, None]
                )
            )
        return seen, place.train(model, sgd(model)), model

    same_loop(script)


def test_per_example_gradients_inside_run(same_run):
    def script(place):
        model = place.put(Net())

        def step(x, y):
            params = {k: p.detach() for k, p in model.named_parameters()}

            def loss(params, x, y):
                return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

            grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(
                params, x[:, None], y[:, None]
            )
            return {k: g.square().flatten(1).sum(1).mean() for k, g in grads.items()}

        return [place.step(step, *batch) for batch in features()]

    same_run(script)


@pytest.mark.parametrize("kind", ["export", "trace"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_model_is_exported_as_a_plain_one(kind, same_loop):
    def script(place):
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        place.put(model).eval()
        optimizer = sgd(model)
        place.train(model, optimizer)
        x = torch.randn(4, 6)
        if kind == "export":
            program = torch.export.export(model, (x,))
            names = sorted(program.state_dict)
            kinds = sorted(str(node.target) for node in program.graph.nodes)
            exported = program.module()
        else:
            exported = torch.jit.trace(model, (x,))
            names, kinds = sorted(exported.state_dict()), []
        # The export is a copy of the program with the values of now: two devices agree on both.
        out = exported(x)
        losses = place.train(model, optimizer)
        return out, names, kinds, losses, model

    same_loop(script)


def test_summaries_of_the_model_read_as_of_a_plain_one(same):
    def script(place):
        model = place.put(Net())
        place.train(model, sgd(model), sizes=(5,))
        return {
            "text": str(model),
            "names": [name for name, _ in model.named_parameters()],
            "modules": [type(m).__name__ for m in model.modules()],
            "count": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
            "vector": nn.utils.parameters_to_vector(model.parameters()),
            "norm": torch.stack([p.detach().norm() for p in model.parameters()]).norm(),
            "largest": max(p.abs().max().item() for p in model.parameters()),
            "numpy": torch.from_numpy(model.head.bias.detach().numpy().copy()),
            "list": model.head.bias.tolist(),
        }

    same(script)


def test_a_vector_is_put_into_the_parameters(same):
    def script(place):
        model = place.put(Net())
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 0.5, model.parameters())
        optimizer = sgd(model)
        return place.train(model, optimizer), model, optimizer

    same(script)


# Threads


def test_training_outside_the_main_thread(same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)
        losses, error, _ = finishes(lambda: place.train(model, optimizer))
        if error is not None:
            raise error
        return losses, place.train(model, optimizer), model, optimizer

    same(script)


@pytest.mark.parametrize("in_run", [False, True])
def test_two_strategies_train_in_two_threads(in_run, make_strategy):
    batches = [features(), features()]
    models = [Net(), Net()]
    expected = []
    for model, data in zip(copy.deepcopy(models), batches, strict=True):
        losses = Place().train(model, sgd(model), data=lambda sizes, data=data: data)
        expected.append((losses, model.state_dict()))

    def train(i):
        place = Place(make_strategy(2), in_run)
        model = place.put(models[i])
        losses = place.train(model, sgd(model), data=lambda sizes: batches[i])
        return losses, model.state_dict()

    outcomes = [None, None]
    start = threading.Barrier(2)

    def target(i):
        start.wait()
        outcomes[i] = finishes(lambda: train(i))

    threads = [threading.Thread(target=target, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for outcome, want in zip(outcomes, expected, strict=True):
        result, error, _ = outcome
        assert error is None, error
        assert_same(result, want)
