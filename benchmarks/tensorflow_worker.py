"""A process that runs the steps of TensorFlow's MirroredStrategy, on logical CPUs.

It runs under an interpreter that has TensorFlow. Of this folder it needs only ``cases.py`` and
``resident.py``. Commands and answers are those of ``train_worker.py``. The models have the sizes
and the number of weights of ``models.py``; values and layouts are TensorFlow's own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from cases import CASES, LEARNING_RATE, MOMENTUM, Case
from resident import serve
from timing import seconds_of

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras
import tensorflow as tf
from keras import layers

FIRST_STEPS = 3


class Contestant:
    """The whole step as one compiled function that ``strategy.run`` calls on every replica."""

    def __init__(self, options: dict[str, Any]) -> None:
        n, threads = options["n"], options["threads"]
        # One pool of each kind serves all logical devices of the process.
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * n
        )
        self._strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(n)])
        self._read_loss = options["read_loss"]
        self._step: Callable[[], Any] = lambda: None

    def answer(self, command: dict[str, Any]) -> object:
        if "case" in command:
            keras.backend.clear_session()
            self._step = self._prepare(CASES[command["case"]])
            return [float(self._step()) for _ in range(FIRST_STEPS)]
        self._step()
        return seconds_of(partial(self._repeat, command["steps"])) / command["steps"]

    def _repeat(self, count: int) -> None:
        for _ in range(count):
            loss = self._step()
        loss.numpy()  # a step may still be running

    def _prepare(self, case: Case) -> Callable[[], Any]:
        keras.utils.set_random_seed(0)
        with self._strategy.scope():
            model = build(case)
            optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
            optimizer.build(model.trainable_variables)
        entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        elements = case.batch * case.per_example

        def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(entropy(y, model(x, training=True))) / elements
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        @tf.function
        def train_everywhere(x: Any, y: Any) -> tf.Tensor:
            losses = self._strategy.run(train, args=(x, y))
            return self._strategy.reduce("SUM", losses, axis=None)

        x, y = (self._parts(tensor) for tensor in batch_of(case))

        def step() -> Any:
            loss = train_everywhere(x, y)
            if self._read_loss:
                loss.numpy()
            return loss

        return step

    def _parts(self, tensor: tf.Tensor) -> Any:
        parts = tf.split(tensor, self._strategy.num_replicas_in_sync)
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )


def batch_of(case: Case) -> tuple[tf.Tensor, tf.Tensor]:
    n, sizes = case.batch, case.sizes
    if case.model == "transformer":
        shape, top = (n, sizes["tokens"]), sizes["vocabulary"]
        return tuple(tf.random.uniform(shape, maxval=top, dtype=tf.int32) for _ in "xy")
    if case.model == "mlp":
        x, classes = tf.random.normal((n, sizes["width"])), sizes["width"]
    else:
        channels = 1 if case.model == "cnn" else 3
        x = tf.random.normal((n, sizes["size"], sizes["size"], channels))
        classes = sizes["classes"]
    return x, tf.random.uniform((n,), maxval=classes, dtype=tf.int32)


def build(case: Case) -> keras.Model:
    kinds = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "resnet50": resnet50}
    return kinds[case.model](**case.sizes)


def mlp(depth: int, width: int) -> keras.Model:
    hidden = [layers.Dense(width, "relu") for _ in range(depth - 1)]
    return keras.Sequential([keras.Input((width,)), *hidden, layers.Dense(width)])


def cnn(size: int, channels: int, hidden: int, classes: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((size, size, 1)),
            layers.Conv2D(channels, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(2 * channels, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(hidden, "relu"),
            layers.Dense(classes),
        ]
    )


class Positions(layers.Layer):
    def build(self, shape: tuple[int, ...]) -> None:
        self.positions = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + self.positions


class CausalAttention(layers.Layer):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv, self.projection = layers.Dense(3 * width), layers.Dense(width)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        tokens, each = x.shape[1], self.width // self.heads
        qkv = tf.reshape(self.qkv(x), (-1, tokens, 3, self.heads, each))
        q, k, v = tf.unstack(tf.transpose(qkv, (2, 0, 3, 1, 4)))
        scores = tf.matmul(q, k, transpose_b=True) * each**-0.5
        allowed = tf.linalg.band_part(tf.ones((tokens, tokens), tf.bool), -1, 0)
        weights = tf.nn.softmax(tf.where(allowed, scores, -1e9))
        joined = tf.transpose(tf.matmul(weights, v), (0, 2, 1, 3))
        return self.projection(tf.reshape(joined, (-1, tokens, self.width)))


def transformer(layers: int, width: int, heads: int, tokens: int, vocabulary: int) -> keras.Model:
    make = keras.layers
    inputs = keras.Input((tokens,), dtype="int32")
    x = Positions()(make.Embedding(vocabulary, width)(inputs))
    for _ in range(layers):
        x = x + CausalAttention(width, heads)(make.LayerNormalization(epsilon=1e-5)(x))
        inner = make.Dense(4 * width, "gelu")(make.LayerNormalization(epsilon=1e-5)(x))
        x = x + make.Dense(width)(inner)
    x = make.LayerNormalization(epsilon=1e-5)(x)
    return keras.Model(inputs, make.Dense(vocabulary)(x))


def resnet50(size: int, width: int, classes: int) -> keras.Model:
    def convolution(x: Any, channels: int, kernel: int, stride: int = 1) -> Any:
        x = layers.Conv2D(channels, kernel, stride, "same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    inputs = keras.Input((size, size, 3))
    x = layers.ReLU()(convolution(inputs, width, 7, 2))
    x = layers.MaxPooling2D(3, 2, "same")(x)
    for stage, count in enumerate((3, 4, 6, 3)):
        inner = width * 2**stage
        for i in range(count):
            stride = 2 if stage and not i else 1
            path = layers.ReLU()(convolution(x, inner, 1))
            path = layers.ReLU()(convolution(path, inner, 3, stride))
            path = convolution(path, 4 * inner, 1)
            shortcut = x if i else convolution(x, 4 * inner, 1, stride)
            x = layers.ReLU()(path + shortcut)
    return keras.Model(inputs, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


if __name__ == "__main__":
    serve(Contestant(json.loads(sys.argv[1])).answer)
