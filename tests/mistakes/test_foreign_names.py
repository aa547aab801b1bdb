"""Names and keywords of other libraries: each is answered by mirror's name."""

import inspect
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import mirror
from mirror.base.migration_hints import table

# What people have written, and a word of the answer; gathered apart from the table.
HABITS = """
strategy.experimental_run_v2                      strategy.run
strategy.experimental_run                         strategy.run
strategy.experimental_distribute_dataset          distribute_dataset
strategy.make_dataset_iterator                    distribute_dataset
strategy.make_input_fn_iterator                   distribute_dataset
strategy.experimental_local_results               local_results
strategy.unwrap                                   local_results
strategy.extended                                 strategy
strategy.distribute_datasets_from_function        distribute_dataset_from_function
strategy.experimental_distribute_datasets_from_function distribute_dataset_from_function
strategy.experimental_distribute_values_from_function   distribute_values_from_function
strategy.experimental_make_numpy_dataset          from_arrays
strategy.cluster_resolver                         MultiWorkerMirroredStrategy
strategy.configure                                cluster_resolver=
strategy.call_for_each_replica                    strategy.run
strategy.update                                   all replicas
strategy.worker_devices                           strategy.devices
strategy.module                                   the model
strategy.state_dict                               the model
strategy.parameters                               the model
strategy.train                                    the model
strategy.device_ids                               strategy.devices
strategy.register_comm_hook                       wire_dtype
strategy.join                                     uneven
strategy.process_group                            one process
strategy.rank                                     replica_id_in_sync_group
strategy.world_size                               num_replicas_in_sync
strategy.barrier                                  merge_call
strategy.broadcast                                strategy.mirror
strategy.all_reduce                               strategy.reduce
strategy.all_gather                               strategy.gather
strategy.merge_call                               get_replica_context
strategy.setup                                    scope
strategy.setup_module                             strategy.mirror
strategy.setup_optimizers                         scope
strategy.setup_dataloaders                        distribute_dataset
strategy.backward                                 loss.backward
strategy.launch                                   one process
strategy.clip_gradients                           clip_grad_norm_
strategy.no_backward_sync                         no_sync
strategy.is_global_zero                           one process
strategy.global_rank                              replica_id_in_sync_group
strategy.autocast                                 torch.autocast
strategy.save                                     torch.save
strategy.load                                     torch.save
strategy.print                                    one process
strategy.seed_everything                          manual_seed
strategy.to_device                                distribute_dataset
strategy.prepare                                  scope
strategy.accumulate                               no_sync
strategy.gather_for_metrics                       strategy.gather
strategy.clip_grad_norm_                          torch.nn.utils
strategy.unwrap_model                             deepcopy
strategy.wait_for_everyone                        one process
strategy.is_main_process                          one process
strategy.num_processes                            num_replicas_in_sync
strategy.process_index                            replica_id_in_sync_group
strategy.save_state                               mirror.Checkpoint
strategy.sync_gradients                           no_sync
strategy.allreduce                                strategy.reduce
strategy.broadcast_parameters                     strategy.mirror
strategy.size                                     num_replicas_in_sync
context.rank                                      replica_id_in_sync_group
context.world_size                                num_replicas_in_sync
context.reduce                                    all_reduce
context.gather                                    all_gather
context.is_main_process                           replica_id_in_sync_group
context.barrier                                   wait
context.allreduce                                 all_reduce
context.scope                                     merge_call
mirror.NcclAllReduce                              nccl
mirror.GradScaler                                 mirror.amp.GradScaler
mirror.LossScaleOptimizer                         mirror.amp.GradScaler
mirror.convert_sync_batchnorm                     mirror.nn
mirror.set_seed                                   manual_seed
mirror.compile                                    strategy.compile
mirror.save                                       torch.save
mirror.find_executable_batch_size                 OutOfMemoryError
mirror.HierarchicalCopyAllReduce                  hierarchical
mirror.ReductionToOneDevice                       naive
mirror.CrossDeviceOps                             backend
mirror.StrategyExtended                           MirroredStrategy
mirror.distribute                                 mirror.MirroredStrategy
mirror.experimental                               mirror.MirroredStrategy
mirror.experimental_set_strategy                  scope
mirror.DistributedValues                          PerReplica
mirror.DataParallel                               MirroredStrategy
mirror.DistributedDataParallel                    MirroredStrategy
mirror.DDP                                        strategy.mirror
mirror.Fabric                                     MirroredStrategy
mirror.Accelerator                                MirroredStrategy
mirror.init_process_group                         MirroredStrategy
mirror.get_rank                                   replica_id_in_sync_group
mirror.init                                       MirroredStrategy
mirror.DistributedOptimizer                       scope
mirror.DistributedSampler                         distribute_dataset
mirror.nn.DataParallel                            MirroredStrategy
mirror.Server                                     mirror.server.Server
mirror.ClusterSpec                                mirror.cluster.ClusterSpec
mirror.RemoteValue                                mirror.server.RemoteValue
mirror.PerWorkerValues                            mirror.server.PerWorkerValues
mirror.MinSizePartitioner                         mirror.server.MinSize
mirror.TFConfigClusterResolver                    mirror.cluster.TFConfigResolver
mirror.MonitoredTrainingSession                   mirror.train.Training
mirror.Supervisor                                 mirror.train.Training
mirror.SyncReplicasOptimizer                      sync=True
mirror.replica_device_setter                      placement=
mirror.DTensor                                    whole model
mirror.FSDP                                       torch's FSDP
mirror.Adasum                                     there is no Adasum
mirror.grouped_allreduce                          all_reduce
mirror.alltoall                                   all_gather
mirror.allreduce_async_                           not asynchronous
mirror.ProcessSet                                 another strategy
mirror.Trainer                                    mirror.lightning.MirroredStrategy
mirror.initialize                                 strategy.mirror
mirror.pmap                                       strategy.run
mirror.pmean                                      all_reduce
mirror.train.Server                               mirror.server.Server
mirror.train.SyncReplicasOptimizer                sync=True
mirror.amp.autocast                               torch.autocast
mirror.data.Dataset                               distribute_dataset
mirror.comm.NcclAllReduce                         nccl
mirror.server.MinSizePartitioner                  mirror.server.MinSize
mirror.metrics.Mean                               strategy.reduce
dataset.set_epoch                                 sampler
dataset.element_spec                              next
dataset.get_next                                  for batch in
dataset.batch_size                                loader
MirroredStrategy(cross_device_ops=)               backend
MirroredStrategy(device_ids=)                     devices=
MirroredStrategy(num_gpus=)                       devices=
MirroredStrategy(output_device=)                  first
MirroredStrategy(find_unused_parameters=)         leave it out
MirroredStrategy(bucket_cap_mb=)                  bytes_per_pack
MirroredStrategy(process_group=)                  leave it out
MirroredStrategy(accelerator=)                    devices=
MirroredStrategy(precision=)                      GradScaler
MirroredStrategy(mixed_precision=)                GradScaler
MirroredStrategy(cluster_resolver=)               MultiWorkerMirroredStrategy
MirroredStrategy(num_nodes=)                      torchrun
MirroredStrategy(delay_all_reduce_named_params=)  leave it out
MirroredStrategy(ignored_modules=)                requires_grad_
MirroredStrategy(process_set=)                    one group
OneDeviceStrategy(bucket_cap_mb=)                 one replica
OneDeviceStrategy(devices=)                       device=
CentralStorageStrategy(num_gpus=)                 compute_devices=
MultiWorkerMirroredStrategy(rank=)                torchrun
MultiWorkerMirroredStrategy(bucket_cap_mb=)       bytes_per_pack
ParameterServerStrategy(cluster_resolver=)        cluster=
ParameterServerStrategy(variable_partitioner=)    partitioner=
TPUStrategy(tpu_cluster_resolver=)                leave it out
MirroredStrategy(gradient_accumulation_steps=)    no_sync
MirroredStrategy(timeout=)                        timeout_seconds
MirroredStrategy(bytes_per_pack=)                 CommunicationOptions
CommunicationOptions(implementation=)             backend=
InputOptions(experimental_per_replica_buffer_size=)  prefetch=
"""


