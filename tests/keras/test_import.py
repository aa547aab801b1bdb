"""Only ``mirror.keras`` imports Keras."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_importing_mirror_does_not_import_keras():
    script = "import mirror, sys; assert 'keras' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
