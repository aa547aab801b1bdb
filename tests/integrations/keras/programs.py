"""Programs of Keras, each a function that returns numbers; run in a process of their own.

``python programs.py`` calls all of them and prints what they returned, or raised, as JSON.
"""

import contextlib
import copy
import functools
import importlib.util
import json
import os
import subprocess
import sys
import traceback

import pytest


@functools.cache
def outcomes():
    """Returns what the programs return, by name; skips the test where Keras is not installed."""
    if importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed")
    command = [sys.executable, __file__]
    environment = os.environ | {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def main():
    import keras
    import numpy as np
    import torch
    from keras import layers, ops

    import mirror
    import mirror.keras
    from mirror.execution.lifecycle import step_ends
    from mirror.execution.run import current
    from mirror.keras import _whole_batch

    generator = np.random.default_rng(0)
    x = generator.normal(size=(50, 8)).astype("float32")
    y = generator.integers(0, 3, size=(50,)).astype("int32")

    def cpus(n=3):
        return mirror.MirroredStrategy(["cpu"] * n)

    def trained(make, strategy=None, **options):
        keras.utils.set_random_seed(3)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = make()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            model.compile(optimizer, loss=loss, metrics=["accuracy"])
        history = model.fit(x, y, batch_size=20, epochs=2, verbose=0, shuffle=False, **options)
        values = [v for series in history.history.values() for v in series]
        values += model.evaluate(x, y, verbose=0, return_dict=True).values()
        values += [model.predict(x, verbose=0), *model.get_weights()]
        return np.concatenate([np.ravel(v) for v in values])

    def difference(make):
        return float(abs(trained(make) - trained(make, cpus())).max())

    class State(layers.Layer):
        def build(self, shape):
            self.n = self.add_weight(shape=(), initializer="zeros", trainable=False, name="n")

        def call(self, x):
            self.n.assign(0.9 * self.n + 0.1 * ops.mean(x))
            return x

    class Counted(State):
        def build(self, shape):
            super().build(shape)
            self.seen = self.add_weight(
                shape=(), initializer="zeros", dtype="int32", trainable=False, name="seen"
            )

        def call(self, x):
            self.seen.assign_add(ops.shape(x)[0])
            return super().call(x)

    class AddLoss(layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * ops.mean(x**2))
            return x

    class Parts(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(8, 16)
            self.last = keras.Sequential([layers.Dense(3)])

        def call(self, x):
            return self.last(ops.relu(self.first(x)))

    class Custom(Parts):
        def train_step(self, data):
            inputs, targets = data
            self.zero_grad()
            loss = self.compute_loss(y=targets, y_pred=self(inputs, training=True))
            loss.backward()
            variables = self.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in variables], variables)
            return {"loss": loss}

    def sequential(*inner):
        return lambda: keras.Sequential([layers.Input((8,)), *(f() for f in inner)])

    def out():
        return layers.Dense(3)

    def regularized():
        return layers.Dense(8, activity_regularizer="l2", kernel_regularizer="l2")

    def normalized():
        return layers.Dense(8, use_bias=False)

    def moving():
        with cpus().scope():
            layer = layers.BatchNormalization(momentum=0.0)
            model = keras.Sequential([layers.Input((4,)), layer])
            model.compile("sgd", "mse")
        numbers = np.arange(120, dtype="float32").reshape(30, 4)
        model.fit(numbers, numbers, batch_size=30, verbose=0)
        return layer.moving_mean.numpy().tolist()

    def normalization():
        batch = sequential(normalized, layers.BatchNormalization, out)
        whole = sequential(normalized, mirror.keras.SyncBatchNormalization, out)
        return float(abs(trained(batch) - trained(whole, cpus())).max())

    def moments():
        """In double precision, in which Keras itself does not multiply matrices."""

        class Normal(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = (torch.nn.Linear(8, 8).double() for _ in range(2))

            def forward(self, x):
                h, replica = self.first(x), current.replica
                known = h.mean(0), h.var(0, unbiased=False)
                mean, var = known if replica is None else _whole_batch(replica, h, None)
                return self.last((h - mean) * torch.rsqrt(var + 1e-3))

        plain = Normal()
        split = cpus().mirror(copy.deepcopy(plain))
        two, told = torch.randn(2, 8).double(), []
        for model in (plain, split):
            made = model(two)
            made.square().mean().backward()
            told.append(
                torch.cat([made.flatten(), *(p.grad.flatten() for p in model.parameters())])
            )
        return float((told[0] - told[1]).abs().max())

    def dropout():
        def draws():
            with cpus().scope():
                model = sequential(lambda: layers.Dense(8), lambda: layers.Dropout(0.5, seed=7))()
            model.layers[0].set_weights([np.eye(8), np.zeros(8)])
            ones = np.ones((30, 8), "float32")
            return [model(ones, training=True).detach().numpy() for _ in range(2)]

        (one, two), again = draws(), draws()
        parts = [one[:10].tolist(), one[10:20].tolist(), one[20:].tolist()]
        different = all(parts[i] != parts[j] for i, j in ((0, 1), (0, 2), (1, 2)))
        same = np.array_equal(one, again[0]) and np.array_equal(two, again[1])
        return {"reproducible": same, "different": different, "new": not np.array_equal(one, two)}

    def in_run(make, num_replicas, kind=mirror.MirroredStrategy):
        keras.utils.set_random_seed(3)
        strategy = kind(["cpu"] * num_replicas)
        with strategy.scope():
            model, optimizer = make(), keras.optimizers.Adam(1e-2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def step(inputs, targets):
            model.zero_grad()
            loss(targets, model(inputs, training=True)).backward()
            variables = model.trainable_weights
            optimizer.apply([v.value.grad for v in variables], variables)

        for i in range(0, 48, 12):

            def part(values, i=i):
                rows = torch.tensor(values[i : i + 12]).tensor_split(num_replicas)
                choose = lambda context: rows[context.replica_id_in_sync_group]  # noqa: E731
                return strategy.distribute_values_from_function(choose)

            strategy.run(step, args=(part(x), part(y)))
        weights = np.concatenate([np.ravel(w) for w in model.get_weights()])
        return weights, int(optimizer.iterations)

    def apply_in_run():
        make = sequential(lambda: layers.Dense(8), State, out)
        one, three = in_run(make, 1), in_run(make, 3)
        central = in_run(make, 1, mirror.CentralStorageStrategy)
        difference = max(abs(one[0] - other[0]).max() for other in (three, central))
        return {"weights": float(difference), "iterations": [three[1], central[1]]}

    def ends_of_steps():
        """Ends of steps that are heard, and that the strategy counts, by what is fitted."""
        strategy, heard, found = cpus(), [], {}

        def several():
            kernels, rest = keras.optimizers.SGD(), keras.optimizers.Adam()
            return keras.optimizers.MultiOptimizer(
                lambda variable: kernels if "kernel" in variable.path else rest
            )

        wrapping = keras.optimizers.LossScaleOptimizer
        optimizers = {
            "one": keras.optimizers.SGD,
            "wrapped": lambda: wrapping(keras.optimizers.SGD()),
            "several": several,
        }

        def count_step():
            heard.append(1)

        step_ends.listeners.append(count_step)
        for name, optimizer in optimizers.items():
            with strategy.scope():
                model = sequential(lambda: layers.Dense(8), out)()
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile(optimizer(), loss=loss)
            before = len(heard), strategy.report().num_steps
            model.fit(x, y, batch_size=20, epochs=2, verbose=0)
            found[name] = [len(heard) - before[0], strategy.report().num_steps - before[1]]
        step_ends.listeners.remove(count_step)
        return found

    def assigns_trainable():
        class Assigns(layers.Dense):
            def call(self, x):
                self.bias.assign(ops.mean(ops.matmul(x, self.kernel), axis=0))
                return super().call(x)

        trained(sequential(lambda: Assigns(3)), cpus())

    def differing_integers():
        class Counts(layers.Layer):
            def build(self, shape):
                self.n = self.add_weight(
                    shape=(), initializer="zeros", dtype="int32", trainable=False, name="n"
                )

            def call(self, x):
                self.n.assign_add(ops.cast(ops.sum(x > 0), "int32"))
                return x

        trained(sequential(Counts, out), cpus())

    def one_example_each():
        with cpus().scope():
            model = sequential(Counted)()
        model(x[:2])

    def loss_in_run():
        in_run(sequential(regularized, out), 3)

    def count_in_run():
        in_run(sequential(Counted, out), 3)

    def saved():
        with cpus().scope():
            model = sequential(normalized, mirror.keras.SyncBatchNormalization, out)()
        model.save("model.keras")
        loaded = keras.models.load_model("model.keras")
        copied = keras.models.clone_model(model)
        kinds = [type(m.layers[1]).__name__ for m in (loaded, copied)]
        before, after = (m.predict(x, verbose=0) for m in (model, loaded))
        return {"kinds": kinds, "difference": float(abs(before - after).max())}

    def compiled():
        strategy = mirror.MirroredStrategy(["cpu"] * 2)
        with strategy.scope():
            model = keras.Sequential([layers.Dense(3)])
        strategy.compile(model, fallback="error")

    programs = {
        "dense": lambda: difference(sequential(lambda: layers.Dense(16, activation="relu"), out)),
        "built by fit": lambda: difference(lambda: keras.Sequential([layers.Dense(3)])),
        "state": lambda: difference(sequential(Counted, lambda: layers.Dense(3))),
        "add_loss": lambda: difference(sequential(lambda: layers.Dense(8), AddLoss, out)),
        "activity regularizer": lambda: difference(sequential(regularized, regularized, out)),
        "parts of torch and Keras": lambda: difference(Parts),
        "train_step": lambda: difference(Custom),
        "moving statistics": moving,
        "normalization": normalization,
        "moments": moments,
        "dropout": dropout,
        "apply in run": apply_in_run,
        "ends of steps": ends_of_steps,
        "assigns trainable": assigns_trainable,
        "differing integers": differing_integers,
        "loss in run": loss_in_run,
        "count in run": count_in_run,
        "one example each": one_example_each,
        "saved": saved,
        "compiled": compiled,
    }
    results = {}
    for name, program in programs.items():
        try:
            results[name] = program()
        except mirror.errors.MirrorError as error:
            results[name] = f"{type(error).__name__}: {error}"
        except Exception:
            results[name] = traceback.format_exc()[-1500:]
    print(json.dumps(results))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main()
