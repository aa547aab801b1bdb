"""What layers write in their call: statistics, seeds, counters, losses."""

import keras
import numpy as np
from keras import layers, ops

from tests.keras.programs.common import IMAGES, X, compiled, fitted, trained

# A batch of two examples is normalised by a tenth of what it differs by, and rounds as much.
TOLERANCES = {"batch_normalization": 1e-4}


def _sequential(*inner, shape=(8,)):
    return lambda: keras.Sequential([layers.Input(shape), *(make() for make in inner)])


def _three():
    return layers.Dense(3)


def _normalization(**options):
    import mirror.keras

    return mirror.keras.SyncBatchNormalization(**options)


def batch_normalization(scope):
    return trained(scope, _sequential(lambda: layers.Dense(6), _normalization, _three))


def batch_normalization_of_images(scope):
    make = _sequential(
        lambda: layers.Conv2D(4, 3, use_bias=False),
        lambda: _normalization(momentum=0.9, axis=-1),
        layers.ReLU,
        layers.GlobalAveragePooling2D,
        _three,
        shape=(8, 8, 3),
    )
    return trained(scope, make, IMAGES)


def frozen_batch_normalization(scope):
    model = compiled(
        scope, _sequential(lambda: layers.Dense(6), layers.BatchNormalization, _three)
    )
    model.layers[1].moving_mean.assign(np.arange(6) / 10)
    model.layers[1].trainable = False
    return fitted(model)


def moving_statistics(scope):
    """Each replica normalises its own part, as in TensorFlow; the statistics are of all."""
    with scope():
        layer = layers.BatchNormalization(momentum=0.0, trainable=True)
        model = keras.Sequential([layers.Input((4,)), layer])
    numbers = np.arange(120, dtype="float32").reshape(30, 4)
    model(numbers, training=True)
    return layer.moving_mean


def running_mean(scope):
    class State(layers.Layer):
        def build(self, shape):
            self.n = self.add_weight(shape=(), initializer="zeros", trainable=False, name="n")

        def call(self, x):
            self.n.assign(0.9 * self.n + 0.1 * ops.mean(x))
            return x

    return trained(scope, _sequential(State, _three))


def counters(scope):
    class Counts(layers.Layer):
        def build(self, shape):
            options = {"shape": (), "initializer": "zeros", "trainable": False}
            self.calls = self.add_weight(dtype="int32", name="calls", **options)
            self.examples = self.add_weight(dtype="int32", name="examples", **options)
            self.total = self.add_weight(aggregation="sum", name="total", **options)

        def call(self, x):
            self.calls.assign_add(1)
            self.examples.assign_add(ops.shape(x)[0])
            self.total.assign_add(ops.sum(x))
            return x

    return trained(scope, _sequential(Counts, _three))


def metrics_of_layers(scope):
    class Measured(layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean(name="mean_of_layer")
            self.sum = keras.metrics.Sum(name="sum_of_layer")

        def call(self, x):
            self.mean.update_state(x)
            self.sum.update_state(ops.abs(x))
            return x

    model = compiled(scope, _sequential(Measured, _three))
    return fitted(model), model.layers[0].mean.result(), model.layers[0].sum.result()


def losses_of_layers(scope):
    class AddLoss(layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * ops.mean(x**2))
            return x

    return trained(scope, _sequential(lambda: layers.Dense(6), AddLoss, _three))


def activity_regularizers(scope):
    make = _sequential(
        lambda: layers.Dense(6, activity_regularizer="l2"), layers.ActivityRegularization
    )
    inner = lambda: keras.Sequential([make(), layers.Dense(3, activity_regularizer="l1")])  # noqa: E731
    return trained(scope, inner)


def losses_of_a_model(scope):
    """Nested, and added by a model to itself."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.Sequential([layers.Dense(6, activity_regularizer="l2")])
            self.last = layers.Dense(3)

        def call(self, x):
            h = self.inner(x)
            self.add_loss(ops.mean(ops.abs(h)) * 0.05)
            return self.last(h)

    model = compiled(scope, Net)
    return fitted(model), model(X), sum(model.losses)


def dropout_of_one_seed(scope):
    """The first part is that of one device; what fit leaves of the seeds is, too."""
    model = compiled(
        scope, _sequential(lambda: layers.Dense(6), lambda: layers.Dropout(0.5, seed=7))
    )
    with scope():
        seeds = model.layers[1].seed_generator
    outputs = [model(X[:21], training=True)[:7] for _ in range(2)]
    return outputs, seeds.state, model(X)


def dropout_out_of_training(scope):
    model = compiled(
        scope, _sequential(lambda: layers.Dropout(0.5), lambda: layers.GaussianNoise(0.1), _three)
    )
    return model(X, training=False), model.predict(X, verbose=0)


def preprocessing_layers(scope):
    with scope():
        normalization = layers.Normalization()
        normalization.adapt(X)
        discretization = layers.Discretization(bin_boundaries=[-1.0, 0.0, 1.0])
        one = keras.Input((8,))
        codes = layers.Embedding(5, 2)(discretization(one))
        h = layers.Concatenate()([normalization(one), layers.Flatten()(codes)])
        model = keras.Model(one, layers.Dense(3)(layers.Rescaling(0.5, 0.1)(h)))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fitted(model)


def category_layers(scope):
    with scope():
        one = keras.Input((2,), dtype="int32")
        crossed = layers.CategoryEncoding(num_tokens=8, output_mode="multi_hot")(one)
        model = keras.Model(one, layers.Dense(3)(crossed))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    numbers = (np.abs(X[:, :2]) * 3).astype("int32") % 8
    return fitted(model, numbers)
