"""Recorded models, persistent ids of objects on servers, and the report of servers."""

import copy
import functools
import gc
import pickle
import threading
import xml.etree.ElementTree as ET

import pytest
import torch
from torch import nn

from mirror.errors import StepError
from mirror.server.persistent_ids import dump, dump_step, load_pickled, names_in
from mirror.server.recorded_model import (
    Model,
    PullOnReadDict,
    RecordedModules,
    plain_parameters,
    watch,
)
from mirror.server.servers_report import ServersReport


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


MODEL = torch.nn.Linear(2, 2)


def step_of_module(x):
    return MODEL(x)


def find(thing):
    return ("module", 0) if thing is MODEL else None


class Trainer:
    def __init__(self):
        self.net = MODEL
        self.lock = None

    def step(self, x):
        return self.net(x)


def roundtrip(fn, *args):
    other = torch.nn.Linear(2, 2)
    found, own, _ = load_pickled(dump_step(fn, args, {}, find), lambda token: other)
    return found, own, other


def test_our_things_are_found_wherever_they_are():
    x = torch.ones(1, 2)
    local = MODEL
    for fn in (
        step_of_module,
        lambda x: local(x),
        Trainer().step,
        functools.partial(lambda m, x: m(x), MODEL),
    ):
        found, _, other = roundtrip(fn)
        assert torch.equal(found(x), other(x))
    found, own, other = roundtrip(max, {"a": [MODEL]})
    assert found is max
    assert own[0]["a"][0] is other


def test_no_weights_travel():
    large = torch.nn.Linear(1000, 1000)
    data = dump_step(lambda: large, (), {}, lambda t: ("module", 0) if t is large else None)
    assert len(data) < 2000


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda lock: (lambda: lock, (), {}), "lock"),
        (lambda lock: (max, (1, lock), {}), r"args\[1\]"),
        (lambda lock: (max, (), {"key": lock}), "key"),
        (lambda lock: (_with(lock).step, (), {}), r"self\.lock"),
    ],
)
def test_what_cannot_be_pickled_is_named(make, name):
    fn, args, kwargs = make(threading.Lock())
    with pytest.raises(StepError, match=f"{name}, a lock, cannot be pickled") as caught:
        dump_step(fn, args, kwargs, find)
    assert isinstance(caught.value, TypeError)


def _with(lock):
    trainer = Trainer()
    trainer.lock = lock
    return trainer


def test_results_name_our_things_too():
    assert load_pickled(dump([MODEL, 1], find), lambda token: token) == [("module", 0), 1]


def test_names_are_those_of_the_program():
    first = 1

    def fn(x):
        return MODEL, first

    found = dict(names_in(fn, (2,), {"y": 3}))
    assert found == {"first": 1, "MODEL": MODEL, "args[0]": 2, "y": 3}


REPORT = ServersReport(
    num_steps=10,
    num_retried=1,
    num_updates=9,
    staleness={0: 6, 2: 3},
    pulled_bytes=120,
    pushed_bytes=60,
    pull_seconds=0.1,
    push_seconds=0.2,
    step_seconds=1.0,
    server_bytes=(8, 4),
)


def test_a_report_is_printed_as_a_table():
    assert str(REPORT).splitlines() == [
        "steps           10, 1 times again on another worker",
        "updates         9, gradients dropped: 0, waiting: 0",
        "a step          100.00 ms, of which pull 10.00, push 20.00",
        "bytes a step    pulled 12, pushed 6",
        "servers         8 bytes, 4 bytes",
        "staleness       gradients",
        f"        0       6        {'#' * 30}",
        f"        2       3        {'#' * 15}",
    ]


def test_a_notebook_shows_the_same():
    shown = ET.fromstring(REPORT._repr_html_())
    lines = [" ".join(line.itertext()).split() for line in shown.iter("tr")]
    assert lines[1:] == [
        ["pull", "10.000", "ms", "10%"],
        ["push", "20.000", "ms", "20%"],
        ["on", "the", "worker", "70.000", "ms", "70%"],
    ]
    words = "".join(shown.itertext())
    assert all(line in words for line in str(REPORT).splitlines() if "a step   " not in line)


def test_a_report_of_nothing_is_shown_too():
    assert "steps           0" in str(ServersReport())
    assert "mean of 0" in ServersReport()._repr_html_()
