"""The public names, their types, and that importing mirror does nothing else."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mirror

NAMES = {
    "BackendError",
    "BatchError",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "ClusterCoordinator",
    "CollectiveTimeoutError",
    "CompileError",
    "CommunicationOptions",
    "DeviceError",
    "DistributedDataset",
    "DivergenceError",
    "GradientError",
    "Guards",
    "InputContext",
    "InputOptions",
    "MirrorError",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NanLossError",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "PreemptionCheckpointHandler",
    "ReduceOp",
    "ReplicaContext",
    "ReplicaMismatchError",
    "ServerLostError",
    "ShapeError",
    "StepError",
    "StrategyError",
    "StructureError",
    "TPUStrategy",
    "Trace",
    "WorkerLostError",
    "__version__",
    "amp",
    "cluster",
    "comm",
    "data",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "is_mirrored",
    "metrics",
    "nn",
    "plan",
    "set_aggregation",
    "testing",
    "train",
}

OPTIONAL = (
    *"cupy google_crc32c keras lightning matplotlib ray sklearn tensorboard tensorflow".split(),
    *"jax jaxlib torchax torchmetrics transformers".split(),
    "mirror.cluster",
    "mirror.lightning",
    "mirror.testing",
)
# What is imported where it is used; a module is there if any part of it is.
LATE = (
    *"mirror.server mirror.strategy.parameter_server mirror.tools mirror.train".split(),
    *"mirror.amp mirror.data.tfrecord mirror.integrations.tpu mirror.metrics mirror.nn".split(),
)
MOST_MODULES = 215  # of mirror and what it imports beside torch: the stable measure of the time
SHARE = 0.15  # of the time that importing torch takes; 0.04 of some 1.5 s on a quiet machine

# Without collections: one would look at all that torch has imported, and fall anywhere.
TIMED_IMPORT = """
import gc, time
gc.disable()
start = time.thread_time()
import torch
middle = time.thread_time()
import mirror
print((time.thread_time() - middle) / (middle - start))
"""

OBSERVED_IMPORT = """
import os, random, signal, sys, threading
import numpy, torch

def state():
    return {
        "threads": threading.active_count(),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "torch threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "CUDA is used": torch.cuda.is_initialized(),
        "torch._dynamo": "torch._dynamo" in sys.modules,
        "torch.distributed.run": "torch.distributed.run" in sys.modules,
    }

before, modules = state(), set(sys.modules)
import mirror
after, imported = state(), set(sys.modules) - modules
print([key for key in before if before[key] != after[key]])
print([name for name in sys.argv[1:] if name in imported])
print(len(imported))
"""


def test_the_public_names_are_those_of_the_api():
    assert mirror.__all__ == sorted(NAMES)


def test_every_public_name_has_a_docstring():
    assert [name for name in mirror.__all__ if not getattr(mirror, name).__doc__] == []


def test_importing_is_quick(monkeypatch):
    # A ratio of this thread's own times: what else the machine does slows both down. The first
    # time something may have to be compiled.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    assert any(float(_python(TIMED_IMPORT)) < SHARE for _ in range(3))


def test_importing_changes_nothing_and_imports_nothing_that_can_wait():
    changed, early, num_modules = _python(OBSERVED_IMPORT, *OPTIONAL, *LATE).splitlines()
    assert (changed, early) == ("[]", "[]")
    assert int(num_modules) <= MOST_MODULES


@pytest.mark.parametrize("package", [mirror, mirror.data, mirror.train])
def test_lazy_names_are_those_that_type_checkers_see(package):
    tree = ast.parse(inspect.getsource(package))
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: f"{node.module}.{alias.name}"
        if node.module == package.__name__
        else node.module
        for node in guarded.body
        for alias in node.names
    }
    ((lazy,),) = (
        [key.value for key in call.keywords]
        for call in ast.walk(guarded)
        if isinstance(call, ast.Call)
    )
    lazy = ast.literal_eval(lazy)
    assert {name: lazy.pop(name) for name in seen} == seen
    assert lazy.keys() <= {
        "keras",
        "lightning",
    }  # not for type checkers, which have no types of these


def test_all_names_are_there_and_imported_by_a_star_and_listed_by_dir():
    # In a process of its own: here other tests have imported submodules.
    program = "import mirror; print([n for n in mirror.__all__ if n not in dir(mirror)]); "
    program += "print([n for n in mirror.__all__ if not hasattr(mirror, n)]); "
    program += (
        "from mirror import *; print(plan is mirror.plan, train.Training is mirror.train.Training)"
    )
    assert _python(program).splitlines() == ["[]", "[]", "True True"]


def _python(program, *args):
    command = [sys.executable, "-W", "error", "-c", program, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


ROOT = Path(__file__).parents[2]

PROGRAM = """
import torch

import mirror
from mirror import ReduceOp

strategy = mirror.MirroredStrategy(["cpu"] * 2, gradient_reduction="sum", schedule="lockstep")
strategy = mirror.MirroredStrategy(gradient_reduction="avg")  # wrong
strategy = mirror.MirroredStrategy(schedule="lock-step")  # wrong
mirror.CentralStorageStrategy(schedule="stagered")  # wrong
mirror.MultiWorkerMirroredStrategy(gradient_reduction="men")  # wrong


def step(x: torch.Tensor) -> torch.Tensor:
    context = mirror.get_replica_context()
    assert context is not None
    context.all_reduce("maen", x)  # wrong
    context.all_reduce(ReduceOp.MAX, x)
    return torch.as_tensor(context.all_reduce("sum", x))


strategy.compile(step, fallback="eager", mode="trace")
strategy.compile(step, fallback="ignore")  # wrong
strategy.compile(step, mode="eager")  # wrong
for op in ("sum", "MEAN", ReduceOp.PROD):
    print(op)
print(strategy.reduce("sum", 1), strategy.reduce("MEAN", 1), strategy.reduce(ReduceOp.MIN, 1))
print(strategy.reduce("average", 1))  # wrong
"""


@pytest.mark.slow  # mypy reads torch's sources, where `make lint` has not just done so
def test_a_typo_is_found_and_nothing_else(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", str(program)]  # as this project asks it: strictly
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = {int(line) for line in re.findall(r"program\.py:(\d+): error", done.stdout)}
    lines = enumerate(PROGRAM.splitlines(), 1)
    assert found == {number for number, line in lines if "# wrong" in line}, done.stdout
