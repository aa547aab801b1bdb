"""setup.py: what a user without a compiler is told, and when a library is built again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def build(tmp_path):
    pytest.importorskip("setuptools")

    def run(compiler):
        places = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
        return subprocess.run(
            [sys.executable, "setup.py", "build_ext", *places],
            cwd=ROOT,
            env={**os.environ, "CXX": compiler},
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def compiler(tmp_path):
    """A compiler that only writes its -o file, and a line for each call."""
    calls = tmp_path / "calls"
    calls.touch()
    program = tmp_path / "compiler"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nfor last; do :; done\ntouch "$last"\n')
    program.chmod(0o755)
    return str(program), calls


def test_a_missing_compiler_is_named(build):
    result = build("no-such-compiler")
    assert result.returncode != 0
    assert "needs g++ with C++20" in result.stderr
    assert "no 'no-such-compiler' on PATH" in result.stderr


def test_a_failing_compiler_leaves_nothing_behind(build, tmp_path):
    result = build("false")
    assert result.returncode != 0
    assert "could not build _" in result.stderr
    assert not list((tmp_path / "lib").rglob("_*"))


def test_a_library_per_source_is_built_once(build, compiler, tmp_path):
    program, calls = compiler
    names = [path.stem for path in sorted((ROOT / "csrc" / "host").glob("*.cpp"))]
    for _ in range(2):
        assert build(program).returncode == 0
        assert len(calls.read_text().splitlines()) == len(names)
    libraries = sorted((tmp_path / "lib" / "mirror" / "comm").glob("_*.so"))
    assert [path.name for path in libraries] == [f"_{name}.so" for name in names]
    os.utime(libraries[0], (0, 0))  # as if its source had changed since
    assert build(program).returncode == 0
    assert len(calls.read_text().splitlines()) == len(names) + 1


def test_a_wheel_holds_the_kernels_and_the_benchmarks(build, compiler, tmp_path):
    program, _ = compiler
    assert build(program).returncode == 0
    package = tmp_path / "lib" / "mirror"
    for folder, patterns in (("comm/csrc", ("*.cu", "*.h")), ("benchmarks", ("*.py",))):
        source = ROOT / folder.removeprefix("comm/")
        expected = {path.name for pattern in patterns for path in source.glob(pattern)}
        assert {path.name for path in (package / folder).iterdir()} == expected
        assert expected
