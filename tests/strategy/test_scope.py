"""Scopes, and which strategy is current."""

import copy
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same


def test_without_a_strategy_the_default_one_is_current():
    assert not mirror.has_strategy()
    assert not mirror.in_cross_replica_context()
    assert mirror.get_strategy().num_replicas_in_sync == 1
    context = mirror.get_replica_context()
    assert context.num_replicas_in_sync == 1
    assert context.replica_id_in_sync_group == 0


def test_in_the_default_context_collectives_are_the_identity():
    context = mirror.get_replica_context()
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for op in ("sum", "mean", mirror.ReduceOp.SUM):
        assert torch.equal(context.all_reduce(op, x), x)
    assert torch.equal(context.all_reduce("sum", {"a": [x]})["a"][0], x)
    assert torch.equal(context.all_gather(x), x)
    (gradient,) = torch.autograd.grad(context.all_reduce("sum", x * 3).sum(), x)
    assert gradient.tolist() == [3.0, 3.0]


def test_in_the_default_context_merge_call_calls_the_function_once():
    calls = []

    def merged(strategy, x, *, y):
        assert mirror.in_cross_replica_context()
        assert strategy.num_replicas_in_sync == 1
        calls.append(strategy.local_results((x, y)))
        return strategy.reduce("sum", x)

    context = mirror.get_replica_context()
    result = context.merge_call(merged, args=(torch.tensor(2),), kwargs={"y": 3})
    assert result.item() == 2
    assert calls == [((2, 3),)]


def test_scope_makes_the_strategy_current_and_leaves_it_again(make_strategy):
    strategy = make_strategy(2)
    with strategy.scope():
        assert mirror.has_strategy()
        assert mirror.get_strategy() is strategy
        assert mirror.in_cross_replica_context()
        assert mirror.get_replica_context() is None
        with strategy.scope():
            assert mirror.get_strategy() is strategy
        assert mirror.get_strategy() is strategy
    assert not mirror.has_strategy()


def test_in_run_the_replica_context_is_current(make_strategy):
    strategy = make_strategy(2)

    def fn():
        context = mirror.get_replica_context()
        assert context is not None
        assert context.strategy is strategy
        assert mirror.get_strategy() is strategy
        assert mirror.has_strategy()
        assert not mirror.in_cross_replica_context()
        assert context.num_replicas_in_sync == 2
        assert context.device == strategy.devices[context.replica_id_in_sync_group]
        return context.replica_id_in_sync_group

    with strategy.scope():
        assert strategy.run(fn).values == (0, 1)
        assert mirror.in_cross_replica_context()
    assert strategy.run(fn).values == (0, 1)


def test_a_scope_left_by_an_exception_is_left(make_strategy):
    strategy = make_strategy(2)
    with pytest.raises(KeyError), strategy.scope():
        raise KeyError
    assert not mirror.has_strategy()


def test_a_scope_belongs_to_its_thread(make_strategy):
    seen = []
    with make_strategy(2).scope():
        thread = threading.Thread(target=lambda: seen.append(mirror.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_scope_mirrors_what_is_made_inside_and_nothing_else(make_strategy):
    strategy = make_strategy(2)
    before = nn.Linear(2, 2)
    with strategy.scope():
        inside = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(inside.parameters(), lr=0.1)
    after = nn.Linear(2, 2)
    strategy.run(lambda: None)
    assert mirror.is_mirrored(inside)
    assert mirror.is_mirrored(inside.weight)
    assert mirror.is_mirrored(optimizer)
    for plain in (before, after):
        assert not mirror.is_mirrored(plain)
        assert not mirror.is_mirrored(plain.weight)


def test_mirror_works_in_place_and_returns_the_module(make_strategy):
    module = nn.Linear(2, 2)
    weight = module.weight
    assert make_strategy(2).mirror(module) is module
    assert module.weight is weight
    assert mirror.is_mirrored(module)


def test_close_is_idempotent_and_ends_the_strategy():
    before = set(threading.enumerate())
    strategy = mirror.MirroredStrategy(["cpu"] * 3)
    strategy.run(lambda: 1)
    strategy.close()
    strategy.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


def test_strategies_over_the_same_devices_train_in_turn(make_strategy):
    strategies = [make_strategy(2), make_strategy(3), make_strategy(2)]
    plain = nn.Linear(3, 2)
    models = [s.mirror(copy.deepcopy(plain)) for s in strategies]
    x = torch.randn(7, 3)
    everything = [torch.optim.SGD(m.parameters(), lr=0.1) for m in [plain, *models]]
    for _ in range(3):
        for optimizer, model in zip(everything, [plain, *models], strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for model, strategy in zip(models, strategies, strict=True):
        assert_same(model.state_dict(), plain.state_dict())
        strategy.check_replicas()


def test_keras_layers_of_another_library_than_torch_are_refused_in_a_scope(monkeypatch):
    class Layer:
        pass

    keras = SimpleNamespace(StatelessScope=None, Layer=Layer)
    keras.config = SimpleNamespace(backend=lambda: "jax")
    monkeypatch.setitem(sys.modules, "keras", keras)
    with (
        mirror.MirroredStrategy(["cpu"] * 2).scope(),
        pytest.raises(
            mirror.errors.StrategyError, match="layer Layer, and Keras computes with 'jax'"
        ),
    ):
        Layer()
    assert isinstance(Layer(), Layer)  # outside it is not mirrored
