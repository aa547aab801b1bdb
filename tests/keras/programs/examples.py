"""Programs as in Keras's code examples, small: vision, sequences, graphs, recommendations."""

import keras
import numpy as np
from keras import layers, ops

from tests.keras.programs.common import (
    IMAGES,
    SERIES,
    WEIGHTS,
    WORDS,
    Y,
    compiled,
    crossentropy,
    fitted,
    trained,
)

TOLERANCES = {"causal_transformer": 1e-4, "vision_transformer": 1e-4}


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-4)


def causal_transformer(scope):
    """Next words, with both masks: of what is to come, and of what is not there."""

    class Decoder(layers.Layer):
        def __init__(self):
            super().__init__()
            self.supports_masking = True
            self.attention = layers.MultiHeadAttention(2, 3)
            self.feed = keras.Sequential([layers.Dense(8, activation="gelu"), layers.Dense(6)])
            self.norms = [layers.LayerNormalization() for _ in range(2)]

        def call(self, x, mask=None):
            mask = None if mask is None else mask[:, None]
            seen = self.attention(x, x, attention_mask=mask, use_causal_mask=True)
            x = self.norms[0](x + seen)
            return self.norms[1](x + self.feed(x))

    def make():
        words = keras.Input((None,), dtype="int32")
        h = layers.Embedding(20, 6, mask_zero=True)(words)
        for _ in range(2):
            h = Decoder()(h)
        return keras.Model(words, layers.Dense(20)(h))

    following = np.concatenate([WORDS[:, 1:], 0 * WORDS[:, :1]], 1)
    loss = crossentropy
    model = compiled(scope, make, adam, loss=lambda: loss(ignore_class=0))
    told = fitted(model, WORDS, following)
    written = WORDS[:2, :3]
    for _ in range(4):
        last = model.predict(written, verbose=0)[:, -1]
        written = np.concatenate([written, last.argmax(1)[:, None].astype("int32")], 1)
    return told, written


def sums_of_digits(scope):
    """Encoder, repeated state, and decoder, of recurrent layers."""

    def make():
        return keras.Sequential(
            [
                layers.Input((9,)),
                layers.Embedding(20, 6),
                layers.LSTM(6),
                layers.RepeatVector(4),
                layers.LSTM(6, return_sequences=True),
                layers.TimeDistributed(layers.Dense(20)),
            ]
        )

    return trained(scope, make, WORDS, WORDS[:, :4])


def teacher_and_then_alone(scope):
    """Trained with the true words before; then its two halves write word by word."""

    def make():
        source, target = keras.Input((None, 4)), keras.Input((None, 4))
        _, *state = layers.LSTM(5, return_state=True, name="reads")(source)
        writes = layers.LSTM(5, return_sequences=True, return_state=True, name="writes")
        h, _, _ = writes(target, initial_state=state)
        return keras.Model([source, target], layers.Dense(4, name="tells")(h))

    model = compiled(scope, make, adam, loss=keras.losses.MeanSquaredError, metrics=[])
    told = fitted(model, [SERIES, np.roll(SERIES, 1, 1)], SERIES)
    with scope():
        encoder = keras.Model(model.input[0], model.get_layer("reads").output[1:])
        states = [keras.Input((5,)), keras.Input((5,))]
        word = keras.Input((1, 4))
        h, *after = model.get_layer("writes")(word, initial_state=states)
        decoder = keras.Model([word, *states], [model.get_layer("tells")(h), *after])
    states, word, written = encoder.predict(SERIES[:5], verbose=0), SERIES[:5, :1], []
    for _ in range(3):
        word, *states = decoder.predict([word, *states], verbose=0)
        written.append(word)
    return told, written


def handwriting(scope):
    """A loss over alignments, of labels of different length."""

    def make():
        inputs = keras.Input((9, 4))
        h = layers.Bidirectional(layers.GRU(4, return_sequences=True))(inputs)
        return keras.Model(inputs, layers.Dense(6)(h))

    labels = np.where(np.arange(4) < 2 + Y[:, None], WORDS[:, :4] % 5 + 1, 0)
    model = compiled(scope, make, adam, loss=keras.losses.CTC, metrics=[])
    return fitted(model, SERIES, labels.astype("int32"))


def next_frames(scope):
    frames = np.stack([IMAGES[..., 0], IMAGES[..., 1], IMAGES[..., 2]], 1)[..., None]

    def make():
        inputs = keras.Input((3, 8, 8, 1))
        h = layers.ConvLSTM2D(3, 3, padding="same", return_sequences=True)(inputs)
        return keras.Model(inputs, layers.Conv3D(1, 3, padding="same")(h))

    model = compiled(scope, make, adam, loss=keras.losses.MeanSquaredError, metrics=["mae"])
    return fitted(model, frames, frames[:, ::-1].copy(), epochs=1)


