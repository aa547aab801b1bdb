"""Evaluation between steps."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.training.programs import Net, features, sgd


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
