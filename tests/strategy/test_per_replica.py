"""PerReplica values, and how they are reduced."""

import pytest
import torch

import mirror
from mirror.values import ABSENT
from tests.oracle import assert_same
from tests.strategy.programs import Box, Pair, ids, values
from tests.toy_models import replica_id


def test_values_is_a_tuple():
    assert mirror.PerReplica([1, 2]).values == (1, 2)
    assert mirror.PerReplica(i for i in range(2)).values == (0, 1)


# What works on every part by itself, with what it leaves of a part.
KEEPING = {
    "detach": lambda v: v.detach(),
    "torch.detach": torch.detach,
    "clone": lambda v: v.clone(),
    "clone, keyword": lambda v: v.clone(memory_format=torch.contiguous_format),
    "contiguous": lambda v: v.contiguous(),
    "data": lambda v: v.data,
    "cpu": lambda v: v.cpu(),
    "to a device": lambda v: v.to("cpu"),
    "to a dtype": lambda v: v.to(torch.float64),
    "to, keywords": lambda v: v.to(device="cpu", dtype=torch.float16, copy=True),
    "to another": lambda v: v.to(torch.zeros((), dtype=torch.float64)),
    "double": lambda v: v.double(),
    "half": lambda v: v.half(),
    "bfloat16": lambda v: v.bfloat16(),
    "long": lambda v: v.long(),
    "type": lambda v: v.type(torch.float64),
    "type_as": lambda v: v.type_as(torch.zeros(1, dtype=torch.int32)),
    "requires_grad_": lambda v: v.detach().requires_grad_(),
    "requires_grad_ off": lambda v: v.detach().requires_grad_(False),
    "zeros_like": lambda v: torch.zeros_like(v, dtype=torch.float64),
    "ones_like": torch.ones_like,
    "zero_": lambda v: v.detach().clone().zero_(),
}


def parts_of_two():
    """Parts of different shapes, with weights, and none of the last replica."""
    parts = [torch.rand(2, size, 3).transpose(0, 1).requires_grad_() for size in (3, 1)]
    parts = [part * 9 for part in parts]
    return mirror.PerReplica([*parts, ABSENT], weights=[3, 1, 0]), parts


@pytest.mark.parametrize("keep", KEEPING.values(), ids=KEEPING.keys())
def test_what_works_on_every_part_by_itself_gives_parts(keep):
    value, parts = parts_of_two()
    result = keep(value)
    assert type(result) is mirror.PerReplica
    assert result.weights == (3, 1, 0)
    assert result.values[2] is ABSENT
    for part, whole in zip(result.values, parts, strict=False):
        expected = keep(whole)
        assert part.dtype == expected.dtype
        assert part.requires_grad == expected.requires_grad
        assert part.is_contiguous() == expected.is_contiguous()
        assert torch.equal(part, expected)


@pytest.mark.parametrize(
    "change", [lambda v: v.detach_(), lambda v: v.zero_(), lambda v: v.requires_grad_()]
)
def test_what_works_in_place_gives_the_same_value(change):
    value = mirror.PerReplica([torch.ones(2), torch.ones(1)])
    assert change(value) is value
    assert value.to(torch.float32) is value


def test_parts_of_another_value_go_to_the_parts_of_this_one():
    value = mirror.PerReplica([torch.ones(2), torch.ones(1)])
    other = mirror.PerReplica([torch.zeros(1).double(), torch.zeros(1).half()])
    assert [part.dtype for part in value.to(other).values] == [torch.float64, torch.float16]


def test_what_tensors_have_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        mirror.PerReplica([torch.ones(2)]).unknown
    assert not hasattr(mirror.PerReplica([1]), "unknown")


