"""What other libraries have for several devices is here, or has a signpost: name by name."""

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import mirror
from mirror.base.migration_hints import table


def parameters_of(function):
    return {
        n for n in inspect.signature(function).parameters if n not in ("self", "args", "kwargs")
    }


def members_of(kind, above=object):
    return {n for n in dir(kind) if not n.startswith("_") and n not in dir(above)}


def told_at(*places):
    return {name for place in places for name in table()[place]}


# What reads or sets what mirror has nothing of, and is asked by the library itself.
EXEMPT = {
    "to_kwargs",  # of DDP, for Join
    *"reset_iter_state set_all_reduce_hook set_post_optim_event".split(),  # of FSDP2
    *"set_reduce_scatter_max_input_buffers set_reduce_scatter_unused_params".split(),
    *"deepspeed_ulysses_dl_adapter fp8_backend is_composable_parallelism_enabled".split(),
    *"lomo_backward verify_device_map".split(),  # of Accelerate
}
# A later torch may have more of them.
seen_torch = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) > (2, 13),
    reason="its names were not looked at",
)


@seen_torch
def test_all_that_torch_takes_and_has_for_several_devices_has_a_signpost():
    wrappers = (DataParallel, DistributedDataParallel, FullyShardedDataParallel, fully_shard)
    own = told_at("MirroredStrategy()") | parameters_of(mirror.MirroredStrategy)
    for wrapper in wrappers:
        assert parameters_of(wrapper) - own == set()
        # `strategy.mirror(model, ...)` in place of `Wrapper(model, ...)`
        assert parameters_of(wrapper) - told_at("MirroredStrategy.mirror()") == {"module"}
    own = told_at("MirroredStrategy") | members_of(mirror.MirroredStrategy) | EXEMPT
    for wrapper in (*wrappers[:3], FSDPModule):
        assert members_of(wrapper, nn.Module) - own == set()


@pytest.mark.parametrize(
    ("module", "kind"), [("accelerate", "Accelerator"), ("lightning", "Fabric")]
)
def test_all_that_accelerate_and_fabric_have_has_a_signpost(module, kind):
    library = pytest.importorskip(module)
    own = told_at("MirroredStrategy()") | parameters_of(mirror.MirroredStrategy)
    assert parameters_of(getattr(library, kind)) - own == set()
    own = told_at("MirroredStrategy") | members_of(mirror.MirroredStrategy) | EXEMPT
    assert members_of(getattr(library, kind)) - own == set()


# The public names of libraries that are not installed here, by the module they are written on.
LISTS = {
    "tf.distribute": (
        "mirror",
        """CrossDeviceOps DistributedDataset DistributedIterator DistributedValues
        HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode MirroredStrategy
        MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy ParameterServerStrategy
        ReduceOp ReductionToOneDevice ReplicaContext RunOptions Server Strategy StrategyExtended
        TPUStrategy cluster_resolver coordinator experimental experimental_set_strategy
        get_replica_context get_strategy has_strategy in_cross_replica_context get_loss_reduction
        CentralStorageStrategy CollectiveCommunication CollectiveHints CommunicationImplementation
        CommunicationOptions PreemptionCheckpointHandler PreemptionWatcher TerminationConfig
        ValueContext partitioners rpc ClusterCoordinator PerWorkerValues RemoteValue
        experimental_get_current_worker_index Partitioner FixedShardsPartitioner
        MinSizePartitioner MaxSizePartitioner PerReplica Mirrored VariableAggregation
        VariableSynchronization""",
    ),
    "tf.distribute.cluster_resolver": (
        "mirror.cluster",
        """ClusterResolver GCEClusterResolver KubernetesClusterResolver SimpleClusterResolver
        SlurmClusterResolver TFConfigClusterResolver TPUClusterResolver UnionResolver""",
    ),
    "tf.train of TensorFlow 1, and tf.estimator": (
        "mirror",
        """ClusterSpec Server MonitoredTrainingSession MonitoredSession Supervisor Scaffold
        SyncReplicasOptimizer replica_device_setter SessionRunHook StopAtStepHook NanTensorHook
        LoggingTensorHook CheckpointSaverHook StepCounterHook SummarySaverHook Estimator RunConfig
        DistributeConfig TrainSpec EvalSpec train_and_evaluate Checkpoint CheckpointManager
        ExponentialMovingAverage""",
    ),
    "horovod.torch": (
        "mirror",
        """init shutdown is_initialized start_timeline stop_timeline size local_size cross_size
        rank local_rank cross_rank is_homogeneous mpi_threads_supported mpi_enabled mpi_built
        gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built allreduce
        allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async
        grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather
        allgather_async grouped_allgather grouped_allgather_async broadcast broadcast_async
        broadcast_ broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async
        grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize
        DistributedOptimizer broadcast_parameters broadcast_optimizer_state broadcast_object
        allgather_object Average Sum Adasum Min Max Product Compression SyncBatchNorm elastic
        ProcessSet add_process_set remove_process_set global_process_set run""",
    ),
    "deepspeed": (
        "mirror",
        """initialize init_distributed add_config_arguments DeepSpeedEngine PipelineModule zero moe
        checkpointing""",
    ),
    "jax": (
        "mirror",
        """pmap shard_map pjit jit grad value_and_grad local_devices device_count
        local_device_count process_count process_index device_put_replicated device_put_sharded
        lax psum pmean pmin pmax ppermute axis_index all_gather all_to_all psum_scatter
        unreplicate replicate shard prefetch_to_device Mesh NamedSharding PartitionSpec""",
    ),
    "DTensor": (
        "mirror",
        """DTensor DeviceMesh init_device_mesh distribute_tensor distribute_module Shard Replicate
        Partial parallelize_module Layout Mesh dtensor""",
    ),
    "DeepSpeedEngine": (
        "MirroredStrategy",
        """backward step train eval save_checkpoint load_checkpoint no_sync module device
        local_rank world_size global_rank train_batch eval_batch train_batch_size
        train_micro_batch_size_per_gpu gradient_accumulation_steps get_global_grad_norm
        is_gradient_accumulation_boundary set_gradient_accumulation_boundary
        allreduce_gradients save_16bit_model""",
    ),
    "tf.distribute.Strategy": (
        "MirroredStrategy",
        """cluster_resolver extended num_replicas_in_sync distribute_datasets_from_function
        experimental_distribute_dataset experimental_distribute_values_from_function
        experimental_local_results gather reduce run scope experimental_run_v2
        make_dataset_iterator make_input_fn_iterator experimental_make_numpy_dataset
        experimental_run update_config_proto configure unwrap call_for_each_replica
        broadcast_to batch_reduce_to reduce_to colocate_vars_with non_slot_devices
        parameter_devices worker_devices read_var update update_non_slot value_container
        experimental_require_static_shapes""",
    ),
}


@pytest.mark.parametrize("library", LISTS)
def test_all_public_names_of_a_library_are_here_or_have_a_signpost(library):
    place, names = LISTS[library]
    here = (
        vars(mirror.cluster) if place == "mirror.cluster" else dir(getattr(mirror, place, mirror))
    )
    assert set(names.split()) - told_at(place) - set(here) == set()
