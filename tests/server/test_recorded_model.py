"""Recording: what was made under a scope, each variable once, and reading it."""

import copy
import gc
import pickle
import threading

import torch
from torch import nn

from mirror.server.pull_on_read import PullOnReadDict, plain_parameters, unwatch, watch
from mirror.server.recorded_model import Model, RecordedModules


def record(make):
    recorded = RecordedModules()
    with recorded.recording():
        made = make()
    return recorded, made


def test_roots_are_found_in_their_order_and_only_while_they_live():
    before = nn.Linear(1, 1)
    recorded, made = record(lambda: [nn.Sequential(before, nn.ReLU()), nn.BatchNorm1d(2)])
    nn.Linear(3, 3)
    assert recorded.roots() == made
    del made[0]
    gc.collect()
    assert recorded.roots() == made


def test_another_threads_modules_are_not_recorded():
    def make():
        thread = threading.Thread(target=lambda: kept.append(nn.Linear(1, 1)))
        thread.start()
        thread.join()
        return nn.Linear(2, 2)

    kept = []
    recorded, made = record(make)
    assert recorded.roots() == [made]


def test_variables_are_parameters_first_each_once_with_their_names():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(2, 2)
            self.norm = nn.BatchNorm1d(2)
            self.two = nn.Linear(2, 2)
            self.two.weight = self.one.weight

    model = Model(record(Tied)[0].roots() or [Tied()])
    names = [variable.name for variable in model.variables]
    assert names == [
        "one.weight one.bias norm.weight norm.bias two.bias".split(),
        "norm.running_mean norm.running_var norm.num_batches_tracked".split(),
    ][0] + ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert model.num_parameters == 5
    assert [v.is_whole for v in model.variables] == [False] * 5 + [True] * 3


def test_tables_that_nothing_else_uses_go_by_rows():
    sparse = nn.Embedding(4, 2, sparse=True)
    tied = nn.Embedding(4, 2, sparse=True)
    decoder = nn.Linear(2, 4, bias=False)
    decoder.weight = tied.weight
    model = Model([nn.ModuleList([sparse, nn.Embedding(4, 2), tied, decoder])])
    assert [variable.by_rows for variable in model.variables] == [True, False, False]


def test_every_way_to_read_asks_first():
    asked = []
    module = nn.Linear(2, 2)
    plain = plain_parameters(module)
    watch(module, asked.append)
    for read in (
        lambda: module.weight,
        lambda: list(module.parameters()),
        lambda: module.state_dict(),
        lambda: module(torch.ones(1, 2)),
        lambda: module._parameters.get("bias"),
        lambda: module._parameters.values(),
    ):
        asked.clear()
        read()
        assert asked
    asked.clear()
    assert plain_parameters(module) == plain
    assert asked == []
    for copied in copy.deepcopy(module), pickle.loads(pickle.dumps(module)):
        assert type(copied._parameters) is dict
        assert torch.equal(copied.weight, module.weight)
    assert isinstance(module._parameters, PullOnReadDict)
    unwatch(module)
    assert type(module._parameters) is dict
