"""Programs as in Keras's guides and examples, small: generative, siamese, transfer, sequences."""

import keras
import numpy as np
import torch
from keras import layers, ops

from mirror.keras import SyncBatchNormalization
from tests.keras.programs.common import (
    IMAGES,
    SERIES,
    WORDS,
    X,
    Y,
    compiled,
    crossentropy,
    fitted,
    trained,
)

TOLERANCES = {"transformer_block": 1e-4}


def _step(model, loss):
    model.zero_grad()
    loss.backward()
    variables = [*model.trainable_weights]
    with torch.no_grad():
        model.optimizer.apply([v.value.grad for v in variables], variables)


def _epochs(model, x, y=None):
    history = model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    return list(history.history.values()), model.get_weights()


def variational_autoencoder(scope):
    """Its sampling layer without noise: that differs on each replica."""

    class Sampling(layers.Layer):
        def call(self, inputs):
            mean, log_var, noise = inputs
            return mean + ops.exp(0.5 * log_var) * noise

    class Vae(keras.Model):
        def __init__(self):
            super().__init__()
            inputs = keras.Input((8, 8, 3))
            h = layers.Flatten()(layers.Conv2D(4, 3, strides=2, activation="relu")(inputs))
            noise = keras.Input((2,))
            mean, log_var = layers.Dense(2)(h), layers.Dense(2)(h)
            sampled = Sampling()([mean, log_var, noise])
            self.encoder = keras.Model([inputs, noise], [mean, log_var, sampled])
            latent = keras.Input((2,))
            h = layers.Reshape((4, 4, 2))(layers.Dense(32, activation="relu")(latent))
            h = layers.Conv2DTranspose(3, 3, strides=2, padding="same", activation="sigmoid")(h)
            self.decoder = keras.Model(latent, h)
            self.trackers = [keras.metrics.Mean(name=n) for n in ("total", "kl")]

        @property
        def metrics(self):
            return self.trackers

        def call(self, inputs):
            return self.decoder(self.encoder(inputs)[2])

        def train_step(self, data):
            ((images, noise),) = data if isinstance(data, tuple) and len(data) == 1 else (data,)
            mean, log_var, sampled = self.encoder([images, noise])
            made = self.decoder(sampled)
            rebuilt = ops.mean(ops.sum((ops.sigmoid(images) - made) ** 2, axis=(1, 2, 3)))
            kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
            kl = ops.mean(ops.sum(kl, axis=1))
            _step(self, rebuilt + kl)
            for tracker, value in zip(self.trackers, (rebuilt + kl, kl), strict=True):
                tracker.update_state(value)
            return {tracker.name: tracker.result() for tracker in self.trackers}

    with scope():
        model = Vae()
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-4))
    noise = np.random.default_rng(1).normal(size=(42, 2)).astype("float32")
    return _epochs(model, [IMAGES, noise])


def siamese_network(scope):
    """Two towers of one network, and a contrastive loss over their distance."""

    def make():
        tower = keras.Sequential([layers.Input((8,)), layers.Dense(6, activation="tanh")])
        tower.add(layers.BatchNormalization(trainable=False))
        one, other = keras.Input((8,)), keras.Input((8,))
        away = ops.sum((tower(one) - tower(other)) ** 2, 1, keepdims=True)
        return keras.Model([one, other], ops.sqrt(away + 1e-6))

    def contrastive(y, away):
        y = ops.cast(ops.reshape(y, (-1, 1)), away.dtype)
        return ops.mean((1 - y) * away**2 + y * ops.maximum(1 - away, 0) ** 2)

    with scope():
        model = make()
        model.compile(keras.optimizers.RMSprop(0.01, epsilon=1e-4), loss=contrastive)
    return fitted(model, [X, X[::-1].copy()], (Y > 0).astype("int32"))


