"""Watching: what a trace would freeze is refused, and the line is named."""

import pytest
import torch
from torch.nn import functional as F

import mirror
from tests.steps.training import Beside, batches, usual_step

outside = torch.ones(3)


def item(loss, model):
    return loss.item()


def branch(loss, model):
    return loss * 2 if loss > 0 else loss


def to_list(loss, model):
    return loss.detach().tolist()


def to_numpy(loss, model):
    return loss.detach().numpy()


def sized_by_values(loss, model):
    return (loss > 0).nonzero()


def change_what_is_outside(loss, model):
    outside.add_(1)
    return loss


def index_of_the_replica(loss, model):
    return loss * mirror.get_replica_context().replica_id_in_sync_group


def merge(loss, model):
    mirror.get_replica_context().merge_call(lambda strategy: None)
    return loss


@pytest.mark.parametrize(
    "what",
    [
        item,
        branch,
        to_list,
        to_numpy,
        sized_by_values,
        change_what_is_outside,
        index_of_the_replica,
        merge,
    ],
)
def test_what_a_trace_would_freeze_is_refused_with_its_line(what):
    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            return what(usual(x, y), model)

        return step

    beside = Beside(2, make_step=make_step)
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    before = [p.detach().clone() for p in beside.model.parameters()]
    line = what.__code__.co_firstlineno
    with pytest.raises(mirror.CompileError, match=rf"test_watching.py:({line + 1}|{line + 2}) "):
        beside.compiled(*second)
    for parameter, value in zip(beside.model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach(), value)
    F.relu(beside.model(second[0].values[0]))  # all is as before
