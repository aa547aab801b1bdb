"""What a step changes around itself while it is traced: refused with its line, or warned of."""

import logging
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirror
from tests.compiler.training import Beside, batches, linear, usual_step

LOCAL = np.random.default_rng(0)
OWN = random.Random(0)


class Kept:
    def __init__(self):
        self.value, self.count, self.log = None, 0, []


def made(body):
    """Returns what makes a step that does the usual, and then something around itself."""

    def make_step(model, optimizer):
        usual, kept, entries = usual_step(model, optimizer), Kept(), {}

        def step(x, y):
            return body(usual(x, y), kept, entries)

        step.kept = kept
        return step

    return make_step


def in_a_list(loss, kept, entries):
    kept.log.append(loss.detach())
    return loss


def in_a_field(loss, kept, entries):
    kept.value = loss.detach()
    return loss


def in_a_dict(loss, kept, entries):
    entries["average"] = loss.detach() if "average" not in entries else entries["average"] * 0.9
    return loss


def by_a_count(loss, kept, entries):
    kept.count += 1
    return loss * 2 if kept.count % 2 else loss


def by_numpys_own(loss, kept, entries):
    return loss * LOCAL.random()


def by_numpys_of_all(loss, kept, entries):
    return loss * np.random.rand()


def by_pythons_own(loss, kept, entries):
    return loss * OWN.random()


def by_pythons_of_all(loss, kept, entries):
    return loss * random.random()


@pytest.mark.parametrize(
    "body",
    [
        in_a_list,
        in_a_field,
        in_a_dict,
        by_a_count,
        by_numpys_own,
        by_numpys_of_all,
        by_pythons_own,
        by_pythons_of_all,
    ],
)
def test_what_calls_would_be_missing_is_refused_and_put_back(body):
    beside = Beside(1, linear, make_step=made(body))
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    kept = beside.step.kept
    before = kept.value, kept.count, list(kept.log)
    line = r"test_side_effects_effects\.py:\d+ `.*fallback='eager'"
    with pytest.raises(mirror.CompileError, match=line):
        beside.compiled(*second)
    assert kept.value is before[0]
    assert (kept.count, len(kept.log)) == (before[1], len(before[2]))


def test_on_request_such_a_step_runs_uncompiled_and_counts_each_call_once():
    beside = Beside(1, linear, make_step=made(by_a_count), fallback="eager")
    beside.train(batches([8] * 5))
    assert beside.step.kept.count == 5


def count_only(loss, kept, entries):
    kept.count += 1
    kept.log.append(1)
    return loss


def test_what_is_only_counted_is_warned_of_and_happens_at_traces(caplog):
    beside = Beside(1, linear, make_step=made(count_only))
    with caplog.at_level(logging.WARNING, "mirror"):
        beside.train(batches([8] * 5))
    assert beside.step.kept.count == 2
    assert beside.step.kept.log == [1, 1]
    assert "Kept.count" in caplog.text or "count" in caplog.text


class Nudged(torch.optim.SGD):
    """Keeps a tensor in its state outside of its step, as sharpness-aware ones do."""

    @torch.no_grad()
    def nudge(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.detach().clone()
                p.add_(p.grad, alpha=0.05)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_state_that_is_set_outside_of_an_optimizers_step_is_refused(num_replicas):
    def make_step(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.nudge()
            optimizer.step()
            return loss

        return step

    beside = Beside(
        num_replicas, linear, make_optimizer=lambda p: Nudged(p, 0.1), make_step=make_step
    )
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    with pytest.raises(mirror.CompileError, match=r"'before' of the state of Nudged"):
        beside.compiled(*second)
    for entry in beside.optimizer.state.values():
        assert not isinstance(entry["before"], torch._subclasses.FakeTensor)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_parameters_that_are_set_by_data_are_those_of_one_device(num_replicas):
    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            loss = usual(x, y)
            for p in model.parameters():
                p.data = p.data.clamp(-0.1, 0.1)
            return loss

        return step

    beside = Beside(num_replicas, linear, make_step=make_step)
    beside.train(batches([8, 8, 7, 8]))
    assert max(p.abs().max() for p in beside.model.parameters()) <= 0.1


def double():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.01),
        lambda p: torch.optim.Adam(p, torch.tensor(0.01, dtype=torch.float64), amsgrad=True),
    ],
)
def test_in_double_precision_rates_and_counts_are_as_exact(make_optimizer):
    data = [(x.double(), y) for x, y in batches([8, 8, 7, 8])]
    beside = Beside(2, double, make_optimizer)
    beside.train(data, rtol=1e-12, atol=1e-12)
    assert beside.compiled.num_traces == 1


def test_a_mask_as_an_index_is_refused_with_its_line():
    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            return usual(x, y) + x[y > 0].sum()

        return step

    beside = Beside(2, linear, make_step=make_step)
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    with pytest.raises(
        mirror.CompileError, match=r"test_side_effects_effects.py:\d+ `return .*a mask"
    ):
        beside.compiled(*second)
