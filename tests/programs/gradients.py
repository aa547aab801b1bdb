"""Hooks and gradients in training scripts."""

import threading

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import mirror
from tests.programs.catalogue import ON_HOST, Net, adam, cross_entropy, features, program, sgd


@program
def forward_hooks_change_inputs_and_outputs(place):
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


@program
def backward_hooks_change_gradients(place):
    def through_input(model, x, y):
        return cross_entropy(model, x.clone().requires_grad_(), y)

    model = Net()
    model.head.register_full_backward_hook(lambda module, ins, outs: (ins[0] * 2,))
    place.put(model)
    model.first.register_full_backward_pre_hook(lambda module, outs: (outs[0] * -0.5,))
    handle = model.register_full_backward_pre_hook(lambda module, outs: (outs[0] * 3,))
    optimizer = sgd(model, lr=0.02)
    losses = place.train(model, optimizer, through_input)
    handle.remove()
    return losses, place.train(model, optimizer, through_input), model, optimizer


@program(ways=["run"])
def features_caught_by_a_hook_enter_the_loss(place):
    """Perceptual losses and distillation: inside run a hook sees its replica's features."""

    model = place.put(Net())
    caught = threading.local()
    model.first.register_forward_hook(lambda m, args, out: setattr(caught, "value", out))
    optimizer = sgd(model)

    def loss(model, x, y):
        return cross_entropy(model, x, y) + caught.value.square().mean()

    return place.train(model, optimizer, loss), model, optimizer


@program
def global_module_hooks_act(place):
    model = place.put(Net())
    optimizer = sgd(model)

    def double(module, args, out):
        return out * 2 if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        return place.train(model, optimizer), model, optimizer
    finally:
        handle.remove()


@program(apart=ON_HOST, where=["before mirroring", "after mirroring"])
def gradient_hooks_of_parameters_scale_and_mask(place, where):
    """Linear hooks: the same on every part of the gradient as on the whole."""

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


@program
def gradient_hooks_of_parameters_clamp_the_whole_gradient(place):
    """A popular way to clip: what is clamped is the gradient of the batch, not of a part."""

    model = place.put(Net())
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    optimizer = sgd(model)
    return place.train(model, optimizer), model, optimizer


@program
def gradient_hooks_of_activations(place):
    model = place.put(Net())
    optimizer = sgd(model)

    def loss(model, x, y):
        hidden = torch.tanh(model.first(x))
        hidden.register_hook(lambda grad: grad * 0.5)
        return F.cross_entropy(model.head(hidden), y)

    return place.train(model, optimizer, loss), model, optimizer


@program(ways=["loop"])
def optimizer_hooks_see_one_step(place):
    model = place.put(Net())
    optimizer = sgd(model)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    place.train(model, optimizer)
    return seen, model, optimizer


def _zero_with(optimizer, model, how):
    if how == "model":
        model.zero_grad()
    elif how == "one by one":
        for p in model.parameters():
            p.grad = None
    else:
        optimizer.zero_grad(set_to_none=how == "none")


@program(
    how=["none", "zeros", "model", "one by one"],
    when=["first", "before backward", "after step", "outside"],
)
def gradients_may_be_cleared_anywhere(place, how, when):
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


@program
def clearing_between_backward_passes_drops_the_first(place):
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


@program
def zeroed_gradients_let_momentum_and_decay_act_as_on_one_device(place):
    """set_to_none=False leaves a zero, which steps unused parameters; None skips them."""

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


@program(quick=["loop-x2-central", "run-x2-central"], no_sync=[False, True], clip=[False, True])
def gradients_accumulate_over_micro_batches(place, no_sync, clip):
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


@program
def gradients_accumulate_over_forward_passes_of_one_step(place):
    model = place.put(Net())
    optimizer = sgd(model)

    def step(x, y):
        optimizer.zero_grad()
        for scale in (1.0, 0.5, -1.0):
            (cross_entropy(model, x * scale, y) / 3).backward()
        optimizer.step()

    place.steps(step)
    return model, optimizer


@program(look=[False, True])
def several_losses_of_one_graph(place, look):
    """backward with retain_graph, also with a look at the gradient in between."""

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


@program
def backward_with_inputs_fills_only_their_gradients(place):
    model = place.put(Net())
    optimizer = sgd(model)

    def step(x, y):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward(inputs=list(model.head.parameters()))
        optimizer.step()

    place.steps(step)
    return model, optimizer, [p.grad is None for p in model.parameters()]


@program
def inputs_of_backward_are_found_where_torch_does_not_ask_them(place):
    """Older versions of torch call no override of what is passed as ``inputs`` alone."""

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


@program
def changed_gradients_are_what_the_optimizer_sees(place):
    """Gradients scaled, noised and replaced by hand, centred as some scripts do."""

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


def _by_hand(model, change):
    with torch.no_grad():
        for p in model.parameters():
            change(p)


def _averaged_again(model):
    if mirror.in_cross_replica_context():
        return
    for p in model.parameters():
        p.grad = mirror.get_replica_context().all_reduce("mean", p.grad)


ACTIONS = {
    "zero": lambda model, optimizer, x, y: optimizer.zero_grad(),
    "zeros": lambda model, optimizer, x, y: optimizer.zero_grad(set_to_none=False),
    "backward": lambda model, optimizer, x, y: cross_entropy(model, x, y).backward(),
    "backward of half": lambda model, optimizer, x, y: (cross_entropy(model, x, y) / 2).backward(),
    "average again": lambda model, optimizer, x, y: _averaged_again(model),
    "step": lambda model, optimizer, x, y: optimizer.step(),
    "update": lambda model, optimizer, x, y: _by_hand(model, lambda p: p.sub_(p.grad, alpha=0.1)),
    "update of data": lambda model, optimizer, x, y: _by_hand(
        model, lambda p: p.data.sub_(p.grad.data, alpha=0.1)
    ),
}


@program(
    actions=[
        "backward, step",
        "backward, zero, step",
        "zeros, backward, step",
        "step, backward",
        "backward",
        "zero, backward, step, step",
        "zero, backward of half, step",
        "zero, backward, average again, step",
        "zero, backward, update",
        "zero, backward, update of data",
    ]
)
def loops_in_an_unusual_order(place, actions):
    model = place.put(Net())
    optimizer = sgd(model)

    def step(x, y):
        for action in actions.split(", "):
            ACTIONS[action](model, optimizer, x, y)

    place.steps(step)
    return model, optimizer, [p.grad for p in model.parameters()]
