"""The interpreter ends, and objects are collected, whatever a strategy is doing."""

import pytest

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
        "while sum('replica' in t.name for t in threading.enumerate()) > 4:\n"
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
@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_a_program_ends(schedule, script_pool):
    other, said = outcomes(script_pool, ENDS, schedule)
    assert other == []
    assert "Fatal" not in said