def triplet_network(scope):
    """A layer of distances inside a model with a train_step of its own."""

    class Distances(layers.Layer):
        def call(self, anchor, positive, negative):
            return ops.sum((anchor - positive) ** 2, -1), ops.sum((anchor - negative) ** 2, -1)

    class Triplets(keras.Model):
        def __init__(self):
            super().__init__()
            one = [keras.Input((8,)) for _ in range(3)]
            embed = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(4)])
            self.network = keras.Model(one, Distances()(*(embed(i) for i in one)))
            self.tracker = keras.metrics.Mean(name="loss")

        def call(self, inputs):
            return self.network(inputs)

        def train_step(self, data):
            near, far = self.network(data[0])
            loss = ops.mean(ops.maximum(near - far + 0.5, 0.0))
            _step(self, loss)
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

    with scope():
        model = Triplets()
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-4))
    return _epochs(model, [X, X * 0.9, X[::-1].copy()], Y)


def transfer_learning(scope):
    """A frozen network under a new head; then all of it, slowly."""
    metrics = ["accuracy"]
    with scope():
        inner = [layers.Conv2D(4, 3), SyncBatchNormalization(), layers.ReLU()]
        base = keras.Sequential([layers.Input((8, 8, 3)), *inner])
        base.trainable = False
        inputs = keras.Input((8, 8, 3))
        h = layers.GlobalAveragePooling2D()(base(layers.Rescaling(0.5)(inputs), training=False))
        model = keras.Model(inputs, layers.Dense(3)(h))
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-4), crossentropy(), metrics=metrics)
    first = fitted(model, IMAGES)
    base.trainable = True
    model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-4), crossentropy(), metrics=metrics)
    return first, fitted(model, IMAGES)


def autoencoder(scope):
    def make():
        return keras.Sequential(
            [
                layers.Input((8, 8, 3)),
                layers.Conv2D(4, 3, activation="relu", padding="same"),
                layers.MaxPooling2D(2, padding="same"),
                layers.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same"),
                layers.Conv2D(3, 3, activation="sigmoid", padding="same"),
            ]
        )

    squashed = 1 / (1 + np.exp(-IMAGES))
    model = compiled(scope, make, loss=keras.losses.BinaryCrossentropy, metrics=[])
    return fitted(model, squashed, squashed)


def text_classification(scope):
    def make():
        words = keras.Input((None,), dtype="int32")
        h = layers.Embedding(20, 6)(words)
        h = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(h)
        h = layers.Bidirectional(layers.LSTM(4))(h)
        return keras.Model(words, layers.Dense(1, activation="sigmoid")(h))

    model = compiled(scope, make, loss=keras.losses.BinaryCrossentropy)
    return fitted(model, WORDS, (Y > 0).astype("float32"))


def transformer_block(scope):
    class Block(layers.Layer):
        def __init__(self, width, heads):
            super().__init__()
            self.attention = layers.MultiHeadAttention(heads, width)
            self.feed = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(width)])
            self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]

        def call(self, x):
            x = self.norms[0](x + self.attention(x, x))
            return self.norms[1](x + self.feed(x))

    class Positions(layers.Layer):
        def __init__(self):
            super().__init__()
            self.words = layers.Embedding(20, 6)
            self.places = layers.Embedding(9, 6)

        def call(self, x):
            return self.words(x) + self.places(ops.arange(0, ops.shape(x)[-1]))

    def make():
        words = keras.Input((9,))
        h = layers.GlobalAveragePooling1D()(Block(6, 2)(Positions()(words)))
        return keras.Model(words, layers.Dense(3)(layers.Dropout(0.0)(h)))

    return trained(scope, make, WORDS)


def timeseries_forecast(scope):
    series = np.cumsum(SERIES.reshape(-1, 4), axis=0)[:60] / 10
    windows = np.stack([series[i : i + 9] for i in range(42)])
    targets = series[9:51, :1]

    def make():
        inputs = keras.Input((9, 4))
        return keras.Model(inputs, layers.Dense(1)(layers.GRU(5)(inputs)))

    model = compiled(scope, make, loss=keras.losses.Huber, metrics=["mae"])
    return fitted(model, windows.astype("float32"), targets.astype("float32"))


def timeseries_convolutions(scope):
    def make():
        h = inputs = keras.Input((9, 4))
        for _ in range(2):
            h = layers.Conv1D(4, 3, padding="same")(h)
            h = layers.ReLU()(layers.LayerNormalization()(h))
        return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))

    return trained(scope, make, SERIES)


