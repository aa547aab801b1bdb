"""MultiWorkerMirroredStrategy: training as on one device, diverging workers, ends of programs."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import MirrorError
from tests.comm.workers.programs import LONG, Program
from tests.comm.workers.test_monitored_wait import quick
from tests.multi_worker import strategy_of
from tests.pairs import EXHAUSTIVE


def make_contexts():
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
    contexts = strategy.distribute_values_from_function(
        lambda c: (c.replica_id_in_sync_group, c.num_replicas_in_sync)
    )
    ids = strategy.run(lambda: mirror.get_replica_context().replica_id_in_sync_group)
    names = strategy._group.replicas.names
    return strategy.num_replicas_in_sync, names, str(contexts), int(strategy.local_results(ids)[0])


def test_replicas_are_counted_over_all_workers(worker_pool):
    found = worker_pool(2).run(make_contexts)
    assert [n for n, _, _, _ in found] == [2, 2]
    assert found[1][1] == ("replica 1 of 2 (worker 1, cpu)",)
    assert [own for _, _, _, own in found] == [0, 1]


def drawn():
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
    torch.manual_seed(3)
    own = strategy.run(lambda: torch.rand(()))
    return float(strategy.local_results(own)[0]), float(torch.rand(()))


def test_workers_draw_different_numbers_within_runs_and_equal_ones_between(worker_pool):
    (own, between), (others, too) = worker_pool(2).run(drawn)
    assert own != others
    assert between == too


def test_one_worker_is_a_mirrored_strategy(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    with mirror.MultiWorkerMirroredStrategy(["cpu"] * 2) as strategy:
        assert strategy.num_replicas_in_sync == 2
        assert strategy.cluster_resolver is None
        assert strategy._group.replicas.names[1] == "replica 1 of 2 (cpu)"


def looked_at(folder):
    with strategy_of((1, 2)) as strategy:
        layer = strategy.mirror(torch.nn.Linear(2, 1))
        with strategy.trace(Path(folder) / "step.json"):
            layer(torch.ones(2, 2)).sum().backward()
            assert layer.weight.grad is not None
            strategy.run(lambda: mirror.get_replica_context().all_reduce("sum", torch.ones(1)))
        report = strategy.report()
        return str(report).splitlines()[0], report.num_replicas


def test_traces_and_reports_are_of_a_worker(worker_pool, tmp_path):
    (first, one), (second, two) = worker_pool(2).run(looked_at, str(tmp_path))
    assert (one, two) == (1, 2)
    assert first.endswith("on 1 replicas of worker 0 of 2")
    assert second.endswith("on 2 replicas of worker 1 of 2")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step.worker0.json",
        "step.worker1.json",
    ]
    trace = json.loads((tmp_path / "step.worker1.json").read_text())
    lanes = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert "replica 2 of 3 (worker 1, cpu)" in lanes
    assert any(event.get("name") == "gradients of all workers" for event in trace["traceEvents"])


def run_within_a_merge():
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])

    def fn():
        merge = mirror.get_replica_context().merge_call
        return merge(lambda strategy: strategy.local_results(strategy.run(lambda: 5)))

    return strategy.local_results(strategy.run(fn))


def test_a_run_within_a_merge_is_the_workers_own(worker_pool):
    assert worker_pool(2).run(run_within_a_merge) == [((5,),)] * 2


_ROOT = Path(__file__).parents[2]

# That of docs/workers.md.
_PROGRAM = """
import sys
import torch
import torch.nn.functional as F
from torch import nn

import mirror

torch.manual_seed(0)
data = mirror.data.from_arrays((torch.randn(64, 8), torch.randint(4, (64,))), 16, shuffle=True)
strategy = {strategy}
with strategy.scope():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())


