"""Fixtures for all tests: devices, strategies that are closed afterwards, one seed."""

import gc
import logging
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import mirror
from mirror.base.torch_private import num_dispatch_modes, num_function_modes
from mirror.replica.modules.replica_attributes import ReplicaAttribute
from mirror.threads import lockstep, schedule
from tests.pairs import leave_products_to_exhaustive

# So that `from tests.oracle import ...` works however pytest is started.
sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.register_assert_rewrite("tests.oracle")

# A shell starts background jobs with SIGINT ignored, and the processes of tests inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes of tests write whole lines into a pipe that they share; unbuffered ones write pieces.
os.environ.pop("PYTHONUNBUFFERED", None)

# At its first use torch records for good which functions create tensors. Some tests replace those
# functions, so the first use must come earlier.
with torch.device("cpu"):
    torch.empty(0)

TORCHS_LAYERS = [kind for kind in vars(torch.nn).values() if isinstance(kind, type)]


if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("no deadline", deadline=None)  # a busy machine misses any
    settings.load_profile("no deadline")


def pytest_addoption(parser):
    parser.addoption(
        "--schedule", default="auto", help="of the strategies that fixtures make: parallel, say"
    )
    parser.addoption(
        "--optimizer-state", default="replicated", help="of the strategies that fixtures make"
    )
    parser.addoption(
        "--own-steps",
        action="store_true",
        help="strategies that fixtures make step on every replica, as on distinct devices",
    )


def pytest_configure(config):
    # Tests that draw or compile train all the same: their replicas take turns then.
    if config.getoption("--schedule") == "parallel":
        for start in ("from now on the replicas take turns", "the replicas run at once, but this"):
            config.addinivalue_line("filterwarnings", f'ignore:schedule="parallel". {start}')


def pytest_collection_modifyitems(config, items):
    leave_products_to_exhaustive(items)
    if config.getoption("--optimizer-state") == "sharded":
        skip = pytest.mark.skip(reason="tests how replicated state is kept")
        for item in items:
            if item.get_closest_marker("replicated_state"):
                item.add_marker(skip)


def _device_lists():
    lists = {"cpu-x1": ["cpu"], "cpu-x2": ["cpu"] * 2, "cpu-x3": ["cpu"] * 3}
    if torch.cuda.is_available():
        lists["cuda0-x4"] = ["cuda:0"] * 4
        lists["gpus"] = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return lists


def pytest_collection_finish():
    """Makes garbage collection and logging cheap.

    Permanent objects (modules, collected tests) are frozen: each collection would scan hundreds
    of thousands of them, most from the compiler, which torch imports with the first optimizer.
    In each phase of a test pytest adds two handlers to every logger that does not propagate;
    torch has dozens of those.
    """
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    freeze()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


def freeze():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def frozen_caches():
    """Freezes what earlier tests have imported, and what they have left in caches.

    Torch's compiler keeps some 2,000 objects of each trace. A trace looks for closures among all
    objects that are not frozen, so that it took five times as long after a hundred traces.
    """
    if len(gc.get_objects(generation=2)) > 20_000:
        freeze()


@pytest.fixture(autouse=True)
def seed():
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed formats the stack for each kind of device that is not initialized
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def no_modes_left():
    """A mode that a test leaves on torch's stacks would change the tests after it."""
    before = num_function_modes(), num_dispatch_modes()
    yield
    assert (num_function_modes(), num_dispatch_modes()) == before


