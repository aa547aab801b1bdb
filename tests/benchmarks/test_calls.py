"""The number of calls on hot paths, of Python and C functions, does not rise."""

import contextlib
import gc
import math
import sys
import threading
import types
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mirror
from mirror.comm.packing import move_into_flats
from mirror.execution.run import Run
from mirror.replica.gradients import grad_tracker
from mirror.threads.lockstep import Lockstep
from tests.gpu import tensors
from tests.gpu.compiling import compiling_gpus
from tests.gpu.fake import FakeGpus
from tests.gpu.graphs import graphs_on
from tests.pairs import each_once
from tests.profiled import profiled
from tests.toy_models import collect

PACKAGE = str(Path(mirror.__file__).parent)
TIMES, WARM = 4, 5
N = 2


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """Another test of this process may have used it, and every run then lifts its limits."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None:
        unused = types.SimpleNamespace(values={})
        monkeypatch.setattr(frames, "always_optimize_code_objects", unused)


@pytest.fixture(autouse=True)
def no_passes_at_once(monkeypatch):
    """Whether passes are long enough for that is up to the clock."""
    monkeypatch.setattr("mirror.threads.schedule._has_cpus", lambda: False)


@pytest.fixture(autouse=True)
def no_other_strategies(monkeypatch):
    """A backward pass asks each strategy that is alive, as some of other tests are for a while."""
    monkeypatch.setattr(grad_tracker, "_trackers", ())


def calls_of(fn, events=("call", "c_call"), *, warm=WARM, counts=lambda frame: True):
    """Returns the calls of one ``fn()``, on all threads: how many, not how long, is exact.

    The least of several, without garbage collections: what finalizers of other tests' objects do,
    which may run at any time, does not count.

    Args:
        warm: how often ``fn`` is called before.
        counts: whether a call counts, given its frame, in its thread.
    """
    count, counting = [0], [False]

    def count_call(frame, event, arg):
        if counting[0] and event in events and counts(frame):
            count[0] += 1

    for _ in range(5):  # strategies of this test that are gone: a backward pass asks each
        gc.collect()
    gc.disable()
    try:
        with profiled(count_call, threads=True):  # the replicas' start below
            for _ in range(warm):
                fn()
            least = math.inf
            for _ in range(TIMES):
                count[0], counting[0] = 0, True
                fn()
                counting[0] = False
                least = min(least, count[0])
    finally:
        gc.enable()
        counting[0] = False
    return least


def nothing(*_):
    pass


@pytest.mark.parametrize(("n", "most"), [(1, 68), (2, 158), (8, 350)])
def test_an_empty_run(n, most):
    with mirror.MirroredStrategy(["cpu"] * n) as strategy:
        assert calls_of(lambda: strategy.run(nothing)) <= most


def test_a_merge():
    def merge(times):
        for _ in range(times):
            mirror.get_replica_context().merge_call(nothing)

    with mirror.MirroredStrategy(["cpu"] * N) as strategy:
        few, many = (calls_of(lambda t=t: strategy.run(merge, args=(t,))) for t in (2, 12))
    assert (many - few) / 10 <= 50


def test_a_step_in_run_and_what_a_parameter_adds():
    def calls(num_layers):
        with mirror.MirroredStrategy(["cpu"] * N) as strategy:
            model = strategy.mirror(nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers))))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

            def step():
                optimizer.zero_grad()
                model(torch.ones(2, 4)).mean().backward()
                optimizer.step()

            return calls_of(lambda: strategy.run(step))

    few = calls(2)
    assert few <= 750
    assert (calls(12) - few) / 20 <= 20


FLATTENED = {
    "1-D": torch.ones(8),
    "1-D, with a gap behind it": torch.ones(7),
    "n-D": torch.ones(4, 4),
    "n-D, in channels-last layout": torch.ones(4, 4, 2, 2).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("grad", FLATTENED.values(), ids=FLATTENED)
def test_moving_a_gradient_into_a_flat_buffer_makes_no_call_of_its_own(grad, n):
    """It made 8.5, and 15 in channels-last layout. A replica's pack makes a few, for all."""

    def calls(num_grads):
        columns = [[grad.clone() for _ in range(num_grads)] for _ in range(n)]
        return calls_of(lambda: move_into_flats([list(column) for column in columns], 2**20))

    few = calls(4)
    assert calls(24) == few
    assert few <= 9 + 8 * n