def wide_and_deep(scope):
    with scope():
        numbers, codes = keras.Input((8,), name="numbers"), keras.Input((9,), name="codes")
        deep = layers.Flatten()(layers.Embedding(20, 2)(codes))
        deep = layers.Dense(6, activation="relu")(layers.Concatenate()([deep, numbers]))
        model = keras.Model([numbers, codes], layers.Dense(3)(deep) + layers.Dense(3)(numbers))
        model.compile("adagrad", crossentropy(), metrics=["accuracy"])
    return fitted(model, {"numbers": X, "codes": WORDS}, epochs=1)


def residual_network(scope):
    def make():
        inputs = keras.Input((8, 8, 3))
        h = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
        for _ in range(2):
            inner = layers.GroupNormalization(2)(layers.Conv2D(4, 3, padding="same")(h))
            h = layers.Add()([h, layers.ReLU()(inner)])
        return keras.Model(inputs, layers.Dense(3)(layers.GlobalMaxPooling2D()(h)))

    return trained(scope, make, IMAGES)


def segmentation(scope):
    """A small U-Net: the outputs have the images' places, and the loss is over them all."""

    def make():
        inputs = keras.Input((8, 8, 3))
        down = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")(inputs)
        up = layers.UpSampling2D(2)(down)
        h = layers.Concatenate()([up, inputs])
        return keras.Model(inputs, layers.Conv2D(3, 3, padding="same")(h))

    labels = (IMAGES[..., 0] > 0).astype("int32") + (IMAGES[..., 1] > 1)
    return trained(scope, make, IMAGES, labels)


def translation(scope):
    """Encoder and decoder, which begins with the encoder's state."""

    def make():
        source, target = keras.Input((9,)), keras.Input((9,))
        embed = layers.Embedding(20, 6)
        _, state = layers.GRU(5, return_state=True)(embed(source))
        h = layers.GRU(5, return_sequences=True)(embed(target), initial_state=state)
        return keras.Model([source, target], layers.Dense(20)(h))

    model = compiled(scope, make)
    return fitted(model, [WORDS, np.roll(WORDS, 1, axis=1)], WORDS)


def distillation(scope):
    class Distiller(keras.Model):
        def __init__(self, teacher, student):
            super().__init__()
            self.teacher, self.student = teacher, student

        def call(self, x):
            return self.student(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            soft = ops.softmax(self.teacher(x, training=False) / 2)
            own = keras.losses.kl_divergence(soft, ops.softmax(y_pred / 2))
            return crossentropy()(y, y_pred) + ops.mean(own)

    def make():
        teacher = keras.Sequential([layers.Input((8,)), layers.Dense(3)])
        teacher.trainable = False
        return Distiller(teacher, keras.Sequential([layers.Input((8,)), layers.Dense(3)]))

    return trained(scope, make)


def contrastive_learning(scope):
    """Every example is compared with the whole batch, after the encoder's call."""

    class Contrastive(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(4)])

        def call(self, x):
            return self.encoder(x)

        def train_step(self, data):
            x = data[0]
            one, other = self(x, training=True), self(x * 0.9, training=True)
            likeness = ops.normalize(one) @ ops.transpose(ops.normalize(other)) / 0.5
            loss = crossentropy()(ops.arange(len(x)), likeness)
            _step(self, loss)
            return {"loss": loss}

    with scope():
        model = Contrastive()
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-4))
    return _epochs(model, X, Y)


def actor_and_critic(scope):
    """Five states of an episode at a time, with a loss over what was done in them."""
    with scope():
        inputs = keras.Input((8,))
        h = layers.Dense(8, activation="relu")(inputs)
        model = keras.Model(inputs, [layers.Dense(2, activation="softmax")(h), layers.Dense(1)(h)])
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-4))
    told = []
    for i in (0, 5, 10):
        chances, values = model(X[i : i + 5])
        gain = torch.tensor(Y[i : i + 5]).float() - values[:, 0]
        loss = ops.sum(gain**2 - ops.log(chances[:, 0]) * gain.detach())
        _step(model, loss)
        told.append(loss)
    return told, model.get_weights()
