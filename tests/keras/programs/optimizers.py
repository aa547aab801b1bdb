"""All optimizers of Keras, their options, and torch's over a model of Keras."""

import keras
import torch
from keras import layers

from tests.keras.programs.common import X, Y, compiled, crossentropy, dense, fitted

TOLERANCES = {"muon": 1e-3, "adafactor": 1e-4, "lion": 1e-4}


def _with(scope, make, **options):
    return fitted(compiled(scope, dense, make, **options))


def sgd_with_nesterov(scope):
    return _with(scope, lambda: keras.optimizers.SGD(0.05, 0.9, nesterov=True))


def rmsprop(scope):
    return _with(scope, lambda: keras.optimizers.RMSprop(0.01, centered=True, epsilon=1e-4))


def adam(scope):
    return _with(scope, lambda: keras.optimizers.Adam(0.01, amsgrad=True, epsilon=1e-4))


def adamw(scope):
    return _with(scope, lambda: keras.optimizers.AdamW(0.01, epsilon=1e-4))


def adagrad(scope):
    return _with(scope, lambda: keras.optimizers.Adagrad(0.05))


def adadelta(scope):
    return _with(scope, lambda: keras.optimizers.Adadelta(0.5))


def adamax(scope):
    return _with(scope, lambda: keras.optimizers.Adamax(0.01, epsilon=1e-4))


def nadam(scope):
    return _with(scope, lambda: keras.optimizers.Nadam(0.01, epsilon=1e-4))


def ftrl(scope):
    return _with(scope, lambda: keras.optimizers.Ftrl(0.05))


def lion(scope):
    return _with(scope, lambda: keras.optimizers.Lion(0.001))


def lamb(scope):
    return _with(scope, lambda: keras.optimizers.Lamb(0.01, epsilon=1e-4))


def muon(scope):
    return _with(scope, lambda: keras.optimizers.Muon(0.01))


def adafactor(scope):
    return _with(scope, lambda: keras.optimizers.Adafactor(0.01))


def clipnorm(scope):
    return _with(scope, lambda: keras.optimizers.SGD(0.1, clipnorm=0.1))


def global_clipnorm(scope):
    return _with(scope, lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.2))


def clipvalue(scope):
    return _with(scope, lambda: keras.optimizers.SGD(0.1, clipvalue=0.01))


def accumulation(scope):
    return _with(scope, lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))


def moving_average(scope):
    def make():
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2)

    return _with(scope, make)


def schedule(scope):
    def make():
        rate = keras.optimizers.schedules.CosineDecay(0.1, 6, warmup_target=0.2, warmup_steps=2)
        return keras.optimizers.SGD(rate, momentum=0.9)

    return _with(scope, make)


def loss_scale(scope):
    def make():
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=64.0, dynamic_growth_steps=2
        )

    return _with(scope, make)


def weight_decay_left_out(scope):
    with scope():
        model = dense()
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-4)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        model.compile(optimizer, loss=crossentropy())
    return fitted(model)


def optimizer_of_torch(scope):
    with scope():
        model = dense()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-4)
    losses = []
    for i in (0, 20, 40, 0, 20, 40):
        loss = crossentropy()(Y[i : i + 20], model(X[i : i + 20], training=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses, model.get_weights()


def its_state(scope):
    model = compiled(scope, dense, lambda: keras.optimizers.Adam(0.01, epsilon=1e-4))
    fitted(model)
    return model.optimizer.variables


def unused_variables(scope):
    """A layer that takes no part has no gradient."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = layers.Dense(3), layers.Dense(3)

        def call(self, x):
            self.unused(x)
            return self.used(x)

    return fitted(compiled(scope, Net, lambda: keras.optimizers.SGD(0.1)))
