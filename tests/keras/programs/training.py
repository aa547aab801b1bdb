"""Programs as in Keras's guides of training, small: several losses, schedules, what goes wrong."""

import keras
import numpy as np
import torch
from keras import layers, ops

from tests.keras.programs.common import (
    SERIES,
    WEIGHTS,
    WORDS,
    X,
    Y,
    compiled,
    crossentropy,
    dense,
    fitted,
    trained,
)

_ORDER = {"batch_size": 20, "shuffle": False, "verbose": 0}


def outputs_by_name(scope):
    """A loss, a weight, metrics and weights of examples for each output."""
    with scope():
        inputs = keras.Input((8,))
        h = layers.Dense(8, activation="relu")(inputs)
        kinds, sizes = layers.Dense(3, name="kinds")(h), layers.Dense(1, name="sizes")(h)
        model = keras.Model(inputs, {"kinds": kinds, "sizes": sizes})
        model.compile(
            "sgd",
            loss={"kinds": crossentropy(), "sizes": "mse"},
            loss_weights={"kinds": 1.0, "sizes": 0.3},
            metrics={"kinds": ["accuracy"], "sizes": ["mae"]},
            weighted_metrics={"sizes": ["mse"]},
        )
    targets = {"kinds": Y, "sizes": WEIGHTS[:, None]}
    weights = {"kinds": WEIGHTS, "sizes": WEIGHTS[::-1].copy()}
    history = model.fit(X, targets, sample_weight=weights, epochs=2, **_ORDER)
    told = model.evaluate(X, targets, batch_size=20, verbose=0, return_dict=True)
    return list(history.history.values()), list(told.values()), model.predict(X, verbose=0)


def warm_up_and_clipping(scope):
    """A schedule, gathered gradients, a clipped norm, decay and an average, at once."""

    def make():
        rate = keras.optimizers.schedules.CosineDecay(
            0.0, 6, warmup_target=0.05, warmup_steps=2, alpha=0.1
        )
        return keras.optimizers.AdamW(
            rate,
            weight_decay=0.01,
            global_clipnorm=0.5,
            gradient_accumulation_steps=2,
            use_ema=True,
            ema_overwrite_frequency=3,
            epsilon=1e-4,
        )

    return fitted(compiled(scope, optimizer=make), epochs=5)


def rates_of_every_kind(scope):
    of = keras.optimizers.schedules
    rates = [
        of.ExponentialDecay(0.1, 2, 0.5, staircase=True),
        of.PiecewiseConstantDecay([2, 4], [0.1, 0.05, 0.01]),
        of.PolynomialDecay(0.1, 4, 0.01, power=2.0, cycle=True),
        of.InverseTimeDecay(0.1, 2, 0.5),
        of.CosineDecayRestarts(0.1, 2),
    ]
    return [
        fitted(compiled(scope, optimizer=lambda r=rate: keras.optimizers.SGD(r))) for rate in rates
    ]


