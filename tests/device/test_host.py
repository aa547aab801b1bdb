"""The host: its memory, the facts that tell machines apart, and its OpenMP threads."""

import ctypes
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mirror.device import host as machine_facts
from mirror.device.host import facts_of_machine, release_thread_pool, status_of_process

ROOT = str(Path(__file__).parents[2])
STEPS, BLOCKS, BYTES = 5, 4, 24 * 2**20
PROGRAM = f"""
import resource, torch, mirror

def step():
    blocks = [torch.ones({BYTES} // 4) for _ in range({BLOCKS})]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

strategy = mirror.MirroredStrategy(["cpu"] * 2)
for _ in range({STEPS}):
    step()
before = faults()
for _ in range({STEPS}):
    step()
kept = resident()
print((faults() - before) * resource.getpagesize() / ({STEPS} * {BLOCKS} * {BYTES}))
strategy.close()
print(kept - resident())
"""

glibc_only = pytest.mark.skipif(
    not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")),
    reason="glibc alone is told",
)


def measured(**variables):
    """Returns the share of a step's memory that is new to it, and what closing gives back."""
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**clean, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", **variables},
    )
    return tuple(map(float, done.stdout.split()))


@glibc_only
def test_a_step_reuses_the_memory_of_the_one_before_and_closing_gives_it_back():
    share, given_back = measured()
    assert share < 0.05
    assert given_back > 0.9 * BLOCKS * BYTES


@glibc_only
def test_what_the_user_has_set_stays():
    share, _ = measured(MALLOC_TRIM_THRESHOLD_="131072")
    assert share > 0.5


GPUS = [torch.device("cuda", i) for i in range(2)]


@pytest.fixture
def properties(monkeypatch):
    found = [
        SimpleNamespace(name="H100", uuid=f"GPU-{i}", total_memory=80, pci_bus_id=i)
        for i in range(2)
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found[device.index])
    return found


def test_gpus_are_distinguished_by_kind_and_order(properties):
    facts = facts_of_machine(GPUS)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["gpus"] == [
        ["H100", "GPU-0", "80", "", "0", ""],
        ["H100", "GPU-1", "80", "", "1", ""],
    ]
    assert facts_of_machine(GPUS) == facts
    assert facts_of_machine(GPUS[::-1]) != facts
    properties[1].uuid = "GPU-7"
    assert facts_of_machine(GPUS) != facts


def test_another_driver_or_command_line_is_another_machine(properties, monkeypatch, tmp_path):
    files = {name: tmp_path / name for name in machine_facts._FILES}
    monkeypatch.setattr(machine_facts, "_FILES", files)
    seen = [facts_of_machine(GPUS)]  # nothing is there
    assert seen[0]["driver"] == ""
    for name in files:
        files[name].write_text("560.1")
        seen.append(facts_of_machine(GPUS))
    assert seen[0] != seen[1] != seen[2]


def test_the_cpu_has_a_name_only():
    assert facts_of_machine([torch.device("cpu")] * 2)["gpus"] == [["cpu"], ["cpu"]]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_status_of_a_process_tells_whether_it_is_stopped_and_ends_with_it():
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    process = subprocess.Popen([sys.executable, "-c", program])
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert status_of_process(process.pid)["State"] == "T (stopped)"
    process.kill()
    process.wait()
    with pytest.raises(FileNotFoundError):
        status_of_process(process.pid)


# OpenMP threads of one thread end, and start again


can_end_teams = pytest.mark.skipif(
    release_thread_pool is None, reason="this OpenMP cannot end teams"
)
LARGE = torch.linspace(-1, 1, 1_000_000)


@pytest.fixture
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    release_thread_pool()
    torch.set_num_threads(before)


def threads():
    """Returns the ids of all threads; those of other tests may end at any time."""
    return set(os.listdir("/proc/self/task"))


@can_end_teams
@pytest.mark.usefixtures("several_threads")
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are counted there")
def test_a_team_ends_and_comes_again_and_computes_the_same():
    release_thread_pool()
    before = threads()
    expected = LARGE.sum()
    team = threads() - before
    assert len(team) == 2
    release_thread_pool()
    assert not team & threads()
    before = threads()
    assert torch.equal(LARGE.sum(), expected)
    assert len(threads() - before) == 2


@can_end_teams
@pytest.mark.usefixtures("several_threads")
def test_it_ends_no_team_of_another_thread():
    found, may_go_on, is_done = [], threading.Event(), threading.Event()

    def compute():
        torch.set_num_threads(3)
        LARGE.sum()
        is_done.set()
        may_go_on.wait(20)
        found.append(LARGE.sum())

    thread = threading.Thread(target=compute)
    thread.start()
    assert is_done.wait(20)
    for _ in range(3):
        LARGE.sum()
        release_thread_pool()
    may_go_on.set()
    thread.join()
    assert torch.equal(found[0], LARGE.sum())
