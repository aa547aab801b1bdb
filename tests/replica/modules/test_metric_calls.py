"""Metrics that a mirrored module updates in forward have the value of one device."""

import copy
import inspect
import pickle
import sys
import types

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import DivergenceError, StrategyError
from tests.oracle import assert_same
from tests.pairs import each_once, quick_of

torchmetrics = pytest.importorskip("torchmetrics")
classification = torchmetrics.classification
regression = torchmetrics.regression

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = [9, 7, 1, 2]  # uneven parts, and replicas that sit out


class Net(nn.Module):
    def __init__(self, metric, inputs):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.metric, self.inputs = metric, inputs

    def forward(self, x, y, how="update"):
        h = self.linear(x)
        given = self.inputs(h, y)
        if how == "update":
            self.metric.update(*given)
            return h
        return h, self.metric(*given)


def multiclass(h, y):
    return h.softmax(1), y


def binary(h, y):
    return h[:, 0].sigmoid(), y % 2


def multilabel(h, y):
    return h.sigmoid(), (h > 0.3).long()


def values(h, y):
    return h[:, 0].abs() + 0.1, h[:, 1].abs() + y + 0.1


INPUTS = {"Multiclass": multiclass, "Binary": binary, "Multilabel": multilabel}
ARGUMENTS = {
    "num_classes": 4,
    "num_labels": 4,
    "num_outputs": 1,
    "min_recall": 0.5,
    "min_precision": 0.5,
    "min_specificity": 0.5,
    "min_sensitivity": 0.5,
    "p": 2.0,
}
# They take another form of input.
LEFT_OUT = {
    "KLDivergence",
    "ContinuousRankedProbabilityScore",
    "JensenShannonDivergence",
    "CosineSimilarity",
    "KendallRankCorrCoef",
}


def catalogue():
    for library in (classification, regression):
        for name in sorted(library.__all__):
            kind = getattr(library, name)
            inputs = next((f for start, f in INPUTS.items() if name.startswith(start)), None)
            inputs = values if library is regression else inputs
            if inputs is None or name in LEFT_OUT or "Fairness" in name:
                continue
            wanted = inspect.signature(kind).parameters
            required = {"num_classes"} & wanted.keys() if inputs is multiclass else set()
            required |= {k for k, p in wanted.items() if p.default is p.empty and k != "kwargs"}
            if required <= ARGUMENTS.keys():
                arguments = {key: ARGUMENTS[key] for key in required}
                yield pytest.param(lambda k=kind, a=arguments: k(**a), inputs, id=name)


COLLECTION = pytest.param(
    lambda: torchmetrics.MetricCollection(
        [
            classification.MulticlassAccuracy(4),
            classification.MulticlassPrecision(4),  # shares its states with accuracy
            classification.MulticlassAUROC(4),
        ]
    ),
    multiclass,
    id="collection",
)
OTHERS = [
    COLLECTION,
    pytest.param(lambda: torchmetrics.MeanMetric(), lambda h, y: (h.mean(),), id="mean"),
    pytest.param(
        lambda: torchmetrics.MeanMetric(), lambda h, y: (h.mean(), len(h)), id="weighted mean"
    ),
    pytest.param(lambda: torchmetrics.MaxMetric(), lambda h, y: (h.max(),), id="max"),
    pytest.param(lambda: torchmetrics.SumMetric(), lambda h, y: ((y > 1).sum(),), id="sum"),
    pytest.param(lambda: torchmetrics.CatMetric(), lambda h, y: (h,), id="cat"),
    pytest.param(
        lambda: torchmetrics.MinMaxMetric(classification.MulticlassAccuracy(4)),
        multiclass,
        id="wrapper",
    ),
    pytest.param(
        lambda: classification.MulticlassAccuracy(4),
        lambda h, y: (h.repeat_interleave(3, 0), y.repeat_interleave(3)),
        id="rows of tokens",
    ),
]


def computed(metric):
    try:
        return metric.compute()
    except (ValueError, IndexError, RuntimeError) as error:  # too few examples
        return type(error).__name__


def is_same(actual, expected):
    def plain(value):
        value = list(value.values()) if isinstance(value, dict) else value
        return list(value) if isinstance(value, tuple) else value

    assert_same(plain(actual), plain(expected), tolerance=1e-4)


METRICS = {metric.id: metric.values for metric in [*catalogue(), *OTHERS]}
# Of the catalogue every second one; those with a kind of their own, all.
QUICK = {*list(METRICS)[::2], *(metric.id for metric in OTHERS)}


@each_once(metric=quick_of(METRICS, QUICK), schedule=["lockstep", "staggered", "parallel"])
def test_a_metric_in_forward_is_that_of_one_device(metric, schedule, make_strategy):
    # Integer states were the first replica's: accuracy 0.68 instead of 0.46.
    make, inputs = METRICS[metric]
    plain = Net(make(), inputs)
    model = make_strategy(3, schedule=schedule).mirror(copy.deepcopy(plain))
    for size in SIZES:
        x, y = torch.randn(size, 4), torch.randint(4, (size,))
        with torch.no_grad():
            plain(x, y)
            model(x, y)
    is_same(computed(model.metric), computed(plain.metric))
    plain.metric.reset()
    model.metric.reset()
    x, y = torch.randn(7, 4), torch.randint(4, (7,))
    with torch.no_grad():
        expected, actual = plain(x, y, "call"), model(x, y, "call")
    is_same(actual[1], expected[1])
    is_same(computed(model.metric), computed(plain.metric))


def test_a_model_with_metrics_trains_as_one_device_and_its_copies_are_plain(make_strategy):
    plain = Net(COLLECTION.values[0](), multiclass)
    model = make_strategy(2).mirror(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    for size in SIZES:
        x, y = torch.randn(size, 4), torch.randint(4, (size,))
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(m(x, y), y).backward()
            optimizer.step()
    assert_same(model.state_dict(), plain.state_dict())
    again = copy.deepcopy(model)
    again.inputs = model.inputs = plain.inputs = None
    for m in (again, pickle.loads(pickle.dumps(model))):
        assert not mirror.is_mirrored(m)
        is_same(m.metric.compute(), plain.metric.compute())


def test_a_metric_is_reset_and_computed_once_in_run(make_strategy):
    strategy = make_strategy(2)
    metric = torchmetrics.MetricCollection([classification.MulticlassAccuracy(4)])
    model = strategy.mirror(Net(metric, multiclass))
    x, y = torch.randn(7, 4), torch.randint(4, (7,))

    def evaluate(batch):
        model.metric.reset()
        model(*batch)
        return model.metric.compute()["MulticlassAccuracy"]

    (batch,) = strategy.distribute_dataset([(x, y)])
    first, second = strategy.local_results(strategy.run(evaluate, args=(batch,)))
    expected = classification.MulticlassAccuracy(4)(model.linear(x), y)
    assert_same([first, second], [expected, expected])


def test_what_cannot_be_joined_for_a_metric_is_refused(make_strategy):
    model = make_strategy(2).mirror(Net(torchmetrics.SumMetric(), lambda h, y: (h.sum(),)))
    with pytest.raises(StrategyError, match=r"updated once .* pass one row per example"):
        model(torch.randn(4, 4), torch.zeros(4))


def test_what_forward_logs_is_logged_once(make_strategy, monkeypatch):
    class LightningModule(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.logged = []

        def log(self, name, value, batch_size=None):
            self.logged.append((name, float(value), batch_size))

        def forward(self, x):
            h = self.linear(x)
            self.log("mean", h.mean(), batch_size=len(x))
            self.log("three", 3.0)
            return h

    library = types.ModuleType("lightning.pytorch")
    library.LightningModule = LightningModule
    monkeypatch.setitem(sys.modules, "lightning.pytorch", library)
    plain = LightningModule()
    model = make_strategy(3).mirror(copy.deepcopy(plain))
    for size in (7, 2):
        x = torch.randn(size, 4)
        plain(x)
        model(x)
    assert_same(model.logged, plain.logged)


def test_a_metric_that_one_replica_alone_updates_is_an_error(make_strategy):
    def sometimes(h, y):
        if mirror.get_replica_context().replica_id_in_sync_group == 0:
            model.metric.update(*multiclass(h, y))
        return multiclass(h, y)

    model = make_strategy(2).mirror(Net(classification.MulticlassAccuracy(4), sometimes))
    with pytest.raises(DivergenceError):
        model.train()
        model(torch.randn(4, 4), torch.randint(4, (4,)))
