"""Runs programs of Keras on one device and over three replicas; prints what they differ by.

``python -m tests.keras.one_device lockstep layers lora`` does it for one; without a name, for all.
A program is a function of a file in programs/, which takes ``scope``: what a strategy's scope is,
or nothing. What it returns is compared, number by number. A file may have ``TOLERANCES``.
"""

import ast
import contextlib
import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

FILES = Path(__file__).parent / "programs"
TOLERANCE = 1e-5


def names(module):
    """Returns the names of the programs of a file, without importing it."""
    tree = ast.parse((FILES / f"{module}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if [a.arg for a in f.args.args] == ["scope"]]


def main():
    warnings.simplefilter("ignore")
    schedule, module, *chosen = sys.argv[1:]
    programs = importlib.import_module(f"tests.keras.programs.{module}")
    tolerances = getattr(programs, "TOLERANCES", {})
    for name in chosen or names(module):
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what Keras says is no result
                difference = _difference(getattr(programs, name), schedule)
            result = [difference, tolerances.get(name, TOLERANCE)]
        except Exception:
            result = traceback.format_exc()[-3000:]
        print(json.dumps([name, result]), flush=True)


def _difference(program, schedule):
    import numpy as np

    import mirror
    from mirror.integrations.keras_layers import LayerWrites
    from mirror.threads import schedule as turns

    one = _numbers(program, contextlib.nullcontext)
    replicas = set()
    of = LayerWrites.call_layer

    def counted(written, call):
        replicas.add(written.replica_id)
        return of(written, call)

    LayerWrites.call_layer = counted
    if schedule == "staggered":  # replicas run beside each other also where their turns are short
        turns.LONG_TURN_SECONDS, turns.NUM_TURNS = -1.0, 1
    try:
        with mirror.MirroredStrategy(["cpu"] * 3, schedule=schedule) as strategy:
            three = _numbers(program, strategy.scope)
    finally:
        LayerWrites.call_layer = of
    assert replicas == {0, 1, 2}, "the replicas were not called"
    assert [a.shape for a in three] == [a.shape for a in one]
    one, three = np.concatenate(one or [[]]), np.concatenate(three or [[]])
    assert len(one), "nothing is compared"
    assert np.isfinite(one).all()
    return float((abs(three - one) / np.maximum(1, abs(one))).max())


def _numbers(program, scope):
    import keras
    import numpy as np

    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    folder = os.getcwd()
    with tempfile.TemporaryDirectory() as own:
        os.chdir(own)
        try:
            result = program(scope)
        finally:
            os.chdir(folder)
    leaves = keras.tree.flatten(result)
    return [np.ravel(keras.ops.convert_to_numpy(leaf)).astype("float64") for leaf in leaves]


if __name__ == "__main__":
    main()
