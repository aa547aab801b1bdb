"""Programs as in Keras's code examples, of several networks and losses."""

import keras
import torch
from keras import layers, ops

from tests.keras.programs.common import IMAGES, WORDS, X, Y, compiled, crossentropy, fitted


def _step(model, loss, optimizer=None, variables=None):
    variables = [*(variables or model.trainable_weights)]
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        (optimizer or model.optimizer).apply([v.value.grad for v in variables], variables)


def _epochs(model, x, y=None):
    history = model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    return list(history.history.values()), model.get_weights()


def adam():
    return keras.optimizers.Adam(0.01, epsilon=1e-4)


def quantized_autoencoder(scope):
    """Codes of a book: gradients go straight through, and the layer adds losses."""

    class Book(layers.Layer):
        def build(self, shape):
            self.codes = self.add_weight(shape=(shape[-1], 5), initializer="random_uniform")

        def call(self, x):
            away = ops.sum(x**2, 1, keepdims=True) + ops.sum(self.codes**2, 0)
            nearest = ops.argmin(away - 2 * x @ self.codes, axis=1)
            found = ops.one_hot(nearest, 5) @ ops.transpose(self.codes)
            self.add_loss(0.25 * ops.mean((ops.stop_gradient(found) - x) ** 2))
            self.add_loss(ops.mean((found - ops.stop_gradient(x)) ** 2))
            return x + ops.stop_gradient(found - x)

    def make():
        inputs = keras.Input((8,))
        return keras.Model(inputs, layers.Dense(8)(Book()(layers.Dense(3)(inputs))))

    return fitted(compiled(scope, make, loss=keras.losses.MeanSquaredError, metrics=[]), X, X)


def critic_with_gradient_penalty(scope):
    """The critic is differentiated twice: with respect to its inputs, then to its weights."""

    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            self.critic = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(1)])
            self.maker = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(8)])

        def compile(self, ours, theirs):
            super().compile()
            self.ours, self.theirs = ours, theirs

        def call(self, pair):
            return self.critic(self.maker(pair[1]))

        def train_step(self, data):
            real, noise = data[0]
            made = self.maker(noise).detach()
            between = (0.3 * real + 0.7 * made).requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
            penalty = ops.mean((ops.sqrt(ops.sum(slope**2, 1) + 1e-6) - 1) ** 2)
            loss = ops.mean(self.critic(made)) - ops.mean(self.critic(real)) + 10 * penalty
            _step(self, loss, self.theirs, self.critic.trainable_weights)
            gain = -ops.mean(self.critic(self.maker(noise)))
            _step(self, gain, self.ours, self.maker.trainable_weights)
            return {"critic": loss, "penalty": penalty, "maker": gain}

    with scope():
        model = Gan()
        model.compile(adam(), adam())
    return _epochs(model, [X, X[:, :4].copy()], Y)


def conditional_networks(scope):
    """A maker and a judge that are told the class, with two optimizers."""

    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            self.judge = keras.Sequential(
                [layers.Input((8, 8, 6)), layers.Conv2D(4, 3, strides=2), layers.LeakyReLU()]
            )
            self.judge.add(layers.GlobalMaxPooling2D())
            self.judge.add(layers.Dense(1))
            self.maker = keras.Sequential(
                [layers.Input((7,)), layers.Dense(64), layers.Reshape((4, 4, 4))]
            )
            self.maker.add(layers.Conv2DTranspose(3, 4, strides=2, padding="same"))

        def call(self, pair):
            return self.judge(ops.concatenate([pair[0], pair[0]], -1))

        def train_step(self, data):
            (images, noise), labels = data
            told = ops.one_hot(labels, 3)
            planes = ops.broadcast_to(told[:, None, None], (len(told), 8, 8, 3))
            made = self.maker(ops.concatenate([noise, told], 1))
            both = ops.concatenate([made.detach(), images])
            both = ops.concatenate([both, ops.concatenate([planes, planes])], -1)
            truth = ops.concatenate([ops.ones((len(told), 1)), ops.zeros((len(told), 1))])
            asked = keras.losses.BinaryCrossentropy(from_logits=True)
            loss = asked(truth, self.judge(both))
            _step(self, loss, self.optimizer, self.judge.trainable_weights)
            fooled = asked(truth[len(told) :], self.judge(ops.concatenate([made, planes], -1)))
            _step(self, fooled, self.other, self.maker.trainable_weights)
            return {"judge": loss, "maker": fooled}

    with scope():
        model = Gan()
        model.compile(keras.optimizers.SGD(0.05))
        model.other = keras.optimizers.SGD(0.05)
    return _epochs(model, [IMAGES, X[:, :4].copy()], Y)


def bootstrapped_representations(scope):
    """A target network that follows the one that is trained, weight by weight."""

    def tower():
        return keras.Sequential([layers.Input((8,)), layers.Dense(8, activation="relu")])

    class Follows(keras.Model):
        def __init__(self):
            super().__init__()
            self.online, self.target, self.guess = tower(), tower(), layers.Dense(8)
            self.target.trainable = False

        def call(self, x):
            return self.guess(self.online(x))

        def train_step(self, data):
            wanted = ops.normalize(self.target(data[0] * 0.9)).detach()
            loss = 2 - 2 * ops.mean(ops.sum(ops.normalize(self(data[0])) * wanted, 1))
            _step(self, loss)
            for own, theirs in zip(self.target.weights, self.online.weights, strict=True):
                own.assign(0.9 * own + 0.1 * theirs)
            return {"loss": loss}

    with scope():
        model = Follows()
        model.compile(adam())
    return _epochs(model, X, Y)


def mixed_up(scope):
    """Pairs of examples, and of labels, are mixed by what is drawn for the whole batch."""

    class Mixes(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(3)])
            self.draws = keras.random.SeedGenerator(5)

        def call(self, x):
            return self.inner(x)

        def train_step(self, data):
            x, y = data
            share = keras.random.beta((len(x), 1), 0.4, 0.4, seed=self.draws)
            y = ops.one_hot(y, 3)
            x, y = (share * a + (1 - share) * ops.flip(a, 0) for a in (x, y))
            predicted = self(x, training=True)
            loss = ops.mean(keras.losses.categorical_crossentropy(y, predicted, from_logits=True))
            _step(self, loss)
            return {"loss": loss}

    with scope():
        model = Mixes()
        model.compile(adam())
    return _epochs(model, X, Y)


def masks_between_models(scope):
    """Words that are not there, for the next model that is called, and for the loss."""

    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.embeds = keras.Sequential([layers.Embedding(20, 6, mask_zero=True)])
            self.reads = keras.Sequential([layers.GRU(5, return_sequences=True), layers.Dense(20)])

        def call(self, words):
            return self.reads(self.embeds(words))

        def train_step(self, data):
            told = self.reads(self.embeds(data[0]))
            loss = crossentropy()(data[1], told)
            _step(self, loss)
            return {"loss": loss, "there": ops.mean(ops.cast(told._keras_mask, "float32"))}

    with scope():
        model = Two()
        model.compile(adam())
    return _epochs(model, WORDS, WORDS)