def vision_transformer(scope):
    class Patches(layers.Layer):
        def call(self, images):
            patches = ops.image.extract_patches(images, 4)
            return ops.reshape(patches, (-1, 4, 48))

    class Places(layers.Layer):
        def build(self, shape):
            self.places = self.add_weight(shape=shape[1:], initializer="random_normal")

        def call(self, x):
            return x + self.places

    def make():
        inputs = keras.Input((8, 8, 3))
        h = Places()(layers.Dense(6)(Patches()(inputs)))
        inner = layers.LayerNormalization()(h)
        h = layers.Add()([h, layers.MultiHeadAttention(2, 3)(inner, inner)])
        h = layers.LayerNormalization()(h)
        return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(h)))

    model = compiled(scope, make, adam, metrics=["accuracy"])
    return fitted(model, IMAGES)


def mixer(scope):
    """Rows and columns in turn; channels are weighed, and convolved each for itself."""

    def make():
        inputs = keras.Input((8, 8, 3))
        h = layers.SeparableConv2D(6, 3, padding="same", activation="silu")(inputs)
        h = layers.DepthwiseConv2D(3, padding="same")(h)
        weighed = layers.GlobalAveragePooling2D(keepdims=True)(h)
        h = layers.Multiply()([h, layers.Conv2D(6, 1, activation="sigmoid")(weighed)])
        h = layers.Reshape((64, 6))(h)
        turned = layers.Permute((2, 1))(h)
        turned = layers.Dense(64, activation="gelu")(turned)
        h = layers.Add()([h, layers.Permute((2, 1))(turned)])
        return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))

    return trained(scope, make, IMAGES)


def points_in_space(scope):
    """A learnt turn of the points, kept near to one by a regularizer."""

    @keras.saving.register_keras_serializable()
    class NearlyOrthogonal(keras.regularizers.Regularizer):
        def __call__(self, turns):
            turns = ops.reshape(turns, (-1, 4, 4))
            square = turns @ ops.transpose(turns, (0, 2, 1))
            return 0.01 * ops.sum((square - ops.eye(4)) ** 2)  # Keras divides by the examples

    def make():
        points = keras.Input((9, 4))
        h = layers.GlobalMaxPooling1D()(layers.Conv1D(6, 1, activation="relu")(points))
        turn = layers.Dense(16, activity_regularizer=NearlyOrthogonal())(h)
        turned = layers.Dot((2, 1))([points, layers.Reshape((4, 4))(turn)])
        h = layers.GlobalMaxPooling1D()(layers.Conv1D(6, 1, activation="relu")(turned))
        return keras.Model(points, layers.Dense(3)(h))

    return trained(scope, make, SERIES)


def graphs(scope):
    """Nodes and the edges between them, an example each; messages pass twice."""
    edges = (WORDS[:, :, None] == WORDS[:, None]).astype("float32")

    class Passes(layers.Layer):
        def __init__(self, width):
            super().__init__()
            self.dense = layers.Dense(width)

        def call(self, nodes, edges):
            told = ops.einsum("bij,bjc->bic", edges, self.dense(nodes))
            return ops.relu(told / ops.sum(edges, 2, keepdims=True))

    with scope():
        inputs = keras.Input((9, 4)), keras.Input((9, 9))
        h = Passes(5)(Passes(5)(*inputs), edges=inputs[1])
        model = keras.Model(inputs, layers.Dense(3)(ops.mean(h, 1)))
        model.compile(adam(), crossentropy(), metrics=["accuracy"])
    return fitted(model, [SERIES, edges])


def recommendations(scope):
    """Products of embeddings, with losses on the embeddings that the batch uses."""

    class Likes(keras.Model):
        def __init__(self):
            super().__init__()
            self.of_users = layers.Embedding(20, 4, embeddings_regularizer="l2")
            self.of_films = layers.Embedding(20, 4, embeddings_regularizer="l2")
            self.biases = layers.Embedding(20, 1)

        def call(self, pairs):
            users, films = pairs[:, 0], pairs[:, 1]
            alike = ops.sum(self.of_users(users) * self.of_films(films), 1, keepdims=True)
            return ops.sigmoid(alike + self.biases(users) + self.biases(films))

    model = compiled(scope, Likes, adam, loss=keras.losses.BinaryCrossentropy, metrics=["mae"])
    return fitted(model, WORDS[:, :2], WEIGHTS[:, None] / 2)
