"""Mistakes with arguments that are numbers: each ends in an error with the argument and the value.

The catalogue has every integer, and every number of seconds, that a public function takes. A
wrong value never ends in an error of another library, and is never taken for another number.
"""

import math

import numpy as np
import pytest
import torch

import mirror
import mirror.server
from mirror.cluster import ClusterSpec, SimpleResolver
from mirror.data import from_arrays
from mirror.errors import short_repr
from mirror.server import FixedShards, MaxSize, MinSize
from mirror.train import LogEvery, SaveEvery, StopAfter, StopAtStep, TerminationConfig
from tests.mistakes.mistake import X, context, net, sgd, step
from tests.pairs import EXHAUSTIVE

NOT_INTEGERS = {
    "half": 1.5,
    "float": 1.0,
    "true": True,
    "false": False,
    "text": "1",
    "bytes": b"1",
    "none": None,
    "list": [1],
    "tensor": torch.tensor([1, 1]),
    "nan": math.nan,
    "infinity": math.inf,
    "per_replica": mirror.PerReplica([1, 1]),
    "negative": -9,
    "large": 2**70,
}
NOT_SECONDS = {name: NOT_INTEGERS[name] for name in NOT_INTEGERS.keys() - {"half", "float"}}


def tensors():
    return [torch.full((4,), float(i)) for i in range(2)]


def call(name, use):
    """Calls a function with a communicator of two replicas and the value."""

    def program(strategy, value):
        communicator = mirror.comm.create(name, ["cpu"] * 2)
        try:
            use(communicator, value)
        finally:
            communicator.close()

    return program


def inside(use):
    """Calls a function with a replica context and the value, on every replica."""
    return lambda strategy, value: strategy.run(lambda: use(context(), value))


def ones(strategy):
    return strategy.run(lambda: torch.ones(2, 3))


def manager(tmp_path="unused", **options):
    return mirror.CheckpointManager(mirror.Checkpoint(model=net()), tmp_path, **options)


def average(value):
    return mirror.nn.compute_average_loss(torch.ones(4), global_batch_size=value)


def program():
    model = net()
    step(model, sgd(model))


def compare(**options):
    return mirror.testing.assert_equal_to_one_device(program, **{"replicas": (2,)} | options)


CLUSTER = ClusterSpec({"worker": ["a:1", "a:2"]})
SERVERS = ClusterSpec({"ps": ["a:1"], "worker": ["a:2", "a:3"]})

# For each argument: the name in the message, the program, and the values above that are right.
INTEGERS = {
    "all_reduce_lists": (
        "bytes_per_pack",
        call("host", lambda c, v: c.all_reduce_lists([tensors(), tensors()], bytes_per_pack=v)),
        {"large"},
    ),
    "max_blocks": (
        "max_blocks",
        lambda s, v: mirror.comm.create("ring", ["cpu"] * 2, max_blocks=v),
        {"none"},
    ),
    "options_pack": (
        "bytes_per_pack",
        lambda s, v: mirror.CommunicationOptions(bytes_per_pack=v),
        {"large"},
    ),
    "guards": ("replicas_every", lambda s, v: mirror.Guards(replicas_every=v), {"large"}),
    "reduce": ("axis", lambda s, v: s.reduce("sum", ones(s), axis=v), {"none"}),
    "gather": ("axis", lambda s, v: s.gather(ones(s), axis=v), set()),
    "all_gather": ("axis", inside(lambda c, v: c.all_gather(torch.ones(2), axis=v)), set()),
    "all_gather_plain": ("axis", lambda s, v: context().all_gather(torch.ones(2), v), set()),
    "prefetch": ("prefetch", lambda s, v: mirror.InputOptions(prefetch=v), {"large"}),
    "pipelines": (
        "num_input_pipelines",
        lambda s, v: mirror.InputContext(num_input_pipelines=v),
        {"large"},
    ),
    "pipeline": ("input_pipeline_id", lambda s, v: mirror.InputContext(input_pipeline_id=v), ()),
    "context_replicas": (
        "num_replicas_in_sync",
        lambda s, v: mirror.InputContext(num_replicas_in_sync=v),
        {"large"},
    ),
    "per_replica_size": (
        "global_batch_size",
        lambda s, v: mirror.InputContext().get_per_replica_batch_size(v),
        {"large"},
    ),
    "batch_size": ("batch_size", lambda s, v: from_arrays(X, v), {"large"}),
    "seed": ("seed", lambda s, v: from_arrays(X, 2, seed=v), {"none", "negative"}),
    "repeat": (
        "repeat",
        lambda s, v: from_arrays(X, 2, repeat=v),
        {"none", "true", "false", "large"},
    ),
    "average": ("global_batch_size", lambda s, v: average(v), {"none"}),
    "average_inside": ("global_batch_size", inside(lambda c, v: average(v)), {"none"}),
    "max_to_keep": ("max_to_keep", lambda s, v: manager(max_to_keep=v), {"none", "large"}),
    "save": ("step", lambda s, v: manager().save(v), set()),
    "exit_code": (
        "exit_code",
        lambda s, v: mirror.PreemptionCheckpointHandler(manager(), exit_code=v),
        set(),
    ),
    "signals": (
        "signals",
        lambda s, v: mirror.PreemptionCheckpointHandler(manager(), signals=(v,)),
        set(),
    ),
    "testing_replicas": ("replicas", lambda s, v: compare(replicas=v), {"list", "large"}),
    "testing_steps": ("steps", lambda s, v: compare(steps=v), {"large"}),
    "fixed_shards": ("num_shards", lambda s, v: FixedShards(v), {"large"}),
    "min_size": ("min_shard_bytes", lambda s, v: MinSize(v), {"large"}),
    "min_size_shards": ("max_shards", lambda s, v: MinSize(8, v), {"large"}),
    "max_size": ("max_shard_bytes", lambda s, v: MaxSize(v), {"large"}),
    "max_size_shards": ("max_shards", lambda s, v: MaxSize(8, v), {"none", "large"}),
    "num_servers": (
        "num_servers",
        lambda s, v: mirror.ParameterServerStrategy(v),
        {"none", "large"},
    ),
    "num_workers": (
        "num_workers",
        lambda s, v: mirror.ParameterServerStrategy(1, v),
        {"none", "large"},
    ),
    "to_aggregate": (
        "replicas_to_aggregate",
        lambda s, v: mirror.ParameterServerStrategy(sync=True, replicas_to_aggregate=v),
        {"none", "large"},
    ),
    "max_staleness": (
        "max_staleness",
        lambda s, v: mirror.ParameterServerStrategy(max_staleness=v),
        {"none", "large"},
    ),
    "task_address": ("task", lambda s, v: CLUSTER.task_address("worker", v), set()),
    "server": ("task", lambda s, v: mirror.server.Server(SERVERS, "worker", v), {"none"}),
    "resolver": (
        "task",
        lambda s, v: SimpleResolver(CLUSTER, task_type="worker", task_id=v).rendezvous(),
        {"none"},
    ),
    "sparse_cluster": ("task", lambda s, v: ClusterSpec({"worker": {v: "a:1"}}), {"text", "list"}),
    "log_every": ("steps", lambda s, v: LogEvery(v), {"none", "large"}),
    "save_every": ("steps", lambda s, v: SaveEvery(v), {"none", "large"}),
    "last_step": ("last_step", lambda s, v: StopAtStep(v), {"none", "large"}),
    "num_steps": ("num_steps", lambda s, v: StopAtStep(num_steps=v), {"none", "large"}),
}
for _name in mirror.comm.available(["cpu"] * 2):
    INTEGERS[f"broadcast_{_name}"] = (
        "root",
        call(_name, lambda c, v: c.broadcast(tensors(), v)),
        (),
    )

