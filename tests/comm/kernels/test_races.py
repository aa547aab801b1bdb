"""The kernels of csrc/ under ThreadSanitizer, with bugs planted on purpose, and for long.

The sanitizer finds missing order between accesses even where x86 hides it. That it would is shown
by planting bugs, each of which it has to flag.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fixtures import made_once
from tests.pairs import EXHAUSTIVE, each_once

DRIVER = Path(__file__).with_name("race_driver.cpp")
ALGORITHMS = ("direct", "ring", "hierarchical")
BUGS = ("WEAK_RELEASE", "WEAK_ACQUIRE", "NO_BARRIER", "NO_CREDIT")
# Whole packs, several at once for 3, 6 and 8 replicas; elements, for tensors are not aligned.
SHIFTS = (0, 1)
RACE = 66

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def build(folder, *flags):
    program = folder / "race_driver"
    command = ["g++", "-std=c++20", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-Wno-psabi", *flags, str(DRIVER), "-o", str(program)], check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    def built(name, *flags):
        folder = made_once(tmp_path_factory, name, lambda folder: build(folder, *flags))
        return folder / "race_driver"

    return built


@pytest.fixture(scope="module")
def sanitized(built):
    return built("sanitized", "-fsanitize=thread")


@pytest.fixture(scope="module", params=BUGS)
def buggy(request, built):
    return built(request.param, "-fsanitize=thread", f"-DMIRROR_PLANT_{request.param}")


@pytest.fixture(scope="module")
def optimized(built):
    return built("optimized", "-O2")


def run(program, *arguments):
    return subprocess.run(
        [str(program), *map(str, arguments)],
        env={**os.environ, "TSAN_OPTIONS": f"halt_on_error=1 exitcode={RACE}"},
        capture_output=True,
        text=True,
        timeout=170,
    )


# replicas, blocks, threads per block; up to 64 threads in all
GRIDS = [(1, 1, 3), (2, 2, 4), (3, 2, 3), (6, 2, 2), (8, 2, 4)]


@each_once(algorithm=ALGORITHMS, shift=SHIFTS, grid=GRIDS)
def test_the_kernels_have_no_race(sanitized, algorithm, grid, shift):
    # Counters begin so that they wrap around in the middle.
    done = run(sanitized, algorithm, *grid, 20, 0xFFFFFFF0, 3001, shift)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@each_once(algorithm=ALGORITHMS, shift=SHIFTS)
def test_a_planted_bug_is_a_race(buggy, algorithm, shift):
    done = run(buggy, algorithm, 6, 2, 2, 20, 0, 3001, shift)
    assert done.returncode == RACE, f"exit status {done.returncode}: {done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("calls", [3_000, pytest.param(10_000, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_thousands_of_calls_are_right_while_counters_wrap_around(optimized, algorithm, calls):
    done = run(optimized, algorithm, 3, 1, 2, calls, 0xFFFFF800, 151, 0)
    assert done.returncode == 0, done.stdout
