"""Optimizers and averages that others wrote: pytorch_optimizer, timm, lion, schedulefree, EMA."""

import copy

import torch
from torch import nn

from tests.scripts.third_party.program import Program, case, regress, vectors


def _net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


_NAMES = (
    "AdaBelief", "AdaBound", "AdaFactor", "Adan", "ADOPT", "CAME", "DiffGrad",
    "Lamb", "LARS", "Lion", "MADGRAD", "NovoGrad", "Prodigy", "RAdam", "Ranger", "Ranger21",
    "ScheduleFreeAdamW", "Shampoo", "StableAdamW", "Tiger", "Yogi", "Muon",
)  # fmt: skip

for _name in _NAMES:

    @case("pytorch_optimizer", _name)
    def of_pytorch_optimizer(name=_name):
        import pytorch_optimizer

        options = {"num_iterations": 8} if name == "Ranger21" else {}
        if name == "Muon":
            options = {"use_muon": True}

        def make(parameters):
            groups = (
                [{"params": [p], **options} for p in parameters] if name == "Muon" else parameters
            )
            extra = {} if name == "Muon" else options
            optimizer = getattr(pytorch_optimizer, name)(groups, **extra)
            if hasattr(optimizer, "train"):
                optimizer.train()
            return optimizer

        return Program(make=_net, batches=vectors(4), loss=regress, optimizer=make)


@case("pytorch_optimizer", "Lookahead over AdamW")
def lookahead():
    from pytorch_optimizer import Lookahead

    return Program(
        make=_net,
        batches=vectors(4),
        loss=regress,
        optimizer=lambda p: Lookahead(torch.optim.AdamW(p, lr=0.01), k=3),
    )


for _name in (
    "lamb",
    "lars",
    "lookahead_adamw",
    "madgradw",
    "nadamw",
    "adafactor",
    "lion",
    "adopt",
):

    @case("timm", f"optimizer {_name}")
    def of_timm(name=_name):
        from timm.optim import create_optimizer_v2

        return Program(
            make=_net,
            batches=vectors(4),
            loss=regress,
            optimizer=lambda p: create_optimizer_v2(list(p), opt=name, lr=0.01),
        )


@case("lion-pytorch", "Lion")
def lion():
    from lion_pytorch import Lion

    return Program(
        make=_net, batches=vectors(4), loss=regress, optimizer=lambda p: Lion(p, lr=1e-3)
    )


@case("schedulefree", "AdamWScheduleFree")
def schedule_free():
    import schedulefree

    def make(parameters):
        optimizer = schedulefree.AdamWScheduleFree(parameters, lr=0.01)
        optimizer.train()
        return optimizer

    return Program(make=_net, batches=vectors(4), loss=regress, optimizer=make)


@case("came-pytorch", "CAME")
def came():
    from came_pytorch import CAME

    return Program(
        make=_net, batches=vectors(4), loss=regress, optimizer=lambda p: CAME(p, lr=1e-3)
    )


@case("ema-pytorch", "EMA of the net, held beside it")
def ema():
    from ema_pytorch import EMA

    averages = {}

    def average(model):
        if id(model) not in averages:
            averages[id(model)] = EMA(
                model,
                ema_model=copy.deepcopy(model),
                beta=0.9,
                update_after_step=2,
                update_every=1,
            )
        return averages[id(model)]

    return Program(
        make=_net,
        batches=vectors(4),
        loss=regress,
        after=lambda model: average(model).update(),
        extra=lambda model: {
            f"ema.{k}": v for k, v in average(model).ema_model.state_dict().items()
        },
    )
