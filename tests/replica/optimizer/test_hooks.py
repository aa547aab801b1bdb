"""Hooks of all optimizers' steps: mirror's own, in their order, and the user's."""

import subprocess
import sys
from pathlib import Path

import pytest

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