def test_gradients_flow_through_copies_and_casts(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(torch.nn.Linear(1, 1, bias=False))
    outputs = strategy.run(lambda: model(torch.ones(1, 1)))
    strategy.reduce("mean", outputs.clone().double().to("cpu"), axis=0).backward()
    assert model.weight.grad.item() == 1.0


@pytest.mark.parametrize("op", ["sum", "SUM", "Sum", "mean", "MEAN", "max", "min", "prod"])
def test_reduce_across_replicas_is_elementwise(op, make_strategy):
    strategy = make_strategy(3)
    value = strategy.run(lambda: torch.tensor([1.0, 2.0]) * (replica_id() + 1))
    rows = torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
    expected = {
        "sum": rows.sum(0),
        "mean": rows.mean(0),
        "max": rows.amax(0),
        "min": rows.amin(0),
        "prod": rows.prod(0),
    }[op.lower()]
    assert torch.equal(strategy.reduce(op, value), expected)
    assert torch.equal(strategy.reduce(op, value, axis=None), expected)


def test_reduce_takes_the_enum(make_strategy):
    strategy = make_strategy(3)
    assert strategy.reduce(mirror.ReduceOp.SUM, ids(strategy)).item() == 3.0
    assert strategy.reduce(mirror.ReduceOp.MEAN, ids(strategy)).item() == 1.0


def test_reduce_keeps_structures(make_strategy):
    strategy = make_strategy(2)

    def fn():
        x = torch.tensor(1.0 + replica_id())
        return {"a": (x, [x * 10]), "p": Pair(x, x), "b": Box(x, x)}

    result = strategy.reduce("sum", strategy.run(fn))
    assert_same(result["a"], (torch.tensor(3.0), [torch.tensor(30.0)]))
    assert type(result["p"]) is Pair
    assert type(result["b"]) is Box
    assert result["b"].value.item() == 3.0


def test_mean_of_results_is_weighted_by_the_examples(make_strategy):
    strategy = make_strategy(3)
    x = torch.arange(10.0)
    (batch,) = strategy.distribute_dataset([x])
    result = strategy.run(lambda part: part.mean(), args=(batch,))
    assert [len(p) for p in batch.values] == [4, 3, 3]
    assert strategy.reduce("mean", result).item() == pytest.approx(4.5)
    nested = strategy.run(lambda part: {"loss": part.mean()}, args=(batch,))
    assert strategy.reduce("mean", nested)["loss"].item() == pytest.approx(4.5)


def test_mean_of_values_made_by_hand_is_the_plain_mean(make_strategy):
    strategy = make_strategy(3)
    value = mirror.PerReplica([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(6.0)])
    assert strategy.reduce("mean", value).item() == 3.0


def test_mean_is_weighted_by_the_weight_that_the_replica_set(make_strategy):
    strategy = make_strategy(2)

    def fn():
        mirror.get_replica_context().weight = 1.0 + 2 * replica_id()
        return torch.tensor(float(replica_id()))

    assert strategy.reduce("mean", strategy.run(fn)).item() == pytest.approx(0.75)
    assert strategy.reduce("mean", ids(strategy)).item() == 0.5  # and is forgotten


def test_mean_over_an_axis_divides_by_the_number_of_elements(make_strategy):
    strategy = make_strategy(3)
    lengths = (4, 2, 1)
    value = strategy.run(lambda: torch.full((lengths[replica_id()], 2), 1.0 + replica_id()))
    expected = torch.cat([torch.full((n, 2), 1.0 + r) for r, n in enumerate(lengths)])
    assert_same(strategy.reduce("mean", value, axis=0), expected.mean(0))
    assert_same(strategy.reduce("sum", value, axis=0), expected.sum(0))
    assert_same(strategy.reduce("max", value, axis=0), expected.amax(0))
    assert_same(strategy.reduce("min", value, axis=0), expected.amin(0))


def test_reduce_over_another_axis(make_strategy):
    strategy = make_strategy(2)
    value = strategy.run(lambda: torch.arange(6.0).view(2, 3) * (replica_id() + 1))
    rows = torch.arange(6.0).view(2, 3)
    whole = torch.cat([rows, rows * 2], dim=1)
    for axis in (1, -1):
        assert_same(strategy.reduce("mean", value, axis=axis), whole.mean(1))
        assert_same(strategy.reduce("sum", value, axis=axis), whole.sum(1))


def test_reduce_of_numbers(make_strategy):
    strategy = make_strategy(3)
    result = strategy.reduce("sum", strategy.run(lambda: replica_id() + 1))
    assert float(result) == 6.0
    assert float(strategy.reduce("mean", strategy.run(lambda: replica_id() + 1.0))) == 2.0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_reduce_of_integers_is_exact(dtype, make_strategy):
    strategy = make_strategy(3)
    value = strategy.run(lambda: torch.tensor([2**24 + 1, replica_id()], dtype=dtype))
    result = strategy.reduce("sum", value)
    assert result.dtype == dtype
    assert result.tolist() == [3 * (2**24 + 1), 3]


def test_reduce_is_differentiable(make_strategy):
    strategy = make_strategy(3)
    leaves = [torch.tensor([1.0, 2.0], requires_grad=True) for _ in range(3)]
    value = mirror.PerReplica([leaf * (i + 1) for i, leaf in enumerate(leaves)])
    (strategy.reduce("sum", value) * torch.tensor([1.0, 10.0])).sum().backward()
    for i, leaf in enumerate(leaves):
        assert_same(leaf.grad, torch.tensor([1.0, 10.0]) * (i + 1))
    value = mirror.PerReplica([leaf.detach().requires_grad_() for leaf in leaves])
    strategy.reduce("mean", value, axis=0).backward()
    assert_same(value.values[1].grad, torch.full((2,), 1 / 6))


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_max_min_and_prod_are_not_differentiable(op, make_strategy):
    strategy = make_strategy(2)
    x = torch.tensor(3.0, requires_grad=True)
    result = strategy.reduce(op, mirror.PerReplica([x * 1, x * 2]))
    assert result.item() == {"max": 6.0, "min": 3.0, "prod": 18.0}[op]
    with pytest.raises(RuntimeError):
        result.backward()


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_concatenates_in_replica_order(axis, make_strategy):
    strategy = make_strategy(3)

    def make(r):
        shape = [2, 2]
        shape[axis] = r + 1
        return torch.full(shape, float(r))

    value = strategy.run(lambda: make(replica_id()))
    expected = torch.cat([make(r) for r in range(3)], dim=axis)
    assert torch.equal(strategy.gather(value, axis=axis), expected)


def test_gather_is_differentiable(make_strategy):
    strategy = make_strategy(2)
    leaves = [torch.ones(n, requires_grad=True) for n in (2, 1)]
    value = mirror.PerReplica([leaf * 2 for leaf in leaves])
    (strategy.gather(value) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert leaves[0].grad.tolist() == [2.0, 4.0]
    assert leaves[1].grad.tolist() == [6.0]


def test_local_results(make_strategy):
    strategy = make_strategy(2)
    assert strategy.local_results(mirror.PerReplica([5, 6])) == (5, 6)
    assert strategy.local_results(7) == (7,)
    assert strategy.local_results("text") == ("text",)
    result = strategy.run(lambda: {"a": replica_id(), "p": Pair(replica_id(), "s")})
    assert strategy.local_results(result) == (
        {"a": 0, "p": Pair(0, "s")},
        {"a": 1, "p": Pair(1, "s")},
    )


def test_a_wrong_number_of_parts_is_an_error_wherever_parts_are_taken(make_strategy):
    strategy = make_strategy(3)
    parts = mirror.PerReplica([torch.ones(1), torch.ones(1)])

    def merge():
        return mirror.get_replica_context().merge_call(lambda strategy: {"a": parts})

    for take in (
        lambda: strategy.run(lambda x: x, args=(parts,)),
        lambda: strategy.run(merge),
        lambda: strategy.reduce("sum", parts),
        lambda: strategy.gather(parts),
        lambda: strategy.local_results({"a": parts}),
    ):
        with pytest.raises(mirror.StructureError, match="has 3 parts, one per replica; got one"):
            take()


@pytest.mark.parametrize("axis", ["0", 0.0, True, (0,)])
def test_an_axis_is_an_integer(make_strategy, axis):
    strategy = make_strategy(2)
    value = strategy.run(lambda: torch.ones(2, 2))
    for combine in (
        lambda: strategy.reduce("sum", value, axis=axis),
        lambda: strategy.gather(value, axis=axis),
        lambda: strategy.run(
            lambda: mirror.get_replica_context().all_gather(torch.ones(2, 2), axis=axis)
        ),
    ):
        with pytest.raises(TypeError, match="axis must be an integer, got "):
            combine()


def test_distribute_values_from_function(make_strategy):
    strategy = make_strategy(3)
    seen = []

    def make(context):
        assert context.num_replicas_in_sync == 3
        seen.append(context.replica_id_in_sync_group)
        return torch.tensor(10.0 * context.replica_id_in_sync_group)

    value = strategy.distribute_values_from_function(make)
    assert seen == [0, 1, 2]
    assert isinstance(value, mirror.PerReplica)
    assert values(strategy, strategy.run(lambda x: x + 1, args=(value,))) == [1.0, 11.0, 21.0]
    nested = strategy.distribute_values_from_function(
        lambda context: {"id": context.replica_id_in_sync_group}
    )
    assert values(strategy, strategy.run(lambda x: x["id"], args=(nested,))) == [0, 1, 2]


# Runs, merges and contexts


@pytest.mark.parametrize("other", [(1.0,), [1.0], {"x": 1.0}])
@pytest.mark.parametrize("leaf", [torch.ones(2), 1.0, "a"])
def test_a_leaf_and_a_structure_in_one_place_are_an_error(make_strategy, leaf, other):
    # Where the first replica's part was a leaf, the others' structures passed for leaves.
    strategy = make_strategy(2)

    def mixed():
        return leaf if mirror.get_replica_context().replica_id_in_sync_group == 0 else other

    with pytest.raises(mirror.StructureError, match="there; return the same structure"):
        strategy.run(mixed)
    with pytest.raises(mirror.StructureError, match=f"a {type(other).__name__} there"):
        strategy.distribute_values_from_function(
            lambda context: (leaf, other)[context.replica_id_in_sync_group]
        )
    batches = strategy.distribute_dataset_from_function(lambda context: [[leaf], [other]])
    with pytest.raises(mirror.BatchError, match="must have one structure"):
        list(batches)


def test_a_list_per_example_of_an_uneven_batch_is_pointed_to_the_batch(make_strategy):
    # Names of files returned by an evaluation step: right in all batches but the last.
    strategy = make_strategy(2)
    names = mirror.PerReplica((["a", "b"], ["c"]))
    with pytest.raises(mirror.StructureError, match=r"strategy.local_results\(batch\)$"):
        strategy.run(lambda batch: batch, args=(names,))
    assert strategy.local_results(names) == (["a", "b"], ["c"])


# Values
