"""Gives programs of Keras a process in which it has been imported."""

import importlib.util
import json

import pytest

from tests.forks import Forks


@pytest.fixture(scope="session")
def differences():
    """Gives ``differences("layers", "dense")``: by program, what it differs by, and may.

    The programs are functions of files in tests/keras/programs/. See one_device.py.
    """
    if importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed")
    forks = Forks("keras")

    def run(module, *names, schedule="lockstep"):
        program = "from tests.keras.one_device import main; main()"
        done = forks.run(program, schedule, module, *names, timeout=170)
        assert done.returncode == 0, done.stderr[-4000:]
        return dict(json.loads(line) for line in done.stdout.splitlines())

    yield run
    forks.close()
