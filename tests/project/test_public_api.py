"""The public names, and that importing mirror does nothing else."""

import subprocess
import sys

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
    "train",
}

OPTIONAL = (
    *"cupy google_crc32c keras lightning matplotlib ray sklearn tensorboard tensorflow".split(),
    *"jax jaxlib torchax torchmetrics transformers".split(),
    "mirror.cluster",
    "mirror.lightning",
)
LATE = ("mirror.tools.planning.prediction",)  # what is imported where it is used
SHARE = 0.2  # of the time that importing torch takes; 0.05 of some 1.5 s on a quiet machine

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

before = state()
import mirror
after = state()
print([key for key in before if before[key] != after[key]])
print([name for name in sys.argv[1:] if name in sys.modules])
"""


def test_the_public_names_are_those_of_the_api():
    assert mirror.__all__ == sorted(NAMES)


def test_every_public_name_is_there():
    assert [name for name in mirror.__all__ if not hasattr(mirror, name)] == []


def test_every_public_name_has_a_docstring():
    assert [name for name in mirror.__all__ if not getattr(mirror, name).__doc__] == []


def test_importing_is_quick(monkeypatch):
    # A ratio of this thread's own times: what else the machine does slows both down. The first
    # time something may have to be compiled.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    assert any(float(_python(TIMED_IMPORT)) < SHARE for _ in range(3))


def test_importing_changes_nothing_and_imports_nothing_that_can_wait():
    assert _python(OBSERVED_IMPORT, *OPTIONAL, *LATE).splitlines() == ["[]", "[]"]


def _python(program, *args):
    command = [sys.executable, "-W", "error", "-c", program, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout
