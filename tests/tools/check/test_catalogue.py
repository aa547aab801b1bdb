"""Scripts as users write them: which train as on one device, and why others do not.

The docstring of a script in ``scripts/different`` names its cause and the module that the check
has to find; a comment marks the line. Each script is checked in this process, with two or three
replicas in turn.
"""

import re
import runpy
import sys
from pathlib import Path

import pytest

from mirror.testing import compare_with_one_device
from mirror.tools.check.check_result import DIFFERENT, EQUAL

SCRIPTS = Path(__file__).parent / "scripts"
EXPECTED = re.compile(r'"""Cause: (?P<cause>.*?); module: (?P<module>.*?)\."""', re.DOTALL)


def _named(folder):
    """Returns the scripts of a folder, each with two or three replicas."""
    paths = sorted((SCRIPTS / folder).glob("*.py"))
    return [pytest.param(path, 2 + i % 2, id=path.stem) for i, path in enumerate(paths)]


def _check(path, replicas, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(path)])
    return compare_with_one_device(
        lambda: runpy.run_path(str(path), run_name="__main__"), replicas=replicas
    )


@pytest.mark.parametrize(("path", "replicas"), _named("equal"))
def test_a_script_is_equal(path, replicas, monkeypatch):
    result = _check(path, replicas, monkeypatch)
    assert result.exit_code == EQUAL, str(result)


@pytest.mark.parametrize(("path", "replicas"), _named("different"))
def test_the_cause_and_the_module_or_line_are_found(path, replicas, monkeypatch):
    text = path.read_text()
    expected = EXPECTED.match(text)
    line = next(i for i, row in enumerate(text.splitlines(), 1) if row.endswith("# here"))
    result = _check(path, replicas, monkeypatch)
    assert result.exit_code == DIFFERENT, str(result)
    assert result.cause == expected["cause"], str(result)
    assert result.module == expected["module"] or f"{path.name}:{line} " in result.line
    assert result.remedy
