"""Callbacks, saving and loading."""

import csv

import keras

from tests.keras.programs.common import X, Y, compiled, crossentropy, dense, fitted

_ORDER = {"batch_size": 20, "shuffle": False, "verbose": 0}


def early_stopping(scope):
    stopping = keras.callbacks.EarlyStopping(
        "val_loss", patience=1, restore_best_weights=True, start_from_epoch=1
    )
    model = compiled(scope)
    return fitted(model, epochs=8, validation_data=(X[::-1], Y), callbacks=[stopping])


def reduced_rate(scope):
    reducing = keras.callbacks.ReduceLROnPlateau("loss", factor=0.3, patience=1, min_delta=0.5)
    model = compiled(scope)
    return fitted(model, epochs=5, callbacks=[reducing]), model.optimizer.learning_rate


def scheduled_rate(scope):
    scheduling = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    return fitted(compiled(scope), epochs=3, callbacks=[scheduling])


def checkpoints(scope):
    saving = keras.callbacks.ModelCheckpoint("best.keras", "loss", save_best_only=True)
    weights = keras.callbacks.ModelCheckpoint("last.weights.h5", save_weights_only=True)
    model = compiled(scope)
    told = fitted(model, callbacks=[saving, weights])
    loaded = keras.models.load_model("best.keras")
    with scope():
        again = dense()
    again.load_weights("last.weights.h5")
    return told, loaded.predict(X, verbose=0), again.predict(X, verbose=0)


def backup(scope):
    """Training that ends in the second epoch, and goes on from the first."""

    class Ends(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise InterruptedError

    model = compiled(scope)
    try:
        backing = keras.callbacks.BackupAndRestore("b")
        model.fit(X, Y, epochs=3, callbacks=[backing, Ends()], **_ORDER)
    except InterruptedError:
        pass
    again = compiled(scope)
    backing = keras.callbacks.BackupAndRestore("b")
    history = again.fit(X, Y, epochs=3, callbacks=[backing], **_ORDER)
    return list(history.history.values()), again.get_weights(), again.optimizer.iterations


def table(scope):
    model = compiled(scope)
    told = fitted(model, callbacks=[keras.callbacks.CSVLogger("log.csv")])
    with open("log.csv") as file:
        rows = [[float(v) for v in row.values() if v != "NA"] for row in csv.DictReader(file)]
    return told, rows


def callback_of_ones_own(scope):
    class Watching(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.told = []

        def on_train_batch_end(self, batch, logs=None):
            self.told.append([logs["loss"], float(self.model.layers[0].kernel.numpy().sum())])

        def on_epoch_end(self, epoch, logs=None):
            self.model.layers[-1].bias.assign(self.model.layers[-1].bias * 0.5)

    watching = Watching()
    return fitted(compiled(scope), callbacks=[watching]), watching.told


def swapped_weights(scope):
    def make():
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7)

    swapping = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    model = compiled(scope, dense, make)
    return fitted(model, validation_data=(X, Y), callbacks=[swapping])


def saved_and_loaded(scope):
    """Whole, with its optimizer; training goes on, in the scope and out of it."""
    model = compiled(scope, dense, lambda: keras.optimizers.Adam(0.01, epsilon=1e-4))
    first = fitted(model)
    model.save("model.keras")
    with scope():
        mirrored = keras.models.load_model("model.keras")
    plain = keras.models.load_model("model.keras")
    return first, [fitted(m) for m in (model, mirrored, plain)]


def weights_given_and_taken(scope):
    model = compiled(scope)
    model.set_weights([w * 0 + 0.1 * i for i, w in enumerate(model.get_weights())])
    first = fitted(model, epochs=1)
    model.layers[0].kernel.assign(model.layers[0].kernel * 2)
    return first, fitted(model, epochs=1), model.count_params()


def of_its_configuration(scope):
    model = compiled(scope)
    with scope():
        again = keras.Sequential.from_config(model.get_config())
        again.compile("sgd", crossentropy())
    again.set_weights(model.get_weights())
    return fitted(again)
