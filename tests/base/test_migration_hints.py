"""migration_hints.py: names of other libraries are answered by mirror's name; every entry."""

import ast
import copy
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import mirror
from mirror.base import migration_hints
from mirror.base.migration_hints import table

TABLE = migration_hints.table()
MODULES = {
    "mirror": mirror,
    "mirror.amp": mirror.amp,
    "mirror.cluster": mirror.cluster,
    "mirror.comm": mirror.comm,
    "mirror.data": mirror.data,
    "mirror.metrics": mirror.metrics,
    "mirror.nn": mirror.nn,
    "mirror.server": mirror.server,
    "mirror.train": mirror.train,
}
STRATEGIES = {
    name: getattr(mirror, name)
    for name in (
        "MirroredStrategy",
        "MultiWorkerMirroredStrategy",
        "OneDeviceStrategy",
        "CentralStorageStrategy",
        "ParameterServerStrategy",
        "TPUStrategy",
    )
}
CLASSES = STRATEGIES | {
    name: getattr(mirror, name)
    for name in (
        "ReplicaContext",
        "DistributedDataset",
        "Checkpoint",
        "CheckpointManager",
        "PreemptionCheckpointHandler",
    )
}
CALLED = STRATEGIES | {
    name: getattr(mirror, name)
    for name in (
        "CommunicationOptions",
        "InputOptions",
        "CheckpointManager",
        "PreemptionCheckpointHandler",
    )
}
MODEL = "a mirrored module"
FUNCTIONS = {
    "MirroredStrategy.mirror": mirror.MirroredStrategy.mirror,
    "MirroredStrategy.compile": mirror.MirroredStrategy.compile,
    "mirror.nn.convert_sync_batchnorm": mirror.nn.convert_sync_batchnorm,
}


def signs_of(kind, suffix=""):
    """Yields what a class says, by name: its own, and what it has from the classes above."""
    places = [f"{base.__name__}{suffix}" for base in kind.__mro__]
    for name in sorted({name for place in places for name in TABLE.get(place, ())}):
        yield name, next(TABLE[place][name] for place in places if name in TABLE.get(place, ()))


@pytest.mark.parametrize("place", MODULES)
def test_every_name_on_a_module_names_its_library_and_a_remedy(place):
    for name, sign in TABLE[place].items():
        check_attribute(MODULES[place], name, sign)


@pytest.mark.parametrize("place", CLASSES)
def test_every_name_on_an_object_names_its_library_and_a_remedy(place):
    kind = CLASSES[place]
    thing = object.__new__(kind)  # no devices, no servers: what is missing, is so for all
    for name, sign in signs_of(kind):
        if name in TABLE.get(place, ()) or not hasattr(kind, name):
            check_attribute(thing, name, sign)
    # Where a class has a member of its own, the sign of the class above must not hide it.
    assert not set(TABLE.get(place, ())) & set(dir(kind))


def check_attribute(thing, name, sign):
    with pytest.raises(AttributeError) as error:
        getattr(thing, name)
    text = str(error.value)
    assert f"{name!r} ({sign.library})" in text
    assert text.endswith(f"; {sign.way}")
    assert not hasattr(thing, name)
    assert getattr(thing, name, 5) == 5