def given_back_in_the_middle(scope):
    """A callback saves the weights, and goes back to them and to another rate later."""

    class GoesBack(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                self.model.save_weights("first.weights.h5")
            if epoch == 2:
                self.model.load_weights("first.weights.h5")
                self.model.optimizer.learning_rate = 0.01

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                kernel = self.model.layers[0].kernel
                kernel.assign(ops.clip(kernel, -0.5, 0.5))

    return fitted(compiled(scope), epochs=4, callbacks=[GoesBack()])


def optimizer_and_all_saved(scope):
    """Saved in the middle with what the optimizer has, loaded, and trained further."""
    model = compiled(scope, optimizer=lambda: keras.optimizers.Nadam(0.02, epsilon=1e-4))
    model.fit(X, Y, epochs=2, **_ORDER)
    model.save("all.keras")
    with scope():
        again = keras.models.load_model("all.keras")
    return fitted(model), fitted(again)


def ends_by_itself(scope):
    """Losses that are no numbers, and a callback that has seen enough."""

    class Enough(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.seen = [*getattr(self, "seen", []), logs["loss"]]
            self.model.stop_training = len(self.seen) == 4

    enough = Enough()
    told = fitted(compiled(scope), epochs=5, callbacks=[enough]), enough.seen
    broken = np.where(np.arange(42)[:, None] == 30, np.nan, X)
    model = compiled(scope)
    ended = keras.callbacks.TerminateOnNaN()
    history = model.fit(broken, Y, epochs=3, callbacks=[ended], **_ORDER)
    return told, len(history.history["loss"]), model.stop_training


def fine_tuned_by_low_ranks(scope):
    """Adapters in a model that was trained; then they are put into its weights."""
    model = compiled(scope)
    first = fitted(model)
    for layer in model.layers:
        layer.enable_lora(2)
    model.compile(keras.optimizers.Adam(0.02, epsilon=1e-4), crossentropy(), metrics=["accuracy"])
    tuned = fitted(model)
    model.save("tuned.keras")
    return first, tuned, keras.models.load_model("tuned.keras").predict(X, verbose=0)


def adapters_of_all_layers(scope):
    def make():
        words = keras.Input((9,))
        embed = layers.Embedding(20, 6)
        h = layers.EinsumDense("abc,cd->abd", (None, 6), bias_axes="d")(embed(words))
        model = keras.Model(words, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))
        for layer in (embed, model.layers[2], model.layers[-1]):
            layer.enable_lora(2)
        return model

    return trained(scope, make, WORDS)


def weights_of_eight_bits(scope):
    """Trained, then with integers for weights."""
    model = compiled(scope)
    told = fitted(model)
    model.quantize("int8")
    return told, model.predict(X, batch_size=20, verbose=0), model.get_weights()


def training_that_knows_of_quantization(scope):
    """Rounded weights and inputs in the forward, and gradients as if they were not."""

    class Rounded(layers.Layer):
        def __init__(self, width):
            super().__init__()
            self.width = width

        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], self.width))
            self.extent = self.add_weight(shape=(), initializer="ones", trainable=False)

        def call(self, x, training=False):
            if training:
                most = ops.max(ops.abs(ops.stop_gradient(self.kernel)))
                self.extent.assign(ops.maximum(self.extent, most))
            kernel = self.kernel / self.extent
            rounded = ops.round(kernel * 127) / 127
            return x @ ((kernel + ops.stop_gradient(rounded - kernel)) * self.extent)

    def make():
        return keras.Sequential([layers.Input((8,)), Rounded(8), layers.ReLU(), Rounded(3)])

    return trained(scope, make)


def operations_alone(scope):
    """A recurrence, a loop, branches and sorting, all of keras.ops."""

    class Recurs(layers.Layer):
        def build(self, shape):
            self.decay = self.add_weight(shape=(shape[-1],), initializer="ones")
            self.mix = self.add_weight(shape=(shape[-1], 5))

        def call(self, x):
            def step(state, one):
                state = ops.tanh(self.decay * state + one)
                return state, state

            steps = ops.transpose(x, (1, 0, 2))
            last, seen = ops.scan(step, ops.zeros_like(steps[0]), steps)
            h = ops.where(last > 0, last, 0.1 * last) + ops.logsumexp(seen, 0)
            best, _ = ops.top_k(h, 3)
            h = ops.concatenate([h, best], -1)[:, :4] @ self.mix
            return ops.fori_loop(0, 3, lambda i, h: h + 0.1 * ops.sort(h, -1), h)

    def make():
        inputs = keras.Input((9, 4))
        return keras.Model(inputs, layers.Dense(3)(Recurs()(inputs)))

    return trained(scope, make, SERIES)


def models_within_models(scope):
    """A functional model, a sequential one and a list of layers, in a class."""

    class Mixed(keras.Model):
        def __init__(self):
            super().__init__()
            inputs = keras.Input((8,))
            h = layers.Dense(6, activation="relu", name="shared")(inputs)
            self.towers = keras.Model(inputs, [layers.Dense(6)(h), layers.Dense(6)(h)])
            self.tails = {"one": keras.Sequential([layers.Dense(3)])}
            self.scales = [layers.Dense(3, use_bias=False) for _ in range(2)]
            self.bias = self.add_weight(shape=(3,), initializer="zeros")

        def call(self, x, training=False):
            one, other = self.towers(x, training=training)
            h = self.tails["one"](one * other) + self.bias
            if training:
                self.add_loss(0.01 * ops.mean(one**2))
            return sum((scale(other) for scale in self.scales), h)

    return trained(scope, Mixed)


