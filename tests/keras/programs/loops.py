"""Steps and loops of one's own: train_step, a loop over batches, and steps inside ``run``."""

import contextlib

import keras
import torch
from keras import layers, ops

from tests.keras.programs.common import (
    WEIGHTS,
    X,
    Y,
    compiled,
    crossentropy,
    dense,
    fitted,
    trained,
)

TOLERANCES = {"statistics_in_run": 1e-4}  # of two examples


def _batches():
    for i in (0, 20, 40, 0, 20):
        yield torch.tensor(X[i : i + 20]), torch.tensor(Y[i : i + 20])


class _Stepping(keras.Model):
    """The train_step of the guide "Customizing what happens in fit() with PyTorch"."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(3)])

    def call(self, x, training=False):
        return self.inner(x)

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        predicted = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=predicted, sample_weight=weights)
        loss.backward()
        variables = [*self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in variables], variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted, sample_weight=weights)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        x, y = data
        predicted = self(x, training=False)
        return {"error": ops.mean(ops.abs(predicted)), "loss": self.compute_loss(x, y, predicted)}


def train_step_in_torch(scope):
    return trained(scope, _Stepping, sample_weight=WEIGHTS)


def train_step_with_trackers(scope):
    """The loss and the metrics are the model's own, at the lowest level."""

    class Net(_Stepping):
        def __init__(self):
            super().__init__()
            self.tracker = keras.metrics.Mean(name="loss")
            self.error = keras.metrics.MeanAbsoluteError(name="mae")
            self.fn = crossentropy()

        @property
        def metrics(self):
            return [self.tracker, self.error]

        def train_step(self, data):
            x, y = data
            predicted = self(x, training=True)
            loss = self.fn(y, predicted)
            self.zero_grad()
            loss.backward()
            variables = [*self.trainable_weights]
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in variables], variables)
            self.tracker.update_state(loss)
            self.error.update_state(ops.one_hot(y, 3), predicted)
            return {"loss": self.tracker.result(), "mae": self.error.result()}

    with scope():
        model = Net()
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-4))
    history = model.fit(X, Y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    return list(history.history.values()), model.get_weights()


def compute_loss_of_ones_own(scope):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = dense()

        def call(self, x):
            return self.inner(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return crossentropy()(y, y_pred) + 0.01 * ops.mean(y_pred**2) + sum(self.losses)

    return trained(scope, Net)


def loop_with_an_optimizer_of_keras(scope):
    """The guide "Writing a training loop from scratch in PyTorch"."""
    with scope():
        model = dense()
        optimizer = keras.optimizers.Adam(0.01, epsilon=1e-4)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    told = []
    for x, y in _batches():
        logits = model(x, training=True)
        loss = crossentropy()(y, logits)
        model.zero_grad()
        loss.backward()
        variables = model.trainable_weights
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
        accuracy.update_state(y, logits)
        told += [loss, accuracy.result()]
    return told, model.get_weights(), optimizer.variables


def mirrored_by_hand(scope):
    """``strategy.mirror`` of a model made elsewhere; no scope at all."""
    import mirror

    model = dense()
    with scope():
        if mirror.has_strategy():
            mirror.get_strategy().mirror(model)
    model.compile("sgd", crossentropy(), metrics=["accuracy"])
    return fitted(model)


def all_in_the_scope(scope):
    with scope():
        return trained(contextlib.nullcontext, dense)


def two_networks(scope):
    """A GAN with parts that are not built, from the guide on train_step."""

    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            self.critic = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
            self.maker = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(8)])

        def compile(self):
            super().compile()
            self.critics, self.makers = (keras.optimizers.Adam(0.01, epsilon=1e-4) for _ in "ab")
            self.fn = keras.losses.BinaryCrossentropy(from_logits=True)

        def call(self, x):
            return self.critic(self.maker(x))

        def step(self, optimizer, network, loss):
            network.zero_grad()
            loss.backward()
            variables = network.trainable_weights
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in variables], variables)

        def train_step(self, real):
            real = real[0] if isinstance(real, tuple) else real
            noise = ops.flip(real, axis=1)
            both = ops.concatenate([self.maker(noise), real])
            labels = ops.concatenate([ops.ones((len(real), 1)), ops.zeros((len(real), 1))])
            first = self.fn(labels, self.critic(both))
            self.step(self.critics, self.critic, first)
            second = self.fn(ops.zeros((len(real), 1)), self.critic(self.maker(noise)))
            self.step(self.makers, self.maker, second)
            return {"critic": first, "maker": second}

    with scope():
        model = Gan()
        model.compile()
    history = model.fit(X, batch_size=20, epochs=2, shuffle=False, verbose=0)
    return list(history.history.values()), model.critic.get_weights(), model.maker.get_weights()


def _in_run(scope, make, optimizer):
    """Steps inside ``run``, as in TensorFlow's tutorial on custom training."""
    import mirror

    with scope():
        model, optimizer = make(), optimizer()
    with scope():
        strategy = mirror.get_strategy()

    def step(batch):
        x, y = batch
        model.zero_grad()
        loss = crossentropy()(y, model(x, training=True))
        loss.backward()
        variables = model.trainable_weights
        optimizer.apply([v.value.grad for v in variables], variables)
        return loss

    told = []
    for batch in strategy.distribute_dataset(list(_batches())):
        told.append(strategy.reduce("mean", strategy.run(step, args=(batch,))))
    return told, model.get_weights(), optimizer.variables


def optimizer_applied_in_run(scope):
    return _in_run(scope, dense, lambda: keras.optimizers.Adam(0.01, epsilon=1e-4))


def clipped_in_run(scope):
    return _in_run(scope, dense, lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1))


def statistics_in_run(scope):
    import mirror.keras

    def make():
        inner = [layers.Dense(6), mirror.keras.SyncBatchNormalization(), layers.Dense(3)]
        return keras.Sequential([layers.Input((8,)), *inner])

    return _in_run(scope, make, lambda: keras.optimizers.SGD(0.1))


def compiled_twice(scope):
    model = compiled(scope)
    first = fitted(model)
    model.compile("adam", crossentropy())
    return first, fitted(model, epochs=1)


def compiled_out_of_the_scope(scope):
    with scope():
        model = dense()
    model.compile("adam", crossentropy(), metrics=["accuracy"])
    return fitted(model)