@pytest.mark.parametrize("habit", HABITS.strip().splitlines(), ids=lambda line: line.split()[0])
def test_a_habit_is_answered(objects, habit):
    written, answer = habit.split(maxsplit=1)
    owners = {
        "strategy": objects["MirroredStrategy"],
        "context": objects["ReplicaContext"],
        "dataset": objects["DistributedDataset"],
        "mirror": mirror,
    }
    if written.endswith("=)"):
        kind, keyword = written[:-2].split("(")
        with pytest.raises(TypeError, match=re.escape(answer)):
            getattr(mirror, kind)(**{keyword: 1})
        return
    root, *path, name = written.split(".")
    owner = owners[root]
    for step in path:
        owner = getattr(owner, step)
    with pytest.raises(AttributeError, match=re.escape(answer)):
        getattr(owner, name)


CLUSTER = mirror.cluster.ClusterSpec({"ps": ["a:1"], "worker": ["b:1"]})
RESOLVER = mirror.cluster.SimpleResolver(CLUSTER)


@pytest.mark.parametrize(
    ("kind", "given", "answer"),
    [
        ("ParameterServerStrategy", RESOLVER, "pass cluster=, a resolver"),
        ("ParameterServerStrategy", CLUSTER, "by its name; pass cluster="),
        ("ParameterServerStrategy", CLUSTER.as_dict(), "by its name; pass cluster="),
        ("MultiWorkerMirroredStrategy", RESOLVER, "by its name; pass cluster_resolver="),
        ("MultiWorkerMirroredStrategy", CLUSTER, "pass cluster_resolver="),
        ("MirroredStrategy", RESOLVER, "MultiWorkerMirroredStrategy(cluster_resolver=...)"),
        ("TPUStrategy", RESOLVER, "leave it out"),
        ("PreemptionCheckpointHandler", RESOLVER, "pass manager="),
    ],
)
def test_a_resolver_in_the_place_of_another_argument_raises_and_names_its_keyword(
    kind, given, answer
):
    with pytest.raises(TypeError, match=re.escape(answer)):
        getattr(mirror, kind)(given)


def test_signposts_of_a_class_above_hold_for_all_strategies_below():
    with mirror.OneDeviceStrategy("cpu") as one, mirror.CentralStorageStrategy(["cpu"]) as central:
        for strategy in (one, central):
            with pytest.raises(AttributeError, match=r"has no 'prepare' \(Accelerate\)"):
                strategy.prepare
    with mirror.MultiWorkerMirroredStrategy(["cpu"]) as workers:
        assert workers.cluster_resolver is None
        with pytest.raises(AttributeError, match="RANK"):
            workers.get_rank()


def test_an_import_of_a_foreign_name_says_the_same():
    with pytest.raises(ImportError, match=r"TensorFlow.*backend='nccl'"):
        from mirror import NcclAllReduce  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from mirror import nothing  # noqa: F401
    with pytest.raises(ImportError, match=r"strategy\.mirror"):
        from mirror.nn import DataParallel  # noqa: F401


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
