"""mirror/signposts.py: who comes from another library is told mirror's way; every entry of it."""

import ast
import copy
import inspect
import re

import pytest
import torch

import mirror
from mirror import signposts

TABLE = signposts.table()
ATTRIBUTES = [(p, name) for p, names in TABLE.items() for name in names if "()" not in p]
KEYWORDS = [(p, name) for p, names in TABLE.items() for name in names if "()" in p]
CLASSES = {
    name: getattr(mirror, name)
    for name in ("MirroredStrategy", "ReplicaContext", "DistributedDataset")
}


@pytest.mark.parametrize(("place", "name"), ATTRIBUTES)
def test_every_name_of_the_table_says_whose_it_is_and_what_to_do(objects, place, name):
    sign = TABLE[place][name]
    with pytest.raises(AttributeError) as error:
        getattr(objects[place], name)
    text = str(error.value)
    assert f"{name!r} ({sign.library})" in text
    assert text.endswith(f"; {sign.way}")
    assert not hasattr(objects[place], name)
    assert getattr(objects[place], name, 5) == 5


@pytest.mark.parametrize(("place", "name"), KEYWORDS)
def test_every_keyword_of_the_table_says_what_to_do(place, name):
    kind = getattr(mirror, place.removesuffix("()"))
    assert name not in inspect.signature(kind).parameters
    with pytest.raises(TypeError) as error:
        kind(**{name: None})
    assert str(error.value).endswith(f"; {TABLE[place][name].way}")


def known_paths():
    """Returns dotted names of what there is, under the names that the texts use."""
    here = {"mirror": mirror, "torch": torch, "context": mirror.ReplicaContext}
    here |= {"strategy": mirror.MirroredStrategy, "copy": copy}
    return here


WAYS = sorted({sign.way for names in TABLE.values() for sign in names.values()})


@pytest.mark.parametrize("way", WAYS)
def test_a_way_names_what_there_is(way):
    assert way == way.strip()
    assert way.isascii()
    assert "{" not in way
    for path in re.findall(r"\b(?:mirror|strategy|context|torch|copy)(?:\.\w+)+", way):
        root, *names = path.split(".")
        found = known_paths()[root]
        for name in names:
            if name == "strategy" and found is mirror.ReplicaContext:
                found = mirror.MirroredStrategy
                continue
            assert hasattr(found, name), path
            found = getattr(found, name)
    for keyword in re.findall(r"\bpass (\w+)=", way):
        callables = (mirror.MirroredStrategy, mirror.CommunicationOptions, mirror.InputOptions)
        assert any(keyword in inspect.signature(kind).parameters for kind in callables), keyword


def test_the_table_is_sorted_into_places_that_exist():
    assert set(TABLE) == {
        "mirror",
        "mirror.cluster",
        "mirror.nn",
        *CLASSES,
        "MirroredStrategy()",
        "CommunicationOptions()",
        "InputOptions()",
    }
    assert all(TABLE.values())
    assert all(sign.library and sign.way for names in TABLE.values() for sign in names.values())


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
strategy.cluster_resolver                         one machine
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
strategy.save_state                               torch.save
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


def test_an_import_of_a_foreign_name_says_the_same():
    with pytest.raises(ImportError, match=r"TensorFlow.*backend='nccl'"):
        from mirror import NcclAllReduce  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from mirror import nothing  # noqa: F401
    with pytest.raises(ImportError, match=r"strategy\.mirror"):
        from mirror.nn import DataParallel  # noqa: F401


def test_a_name_that_nobody_has_is_an_ordinary_error(objects):
    for place, owner in objects.items():
        for name in ("nobody", "_private", "__dunder__"):
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
                getattr(owner, name)
        assert not hasattr(owner, "nobody"), place
    with pytest.raises(TypeError, match="unexpected keyword argument 'nobody'"):
        mirror.MirroredStrategy(["cpu"], nobody=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nobody'"):
        mirror.InputOptions(nobody=1)


def test_a_subclass_may_have_a_keyword_and_a_name_of_its_own():
    class Own(mirror.MirroredStrategy):
        def __init__(self, precision):
            super().__init__(["cpu"])
            self.precision = precision

        def prepare(self):
            return self.precision

    with Own(precision=16) as own:
        assert own.prepare() == 16
        assert repr(own) == "Own([cpu], backend='host')"
        with pytest.raises(AttributeError, match="a Own has no 'setup'"):
            own.setup


def test_signatures_are_what_they_were():
    parameters = list(inspect.signature(mirror.MirroredStrategy).parameters)
    assert parameters[:3] == ["devices", "backend", "communication_options"]
    assert next(iter(inspect.signature(mirror.InputOptions).parameters)) == "prefetch"
    assert mirror.InputOptions() == mirror.InputOptions(2)
    assert hash(mirror.InputOptions()) == hash(mirror.InputOptions(2))


READS_LATE = """
import mirror
from mirror import signposts
strategy = mirror.MirroredStrategy(["cpu"] * 2)
strategy.run(lambda: mirror.get_replica_context().all_reduce("sum", 1))
print(signposts.table.cache_info().currsize)
hasattr(strategy, "prepare")
print(signposts.table.cache_info().currsize)
"""


def test_the_table_is_read_when_a_name_is_missing(forks):
    done = forks.run(READS_LATE)
    assert done.stdout.split() == ["0", "1"]


def test_the_type_checker_still_refuses_unknown_names():
    for module in (mirror, mirror.nn, signposts):
        tree = ast.parse(inspect.getsource(module))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert "__getattr__" not in names
    assert not any("__getattr__" in inspect.getsource(kind) for kind in CLASSES.values())
