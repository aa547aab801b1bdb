"""Only ``mirror.keras`` imports Keras."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_importing_mirror_does_not_import_keras():
    script = "import mirror, sys; assert 'keras' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_what_keras_lacks_is_named_with_the_remedy():
    environ = os.environ | {"KERAS_BACKEND": "tensorflow"}
    script = "import sys; sys.modules['tensorflow'] = None; import mirror.keras"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert 'os.environ["KERAS_BACKEND"] = "torch" before Keras is imported' in done.stderr