@pytest.mark.parametrize("grad", FLATTENED.values(), ids=FLATTENED)
def test_only_a_gradient_with_a_shape_takes_an_operation_of_torch_for_itself(grad):
    """Every operation lets go of the GIL, which then is another thread's."""

    class Count(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.found += 1
            return function(*args, **(kwargs or {}))

    def count(num_grads):
        with Count() as mode:
            move_into_flats([[grad.clone() for _ in range(num_grads)]], 2**20)
        return mode.found - num_grads  # without those of clone

    operations = 0 if grad.dim() == 1 else 1
    assert count(24) - count(4) == 20 * operations
    assert count(4) - 4 * operations <= 4


class Weights(nn.Module):
    """So many parameters of one shape."""

    def __init__(self, count, shape):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(shape)) for _ in range(count))

    def forward(self, x):
        for weight in self.weights:  # one after the other, so gradients come in one order
            x = x * weight.mean()
        return x


@each_once(way=[1, 3, 1, 3], shape=[(8,), (8,), (4, 4), (4, 4)])
def test_a_parameter_takes_as_many_calls_if_its_gradient_is_moved_into_a_flat_buffer(way, shape):
    """It took 18 more."""
    batch, parts = torch.ones(2 * N, 2), mirror.PerReplica([torch.ones(2, 2)] * N)

    def step_calls(backend, count):
        with mirror.MirroredStrategy(["cpu"] * N, backend) as strategy:
            model = strategy.mirror(Weights(count, shape))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

            def step(x):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()

            return calls_of(
                (lambda: step(batch)) if way == 1 else (lambda: strategy.run(step, (parts,)))
            )

    packing, other = (
        (step_calls(backend, 24) - step_calls(backend, 4)) / 20 for backend in ("naive", "host")
    )
    assert packing <= other + 1.1


@each_once(way=[1, 2, 3], n=[1, 2, 3, 2, 3, 3], kind=["cpu", "cpu", "cpu", "cuda", "cuda", "cuda"])
def test_a_parameter_takes_no_call_of_python_in_a_steady_backward_pass(way, n, kind):
    """Its hooks have gone after three passes in one order; those at the ends of buckets stay."""
    here, everywhere = threading.local(), types.SimpleNamespace(is_in_pass=False)
    place = here if way == 3 else everywhere  # in run, other replicas' threads do other things
    devices = [kind if kind == "cpu" else f"cuda:{i}" for i in range(n)]

    def backward(loss):
        place.is_in_pass = True
        loss.backward()
        place.is_in_pass = False

    def counts(frame):  # also not the simulated GPUs
        is_own = frame.f_code.co_filename.startswith(PACKAGE)
        return is_own and getattr(place, "is_in_pass", False)

    def pass_calls(num_parameters):
        collect()  # every strategy that is alive is told of every pass
        with mirror.MirroredStrategy(devices, "naive", schedule="lockstep") as strategy:
            model = strategy.mirror(Weights(num_parameters, (4, 4)).to(devices[0]))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            parts = mirror.PerReplica([torch.ones(2, 2, device=device) for device in devices])

            def step(x):
                optimizer.zero_grad()
                backward(model(x).mean())
                optimizer.step()

            def step_in_two():
                optimizer.zero_grad()
                loss = strategy.run(lambda x: model(x).mean(), (parts,))
                backward(strategy.reduce("mean", loss))
                optimizer.step()

            if way == 1:
                steps = partial(step, torch.ones(2 * n, 2, device=devices[0]))
            else:
                steps = step_in_two if way == 2 else partial(strategy.run, step, (parts,))
            return calls_of(steps, ("call",), warm=3, counts=counts)

    with contextlib.nullcontext() if kind == "cpu" else FakeGpus(n):
        few = pass_calls(2)
        assert few > 0
        assert pass_calls(22) == few


class Convolutions(nn.Sequential):
    """161 parameters and 159 buffers, as ResNet-50 has."""

    def __init__(self):
        layers = (
            (nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2), nn.ReLU()) for _ in range(53)
        )
        super().__init__(
            *(one for three in layers for one in three), nn.Flatten(), nn.Linear(8, 2)
        )


def test_what_a_replica_adds_to_a_step_beyond_its_own_pass():
    """Functions of Python; a replica's own pass is its forward, through copies of 161 parameters.

    That itself takes two calls more than a plain one per module and per look at a variable:
    CallInterceptor, and the dict that hands out the replica's copy.
    """
    batch = torch.ones(24, 2, 2, 2)

    def step_calls(n):
        with mirror.MirroredStrategy(["cpu"] * n) as strategy:
            model = strategy.mirror(Convolutions())
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

            def step():
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()

            return calls_of(step, ("call",))

    def pass_calls():
        def passes(times):
            for _ in range(times):
                model(batch)

        with mirror.MirroredStrategy(["cpu"] * N) as strategy:
            model = strategy.mirror(Convolutions())
            once, thrice = (
                calls_of(lambda t=t: strategy.run(passes, (t,)), ("call",)) for t in (1, 3)
            )
            return (thrice - once) / 2 / N

    added = (step_calls(6) - step_calls(2)) / 4
    assert added - pass_calls() <= 16


