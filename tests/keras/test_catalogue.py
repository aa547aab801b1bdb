"""Programs of Keras, unchanged in a scope: what they compute is what one device computes.

What they do is in programs/; see mirrored.py, which runs them.
"""

import os
import subprocess
import sys

import pytest

from tests.keras.one_device import FILES, names
from tests.pairs import quick_of

PROGRAMS = [(file.stem, name) for file in sorted(FILES.glob("*.py")) for name in names(file.stem)]
QUICK = {
    "layers": ["built_by_fit"],
    "state": ["batch_normalization", "dropout_of_one_seed"],
    "loops": ["optimizer_applied_in_run"],
    "metrics": ["updated_in_run"],
}


def check(result, name):
    assert isinstance(result, list), result
    difference, tolerance = result
    assert difference <= tolerance, name


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), PROGRAMS, ids=map("-".join, PROGRAMS))
def test_a_program_equals_one_device(module, name, differences_of_all):
    check(differences_of_all(module)[name], name)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("module", "name"), PROGRAMS, ids=map("-".join, PROGRAMS))
def test_a_program_alone_in_its_process_equals_one_device(module, name, differences):
    check(differences(module, name)[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("module", quick_of(["loops", "metrics", "state"], ["loops"]))
def test_staggered_replicas_equal_one_device(module, differences):
    for name, result in differences(module, schedule="staggered").items():
        check(result, name)


def test_programs_of_every_kind_equal_one_device(differences):
    for module, chosen in QUICK.items():
        for name, result in differences(module, *chosen).items():
            check(result, name)


# Only mirror.keras imports Keras


@pytest.mark.slow
def test_importing_mirror_does_not_import_keras():
    script = "import mirror, sys; assert 'keras' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.slow
def test_what_keras_lacks_is_named_with_the_remedy():
    environ = os.environ | {"KERAS_BACKEND": "tensorflow"}
    script = "import sys; sys.modules['tensorflow'] = None; import mirror.keras"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert 'os.environ["KERAS_BACKEND"] = "torch" before Keras is imported' in done.stderr
