"""The interpreter exits, or forks, while a strategy is used."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mirror
from tests.pairs import EXHAUSTIVE

BEGIN = """
import atexit, gc, signal, sys, threading, time
import torch, mirror
from torch import nn
schedule = sys.argv[1]
def make():
    strategy = mirror.MirroredStrategy(["cpu"] * 3, schedule=schedule)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    return strategy, model, torch.optim.SGD(model.parameters(), lr=0.1)
def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(6, 4)).sum().backward()
    optimizer.step()
def me():
    return mirror.get_replica_context().replica_id_in_sync_group
def meet():
    mirror.get_replica_context().all_reduce("sum", torch.ones(1))
strategy, model, optimizer = make()
strategy.run(step, args=(model, optimizer))
"""
# What a program ends with, and its exit code.
ENDS = {
    "the end": ("step(model, optimizer)", 0),
    "an error": ("1 / 0", 1),
    "an error in run": ("strategy.run(lambda: 1 / 0)", 1),
    "sys.exit in a replica": ("strategy.run(lambda: sys.exit(3) if me() == 1 else meet())", 3),
    "sys.exit in a merge": (
        "strategy.run(lambda: mirror.get_replica_context().merge_call(lambda s: sys.exit(3)))",
        3,
    ),
    "a step at exit": ("atexit.register(step, model, optimizer)", 0),
    "the main thread ends while another one trains": (
        "thread = threading.Thread(target=lambda: [step(model, optimizer) for _ in range(20)])\n"
        "thread.start()",
        0,
    ),
    "a strategy in a cycle": ("model.me = strategy.model = model; del model, strategy", 0),
    "collections while it trains": (
        "for _ in range(5):\n"
        "    made = make()\n"
        "    step(*made[1:]); made[0].run(step, args=made[1:])\n"
        "    made[1].me = made; del made; gc.collect()\n"
        "until = time.monotonic() + 60\n"
        # The first strategy and the last one may be left, with up to three threads each.
        "while sum('replica' in t.name for t in threading.enumerate()) > 6:\n"
        "    assert time.monotonic() < until\n"
        "    time.sleep(0.01)",
        0,
    ),
    "a cell interrupted and run again": (
        "def cell():\n"
        "    strategy, model, optimizer = make()\n"
        "    for i in range(4):\n"
        "        step(model, optimizer)\n"
        "        yield strategy.check_replicas()\n"
        "for _ in range(3):\n"
        "    try:\n"
        "        for i, _ in enumerate(cell()):\n"
        "            if i == 2:\n"
        "                signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        pass\n"
        "list(cell())",
        0,
    ),
}


def outcomes(script_pool, names, schedule):
    """Runs programs at once; returns those that end otherwise, and what all have said."""
    ended = script_pool.run_all([BEGIN + ENDS[name][0] for name in names], schedule)
    codes = [ENDS[name][1] for name in names]
    other = [done for done, code in zip(ended, codes, strict=True) if done.returncode != code]
    return other, "".join(done.stderr for done in ended)


def test_a_program_ends_with_an_exit_in_a_replica(script_pool):
    other, said = outcomes(script_pool, ["sys.exit in a replica"], "lockstep")
    assert other == []
    assert said == ""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["lockstep", "staggered", "parallel"])
def test_a_program_ends(schedule, script_pool):
    other, said = outcomes(script_pool, ENDS, schedule)
    assert other == []
    assert "Fatal" not in said


def needs_fork(test):
    """Marks a test that forks this process."""
    test = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")(test)
    # Python 3.12 and later warn of any fork in a process of several threads.
    return pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")(test)


SECONDS = 30


@pytest.fixture(params=["lockstep", "staggered", "parallel"])
def training(request, make_strategy):
    """Gives ``train()``: a step of a strategy that has started its replica threads."""
    strategy = make_strategy(3, schedule=request.param)
    model = strategy.mirror(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def train():
        step(torch.ones(6, 4))
        strategy.run(step, args=(torch.ones(2, 4),))
        strategy.check_replicas()
        return [p.detach().clone() for p in model.parameters()]

    train.strategy = strategy
    train()
    return train


forking = threading.Lock()  # filelock, which torch's compiler imports, refuses two forks at once


def in_child(fn):
    """Calls ``fn`` in a forked process; returns its exit code, or that it hangs."""
    with forking:
        child = os.fork()
    if not child:
        try:
            fn()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "hangs"


@needs_fork
def test_a_forked_process_trains_on_and_so_does_the_other(training):
    def fn():
        training()
        training.strategy.close()

    affinity = os.sched_getaffinity(0)
    assert in_child(fn) == 0
    assert os.sched_getaffinity(0) == affinity  # where threads of the child go is their own matter
    training()


@needs_fork
def test_a_process_of_multiprocessing_trains_on(training):
    process = multiprocessing.get_context("fork").Process(target=training)
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0
    training()


@needs_fork
def test_a_process_forked_inside_run_raises_because_the_other_replicas_are_missing(training):
    def fn():
        context = mirror.get_replica_context()
        context.all_reduce("sum", torch.ones(1))  # all have begun
        return in_child(lambda: context.all_reduce("sum", torch.ones(1)))

    codes = training.strategy.run(fn)
    assert codes.values == (1, 1, 1)
    training()


class Squares(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((4,), float(i)) ** 2


@needs_fork
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_workers_of_a_loader_do_not_know_of_the_strategy(training, prefetch):
    loader = DataLoader(
        Squares(), batch_size=6, num_workers=2, multiprocessing_context="fork", timeout=SECONDS
    )
    batches = training.strategy.distribute_dataset(loader, mirror.InputOptions(prefetch=prefetch))
    seen = []
    for batch in batches:
        training()
        seen.append(torch.cat(batch.values))
    assert torch.equal(torch.cat(seen), torch.stack([Squares()[i] for i in range(12)]))


GPUS = """
import os, torch, mirror
strategy = mirror.MirroredStrategy(["cpu"] * 2)
strategy._group.replicas.are_simulated = False  # as of GPUs
if not os.fork():
    try:
        strategy.run(print)
    except mirror.StrategyError as error:
        os._exit("spawn" not in str(error))
    os._exit(2)
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@needs_fork
def test_a_forked_process_raises_when_it_uses_the_gpus_of_its_parent(script_pool):
    assert script_pool.run(GPUS).returncode == 0


ROOT = Path(__file__).parents[2]
WORKERS = """
import torch, mirror
strategy = mirror.MultiWorkerMirroredStrategy(["cpu"] * 2)
with strategy.scope():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        "",
        *(
            pytest.param(e, marks=EXHAUSTIVE)
            for e in ("raise SystemExit(0)", "del model, optimizer, strategy")
        ),
    ],
)
def test_a_program_of_workers_at_module_level_ends_in_silence(tmp_path, end):
    (tmp_path / "program.py").write_text(f"{WORKERS}{end}\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "program.py"),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
