"""Names and keywords of other libraries, as people write them: each is answered by mirror's."""

import re

import pytest

import mirror

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
def test_a_resolver_in_the_place_of_another_argument_is_told_its_keyword(kind, given, answer):
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
