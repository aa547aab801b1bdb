"""What is fed: arrays, tensors, loaders, generators; weights, and parts of the data."""

import importlib.util

import keras
import numpy as np
import torch

from tests.keras.programs.common import (
    SERIES,
    WEIGHTS,
    X,
    Y,
    compiled,
    crossentropy,
    dense,
    fitted,
)


def _fitted(scope, data, **options):
    model = compiled(scope)
    history = model.fit(data, epochs=2, verbose=0, **options)
    return [list(history.history.values()), model.evaluate(data, verbose=0), model.get_weights()]


def tensors(scope):
    return fitted(compiled(scope), torch.tensor(X), torch.tensor(Y))


def lists_of_arrays(scope):
    with scope():
        inputs = [keras.Input((8,)), keras.Input((9, 4))]
        h = keras.layers.Concatenate()([inputs[0], keras.layers.Flatten()(inputs[1])])
        model = keras.Model(inputs, keras.layers.Dense(3)(h))
        model.compile("sgd", crossentropy())
    return fitted(model, [X, SERIES])


def loader(scope):
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return _fitted(scope, torch.utils.data.DataLoader(data, batch_size=20))


def shuffled_loader(scope):
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    draws = torch.Generator().manual_seed(1)
    loader = torch.utils.data.DataLoader(data, 20, shuffle=True, generator=draws)
    return _fitted(scope, loader)


def sequence(scope):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return X[20 * i : 20 * i + 20], Y[20 * i : 20 * i + 20], WEIGHTS[20 * i : 20 * i + 20]

    return _fitted(scope, Batches())


def sequence_by_threads(scope):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return X[20 * i : 20 * i + 20], Y[20 * i : 20 * i + 20]

    return _fitted(scope, Batches(workers=2, use_multiprocessing=False), shuffle=False)


def generator(scope):
    def batches():
        while True:
            for i in (0, 20, 40):
                yield X[i : i + 20], Y[i : i + 20]

    model = compiled(scope)
    history = model.fit(batches(), steps_per_epoch=4, epochs=2, verbose=0)
    checked = model.evaluate(batches(), steps=2, verbose=0)
    return list(history.history.values()), checked, model.get_weights()


def tensorflow_dataset(scope):
    """Where TensorFlow is installed; else of arrays, as the same batches."""
    if importlib.util.find_spec("tensorflow") is None:
        return fitted(compiled(scope))
    import tensorflow as tf

    return _fitted(scope, tf.data.Dataset.from_tensor_slices((X, Y)).batch(20))


def shuffled_by_fit(scope):
    return fitted(compiled(scope), shuffle=True)


def validation(scope):
    model = compiled(scope)
    first = fitted(model, validation_split=0.3)
    return first, fitted(model, validation_data=(X[:7], Y[:7], WEIGHTS[:7]), validation_freq=2)


def class_weights(scope):
    return fitted(compiled(scope), class_weight={0: 1.0, 1: 2.0, 2: 0.5})


def sample_weights(scope):
    with scope():
        model = dense()
        model.compile("sgd", crossentropy(), metrics=["accuracy"], weighted_metrics=["accuracy"])
    return fitted(model, sample_weight=WEIGHTS)


def summed_loss(scope):
    with scope():
        model = dense()
        model.compile(keras.optimizers.SGD(0.005), loss=crossentropy(reduction="sum"))
    return fitted(model)


def average_loss_of_weights(scope):
    with scope():
        model = dense()
        model.compile("sgd", loss=crossentropy(reduction="mean_with_sample_weight"))
    return fitted(model, sample_weight=WEIGHTS)


def loss_of_ones_own(scope):
    def make():
        def loss(y, predicted):
            return keras.ops.mean((keras.ops.one_hot(y, 3) - predicted) ** 2, axis=-1)

        return loss

    return fitted(compiled(scope, loss=make, metrics=[make()]))


def batches_by_hand(scope):
    model = compiled(scope)
    told = []
    for i in (0, 20, 40, 41):
        told.append(model.train_on_batch(X[i : i + 20], Y[i : i + 20], WEIGHTS[i : i + 20]))
        told.append(model.test_on_batch(X[i : i + 20], Y[i : i + 20]))
    return told, model.predict_on_batch(X[:5]), model.get_weights()


def one_example(scope):
    """Less than there are replicas, in every batch."""
    return fitted(compiled(scope), X[:3], Y[:3], batch_size=1)


def predicted_at_once(scope):
    model = compiled(scope)
    return model(X), model.predict(X, batch_size=42, verbose=0), model.predict(X[:1], verbose=0)


def eager_steps(scope):
    return fitted(compiled(scope, run_eagerly=True))


def numbers_of_double_precision(scope):
    return fitted(compiled(scope), X.astype(np.float64), Y.astype(np.int64))
