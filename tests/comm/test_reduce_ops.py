"""Reduce operations are understood in every spelling, or named in the error."""

import enum

import pytest
import torch

import mirror
from mirror.comm.reduce_ops import reduce_op


class TensorFlowOp(enum.Enum):
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "x"


class TextOp(str, enum.Enum):
    AVG = "avg"


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (torch.distributed.ReduceOp.SUM, "sum"),
        (torch.distributed.ReduceOp.AVG, "mean"),
        (torch.distributed.ReduceOp.MAX, "max"),
        (torch.distributed.ReduceOp.MIN, "min"),
        (torch.distributed.ReduceOp.PRODUCT, "prod"),
        (TensorFlowOp.SUM, "sum"),
        (TensorFlowOp.MEAN, "mean"),
        (mirror.ReduceOp.AVG, "mean"),
        (mirror.ReduceOp.PRODUCT, "prod"),
        (TextOp.AVG, "mean"),
    ],
)
def test_operations_of_other_libraries_are_understood(objects, op, name):
    assert reduce_op(op) == name
    values = mirror.PerReplica([torch.tensor(3.0), torch.tensor(5.0)])
    strategy = objects["MirroredStrategy"]
    assert strategy.reduce(op, values) == strategy.reduce(name, values)
    reduced = strategy.run(
        lambda x: mirror.get_replica_context().all_reduce(op, x), args=(values,)
    )
    assert reduced.values[1] == strategy.reduce(name, values)


def test_aliases_are_no_operations_of_their_own():
    assert [op.name for op in mirror.ReduceOp] == ["SUM", "MEAN", "MAX", "MIN", "PROD"]
    assert mirror.ReduceOp.AVG is mirror.ReduceOp.MEAN


UNKNOWN_OPS = [
    torch.distributed.ReduceOp.BAND,
    torch.distributed.ReduceOp.PREMUL_SUM,
    TensorFlowOp.ONLY_FIRST_REPLICA,
    "median",
    "avg",
    "",
    None,
    1,
    sum,
    torch.nn.Linear(2, 2),
]


@pytest.mark.parametrize("op", UNKNOWN_OPS, ids=repr)
def test_an_unknown_operation_is_named(objects, op):
    with pytest.raises(ValueError, match=r"op comes first.* sum, mean, max, min, prod"):
        objects["MirroredStrategy"].reduce(op, mirror.PerReplica([1, 2]))


SECRET = 123.456
LOSSES = [
    mirror.PerReplica([torch.full((50,), SECRET)] * 2),
    torch.full((3,), SECRET),
    [torch.tensor(SECRET)],
    {"loss": torch.tensor(SECRET), "more": mirror.PerReplica([SECRET, SECRET])},
    (SECRET, torch.tensor(SECRET)),
    torch.full((3,), SECRET).numpy(),
]


@pytest.mark.parametrize("losses", LOSSES, ids=lambda value: type(value).__name__)
def test_swapped_arguments_raise_without_their_data(objects, losses):
    strategy = objects["MirroredStrategy"]
    for call in (
        lambda: strategy.reduce(losses, "sum"),
        lambda: strategy.run(lambda: mirror.get_replica_context().all_reduce(losses, "sum")),
    ):
        with pytest.raises(ValueError, match="op comes first") as error:
            call()
        assert "123.4" not in str(error.value)


def test_a_value_that_is_not_distributed_raises_without_its_data(objects):
    for value in (torch.full((3,), SECRET), torch.tensor(SECRET)):
        with pytest.raises(ValueError, match="a float32 tensor of shape") as error:
            objects["MirroredStrategy"].reduce("sum", value)
        assert "123.4" not in str(error.value)
