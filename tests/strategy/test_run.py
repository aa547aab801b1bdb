"""How run handles its arguments and the results of its function."""

import collections
import dataclasses

import pytest
import torch
from torch import nn

import mirror
from mirror.execution.run import shares_of
from tests.oracle import assert_same, in_run
from tests.strategy.programs import Box, Pair, ids, values
from tests.toy_models import mirrored_layer, ones_layer, replica_id


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x, 5),
        lambda x: [x, "text"],
        lambda x: {"a": x, "b": None},
        lambda x: Pair(x, {"deep": [x]}),
        lambda x: Box(x),
        lambda x: [Box((x, Pair(x, 1)))],
        lambda x: collections.OrderedDict(z=x, a=x),
    ],
)
def test_every_per_replica_in_an_argument_is_replaced_by_its_part(wrap, make_strategy):
    strategy = make_strategy(3)
    parts = mirror.PerReplica([torch.tensor(10.0), torch.tensor(11.0), torch.tensor(12.0)])
    given = wrap(parts)

    def fn(positional, *, keyword):
        expected = wrap(torch.tensor(10.0 + replica_id()))
        for argument in (positional, keyword):
            assert type(argument) is type(expected)
            assert_same(argument, expected)
            if isinstance(expected, dict):
                assert list(argument) == list(expected)
        return replica_id()

    result = strategy.run(fn, args=(given,), kwargs={"keyword": given})
    assert result.values == (0, 1, 2)
    assert_parts_are_untouched(given, parts)


def assert_parts_are_untouched(given, parts):
    found = []

    def walk(value):
        if value is parts:
            found.append(value)
        elif dataclasses.is_dataclass(value):
            walk(value.value)
        elif isinstance(value, dict):
            [walk(v) for v in value.values()]
        elif isinstance(value, list | tuple):
            [walk(v) for v in value]

    walk(given)
    assert found


def test_anything_else_is_passed_as_it_is(make_strategy):
    thing, tensor = object(), torch.ones(3)

    def fn(a, b, c):
        assert a is thing
        assert b is tensor
        assert c == {"k": (1, 2)}

    make_strategy(2).run(fn, (thing, tensor, {"k": (1, 2)}))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tensors_and_numbers_always_come_back_per_replica(n, make_strategy):
    strategy = make_strategy(n)
    shared = torch.ones(2)
    for make in (lambda: shared, lambda: 7, lambda: 2.5, lambda: True, lambda: torch.ones(())):
        result = strategy.run(make)
        assert isinstance(result, mirror.PerReplica)
        assert len(result.values) == n


def test_results_keep_their_structure_with_per_replica_leaves(make_strategy):
    strategy = make_strategy(2)

    def fn():
        x = torch.tensor(replica_id())
        return {"t": (x, [x]), "p": Pair(x, None), "b": Box(x), "s": "same"}

    result = strategy.run(fn)
    assert type(result["t"]) is tuple
    assert type(result["p"]) is Pair
    assert type(result["b"]) is Box
    assert result["s"] == "same"
    assert result["p"].second is None
    assert result["b"].note == "box"
    for leaf in (result["t"][0], result["t"][1][0], result["p"].first, result["b"].value):
        assert isinstance(leaf, mirror.PerReplica)
        assert values(strategy, leaf) == [0, 1]


def test_an_object_that_all_replicas_return_comes_back_as_it_is(make_strategy):
    strategy = make_strategy(2)
    thing = object()
    assert strategy.run(lambda: thing) is thing
    assert strategy.run(lambda: None) is None
    assert strategy.run(lambda: "text") == "text"
    made = strategy.run(lambda: f"replica {replica_id()}")
    assert made.values == ("replica 0", "replica 1")


@pytest.mark.parametrize(
    "make",
    [
        lambda r: [1] if r else (1,),
        lambda r: [1] * (1 + r),
        lambda r: {"a" if r else "b": 1},
        lambda r: {"a": 1, "b": 2} if r else {"a": 1},
        lambda r: Pair(1, 2) if r else (1, 2),
        lambda r: Box([1, 2]) if r else Box([1]),
    ],
)
def test_results_that_differ_in_structure_are_an_error(make, make_strategy):
    strategy = make_strategy(2)
    with pytest.raises(mirror.StructureError, match="replica"):
        strategy.run(lambda: make(replica_id()))
    assert values(strategy, ids(strategy)) == [0.0, 1.0]


def test_fn_runs_once_per_replica_in_order_of_ids(make_strategy):
    calls = []
    make_strategy(4).run(lambda: calls.append(replica_id()))
    assert calls == [0, 1, 2, 3]


def test_a_replica_sees_its_own_copy_and_a_step_of_all_stays_equal(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(nn.Linear(2, 2))

    def fn():
        return model.weight.detach().data_ptr(), model.weight.detach().clone()

    pointers, copies = strategy.run(fn)
    assert len(set(pointers.values)) == 3
    for value in copies.values[1:]:
        assert torch.equal(value, copies.values[0])


# Runs, merges and contexts


def test_check_replicas_and_mirror_are_refused_in_run(make_strategy):
    # A check in run reduced the gradients of half a step, each replica's with share 1.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)

    def step(batch):
        layer(batch).mean().backward()
        for call in (strategy.check_replicas, lambda: strategy.mirror(ones_layer())):
            with pytest.raises(mirror.StrategyError, match="inside run"):
                call()

    in_run(strategy, step, torch.tensor([[1.0], [2.0], [6.0]]))
    assert_same(layer.weight.grad, torch.tensor([[3.0]]))


# Lifetime


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((2, 6), (0.25, 0.75)), ((0.25, 0.75), (0.25, 0.75)), ((0, 0), (0.5, 0.5))],
)
def test_shares_of_weights_have_the_sum_1(weights, shares):
    assert shares_of(dict(enumerate(weights)), weighted=True) == dict(enumerate(shares))
    assert shares_of(dict(enumerate(weights)), weighted=False) == {0: 1.0, 1: 1.0}
