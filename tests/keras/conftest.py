"""Runs programs of Keras in a process that has imported it."""

import importlib.util
import json
from functools import cache

import pytest

from tests.fixtures import made_once
from tests.script_pool import ScriptPool


@pytest.fixture(scope="session")
def differences():
    """Gives ``differences("layers", "dense")``: by program, what it differs by, and may.

    The programs are functions of files in tests/keras/programs/. See mirrored.py.
    """
    if importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed")
    script_pool = ScriptPool("keras")

    def run(module, *names, schedule="lockstep"):
        program = "from tests.keras.one_device import main; main()"
        done = script_pool.run(program, schedule, module, *names)
        assert done.returncode == 0, done.stderr[-4000:]
        return dict(json.loads(line) for line in done.stdout.splitlines())

    yield run
    script_pool.close()


@pytest.fixture(scope="session")
def differences_of_all(differences, tmp_path_factory):
    """Gives ``differences_of_all("layers")``: of all its programs, which run in one process, once.

    Keras takes longer to begin than a program does.
    """

    @cache
    def run(module):
        def make(folder):
            (folder / "found.json").write_text(json.dumps(differences(module)))

        found = made_once(tmp_path_factory, f"keras {module}", make) / "found.json"
        return json.loads(found.read_text())

    return run
