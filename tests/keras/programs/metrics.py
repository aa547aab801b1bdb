"""Metrics of Keras: compiled, of one's own, and updated inside ``run``."""

import keras
import torch
from keras import ops

from tests.keras.programs.common import WEIGHTS, X, Y, compiled, crossentropy, dense, fitted


def many(scope):
    metrics = [
        "accuracy",
        keras.metrics.SparseTopKCategoricalAccuracy(2, name="top"),
        keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
    ]
    return fitted(compiled(scope, metrics=metrics))


def curves(scope):
    """Areas under curves, which are no means of those of parts."""

    def make():
        one = keras.layers.Dense(1, activation="sigmoid")
        return keras.Sequential([keras.layers.Input((8,)), one])

    metrics = [
        keras.metrics.AUC(),
        keras.metrics.Precision(),
        keras.metrics.F1Score(threshold=0.5),
    ]
    model = compiled(scope, make, loss=keras.losses.BinaryCrossentropy, metrics=metrics)
    return fitted(model, y=(Y > 0)[:, None].astype("float32"))


def of_ones_own(scope):
    class Positive(keras.metrics.Metric):
        def __init__(self, **options):
            super().__init__(**options)
            self.total = self.add_variable(shape=(), initializer="zeros", name="total")
            self.seen = self.add_variable(shape=(), initializer="zeros", name="seen")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign_add(ops.sum(ops.cast(y_pred > 0, "float32")))
            self.seen.assign_add(ops.cast(ops.shape(y_pred)[0], "float32"))

        def result(self):
            return self.total / self.seen

    return fitted(compiled(scope, metrics=[Positive(name="positive"), "accuracy"]))


def _in_run(scope, metrics, evaluate):
    """Calls ``evaluate(model, x, y, weights)`` inside run, for every batch."""
    import mirror

    with scope():
        model, strategy = dense(), mirror.get_strategy()
    batches = [
        tuple(torch.tensor(a[i : i + 20]) for a in (X, Y, WEIGHTS)) for i in (0, 20, 40, 41)
    ]
    told = []
    for batch in strategy.distribute_dataset(batches):
        strategy.run(lambda batch: evaluate(model, *batch), args=(batch,))
        told.append([metric.result() for metric in metrics])
    return told, [metric.variables for metric in metrics]


def updated_in_run(scope):
    accuracy, loss = keras.metrics.SparseCategoricalAccuracy(), keras.metrics.Mean()

    def evaluate(model, x, y, weights):
        logits = model(x)
        accuracy.update_state(y, logits, sample_weight=weights)
        loss.update_state(crossentropy()(y, logits))  # a mean of means: one for the batch

    return _in_run(scope, [accuracy, loss], evaluate)


def called_and_reset_in_run(scope):
    area = keras.metrics.AUC(num_thresholds=20)
    last = keras.metrics.Mean()
    told = []

    def evaluate(model, x, y, weights):
        last.reset_state()
        told.append(float(area(y > 0, ops.sigmoid(model(x)[:, 0]))))
        last.update_state(ops.abs(model(x)), weights)
        told.append(float(last.result()))

    result = _in_run(scope, [area, last], evaluate)
    return result, sorted(set(told))


def several_outputs_in_run(scope):
    kinds = keras.metrics.MeanMetricWrapper(
        lambda y, p: ops.mean(ops.abs(y - p[0]), axis=-1) + p[1], name="pair"
    )
    total = keras.metrics.Sum()

    def evaluate(model, x, y, weights):
        logits = model(x)
        kinds.update_state(ops.one_hot(y, 3), [logits, weights])
        total.update_state(logits**2)

    return _in_run(scope, [kinds, total], evaluate)
