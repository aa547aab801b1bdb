"""Averages of the weights: averaged models and an EMA by hand."""

import copy

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.optim import swa_utils

from tests.training.programs import Net, adam, features, sgd


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
