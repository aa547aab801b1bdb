"""Metrics that replicas update in run have, merged, the value of one device."""

import pytest
import torch

import mirror
from tests.multi_worker import both, strategy_of
from tests.oracle import assert_same
from tests.pairs import each_once

torchmetrics = pytest.importorskip("torchmetrics")
classification = torchmetrics.classification
regression = torchmetrics.regression

REPLICAS = [1, 2, 3, 4]
SIZES = [9, 7, 1, 2]  # uneven parts, and replicas that sit out


def probabilities(num_examples):
    return torch.rand(num_examples, 4).softmax(1), torch.randint(4, (num_examples,))


def scores(num_examples):
    return torch.rand(num_examples), torch.randint(2, (num_examples,))


def values(num_examples):
    target = torch.randn(num_examples)
    return target + 0.3 * torch.randn(num_examples), target


CASES = {
    "accuracy": (lambda: classification.MulticlassAccuracy(4), probabilities),
    "micro accuracy": (
        lambda: classification.MulticlassAccuracy(4, average="micro"),
        probabilities,
    ),
    "F1": (lambda: classification.MulticlassF1Score(4), probabilities),
    "confusion": (lambda: classification.MulticlassConfusionMatrix(4), probabilities),
    "AUROC": (lambda: classification.BinaryAUROC(), scores),
    "binned AUROC": (lambda: classification.BinaryAUROC(thresholds=20), scores),
    "multiclass AUROC": (lambda: classification.MulticlassAUROC(4), probabilities),
    "average precision": (lambda: classification.BinaryAveragePrecision(), scores),
    "squared error": (lambda: regression.MeanSquaredError(), values),
    "absolute error": (lambda: regression.MeanAbsoluteError(), values),
    "R2": (lambda: regression.R2Score(), values),
    "Pearson": (lambda: regression.PearsonCorrCoef(), values),
    "Spearman": (lambda: regression.SpearmanCorrCoef(), values),
    # Its range is averaged over replicas, where it is the same.
    "signal to noise": (lambda: torchmetrics.image.PeakSignalNoiseRatio(data_range=3.0), values),
    "class by class": (
        lambda: torchmetrics.ClasswiseWrapper(classification.MulticlassAccuracy(4, average=None)),
        probabilities,
    ),
    "collection": (
        lambda: torchmetrics.MetricCollection(
            [
                classification.MulticlassAccuracy(4),
                classification.MulticlassPrecision(4),  # shares its states with accuracy
                classification.MulticlassAUROC(4),
            ]
        ),
        probabilities,
    ),
}


@pytest.mark.filterwarnings("ignore:Metric .* will save all targets:UserWarning")
@each_once(case=[pytest.param(value, id=key) for key, value in CASES.items()], n=REPLICAS)
def test_the_merged_value_is_that_of_one_device(make_strategy, n, case):
    make, draw = case
    strategy = make_strategy(n)
    metrics = strategy.distribute_values_from_function(lambda _: make())
    plain = make()
    for preds, target in map(draw, SIZES):
        (batch,) = strategy.distribute_dataset([(preds, target)])
        strategy.run(lambda batch, metric: metric.update(*batch), args=(batch, metrics))
        plain.update(preds, target)
        # Merging leaves the parts as they are, so it can be done after each step.
        assert_same(mirror.metrics.merge(metrics).compute(), plain.compute())


def test_a_metric_never_updated_merges_to_one(make_strategy):
    metrics = make_strategy(2).distribute_values_from_function(
        lambda _: torchmetrics.aggregation.MeanMetric()
    )
    merged = mirror.metrics.merge(metrics)
    assert isinstance(merged, torchmetrics.aggregation.MeanMetric)
    assert merged.update_count == 0


def test_structures_of_metrics_merge_to_structures(make_strategy):
    strategy = make_strategy(2)
    with strategy.scope():
        metrics = strategy.distribute_values_from_function(
            lambda _: {"sum": torchmetrics.SumMetric(), "top": [torchmetrics.MaxMetric()]}
        )

    def update(metrics, value):
        metrics["sum"].update(value)
        metrics["top"][0].update(value)

    strategy.run(update, args=(metrics, mirror.PerReplica([1.0, 5.0])))
    merged = mirror.metrics.merge(metrics)
    assert (merged["sum"].compute(), merged["top"][0].compute()) == (6.0, 5.0)
    assert merged["sum"].update_count == 2


def test_an_average_of_unknown_weights_is_refused(make_strategy):
    class Average(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("value", torch.zeros(()), dist_reduce_fx="mean")

        def update(self, value):
            self.value = value.mean()

        def compute(self):
            return self.value

    strategy = make_strategy(2)
    metrics = strategy.distribute_values_from_function(lambda _: Average())
    (batch,) = strategy.distribute_dataset([torch.tensor([1.0, 2.0, 6.0])])
    strategy.run(lambda part, metric: metric.update(part), args=(batch, metrics))
    with pytest.raises(ValueError, match="state 'value' is a mean over replicas"):
        mirror.metrics.merge(metrics)


@pytest.mark.parametrize("value", [3, mirror.PerReplica([1, 2]), mirror.PerReplica([])])
def test_what_is_no_metric_is_refused(value):
    with pytest.raises(TypeError, match="merge takes a PerReplica of torchmetrics"):
        mirror.metrics.merge(value)


def test_one_metric_for_all_is_copied():
    metric = torchmetrics.SumMetric()
    metric.update(3)
    merged = mirror.metrics.merge(metric)
    assert merged is not metric
    assert merged.compute() == 3.0


def of_workers(counts):
    with strategy_of(counts) as strategy:
        metrics = strategy.distribute_values_from_function(
            lambda _: {"mean": torchmetrics.MeanMetric(), "all": torchmetrics.CatMetric()}
        )

        def update(metrics):
            r = mirror.get_replica_context().replica_id_in_sync_group
            for metric in metrics.values():
                metric.update(torch.arange(r + 1.0))

        strategy.run(update, args=(metrics,))
        merged = mirror.metrics.merge(metrics)
        found = {name: metric.compute() for name, metric in merged.items()}
    return [found] * len(strategy.devices)


@pytest.mark.slow
def test_a_merged_metric_computes_over_all_workers(worker_pool):
    found, expected = both(worker_pool, of_workers, (1, 2))
    for mine in found:
        assert_same(mine, expected[0])
