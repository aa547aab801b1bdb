"""The host library under ThreadSanitizer, with bugs planted in its text, each to be flagged."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.comm.kernels.test_races import run
from tests.fixtures import made_once
from tests.pairs import each_once

DRIVER = Path(__file__).with_name("race_driver.cpp")
SOURCES = Path(__file__).parents[3] / "csrc" / "host"
# A ticket that two threads may get; helpers that are not waited for; work published without the
# mutex; a second caller that takes the helpers of the first; the first waits a moment for it.
BUGS = {
    "ticket": {
        "next_.fetch_add(per_ticket_, std::memory_order_relaxed)": (
            "next_.load(); std::this_thread::yield(); next_.store(begin + per_ticket_)"
        )
    },
    "no wait": {"all_done_.wait(lock, [&] { return working_ == 0; });": ""},
    "invites unlocked": {"const std::lock_guard lock(mutex_);": ""},
    "two leaders": {
        "if (work_ != nullptr) return false;": "",
        "    lock.unlock();\n    for (int i": (
            "    lock.unlock();\n    std::this_thread::sleep_for(std::chrono::milliseconds(2));\n"
            "    for (int i"
        ),
    },
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]


def build(folder, text):
    for header in SOURCES.glob("*.h"):
        shutil.copy(header, folder)
    (folder / "reduce.cpp").write_text(text)
    program = folder / "race_driver"
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-g", "-pthread", "-fsanitize=thread", "-Wno-psabi",
         f'-DREDUCE_CPP="{folder / "reduce.cpp"}"', str(DRIVER), "-o", str(program)],
        check=True,
    )  # fmt: skip
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    text = (SOURCES / "reduce.cpp").read_text()
    made_in = made_once(tmp_path_factory, "host races", lambda folder: build(folder, text))
    return made_in / "race_driver"


@each_once(num_threads=[1, 2, 4], callers=[1, 3])
def test_the_library_has_no_race(program, callers, num_threads):
    # From 2 MiB read and written on, threads help.
    done = run(program, callers, num_threads, 9, 180_001)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_flagged(tmp_path, bug):
    text = (SOURCES / "reduce.cpp").read_text()
    for right, wrong in BUGS[bug].items():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    program = build(tmp_path, text)
    for _ in range(20):  # a busy machine may run one thread after the other
        try:
            if run(program, 3, 4, 12, 180_001).returncode != 0:
                return
        except subprocess.TimeoutExpired:
            return
    pytest.fail("the race was not found")