{decorator}
def step(x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


for x, y in strategy.distribute_dataset(data):
    strategy.run(step, args=(x, y)) if {uncompiled} else step(x, y)
{end}
"""
_SEVERAL = "mirror.MultiWorkerMirroredStrategy(['cpu'] * {num_local})"
# What lives longer than the modules of mirror: it is torch's, or the interpreter's.
_KEPT = {
    "nothing": "pass",
    "module": "torch.kept = model",
    "parameters": "torch.kept = list(model.parameters())",
    "optimizer": "torch.kept = optimizer",
    "strategy": "torch.kept = strategy, model",
    "scope": "torch.kept = strategy.scope(), model; torch.kept[0].__enter__()",
    "iterator": "torch.kept = iter(strategy.distribute_dataset(data)), model; next(torch.kept[0])",
    "closed": "torch.kept = model; strategy.close()",
    "close": "strategy.close()",
}


def program_that_keeps(kept, *, strategy=_SEVERAL, num_local=1, compiled=False, in_main=False):
    text = _PROGRAM.format(
        strategy=strategy.format(num_local=num_local),
        decorator="@strategy.compile" if compiled else "",
        uncompiled=not compiled,
        end=_KEPT[kept],
    )
    if in_main:
        lines = "".join(f"    {line}\n" for line in text.splitlines() if line.strip())
        text = f"def main():\n{lines}\n\nif __name__ == '__main__':\n    main()\n"
    return text


def environ_of(rank, size, port):
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_ROOT),
    }
    return environ | ({"RANK": str(rank), "WORLD_SIZE": str(size)} if size > 1 else {})


@pytest.mark.parametrize(
    ("kept", "size", "options"),
    [
        pytest.param("module", 2, {}, marks=EXHAUSTIVE),
        pytest.param("module", 2, {"compiled": True}, marks=EXHAUSTIVE),
        ("module", 1, {"strategy": "mirror.MirroredStrategy(['cpu'] * 2)"}),
    ],
)
def test_a_program_ends_without_a_message(tmp_path, kept, size, options, port):
    """By Python itself; the programs of the next test are forks, which start sooner."""
    path = tmp_path / "train.py"
    path.write_text(program_that_keeps(kept, **options))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
    processes = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env=clean | environ_of(rank, size, port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    written = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, written
    assert written == [""] * size


@pytest.mark.parametrize(
    ("kept", "options"),
    [
        ("nothing", {}),
        ("module", {"in_main": True}),
        ("module", {"compiled": True}),
        *((kept, {"num_local": 2}) for kept in ("parameters", "scope", "iterator")),
        *(
            pytest.param(kept, {"in_main": True}, marks=EXHAUSTIVE)
            for kept in ("nothing", "closed", "close", "optimizer", "strategy")
        ),
    ],
)
def test_a_program_ends_without_a_message_at_any_order_of_teardown(
    kept, options, script_pool, port
):
    program = program_that_keeps(kept, **options)
    head = "import os, warnings; warnings.resetwarnings(); os.environ.update({})\n"
    done = script_pool.run_all(
        [head.format(environ_of(rank, 2, port)) + program for rank in range(2)]
    )
    assert [(each.returncode, each.stderr) for each in done] == [(0, "")] * 2


STEPS = (
    "run one",
    "run other",
    "call",
    "step",
    "sum in run",
    "reduce",
    "gather",
    "check",
    "scope",
)
MANNERS = ("another", "skip", "twice", "order", "raise", "raise in run", "close")


def _two_programs(seed):
    """Two lists of steps, which are equal up to where one worker goes its own way."""
    draw = random.Random(seed)
    one = [draw.choice(STEPS) for _ in range(draw.randint(2, 6))]
    other, at, manner = list(one), draw.randrange(len(one)), draw.choice(MANNERS)
    if manner == "another":
        other[at] = draw.choice([step for step in STEPS if step != one[at]])
    elif manner == "skip":
        del other[at]
    elif manner == "twice":
        other.insert(at, other[at])
    elif manner == "order":
        other.insert(draw.randrange(len(one)), other.pop(at))
    else:
        other[at:] = [manner]
    both = [one, other]
    draw.shuffle(both)
    return both


class Trained:
    """Two models of a strategy, and what a program may do with them."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.one, self.other = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
            parameters = [*self.one.parameters(), *self.other.parameters()]
            self.optimizer = torch.optim.SGD(parameters, lr=0.1)

    def do(self, step):
        strategy = self.strategy
        if step in ("run one", "run other"):
            model = self.one if step == "run one" else self.other
            strategy.run(lambda: model(torch.ones(2, 3)).sum().backward())
        elif step == "call":
            with strategy.scope():
                self.one(torch.ones(4, 3)).sum().backward()
        elif step == "step":
            self.optimizer.step()
        elif step == "sum in run":
            strategy.run(lambda: mirror.get_replica_context().all_reduce("sum", torch.ones(2)))
        elif step == "reduce":
            strategy.reduce("mean", strategy.run(lambda: torch.ones(())), axis=None)
        elif step == "gather":
            strategy.gather(strategy.run(lambda: torch.ones(1)))
        elif step == "check":
            strategy.check_replicas()
        elif step == "scope":
            with strategy.scope():
                nn.Linear(1, 1)(torch.ones(2, 1))
        elif step == "raise in run":
            strategy.run(self._raise)
        else:
            raise ValueError("my own")

    def _raise(self):
        raise ValueError("my own")


def part(seeds, num_devices):
    quick()
    told = []
    for seed in [None, *seeds]:
        strategy = mirror.MultiWorkerMirroredStrategy(
            ["cpu"] * num_devices,
            communication_options=mirror.CommunicationOptions(timeout_seconds=300.0),
        )
        rank = strategy._group.replicas.workers.rank
        kind, words = "ended", ""
        try:
            with strategy:
                trained = Trained(strategy)
                # First all steps, by both: torch makes and imports much when it needs it.
                for step in STEPS if seed is None else _two_programs(seed)[rank]:
                    if step == "close":
                        break
                    trained.do(step)
                    if step != "step":
                        _ = [p.grad for p in trained.one.parameters()]
        except (ValueError, MirrorError) as error:
            kind, words = type(error).__name__, str(error)
        told.append((kind, words))
    assert told.pop(0)[0] == "ended"
    return told


def _check(seeds, told_by_both):
    for seed, *told in zip(seeds, *told_by_both, strict=True):
        one, other = _two_programs(seed)
        lost = [kind for kind, _ in told if kind in ("DivergenceError", "WorkerLostError")]
        # Programs that differ need not meet again: a model of one worker waits for no other.
        assert not lost or one != other, (seed, told)
        for kind, words in told:
            assert "timeout_seconds" not in words, (seed, told)  # it does not wait for that
            if kind in ("DivergenceError", "WorkerLostError"):
                assert "worker 0 of 2: " in words, (seed, words)
                assert "worker 1 of 2: " in words, (seed, words)
                assert "test_multi_worker.py:" in words, (seed, words)


def test_workers_that_diverge_are_named(worker_pool):
    seeds = list(range(5))
    _check(seeds, worker_pool(2).run(part, seeds, 1))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("first", "num_devices"), [(100, 1), (160, 1), (220, 2), (260, 2)])
