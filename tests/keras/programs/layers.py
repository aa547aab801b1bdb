"""Kinds of models and of layers."""

import copy

import keras
import torch
from keras import layers, ops

from tests.keras.programs.common import (
    IMAGES,
    SERIES,
    WORDS,
    X,
    Y,
    compiled,
    dense,
    fitted,
    trained,
)

TOLERANCES = {"attention": 1e-4, "mixed_bfloat16": 3e-2}  # bfloat16 rounds to 1 in 256


def _sequential(*inner, shape=(8,)):
    return lambda: keras.Sequential([layers.Input(shape), *(make() for make in inner)])


def _three():
    return layers.Dense(3)


def sequential(scope):
    return trained(scope, dense)


def functional(scope):
    def make():
        inputs = keras.Input((8,))
        h = layers.Dense(8, activation="tanh")(inputs)
        h = layers.Add()([h, inputs])
        return keras.Model(inputs, layers.Dense(3)(layers.Concatenate()([h, inputs])))

    return trained(scope, make)


def subclassed(scope):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = layers.Dense(8, activation="relu"), layers.Dense(3)

        def call(self, x, training=False):
            return self.last(self.first(x))

    return trained(scope, Net)


def built_by_fit(scope):
    return trained(scope, lambda: keras.Sequential([layers.Dense(3)]))


def made_after_the_scope(scope):
    """A layer that the model gets when it is called first, long after the scope."""

    class Late(keras.Model):
        def build(self, shape):
            self.inner = keras.Sequential([layers.Dense(6, activation="relu"), layers.Dense(3)])

        def call(self, x):
            return self.inner(x)

    return trained(scope, Late)


def convolutions(scope):
    make = _sequential(
        lambda: layers.Conv2D(4, 3, activation="relu"),
        lambda: layers.MaxPooling2D(2),
        lambda: layers.SeparableConv2D(4, 2),
        lambda: layers.Conv2DTranspose(2, 2),
        layers.Flatten,
        _three,
        shape=(8, 8, 3),
    )
    return trained(scope, make, IMAGES)


def gru(scope):
    return trained(scope, _sequential(lambda: layers.GRU(6), _three, shape=(9, 4)), SERIES)


def lstm(scope):
    bidirectional = lambda: layers.Bidirectional(layers.LSTM(4))  # noqa: E731
    return trained(scope, _sequential(bidirectional, _three, shape=(9, 4)), SERIES)


def attention(scope):
    def make():
        inputs = keras.Input((9, 4))
        h = layers.MultiHeadAttention(2, 4)(inputs, inputs, use_causal_mask=True)
        h = layers.LayerNormalization()(h + inputs)
        return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))

    return trained(scope, make, SERIES)


def masks(scope):
    make = _sequential(
        lambda: layers.Embedding(20, 6, mask_zero=True),
        lambda: layers.LSTM(5, return_sequences=True),
        layers.GlobalAveragePooling1D,
        _three,
        shape=(9,),
    )
    return trained(scope, make, WORDS)


def normalizations(scope):
    make = _sequential(
        lambda: layers.GroupNormalization(2),
        lambda: layers.LayerNormalization(rms_scaling=True),
        layers.UnitNormalization,
        _three,
    )
    return trained(scope, make)


def torch_modules_inside(scope):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(8, 6)
            self.norm = torch.nn.LayerNorm(6)
            self.last = layers.Dense(3)

        def call(self, x):
            return self.last(ops.relu(self.norm(self.first(x))))

    return trained(scope, Net)


def wrapped_torch_modules(scope):
    wrapped = lambda: layers.TorchModuleWrapper(torch.nn.Linear(8, 6))  # noqa: E731
    return trained(scope, _sequential(wrapped, _three))


def keras_in_a_torch_module(scope):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = dense()
            self.last = torch.nn.Linear(3, 3)

        def forward(self, x):
            return self.last(self.inner(x))

    with scope():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-4)
    losses = []
    for i in (0, 20, 40, 0):
        x, y = torch.tensor(X[i : i + 20]), torch.tensor(Y[i : i + 20]).long()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses, list(model.state_dict().values())


def several_inputs_and_outputs(scope):
    with scope():
        one, other = keras.Input((8,), name="one"), keras.Input((9, 4), name="other")
        h = layers.Concatenate()([layers.Dense(6)(one), layers.GRU(4)(other)])
        outputs = {
            "kind": layers.Dense(3, name="kind")(h),
            "size": layers.Dense(1, name="size")(h),
        }
        model = keras.Model({"one": one, "other": other}, outputs)
        model.compile(
            keras.optimizers.SGD(0.05),
            loss={
                "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "size": "mse",
            },
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={"kind": ["accuracy"], "size": ["mae"]},
        )
    return fitted(model, {"one": X, "other": SERIES}, {"kind": Y, "size": X[:, :1]})


def shared_layers(scope):
    def make():
        one = keras.Input((8,))
        shared = keras.Sequential([layers.Dense(8, activation="tanh")])
        return keras.Model(one, layers.Dense(3)(shared(shared(one)) - shared(-one)))

    return trained(scope, make)


def mixed_bfloat16(scope):
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        return trained(scope, dense)
    finally:
        keras.mixed_precision.set_global_policy("float32")


def float64(scope):
    keras.config.set_floatx("float64")
    try:
        return trained(scope, dense, X.astype("float64"))
    finally:
        keras.config.set_floatx("float32")


def regularizers_and_constraints(scope):
    def make():
        return _sequential(
            lambda: layers.Dense(8, kernel_regularizer="l2", bias_regularizer="l1"),
            lambda: layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(0.5)),
        )()

    return trained(scope, make)


def freezing(scope):
    model = compiled(scope)
    model.layers[0].trainable = False
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    first = fitted(model)
    model.layers[0].trainable = True
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return first, fitted(model)


def lora(scope):
    model = compiled(scope)
    first = fitted(model, epochs=1)
    model.layers[0].enable_lora(2)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return first, fitted(model), model.layers[0].kernel


def copies(scope):
    model = compiled(scope)
    first = fitted(model, epochs=1)
    copied = copy.deepcopy(model)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    return first, [m.predict(X, verbose=0) for m in (model, copied, clone)]