class Wrapping(nn.Module):
    """Has a submodule by the name of a wrapper's, and asks it for what itself lacks."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def test_every_name_on_a_mirrored_module_names_its_library_and_a_remedy():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    model = strategy.mirror(nn.Sequential(nn.Linear(2, 2)))
    wrapping = strategy.mirror(Wrapping(nn.Linear(2, 2)))
    assert isinstance(wrapping.module, nn.Linear)
    for name, sign in TABLE[MODEL].items():
        check_attribute(model, name, sign)
        check_attribute(model[0], name, sign)
        if name != "module":
            check_attribute(wrapping, name, sign)
        with pytest.raises(AttributeError, match=f"'Linear' object has no attribute '{name}'"):
            getattr(nn.Linear(2, 2), name)
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'unknown'"):
        _ = model.unknown
    with pytest.raises(AttributeError) as error:
        _ = model.module
    assert type(error.value) is AttributeError
    with pytest.raises(AttributeError, match="has no attribute `module`"):
        model.get_submodule("0.module")


def test_the_hints_of_a_mirrored_module_cost_attributes_that_exist_nothing():
    mirror.MirroredStrategy(["cpu"] * 2).mirror(nn.Linear(2, 2))
    assert nn.Module.__getattr__.__module__ == "torch.nn.modules.module"
    assert not hasattr(nn.Module.__getattr__, "__wrapped__")
    assert type(nn.Module.__dict__["__getattr__"]).__name__ == "function"


@pytest.mark.parametrize("place", CALLED)
def test_every_keyword_of_a_constructor_says_what_to_do(place):
    kind = CALLED[place]
    known = inspect.signature(kind).parameters
    for name, sign in signs_of(kind, "()"):
        if name not in known:
            with pytest.raises(TypeError) as error:
                kind(**{name: None})
            assert str(error.value) == f"{place}() takes no {name!r} ({sign.library}); {sign.way}"
    assert not set(TABLE.get(f"{place}()", ())) & set(known)


@pytest.mark.parametrize("place", FUNCTIONS)
def test_every_keyword_of_a_function_says_what_to_do(place):
    function = FUNCTIONS[place]
    for name, sign in TABLE[f"{place}()"].items():
        assert name not in inspect.signature(function).parameters
        with pytest.raises(TypeError) as error:
            function(None, nn.Linear(1, 1), **{name: None})
        assert str(error.value) == f"{place}() takes no {name!r} ({sign.library}); {sign.way}"


# What there is


def ways():
    """Yields every text with its place, and the class that a program has there, if it is one."""
    for place in (*MODULES, MODEL, *(f"{name}()" for name in FUNCTIONS)):
        for sign in TABLE[place].values():
            yield place, None, sign.way
    for place, kind in CLASSES.items():
        for name, sign in signs_of(kind):
            if not hasattr(kind, name):
                yield place, kind, sign.way
    for place, kind in CALLED.items():
        for name, sign in signs_of(kind, "()"):
            if name not in inspect.signature(kind).parameters:
                yield f"{place}()", kind, sign.way


WAYS: dict[str, tuple[Any, set[str]]] = {}
for a_place, a_kind, a_way in ways():
    WAYS.setdefault(a_place, (a_kind, set()))[1].add(a_way)
PATH = re.compile(r"\b(?:mirror|strategy|context|torch|copy|nn)(?:\.\w+(?:\(\))?)+")
RETURNED = {"get_replica_context": mirror.ReplicaContext, "get_strategy": mirror.MirroredStrategy}
OPTIONAL = ("mirror.lightning", "mirror.keras")  # which need a library
# Called in the texts by their bare names, after others of the same thing or as Python's own.
BARE = {"iter", "next", "print", "int", "all_gather", "fn", "strategy"}


def find(path, strategy):
    """Returns what a dotted name of a text stands for; AssertionError: there is no such thing."""
    roots = {"mirror": mirror, "torch": torch, "context": mirror.ReplicaContext, "copy": copy}
    roots |= {"strategy": strategy, "nn": nn}
    root, *names = path.split(".")
    found = roots[root]
    for name in names:
        name = name.removesuffix("()")
        if name == "strategy" and found is mirror.ReplicaContext:
            found = mirror.MirroredStrategy
            continue
        assert hasattr(found, name), path
        found = RETURNED.get(name) or getattr(found, name)
    return found


def check_names(way, strategy=mirror.MirroredStrategy):
    """Fails where a text names what there is not: a path, or a keyword of a call."""
    for path in PATH.findall(way):
        module, _, name = path.rpartition(".")
        if module in OPTIONAL:
            source = Path(importlib.util.find_spec(module).origin).read_text()
            assert f'"{name}"' in source.partition("__all__")[2], path
        else:
            find(path, strategy)
    for path, arguments in re.findall(r"\b(mirror(?:\.\w+)+)\(([^()]*)\)", way):
        keywords = re.findall(r"(\w+)=", arguments)
        if keywords:
            known = inspect.signature(find(path, strategy)).parameters
            takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
            assert takes_all or set(keywords) <= set(known), path
    for name in re.findall(r"(?<![.\w])(\w+)\(", way):
        assert name in BARE, name


@pytest.mark.parametrize("place", WAYS)
def test_the_ways_of_a_place_name_what_there_is(place):
    kind, texts = WAYS[place]
    is_call = place.removesuffix("()") in CALLED and place.endswith("()")
    known = inspect.signature(kind if is_call else mirror.MirroredStrategy).parameters
    for way in sorted(texts):
        assert way == way.strip()
        assert way.isascii()
        assert "{" not in way
        check_names(way, kind if kind in STRATEGIES.values() else mirror.MirroredStrategy)
        # What is to be passed is a keyword of what is being made.
        for keyword in re.findall(r"\b(?:pass|here are|and|or) (\w+)=", way):
            assert keyword in known or keyword in CHOSEN.get(place, ()), way


# What a text says is to be passed to something else than the thing at hand.
CHOSEN = {
    "CommunicationOptions()": ["backend"],
    "mirror": ["strategy"],
    "mirror.train": ["strategy"],
}


@pytest.mark.parametrize(
    "way",
    [
        "it is mirror.Server(cluster)",
        "call strategy.distribute(loader)",
        "it is mirror.get_replica_context().broadcast",
        "use mirror.ParameterServerStrategy(resolver=...)",
        "mirror.MirroredStrategy(optimizer=...)",
        "call all_to_all(value)",
    ],
)
def test_a_way_that_names_what_is_not_there_is_found(way):
    with pytest.raises(AssertionError):
        check_names(way)


def test_the_table_is_sorted_into_places_that_exist():
    calls = {f"{name}()" for name in (*CALLED, *FUNCTIONS)}
    assert set(TABLE) <= {*MODULES, MODEL, *CLASSES, *calls}
    assert all(TABLE.values())
    assert all(sign.library and sign.way for names in TABLE.values() for sign in names.values())


def test_no_name_stands_twice_in_one_place():
    text = migration_hints._FILE.read_text()
    sections = list(migration_hints.entries_of(text))
    assert len(sections) == len(dict(sections))
    for title, entries in sections:
        names = [name for head, _ in entries for name in head.partition(": ")[2].split()]
        assert len(names) == len(set(names)), (title, {n for n in names if names.count(n) > 1})
        if title == "phrases":
            unused = [head for head, _ in entries if f"{{{head}}}" not in text]
            assert unused == []
        else:
            assert all(": " in head for head, _ in entries)


def test_texts_end_up_whole():
    """No line of the file is lost between an entry and the next."""
    text = migration_hints._FILE.read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    read = sum(1 for _, entries in migration_hints.entries_of(text) for _ in entries)
    heads = [line for line in lines if not line.startswith((" ", "["))]
    assert read == len(heads)
    assert max(map(len, lines)) <= 99


def test_a_name_of_no_library_is_an_ordinary_error(objects):
    for place, owner in objects.items():
        for name in ("unknown", "_private", "__dunder__"):
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
                getattr(owner, name)
        assert not hasattr(owner, "unknown"), place
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        mirror.MirroredStrategy(["cpu"], unknown=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        mirror.InputOptions(unknown=1)


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
from mirror.base import migration_hints as signposts
strategy = mirror.MirroredStrategy(["cpu"] * 2)
strategy.run(lambda: mirror.get_replica_context().all_reduce("sum", 1))
print(signposts.table.cache_info().currsize)
hasattr(strategy, "prepare")
print(signposts.table.cache_info().currsize)
"""