def metrics_and_losses_of_ones_own(scope):
    class Ratio(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="ratio")
            self.right = self.add_variable((3,), "zeros", name="right")
            self.most = self.add_variable((), "zeros", name="most")

        def update_state(self, y, predicted, sample_weight=None):
            told = ops.one_hot(ops.argmax(predicted, 1), 3)
            self.right.assign_add(ops.sum(told * ops.one_hot(y, 3), 0))
            self.most.assign(ops.maximum(self.most, ops.max(predicted)))

        def result(self):
            return ops.sum(self.right) / (1 + self.most)

    class Focal(keras.losses.Loss):
        def call(self, y, predicted):
            chance = ops.sum(ops.softmax(predicted) * ops.one_hot(y, 3), 1)
            return -((1 - chance) ** 2) * ops.log(chance)

    model = compiled(scope, loss=lambda: Focal(name="focal"), metrics=[Ratio(), "accuracy"])
    return fitted(model, sample_weight=WEIGHTS)


def slopes_of_inputs(scope):
    """What a trained model looks at, and inputs that it likes best."""
    model = compiled(scope)
    told = fitted(model)
    x = torch.tensor(X).requires_grad_()
    chosen = torch.gather(model(x), 1, torch.tensor(Y)[:, None].long())
    (slopes,) = torch.autograd.grad(chosen.sum(), x)
    liked = torch.tensor(X[:7])
    for _ in range(3):
        liked.requires_grad_()
        (up,) = torch.autograd.grad(model(liked)[:, 1].mean(), liked)
        liked = (liked + ops.normalize(up)).detach()
    with scope():
        inner = keras.Model(model.inputs, [layer.output for layer in model.layers])
    return told, slopes, liked, inner.predict(X, batch_size=20, verbose=0)


def rewards(scope):
    """Two networks of which one is now and then given the other's weights."""

    def network():
        return keras.Sequential([layers.Input((8,)), layers.Dense(8, "relu"), layers.Dense(2)])

    with scope():
        network_now, before = network(), network()
        optimizer = keras.optimizers.Adam(0.01, clipnorm=1.0, epsilon=1e-4)
        huber = keras.losses.Huber()
    before.set_weights(network_now.get_weights())
    told = []
    for i in range(6):
        x = X[7 * i : 7 * i + 7]
        best = ops.max(before.predict(x[::-1].copy(), verbose=0), axis=1)
        wanted = torch.as_tensor(WEIGHTS[: len(x)]) + 0.9 * best
        done = ops.one_hot(Y[7 * i : 7 * i + 7] % 2, 2)
        loss = huber(wanted, ops.sum(network_now(x) * done, 1))
        network_now.zero_grad()
        loss.backward()
        variables = network_now.trainable_weights
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
        told.append(loss)
        if i == 3:
            before.set_weights(network_now.get_weights())
    return told, network_now.get_weights(), before.get_weights()


def several_times_evaluated(scope):
    """fit, evaluate, predict and test_on_batch in turn, with metrics that are kept or not."""
    model = compiled(scope, dense)
    told = [model.evaluate(X, Y, batch_size=9, verbose=0)]
    for _ in range(2):
        told.append(list(model.fit(X[:25], Y[:25], epochs=1, **_ORDER).history.values()))
        told.append(model.test_on_batch(X[:4], Y[:4]))
        told.append(model.train_on_batch(X[25:], Y[25:], class_weight={0: 1.0, 1: 3.0, 2: 0.2}))
        told.append(model.evaluate(X, Y, batch_size=20, sample_weight=WEIGHTS, verbose=0))
    return told, model.predict(X[:1], verbose=0), model.get_weights()
