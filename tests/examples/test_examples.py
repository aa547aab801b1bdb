"""Every program in examples/ runs: as a user would run it, and shortened."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ELSEWHERE = ("ray_train",)  # needs Ray: tests/examples/test_ray_train.py
ROOT = Path(__file__).parents[2]
FOUND = sorted((ROOT / "examples").glob("*.py"))
EXAMPLES = [path for path in FOUND if path.stem not in ELSEWHERE]
SHORTENED = {"resumable": ["--kills", "1"]}
PROGRAM = """
import os, runpy, sys
path = sys.argv.pop(1)
os.chdir(os.path.dirname(path))
runpy.run_path(path, run_name="__main__")
"""
# What every installation has: of Python itself, and what mirror needs.
INSTALLED = {*sys.stdlib_module_names, "mirror", "numpy", "torch"}


def _optional_imports():
    """Yields each example with each module that it imports and an installation may lack."""
    for path in FOUND:
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.partition(".")[0])
        for name in sorted(names - INSTALLED):
            yield pytest.param(path, name, id=f"{path.stem} {name}")


def test_there_are_examples():
    assert EXAMPLES
    for name in ELSEWHERE:
        assert (Path(__file__).parent / f"test_{name}.py").exists()


@pytest.mark.parametrize(("path", "module"), list(_optional_imports()))
def test_an_example_without_its_library_says_what_to_install(path, module, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path)])
    with pytest.raises(SystemExit) as exited:
        runpy.run_path(str(path), run_name="__main__")
    said = exited.value.code  # a text: Python prints it, and exits with 1
    assert re.fullmatch(
        r".*; this example needs [\w-]+: pip install 'mirror-strategy\[\w+\]'", said
    )
    extra = re.search(r"\[(\w+)\]", said)[1]
    assert re.search(rf"^{extra} = ", (ROOT / "pyproject.toml").read_text(), re.M)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_of_few_epochs_runs_without_a_warning(path, tmp_path, script_pool):
    copy = tmp_path / path.name
    copy.write_text(re.sub(r"^NUM_EPOCHS = \d+$", "NUM_EPOCHS = 2", path.read_text(), flags=re.M))
    done = script_pool.run(PROGRAM, copy, *SHORTENED.get(path.stem, ()))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_without_a_warning(path, tmp_path):
    command = [sys.executable, "-W", "error", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=180)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
