"""The programs of README's section on frameworks run as printed, each in a process of its own."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.examples.pages import ROOT

TITLE = "## With Keras, Lightning, transformers\n"
SECTION = (ROOT / "README.md").read_text().partition(TITLE)[2].partition("\n## ")[0]
PROGRAMS = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
# What each takes, in this order; the Trainer of transformers wants accelerate.
PACKAGES = (("keras",), ("lightning",), ("transformers", "accelerate"))

# Asked of each at its end: both replicas have computed. Lightning's strategy holds mirror's.
ASKED = """
report = (strategy if hasattr(strategy, "report") else strategy.mirror).report()
assert report.num_replicas == 2 and min(report.host_seconds) > 0, report
"""


def test_there_are_three_short_programs():
    assert len(PROGRAMS) == len(PACKAGES)
    for program, packages in zip(PROGRAMS, PACKAGES, strict=True):
        assert packages[0] in program
        assert len([line for line in program.splitlines() if line]) <= 10


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PACKAGES)))
def test_a_program_trains_on_two_replicas_as_printed(tmp_path, number):
    missing = [name for name in PACKAGES[number] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"wants {', '.join(missing)}")
    file = tmp_path / "program.py"
    file.write_text(PROGRAMS[number] + ASKED)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("KERAS_BACKEND", None)  # as for who pastes it
    done = subprocess.run(
        [sys.executable, file], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
