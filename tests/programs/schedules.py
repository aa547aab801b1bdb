"""Options of optimizers by hand and by schedulers; clipping; averages of weights."""

import copy

import torch
import torch.utils.checkpoint
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from tests.programs.catalogue import ON_HOST, Net, adam, cross_entropy, features, program, sgd


@program
def learning_rates_per_group_and_by_hand(place):
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


@program
def reduce_on_plateau(place):
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


@program(kind=CLIPS)
def clipping_sees_the_whole_gradient(place, kind):
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


@program(
    apart={"in-scope": "update_bn splits its batches, so its statistics are of parts"},
    scoped=[False],
    kind=["equal", "ema", "ema with buffers"],
)
@program(scoped=[True], kind=["equal", "ema", "ema with buffers"])
def an_averaged_model(place, scoped, kind):
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


@program(apart=ON_HOST, how=["lerp", "data", "foreach", "state_dict"])
def an_ema_by_deepcopy(place, how):
    """The average is updated, evaluated, and its weights put into the model and out again."""

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
