"""Hooks of all optimizers' steps: mirror's own, in their order, and the user's."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ones import ONES, mirrored_layer, ones_layer, sgd
from tests.oracle import assert_same

ROOT = Path(__file__).parents[3]
HISTORY = """
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
import mirror
strategies = [mirror.MirroredStrategy(["cpu"] * n) for n in {history}]
for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
    print([hook.__name__ for hook in hooks.values()])
"""


def hooks_after(history):
    command = [sys.executable, "-c", HISTORY.format(history=history)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("history", [(2,), (1, 2), (2, 1), (1, 1, 3, 2)])
def test_what_lends_is_within_the_time_of_a_step_whoever_came_first(history):
    before, after = hooks_after(history)
    assert before == "['_step_begins', '_before_step']"
    assert after == "['_after_step', '_step_ends']"


def test_a_strategy_of_one_replica_installs_the_time_alone():
    assert hooks_after((1, 1)) == ["['_step_begins']", "['_step_ends']"]


@pytest.mark.parametrize("way", ["groups", "model"])
def test_step_post_hook_writes_to_all_replicas(make_strategy, way):
    # A hook that clamps weights after the step saw the first replica's only.
    def train(layer):
        nn.init.constant_(layer.weight, -1.0)
        optimizer = sgd(layer)

        @torch.no_grad()
        def clamp(optimizer, args, kwargs):
            groups = optimizer.param_groups[0]["params"]
            for p in groups if way == "groups" else layer.parameters():
                p.clamp_(min=0.0)

        optimizer.register_step_post_hook(clamp)
        layer(ONES).sum().backward()
        optimizer.step()
        return layer(ONES)

    strategy = make_strategy(2)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()


def test_step_pre_hook_changes_gradients_of_all_replicas(make_strategy):
    # A hook that clips came after the other replicas had stepped with unclipped gradients.
    def train(layer):
        optimizer = sgd(layer)

        def clip(optimizer, args, kwargs):
            nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)

        optimizer.register_step_pre_hook(clip)
        layer(ONES).sum().backward()
        optimizer.step()
        return layer(ONES)

    strategy = make_strategy(2)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()
