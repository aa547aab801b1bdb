"""Data that the programs have in common, and what they do with a model."""

import keras
import numpy as np
from keras import layers

_draws = np.random.default_rng(0)
# In batches of 20 the last one has 2 examples, of three replicas: uneven, and one sits out.
X = _draws.normal(size=(42, 8)).astype("float32")
Y = _draws.integers(0, 3, size=(42,)).astype("int32")
IMAGES = _draws.normal(size=(42, 8, 8, 3)).astype("float32")
WORDS = _draws.integers(1, 20, size=(42, 9)).astype("int32")
WORDS[np.arange(9) >= _draws.integers(2, 10, size=(42, 1))] = 0  # of different length
SERIES = _draws.normal(size=(42, 9, 4)).astype("float32")
WEIGHTS = _draws.uniform(0.1, 2, size=(42,)).astype("float32")


def crossentropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def dense():
    """Returns a small classifier of rows of ``X``."""
    return keras.Sequential(
        [layers.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(3)]
    )


def compiled(scope, make=dense, optimizer=sgd, loss=crossentropy, metrics=("accuracy",), **more):
    """Returns a model made and compiled in a scope."""
    with scope():
        model = make()
        model.compile(optimizer(), loss=loss(), metrics=[*metrics], **more)
    return model


def fitted(model, x=X, y=Y, **options):
    """Fits, evaluates and predicts outside the scope; returns the numbers of all that."""
    options = {"batch_size": 20, "epochs": 2, "shuffle": False, "verbose": 0} | options
    history = model.fit(x, y, **options)
    return [
        list(history.history.values()),
        list(model.evaluate(x, y, batch_size=20, verbose=0, return_dict=True).values()),
        model.predict(x, batch_size=20, verbose=0),
        model.get_weights(),
    ]


def trained(scope, make, x=X, y=Y, **options):
    """Compiles in a scope, fits, evaluates and predicts."""
    return fitted(compiled(scope, make), x, y, **options)