@each_once(foreach=[False, True], way=[1, 3], n=[2, 8], inside=[False, True])
def test_a_step_with_sharded_state_makes_about_as_many_calls(foreach, n, inside, way):
    batch = torch.ones(24, 2, 2, 2)

    def step_calls(state):
        with mirror.MirroredStrategy(["cpu"] * n, optimizer_state=state) as strategy:
            with strategy.scope():
                model = Convolutions()
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)

            def step():
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()

            with strategy.scope() if inside else contextlib.nullcontext():
                return calls_of(step if way == 1 else lambda: strategy.run(step))

    assert step_calls("sharded") <= 1.1 * step_calls("replicated")


def test_giving_combined_buffers_to_replicas_that_have_them():
    with mirror.MirroredStrategy(["cpu"] * 8) as strategy:
        model = strategy.mirror(Convolutions())
        model(torch.ones(24, 2, 2, 2))
        assert calls_of(strategy._group.runner.prepare) <= 170


@pytest.mark.parametrize("n", [2, 8])
def test_noting_that_an_evaluation_has_run(n):
    with mirror.MirroredStrategy(["cpu"] * n) as strategy:
        model = strategy.mirror(Convolutions())
        model.eval()
        model(torch.ones(24, 2, 2, 2))
        buffers = [buffer._mirrored for buffer in model.buffers()]
        assert calls_of(lambda: [buffer.record_run((0, 1)) for buffer in buffers]) <= 2 * 159 + 5


@pytest.mark.parametrize(("n", "most"), [(2, 0.3), (8, 0.5)])
def test_the_part_of_a_parallel_step_that_no_replica_runs(n, most, monkeypatch):
    """What is before, between and after the replicas' turns, of a plain step's calls.

    The optimizer's step for all replicas of a device is in it, which one device makes, too.
    """
    here, counting, count = threading.local(), [False], [0]

    def within(function, is_serial):
        def call(*args, **kwargs):
            before, here.is_serial = getattr(here, "is_serial", False), is_serial
            try:
                return function(*args, **kwargs)
            finally:
                here.is_serial = before

        return call

    def count_call(frame, event, arg):
        if counting[0] and event in ("call", "c_call") and getattr(here, "is_serial", False):
            count[0] += 1

    def make():
        model = nn.Sequential(*(m for _ in range(24) for m in (nn.Linear(8, 8), nn.ReLU())))
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()

    model, optimizer = make()
    plain, of_optimizer = calls_of(lambda: step(torch.ones(16, 8))), calls_of(optimizer.step)
    monkeypatch.setattr(Run, "act", within(Run.act, True))
    monkeypatch.setattr(Lockstep, "run", within(Lockstep.run, False))
    warnings.filterwarnings("ignore", 'schedule="parallel"')  # there may be a GIL
    with mirror.MirroredStrategy(["cpu"] * n, schedule="parallel") as strategy:
        with strategy.scope():
            model, optimizer = make()
        parts = mirror.PerReplica([torch.ones(16 // n, 8)] * n)
        run = within(strategy.run, True)
        with profiled(count_call, threads=True):
            for _ in range(WARM):
                run(step, args=(parts,))
            counting[0] = True
            run(step, args=(parts,))
    assert of_optimizer < count[0] <= most * plain + of_optimizer


# Compiled steps: mirror's own calls; without inductor torch calls some for every operation


FEW, MANY = 2, 6


class Scalars(nn.Module):
    """So many parameters, and few operations, which are what takes long to trace."""

    def __init__(self, count):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))

    def forward(self, x):
        return x * torch.cat(list(self.weights)).sum()


def own_calls_of(call):
    """Returns how many functions of the package one call calls.

    The least of several, without garbage collections: as of tests/benchmarks/test_calls.py.
    """
    count, counts = 0, []

    def count_call(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    gc.collect()
    gc.disable()
    try:
        for _ in range(TIMES):
            count = 0
            with profiled(count_call):
                call()
            counts.append(count)
    finally:
        gc.enable()
    return min(counts)


def step_calls(n, num_parameters):
    with mirror.MirroredStrategy(["cpu"] * n) as strategy:
        model = strategy.mirror(Scalars(num_parameters))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled = strategy.compile(step, mode="trace")
        (batch,) = strategy.distribute_dataset([torch.ones(2 * n, 2)])
        for _ in range(4):
            compiled(batch)
        assert compiled.num_traces == 1
        return own_calls_of(lambda: compiled(batch))


def test_what_a_replica_and_a_parameter_add_to_a_compiled_step():
    few = step_calls(FEW, 4)
    assert (step_calls(MANY, 4) - few) / (MANY - FEW) <= 10
    assert step_calls(FEW, 12) == few


@pytest.mark.slow
def test_what_a_replica_adds_with_161_parameters():
    assert (step_calls(MANY, 161) - step_calls(FEW, 161)) / (MANY - FEW) <= 10


def module_calls(n, num_layers, *, compiles=True):
    """Returns the calls of mirror's functions, and of user's ``forward``, in a pass.

    The last are calls of C that mirror's functions make.
    """
    with mirror.MirroredStrategy(["cpu"] * n) as strategy:
        layers = [nn.Linear(4, 4) for _ in range(num_layers)]
        model = strategy.mirror(nn.Sequential(*layers))
        if compiles:
            strategy.compile(model, fallback="error")
        batch = torch.ones(2 * n, 4)

        def call():
            model(batch).mean().backward()
            model.zero_grad()

        def is_forward(frame):
            return frame.f_code.co_name == "forward" and "linear" in frame.f_code.co_filename

        def is_own(frame):
            return frame.f_code.co_filename.startswith(PACKAGE)

        return [
            calls_of(call, events, counts=counts)
            for events, counts in (
                (("call",), is_own),
                (("call",), is_forward),
                (("c_call",), is_own),
            )
        ]


def test_what_a_replica_and_a_parameter_add_to_a_pass_of_a_compiled_module():
    """A replica adds calls, as many for any number of parameters; see docs/performance.md."""
    few, many = module_calls(FEW, 4), module_calls(MANY, 4)
    long, long_many = module_calls(FEW, 8), module_calls(MANY, 8)
    for shorter, longer in ((few, many), (long, long_many)):
        assert (longer[0] - shorter[0]) / (MANY - FEW) <= 29
        assert (longer[2] - shorter[2]) / (MANY - FEW) <= 30
    assert long[0] - few[0] <= 26 * 8
    assert few[1] == many[1] == 0


@contextlib.contextmanager
def counting_operations():
    """Gives a list of torch's operations on simulated GPUs, without views and those of graphs.

    A mode of its own would be one that compiled modules notice.
    """
    found, dispatch = [], tensors.Mode.__torch_dispatch__

    def count(mode, function, types, args=(), kwargs=None):
        if not any(a.alias_info and not a.alias_info.is_write for a in function._schema.arguments):
            found.append(function)
        return dispatch(mode, function, types, args, kwargs)

    with mock.patch.object(tensors.Mode, "__torch_dispatch__", count):
        yield found


def loop_calls(n, num_layers, *, set_to_none=True, make=torch.optim.SGD, **options):
    """Returns what a step of a compiled loop makes on simulated GPUs, each with one replica.

    Calls of mirror's functions, calls of C by these, and operations of torch outside graphs.
    """
    with compiling_gpus(n) as gpus, graphs_on(gpus):
        devices = [f"cuda:{i}" for i in range(n)]
        with mirror.MirroredStrategy(devices, "naive", schedule="lockstep") as strategy:
            with strategy.scope():
                model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
                optimizer = make(model.parameters(), lr=0.1, **options)
            strategy.compile(model, fallback="error")
            batch = torch.ones(2 * n, 4, device="cuda:0")

            def step():
                optimizer.zero_grad(set_to_none=set_to_none)
                model(batch).mean().backward()
                optimizer.step()

            def is_own(frame):
                return frame.f_code.co_filename.startswith(PACKAGE)

            python = calls_of(step, ("call",), warm=6, counts=is_own)
            in_c = calls_of(step, ("c_call",), warm=0, counts=is_own)
            with counting_operations() as operations:
                step()
            return python, in_c, len(operations)


LOOPS = {
    "SGD": ({"momentum": 0.9}, 199, 235, 9),
    "SGD, zeros": ({"momentum": 0.9, "set_to_none": False}, 203, 238, 12),
    "AdamW": ({"make": torch.optim.AdamW}, 262, 268, 19),
}


@pytest.mark.parametrize(("how", "python", "in_c", "operations"), LOOPS.values(), ids=LOOPS)
def test_what_a_replica_and_a_parameter_add_to_a_step_of_a_compiled_loop(
    how, python, in_c, operations
):
    """All of it: forward, backward, reduction, zero_grad and the update. Parameters add nothing.

    The simulation is a mode of torch, so here replicas of a split call have threads of their own.
    """
    few, many = loop_calls(2, 2, **how), loop_calls(3, 2, **how)
    added = [more - less for less, more in zip(few, many, strict=True)]
    assert added[0] <= python
    assert added[1] <= in_c
    assert added[2] <= operations
    longer = loop_calls(2, 5, **how)
    assert longer[0] == few[0]
    assert longer[1] - few[1] <= 9  # guards look at each layer
    assert longer[2] == few[2]