SECONDS = {
    "options": ("timeout_seconds", mirror.CommunicationOptions, {"none", "large", "infinity"}),
    "ring": (
        "timeout_seconds",
        lambda **options: mirror.comm.create("ring", ["cpu"] * 2, **options).close(),
        {"none", "large", "infinity"},
    ),
    "servers": ("timeout_seconds", mirror.ParameterServerStrategy, {"large"}),
    "log_every": ("seconds", LogEvery, {"none", "large", "infinity"}),
    "save_every": ("seconds", SaveEvery, {"none", "large", "infinity"}),
    "stop_after": ("seconds", StopAfter, {"large", "infinity"}),
    "grace": ("grace_period", TerminationConfig, {"none", "large"}),
}


WRONG_INTEGERS = [
    (argument, value)
    for argument, (_, _, right) in INTEGERS.items()
    for value in NOT_INTEGERS
    if value not in right
]


# Every argument has several quick values, and every value many quick arguments.
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        pytest.param(*case, id="-".join(case), marks=() if i % 5 == 0 else EXHAUSTIVE)
        for i, case in enumerate(WRONG_INTEGERS)
    ],
)
def test_an_integer_argument_is_refused_with_its_name_and_value(strategy, argument, value):
    name, use, _ = INTEGERS[argument]
    check(name, NOT_INTEGERS[value], lambda given: use(strategy, given))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        pytest.param(argument, value, id=f"{argument}-{value}")
        for argument, (_, _, right) in SECONDS.items()
        for value in sorted(NOT_SECONDS)
        if value not in right
    ],
)
def test_a_number_of_seconds_is_refused_with_its_name_and_value(argument, value):
    name, use, _ = SECONDS[argument]
    check(name, NOT_SECONDS[value], lambda given: use(**{name: given}))


def check(name, value, use):
    """Asserts an error of this package with the argument's name and the value."""
    with pytest.raises((TypeError, ValueError, mirror.MirrorError)) as caught:
        use(value)
    assert name in str(caught.value)
    assert short_repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["1", b"1", None, [1], -1, math.nan, math.inf])
def test_a_weight_is_refused_with_its_value(strategy, value):
    def set_weight(replica, given):
        replica.weight = given

    check("weight", value, lambda given: inside(set_weight)(strategy, given))


@pytest.mark.parametrize("name", mirror.comm.available(["cpu"] * 2))
@pytest.mark.parametrize("value", ["1", b"1", None, [1], True, torch.ones(2)], ids=short_repr)
def test_a_scale_is_refused_with_its_value(strategy, name, value):
    reduce = call(name, lambda communicator, v: communicator.all_reduce(tensors(), "sum", v))
    check("scale", value, lambda given: reduce(strategy, given))


@pytest.mark.parametrize("name", mirror.comm.available(["cpu"] * 2))
def test_integers_of_numpy_are_integers(strategy, name):
    communicator = mirror.comm.create(name, ["cpu"] * 2)
    values = tensors()
    communicator.broadcast(values, np.int64(1))
    communicator.all_reduce_lists([[value] for value in values], "sum", 0.5, np.int64(8))
    communicator.close()
    assert [value.tolist() for value in values] == [[1.0] * 4] * 2


@pytest.mark.parametrize("value", [1.5, True, None, 3])
def test_values_of_replicas_are_a_sequence(value):
    with pytest.raises(TypeError, match=rf"a PerReplica are a sequence.*got {value};"):
        mirror.PerReplica(value)
