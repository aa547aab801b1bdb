"""A training with GradScaler and planned infinite losses."""

import copy

import torch
from torch import nn

OPTIONS = {"init_scale": 8.0, "growth_interval": 2}
SIZES = [7, 4, 9, 1, 6, 2, 8]
BAD = {1: 0, 4: 5}  # step: the example with an infinite loss
CONTEXTS = ["cross", "run"]


def data():
    """Batches of features and factors of the losses, one of which is inf in a bad step."""
    made = []
    for i, size in enumerate(SIZES):
        factors = torch.ones(size)
        if i in BAD:
            factors[BAD[i]] = torch.inf
        made.append((torch.randn(size, 3), factors))
    return made


def loss_of(model, batch):
    x, factors = batch
    return (model(x).square().mean(1) * factors).mean()


def plain_step(scaler, model, optimizers, batch, clip=False):
    """What a training script does; on one device the oracle, on replicas the test."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss_of(model, batch)).backward()
    if clip:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def pair(strategy, plain):
    return strategy.mirror(copy.deepcopy(plain))