def test_the_table_is_read_when_a_name_is_missing(script_pool):
    done = script_pool.run(READS_LATE)
    assert done.stdout.split() == ["0", "1"]


def test_the_type_checker_still_refuses_unknown_names():
    for module in (mirror, mirror.nn, migration_hints):
        tree = ast.parse(inspect.getsource(module))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert "__getattr__" not in names
    own = (mirror.ParameterServerStrategy, mirror.TPUStrategy)  # their remedies are errors
    for kind in CLASSES.values():
        assert kind in own or "def __getattr__" not in inspect.getsource(kind)


# What people have written elsewhere, and all public names of other libraries


# What people have written, and a word of the answer; gathered apart from the table.
HABITS = """
strategy.experimental_run_v2                      strategy.run
strategy.unwrap                                   local_results
strategy.extended                                 strategy
strategy.state_dict                               the model
strategy.rank                                     replica_id_in_sync_group
strategy.prepare                                  scope
strategy.is_main_process                          one process
context.barrier                                   wait
context.scope                                     merge_call
mirror.NcclAllReduce                              nccl
mirror.GradScaler                                 mirror.amp.GradScaler
mirror.DistributedDataParallel                    MirroredStrategy
mirror.nn.DataParallel                            MirroredStrategy
mirror.Server                                     mirror.server.Server
mirror.pmean                                      all_reduce
mirror.train.Server                               mirror.server.Server
mirror.amp.autocast                               torch.autocast
mirror.data.Dataset                               distribute_dataset
mirror.comm.NcclAllReduce                         nccl
mirror.metrics.Mean                               strategy.reduce
dataset.set_epoch                                 sampler
dataset.element_spec                              next
MirroredStrategy(cross_device_ops=)               backend
MirroredStrategy(device_ids=)                     devices=
OneDeviceStrategy(devices=)                       device=
CentralStorageStrategy(num_gpus=)                 compute_devices=
MultiWorkerMirroredStrategy(rank=)                torchrun
ParameterServerStrategy(variable_partitioner=)    partitioner=
TPUStrategy(tpu_cluster_resolver=)                leave it out
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
