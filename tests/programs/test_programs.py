"""Every program leaves on replicas what it leaves on one device: see catalogue.py."""

import contextlib
import dataclasses
import os
import warnings

import pytest

import mirror
from tests.conftest import step_as_on_distinct_devices
from tests.gpu.fake import FakeGpus
from tests.one_memory import one_memory  # noqa: F401
from tests.oracle import assert_same
from tests.pairs import EXHAUSTIVE
from tests.programs.catalogue import Place, all_programs

PROGRAMS = all_programs()


@dataclasses.dataclass(frozen=True)
class Column:
    """Replicas of a kind, and how a program uses them.

    Attributes:
        way: "loop", "run" or "compiled", as in ``Place``.
        options: of the strategy.
        is_central: whether parameters are on a device of their own.
        in_scope: whether all of the program is in the scope.
        own_steps: whether each replica steps an optimizer of its own, as on distinct devices.
        workers: the number of replicas of each worker; none: all are in this process.
        on_gpus: whether the devices are simulated GPUs.
        modules: whether the modules are compiled.
    """

    way: str
    n: int
    options: dict = dataclasses.field(default_factory=dict)
    is_central: bool = False
    in_scope: bool = False
    own_steps: bool = False
    workers: tuple[int, ...] = ()
    on_gpus: bool = False
    modules: bool = False

    def strategy(self, options):
        options = {**options, **self.options}
        if self.workers:
            devices = ["cpu"] * self.workers[int(os.environ["RANK"])]
            return mirror.MultiWorkerMirroredStrategy(devices, **options)
        if self.is_central:
            return mirror.CentralStorageStrategy(["cpu"] * self.n)
        devices = [f"cuda:{i}" if self.on_gpus else "cpu" for i in range(self.n)]
        strategy = mirror.MirroredStrategy(devices, **options)
        if self.own_steps:
            step_as_on_distinct_devices(strategy)
        return strategy


SHARDED = {"optimizer_state": "sharded"}
# Quick for every program are one of the first two and one of the others, both in turn.
COLUMNS = {
    "loop-x3": Column("loop", 3),
    "run-x2-in-scope": Column("run", 2, in_scope=True),
    "run-x3-sharded": Column("run", 3, SHARDED),
    "loop-x2-sharded-in-scope": Column("loop", 2, SHARDED, in_scope=True),
    "run-x3-own-steps": Column("run", 3, own_steps=True),
    "loop-x3-staggered-in-scope": Column("loop", 3, {"schedule": "staggered"}, in_scope=True),
    "run-x2-central": Column("run", 2, is_central=True),
    "loop-x2-central": Column("loop", 2, is_central=True),
    "run-x3-staggered": Column("run", 3, {"schedule": "staggered"}),
    "run-x3-parallel": Column("run", 3, {"schedule": "parallel"}),
    "run-on-gpus-in-scope": Column("run", 2, {"backend": "naive"}, in_scope=True, on_gpus=True),
    "run-on-workers": Column("run", 3, workers=(2, 1)),
    "loop-x1-modules": Column("loop", 1, modules=True),
    "loop-x2-modules-in-scope": Column("loop", 2, in_scope=True, modules=True),
    "run-x2-modules": Column("run", 2, modules=True),
    "loop-x2-modules-central": Column("loop", 2, is_central=True, modules=True),
    "run-sharded-on-workers": Column("run", 3, SHARDED, workers=(2, 1)),
    "compiled-x2": Column("compiled", 2),
}
IN_TURN = list(COLUMNS)[2:-1]


def cases():
    """Yields each program with each column of its ways, marked where it is not quick."""
    for i, program in enumerate(PROGRAMS):
        mine = {
            name: column
            for name, column in COLUMNS.items()
            if column.way.replace("compiled", "run") in program.ways
            and not any(part in name for part in program.apart)
        }
        in_turn = [name for name in IN_TURN if name in mine]
        of_all = list(COLUMNS)[i // 2 % 2]
        quick = {of_all, in_turn[i % len(in_turn)], *program.quick}
        for name, column in mine.items():
            marks = () if name in quick else EXHAUSTIVE
            yield pytest.param(program, column, marks=marks, id=f"{program.name}-{name}")


def run_on_replicas(i, column, options):
    """Returns what the program of that number leaves in a column; runs on workers as well."""
    program = PROGRAMS[i]
    with _ignoring(program), contextlib.ExitStack() as stack:
        if column.on_gpus:
            stack.enter_context(FakeGpus(column.n))
        strategy = stack.enter_context(column.strategy(options))
        if column.in_scope:
            stack.enter_context(strategy.scope())
        return program(Place(strategy, column.way, column.modules))


@contextlib.contextmanager
def _ignoring(program):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", 'schedule="parallel": from now on')
        if program.ignore is not None:
            warnings.filterwarnings("ignore", program.ignore)
        yield


@pytest.mark.parametrize(("program", "column"), list(cases()))
def test_a_program_leaves_what_it_leaves_on_one_device(program, column, pytestconfig, worker_pool):
    options = {
        "schedule": pytestconfig.getoption("--schedule"),
        "optimizer_state": pytestconfig.getoption("--optimizer-state"),
    }
    with _ignoring(program):
        expected = program(Place())
    i = PROGRAMS.index(program)
    if column.workers:
        found = worker_pool(len(column.workers)).run(run_on_replicas, i, column, {})
    else:
        found = [run_on_replicas(i, column, options)]
    for each in found:
        assert_same(each, expected, "program", program.tolerance)


def test_names_of_programs_are_unique():
    names = [program.name for program in PROGRAMS]
    assert sorted(set(names)) == sorted(names)
