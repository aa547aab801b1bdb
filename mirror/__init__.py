"""mirror: tf.distribute's MirroredStrategy for PyTorch."""

from typing import TYPE_CHECKING

from mirror import comm, data
from mirror.base.migration_hints import names_of
from mirror.base.pictures import Trace
from mirror.comm.reduce_ops import ReduceOp
from mirror.data.distributed_dataset import DistributedDataset
from mirror.data.input_options import InputContext, InputOptions
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
from mirror.integrations import keras_call as _keras_call  # noqa: F401  adds Keras
from mirror.strategy.mirrored import (
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    is_mirrored,
    set_aggregation,
)
from mirror.strategy.multi_worker import MultiWorkerMirroredStrategy
from mirror.strategy.replica_context import ReplicaContext
from mirror.strategy.strategy_options import CommunicationOptions, Guards
from mirror.values import PerReplica

if TYPE_CHECKING:
    from mirror import amp, cluster, metrics, nn, testing, train
    from mirror import server as server
    from mirror.integrations.tpu import TPUStrategy
    from mirror.server.roles.coordinator import ClusterCoordinator
    from mirror.strategy.parameter_server import ParameterServerStrategy
    from mirror.tools.planning.plan import plan
    from mirror.train.checkpoint.checkpoint import Checkpoint
    from mirror.train.checkpoint.manager import CheckpointManager
    from mirror.train.checkpoint.preemption import PreemptionCheckpointHandler
else:  # hidden from type checkers, which must report unknown names
    __getattr__ = names_of(
        "mirror",
        lazy={
            "Checkpoint": "mirror.train.checkpoint.checkpoint",
            "CheckpointManager": "mirror.train.checkpoint.manager",
            "ClusterCoordinator": "mirror.server.roles.coordinator",
            "ParameterServerStrategy": "mirror.strategy.parameter_server",
            "PreemptionCheckpointHandler": "mirror.train.checkpoint.preemption",
            "TPUStrategy": "mirror.integrations.tpu",
            "amp": "mirror.amp",
            "cluster": "mirror.cluster",
            "keras": "mirror.keras",
            "lightning": "mirror.lightning",
            "metrics": "mirror.metrics",
            "nn": "mirror.nn",
            "plan": "mirror.tools.planning.plan",
            "server": "mirror.server",
            "testing": "mirror.testing",
            "train": "mirror.train",
        },
    )

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
    "testing",
    "train",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