@pytest.fixture(autouse=True)
def sigterm_listens():
    """An exit for preemption ignores SIGTERM; processes of later tests would inherit that."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def plain_layers():
    """Removes from torch's classes the descriptors of attributes that replicas have set.

    They are permanent, and the compiler breaks its graph there, so later tests would change.
    """
    yield
    for layer in TORCHS_LAYERS:
        if ReplicaAttribute in map(type, vars(layer).values()):
            for name, attribute in list(vars(layer).items()):
                if isinstance(attribute, ReplicaAttribute):
                    delattr(layer, name)


@pytest.fixture
def leaks():
    """Gives ``leaks.threads("mirror side")``: the threads that this test has started."""
    from tests.leaks import Leaks

    return Leaks()


@pytest.fixture
def threads_switch_often():
    """Makes the interpreter switch threads 5,000 times as often as usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def one_thread():
    """Makes replicas compute with one intra-op thread, alone or at once.

    Bits depend on the number: LayerNorm, for one, adds its gradients up per thread.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def eager(monkeypatch):
    """Makes every turn count as a long one."""
    monkeypatch.setattr(schedule, "LONG_TURN_SECONDS", -1.0)
    monkeypatch.setattr(schedule, "NUM_TURNS", 1)


@pytest.fixture(params=_device_lists().values(), ids=_device_lists().keys())
def devices(request):
    return list(request.param)


def step_as_on_distinct_devices(strategy):
    replicas = strategy._group.replicas
    replicas.steps_once = replicas.is_one_device = False


@pytest.fixture
def strategy(devices, request):
    state = request.config.getoption("--optimizer-state")
    schedule = request.config.getoption("--schedule")
    with mirror.MirroredStrategy(devices, schedule=schedule, optimizer_state=state) as strategy:
        if request.config.getoption("--own-steps"):
            step_as_on_distinct_devices(strategy)
        yield strategy


@pytest.fixture
def central():
    """Gives ``central(n)``: a strategy of n simulated devices and a parameter device."""
    made = []

    def make(n=2, **options):
        made.append(mirror.CentralStorageStrategy(["cpu"] * n, **options))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()


@pytest.fixture
def make_strategy(request):
    """Gives ``make(n, **options)``: a strategy of n simulated devices, closed after the test.

    With ``own_steps`` every replica makes optimizer steps of its own, as on distinct devices.
    """
    made, always = [], request.config.getoption("--own-steps")

    def make(n=2, *, own_steps=always, **options):
        options.setdefault("schedule", request.config.getoption("--schedule"))
        options.setdefault("optimizer_state", request.config.getoption("--optimizer-state"))
        made.append(mirror.MirroredStrategy(["cpu"] * n, **options))
        if own_steps:
            step_as_on_distinct_devices(made[-1])
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()


@pytest.fixture
def long_drain(monkeypatch):
    """Makes a run that waits for other replicas after an error wait longer than a test may take.

    A test that passes shows without a clock that nothing waits; a busy machine would mislead it.
    """
    monkeypatch.setattr(lockstep, "DRAIN_SECONDS", 600.0)


@pytest.fixture
def port():
    """A port, as text, that is reserved for a process of this test."""
    from tests.ports import HeldPort

    with HeldPort() as held:
        yield str(held.number)


@pytest.fixture(scope="session")
def worker_pool():
    """Gives ``worker_pool(2)``: processes that run a function of a test file as workers."""
    from tests.worker_pool import WorkerPool

    known = {}

    def of_size(size):
        if size not in known:
            known[size] = WorkerPool(size)
        return known[size]

    yield of_size
    for one in known.values():
        one.close()


@pytest.fixture(scope="session")
def script_pool():
    """Gives ``script_pool.run(program)``: runs it in a process that has torch imported."""
    from tests.script_pool import ScriptPool

    script_pool = ScriptPool()
    yield script_pool
    script_pool.close()


@pytest.fixture(scope="module")
def objects():
    """One object of each kind with attributes that are looked up."""
    contexts = []
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        strategy.run(lambda: contexts.append(mirror.get_replica_context()))
        yield {
            "mirror": mirror,
            "mirror.cluster": mirror.cluster,
            "mirror.nn": mirror.nn,
            "MirroredStrategy": strategy,
            "DistributedDataset": strategy.distribute_dataset([torch.ones(2)]),
            "ReplicaContext": contexts[0],
        }
