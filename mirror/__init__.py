"""mirror: tf.distribute's MirroredStrategy for PyTorch."""

from typing import TYPE_CHECKING

from mirror import amp, comm, data, metrics, nn, train
from mirror.data.distributed.distribute import DistributedDataset
from mirror.data.options import InputContext, InputOptions
from mirror.errors import (
    BackendError,
    BatchError,
    CheckpointError,
    CollectiveTimeoutError,
    CompileError,
    DeviceError,
    DivergenceError,
    GradientError,
    MirrorError,
    NanLossError,
    ReplicaMismatchError,
    ServerLostError,
    ShapeError,
    StepError,
    StrategyError,
    StructureError,
    WorkerLostError,
)
from mirror.pictures.trace import Trace
from mirror.replica.collectives.reduction import ReduceOp
from mirror.server.roles.coordinator import ClusterCoordinator
from mirror.signposts import names_of
from mirror.strategy.current import (
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from mirror.strategy.inspection import is_mirrored, set_aggregation
from mirror.strategy.kinds.central_storage import CentralStorageStrategy
from mirror.strategy.kinds.multi_worker import MultiWorkerMirroredStrategy
from mirror.strategy.kinds.one_device import OneDeviceStrategy
from mirror.strategy.kinds.parameter_server import ParameterServerStrategy
from mirror.strategy.mirrored import MirroredStrategy
from mirror.strategy.options import CommunicationOptions, Guards
from mirror.strategy.replica_context import ReplicaContext
from mirror.tpu.strategy.strategy import TPUStrategy
from mirror.train.checkpoint.checkpoint import Checkpoint
from mirror.train.checkpoint.manager import CheckpointManager
from mirror.train.checkpoint.preemption import PreemptionCheckpointHandler
from mirror.train.planning.plan import plan
from mirror.values import PerReplica

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "BatchError",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "ClusterCoordinator",
    "CollectiveTimeoutError",
    "CommunicationOptions",
    "CompileError",
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
]

if TYPE_CHECKING:
    from mirror import cluster
else:  # what most programs do without; and an unknown name is one to type checkers
    __getattr__ = names_of("mirror", lazy={"cluster", "keras", "lightning"})
