"""Metrics outside mirrored modules that replicas update in run have the value of one device."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import DivergenceError, StrategyError
from mirror.replica.modules import metric_calls
from tests.gpu.fake import FakeGpus
from tests.oracle import assert_same
from tests.pairs import each_once

torchmetrics = pytest.importorskip("torchmetrics")
classification = torchmetrics.classification
wrappers = torchmetrics.wrappers

pytestmark = pytest.mark.filterwarnings("ignore")

N = 3
SIZES = [7, 1, 2]  # uneven parts, and replicas that sit out


def accuracy():
    return classification.MulticlassAccuracy(4)


def collection():
    return torchmetrics.MetricCollection([accuracy(), classification.MulticlassPrecision(4)])


def scores(h, y):
    return h.softmax(1), y


def values(h, y):
    return h[:, 0], y.float()


def mean(h, y):
    return (h.mean(),)


# A number of a part: the mean over it, which is joined by examples.
KINDS = {
    "accuracy": (accuracy, scores),
    "auroc": (lambda: classification.MulticlassAUROC(4), scores),
    "pearson": (torchmetrics.PearsonCorrCoef, values),
    "collection": (collection, scores),
    "mean": (torchmetrics.MeanMetric, mean),
    "weighted mean": (torchmetrics.MeanMetric, lambda h, y: (h.mean(), len(h))),
    "max": (torchmetrics.MaxMetric, lambda h, y: (h.max(),)),
    "count": (torchmetrics.SumMetric, lambda h, y: ((y > 1).sum(),)),
    "cat": (torchmetrics.CatMetric, lambda h, y: (h,)),
    "running": (lambda: wrappers.Running(torchmetrics.MeanMetric(), 2), mean),
    "class by class": (
        lambda: torchmetrics.ClasswiseWrapper(classification.MulticlassAccuracy(4, average=None)),
        scores,
    ),
    "extremes": (lambda: torchmetrics.MinMaxMetric(accuracy()), scores),
    "tasks": (
        lambda: torchmetrics.MultitaskWrapper({"a": accuracy(), "b": torchmetrics.MeanMetric()}),
        lambda h, y: ({"a": h.softmax(1), "b": h[:, 0]}, {"a": y, "b": torch.ones(len(h))}),
    ),
    "of two": (lambda: accuracy() + classification.MulticlassRecall(4), scores),
}


def batches(strategy, sizes=SIZES):
    whole = [(torch.randn(size, 4), torch.randint(4, (size,))) for size in sizes]
    return zip(whole, strategy.distribute_dataset(whole), strict=True)


def is_same(actual, expected):
    def plain(value):
        value = list(value.values()) if isinstance(value, dict) else value
        return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value

    assert_same(plain(actual), plain(expected), tolerance=1e-5)


@each_once(
    **{"make,inputs": [pytest.param(*value, id=key) for key, value in KINDS.items()]},
    schedule=["lockstep", "staggered", "parallel"],
)
def test_a_lone_metric_in_run_is_that_of_one_device(make, inputs, schedule, make_strategy, eager):
    plain, lone = make(), make()
    strategy = make_strategy(N, schedule=schedule)

    def evaluate(batch):
        lone.update(*inputs(*batch))
        return lone.compute()

    for whole, batch in batches(strategy):
        plain.update(*inputs(*whole))
        computed = strategy.local_results(strategy.run(evaluate, args=(batch,)))
        for value in computed:
            is_same(value, plain.compute())
    is_same(lone.compute(), plain.compute())

    def again(batch):
        lone.reset()
        return lone(*inputs(*batch))

    plain.reset()
    ((whole, batch),) = batches(strategy, [7])
    expected = plain(*inputs(*whole))
    for value in strategy.local_results(strategy.run(again, args=(batch,))):
        is_same(value, expected)
    is_same(lone.compute(), plain.compute())


def held_in_a_dict(metric):
    held = {"of": [metric]}
    return lambda: held["of"][0]


def held_by_an_object(metric):
    trainer = SimpleNamespace(state=SimpleNamespace(metric=metric))
    return lambda: trainer.state.metric


def copied(metric):
    return held_in_a_dict(copy.deepcopy(pickle.loads(pickle.dumps(metric.clone()))))


def made_before_there_was_a_run(metric):
    """Its methods are those that its library gave it, as those made before any strategy."""
    for name in {"update", "compute"} & vars(metric).keys():
        method = vars(metric)[name]
        setattr(metric, name, method.__wrapped__)
        assert not hasattr(getattr(metric, name), "_mirror_wrapped")
    metric_calls.unwatched_libraries[:] = ["torchmetrics"]
    return lambda: metric


@pytest.mark.parametrize("make", [accuracy, collection])
@pytest.mark.parametrize(
    "hold", [held_in_a_dict, held_by_an_object, copied, made_before_there_was_a_run]
)
def test_a_lone_metric_is_found_wherever_it_is(hold, make, make_strategy):
    strategy = make_strategy(N)
    strategy.run(lambda: None)
    metric_of, plain = hold(make()), make()
    for whole, batch in batches(strategy):
        strategy.run(lambda batch: metric_of().update(*scores(*batch)), args=(batch,))
        plain.update(*scores(*whole))
    is_same(metric_of().compute(), plain.compute())
    for metric in metric_of().values() if make is collection else [metric_of()]:
        assert metric.update_count == len(SIZES)


def test_a_metric_put_on_a_mirrored_module_is_updated_once(make_strategy):
    strategy = make_strategy(N)
    model = strategy.mirror(nn.Linear(4, 4))
    model(torch.randn(7, 4))
    model.metric, plain = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
    for whole, batch in batches(strategy):
        strategy.run(lambda batch: model.metric.update(batch[0].mean()), args=(batch,))
        plain.update(whole[0].mean())
    is_same(model.metric.compute(), plain.compute())
    assert model.metric.update_count == len(SIZES)


@pytest.mark.parametrize("schedule", ["lockstep", "staggered", "parallel"])
def test_one_replica_alone_may_update_and_compute(schedule, make_strategy, eager):
    strategy = make_strategy(N, schedule=schedule)
    lone, plain = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()

    def step(batch):
        context = mirror.get_replica_context()
        if context.replica_id_in_sync_group == 1:
            lone.update(batch[0].mean())
        total = context.all_reduce("sum", batch[0].sum())
        if context.replica_id_in_sync_group == 2:
            return total, lone.compute()
        return total, None

    ((whole, batch),) = batches(strategy, [7])
    totals, computed = strategy.run(step, args=(batch,))
    plain.update(whole[0].tensor_split(N)[1].mean())
    assert_same(strategy.local_results(computed)[-1], plain.compute())
    assert_same(totals.values, (whole[0].sum(),) * N)


def test_replicas_that_update_are_joined_without_the_rest(make_strategy):
    strategy = make_strategy(N)
    lone, plain = accuracy(), accuracy()

    def step(batch):  # some find more than others, and some nothing
        for x, y in zip(*batch, strict=True):
            if y > 1:
                lone.update(x[None].softmax(1), y[None])

    for (x, y), batch in batches(strategy, [9, 7, 2]):
        strategy.run(step, args=(batch,))
        plain.update(x[y > 1].softmax(1), y[y > 1])
    is_same(lone.compute(), plain.compute())


def test_replicas_with_metrics_of_their_own_are_left_alone(make_strategy):
    strategy = make_strategy(N)
    own = [torchmetrics.MeanMetric() for _ in range(N)]
    first = []

    def step(batch):
        r = mirror.get_replica_context().replica_id_in_sync_group
        local = torchmetrics.MeanMetric()
        if r != 1:
            own[r].update(batch[0].mean())
            local.update(batch[0].max())
        if r == 2:
            first.append(own[r].compute())
        return local.compute()

    ((whole, batch),) = batches(strategy, [7])
    computed = strategy.run(step, args=(batch,)).values
    parts = whole[0].tensor_split(N)
    assert [metric.update_count for metric in own] == [1, 0, 1]
    assert_same([own[0].compute(), first[0]], [parts[0].mean(), parts[2].mean()])
    assert_same([computed[0], computed[2]], [parts[0].max(), parts[2].max()])


def test_a_tracker_moves_on_once(make_strategy):
    strategy = make_strategy(N)
    trackers = [wrappers.MetricTracker(accuracy()) for _ in range(2)]
    model = strategy.mirror(nn.Linear(4, 4))
    model.tracker, lone = trackers
    plain = wrappers.MetricTracker(accuracy())

    def epoch(batch):
        for tracker in (model.tracker, lone):
            tracker.increment()
            tracker.update(*scores(*batch))
        return lone.best_metric()

    for whole, batch in batches(strategy, [9, 7]):
        best = strategy.run(epoch, args=(batch,))
        plain.increment()
        plain.update(*scores(*whole))
    for tracker in (model.tracker, lone):
        is_same(tracker.compute_all(), plain.compute_all())
    assert best.values == (plain.best_metric(),) * N


class Net(nn.Module):
    """Updates a metric that it does not have."""

    def __init__(self, metric, is_to_update=lambda h: True):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.metric_of, self.is_to_update = (lambda: metric), is_to_update

    def forward(self, x, y):
        h = self.linear(x)
        if self.is_to_update(h):
            self.metric_of().update(*scores(h, y))
        return h


def test_a_forward_that_is_split_updates_a_lone_metric_with_the_whole_batch(make_strategy):
    strategy = make_strategy(N)
    lone, plain = accuracy(), accuracy()
    model = strategy.mirror(Net(lone))
    for size in SIZES:
        x, y = torch.randn(size, 4), torch.randint(4, (size,))
        plain.update(*scores(model(x, y), y))
    assert lone.update_count == len(SIZES)
    is_same(lone.compute(), plain.compute())
    only_first = Net(lone, lambda h: mirror.get_replica_context().replica_id_in_sync_group == 0)
    with pytest.raises(DivergenceError, match="MulticlassAccuracy"):
        strategy.mirror(only_first)(torch.randn(4, 4), torch.zeros(4).long())


def test_what_cannot_be_joined_is_refused(make_strategy):
    strategy, lone = make_strategy(N), torchmetrics.SumMetric()
    with pytest.raises(StrategyError, match=r"SumMetric is updated once .* one row per example"):
        strategy.run(lambda: lone.update(torch.rand(())))
    strategy.run(lambda: lone.update(torch.ones(2)))
    assert lone.compute() == 2 * N


def test_a_value_is_differentiated_after_run_and_not_inside(make_strategy):
    strategy = make_strategy(N)
    plain = nn.Linear(4, 1)
    model = strategy.mirror(copy.deepcopy(plain))
    lone, alone = torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()
    ((whole, batch),) = batches(strategy, [7])

    def forward(batch):
        return lone(model(batch[0])[:, 0], batch[1].float())

    losses = strategy.run(forward, args=(batch,))
    strategy.reduce("mean", losses).backward()
    alone(plain(whole[0])[:, 0], whole[1].float()).backward()
    assert_same(model.weight.grad, plain.weight.grad)
    with pytest.raises(StrategyError, match="differentiate a loss of the part"):
        strategy.run(lambda batch: forward(batch).backward(), args=(batch,))


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1", "cpu"])
def test_a_lone_metric_gets_all_where_it_is(device):
    plain = torchmetrics.MeanMetric()
    with (
        FakeGpus(2),
        mirror.MirroredStrategy(["cuda:0", "cuda:1"], "naive", schedule="staggered") as strategy,
    ):
        lone = torchmetrics.MeanMetric().to(device)

        def step(batch):
            lone.update(batch[0].to(device).mean() if device == "cpu" else batch[0].mean())
            return lone.compute()

        for whole, batch in batches(strategy):
            computed = strategy.local_results(strategy.run(step, args=(batch,)))
            plain.update(whole[0].mean())
        places = [str(value.device) for value in computed]
        seen = [float(value) for value in computed]
    assert places == (["cpu"] * 2 if device == "cpu" else ["cuda:0", "cuda:1"])
    assert seen == pytest.approx([float(plain.compute())] * 2)
