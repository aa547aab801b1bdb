"""Options of optimizers by hand and by schedulers."""

import pytest
import torch
import torch.utils.checkpoint
from torch.optim import lr_scheduler

from tests.training.programs import Net, sgd


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
