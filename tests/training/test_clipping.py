"""Clipping sees the whole gradient."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.training.programs import Net, cross_entropy, features, sgd

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