def test_workers_that_diverge_are_named_in_many_programs(worker_pool, first, num_devices):
    seeds = list(range(first, first + 40))
    _check(seeds, worker_pool(2).run(part, seeds, num_devices))


TRAINS = """
import mirror
strategy = mirror.MultiWorkerMirroredStrategy(
    ["cpu"] * {devices},
    communication_options=mirror.CommunicationOptions(timeout_seconds={seconds}),
)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.ones(8, 8)).square().mean()
    loss.backward()
    optimizer.step()
    ready()
    while True:
        optimizer.zero_grad()
        {step}
        optimizer.step()
"""
CALLS = "model(torch.ones(8, 8)).square().mean().backward()"
RUNS = "strategy.run(lambda: model(torch.ones(4, 8)).square().mean().backward())"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("step", "devices", "number", "lost"),
    [
        (CALLS, 1, signal.SIGKILL, 0),
        (CALLS, 2, signal.SIGKILL, 1),
        (RUNS, 2, signal.SIGKILL, 0),
        (RUNS, 1, signal.SIGSTOP, 0),
        (CALLS, 2, signal.SIGSTOP, 1),
    ],
)
def test_a_training_whose_other_worker_is_gone_ends(step, devices, number, lost):
    seconds = LONG if number == signal.SIGKILL else 3.0
    with Program(TRAINS.format(step=step, devices=devices, seconds=seconds)) as program:
        program.ready()
        time.sleep(0.5)
        program.signal(lost, number)
        (ended,) = program.ended(1 - lost)
    assert ended.code == 1, ended
    assert f"mirror.errors.WorkerLostError: worker {lost} of 2 is lost" in ended.err
