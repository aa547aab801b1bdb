"""What api.md promises of the strategy, its values, and the replica context."""

import collections
import contextvars
import copy
import dataclasses
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.oracle import assert_same

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Box:
    value: object
    note: object = "box"


def here():
    return mirror.get_replica_context().replica_id_in_sync_group


def ids(strategy):
    return strategy.run(lambda: torch.tensor(float(here())))


def values(strategy, result):
    return [v.item() if isinstance(v, torch.Tensor) else v for v in strategy.local_results(result)]


# Constructor


def test_devices_default_to_what_is_visible():
    for devices in (None, []):
        with mirror.MirroredStrategy(devices) as strategy:
            visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
            expected = [torch.device("cuda", i) for i in range(visible)] or [torch.device("cpu")]
            assert list(strategy.devices) == expected
            assert isinstance(strategy.devices, tuple)
            assert strategy.num_replicas_in_sync == len(expected)


@pytest.mark.parametrize(
    "devices",
    [
        ["cpu", "cpu"],
        ["cpu:0", "cpu:1"],
        ["CPU:0", "/cpu:1"],
        [torch.device("cpu"), "cpu:7"],
        ("/CPU:0", "Cpu"),
    ],
)
def test_every_spelling_of_cpu_is_a_simulated_device(devices):
    with mirror.MirroredStrategy(devices) as strategy:
        assert strategy.num_replicas_in_sync == 2
        assert {d.type for d in strategy.devices} == {"cpu"}
        assert all(isinstance(d, torch.device) for d in strategy.devices)
        assert values(strategy, ids(strategy)) == [0.0, 1.0]


@pytest.mark.parametrize("name", ["cuda:77", "GPU:77", "/gpu:77", "nonsense", "tpu:0"])
def test_a_device_that_does_not_exist_is_named(name):
    with pytest.raises(mirror.DeviceError, match="77" if "77" in name else name):
        mirror.MirroredStrategy([name])
    assert issubclass(mirror.DeviceError, ValueError)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["GPU:0", "/gpu:0", "cuda:0", "gpu:0"])
def test_every_spelling_of_gpu_is_understood(name):
    with mirror.MirroredStrategy([name]) as strategy:
        assert strategy.devices == (torch.device("cuda", 0),)


def test_cpu_mixed_with_cuda_is_an_error():
    with pytest.raises(mirror.DeviceError):
        mirror.MirroredStrategy(["cpu", "cuda:0"])


@pytest.mark.parametrize("backend", ["nccl", "nonsense"])
def test_a_backend_that_cannot_serve_the_devices_is_an_error_with_the_reason(backend):
    with pytest.raises(mirror.BackendError, match=backend):
        mirror.MirroredStrategy(["cpu"] * 2, backend=backend)
    assert issubclass(mirror.BackendError, RuntimeError)


def test_auto_chooses_an_available_backend_and_tells_which(strategy):
    assert strategy.backend in mirror.comm.available(strategy.devices)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "nonsense"},
        {"gradient_reduction": "max"},
        {"gradient_reduction": "Mean of all"},
    ],
)
def test_unknown_options_are_value_errors(options):
    with pytest.raises(ValueError, match=next(iter(options.values()))):
        mirror.MirroredStrategy(["cpu"], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"bytes_per_pack": -1},
        {"timeout_seconds": -1.0},
        {"wire_dtype": "nonsense"},
        {"wire_dtype": torch.complex64},
    ],
)
def test_bad_communication_options_are_value_errors_at_construction(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        mirror.CommunicationOptions(**options)


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 100, 25 * 2**20])
def test_the_size_of_a_pack_changes_no_value(bytes_per_pack, make_strategy):
    options = mirror.CommunicationOptions(bytes_per_pack=bytes_per_pack)
    strategy = make_strategy(3, communication_options=options)

    def fn():
        tensors = [torch.full((n,), here() + 1.0) for n in (0, 1, 33, 200)]
        return mirror.get_replica_context().all_reduce("sum", tensors)

    for result in strategy.local_results(strategy.run(fn)):
        assert_same(result, [torch.full((n,), 6.0) for n in (0, 1, 33, 200)])


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        mirror.MirroredStrategy(["cpu"], "auto", mirror.CommunicationOptions())


# Scope and current strategy


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


def test_another_strategy_in_a_scope_is_an_error(make_strategy):
    first, second = make_strategy(2), make_strategy(2)
    with first.scope():
        with pytest.raises(mirror.StrategyError), second.scope():
            pytest.fail("entered")
        assert mirror.get_strategy() is first
    with second.scope():
        assert mirror.get_strategy() is second


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
        thread.join(5)
        assert not thread.is_alive()
    for use in (
        lambda: strategy.run(lambda: 1),
        lambda: strategy.reduce("sum", mirror.PerReplica([1.0, 2.0, 3.0])),
        lambda: strategy.mirror(nn.Linear(1, 1)),
        lambda: strategy.scope().__enter__(),
    ):
        with pytest.raises(mirror.StrategyError):
            use()
    assert not mirror.has_strategy()


def test_a_model_outlives_its_closed_strategy_as_a_plain_value():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        model = strategy.mirror(nn.Linear(2, 2))
        state = copy.deepcopy(model.state_dict())
    assert_same(model.state_dict(), state)
    assert_same(copy.deepcopy(model).state_dict(), state)


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


# run: arguments


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
        expected = wrap(torch.tensor(10.0 + here()))
        for argument in (positional, keyword):
            assert type(argument) is type(expected)
            assert_same(argument, expected)
            if isinstance(expected, dict):
                assert list(argument) == list(expected)
        return here()

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


def test_a_per_replica_with_the_wrong_number_of_parts_is_an_error(make_strategy):
    strategy = make_strategy(3)
    with pytest.raises(mirror.StructureError, match="2"):
        strategy.run(lambda x: x, args=(mirror.PerReplica([1, 2]),))
    assert strategy.run(lambda x: x, args=(mirror.PerReplica([1, 2, 3]),)).values == (1, 2, 3)


# run: results


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
        x = torch.tensor(here())
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
    made = strategy.run(lambda: f"replica {here()}")
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
        strategy.run(lambda: make(here()))
    assert values(strategy, ids(strategy)) == [0.0, 1.0]


def test_fn_runs_once_per_replica_in_order_of_ids(make_strategy):
    calls = []
    make_strategy(4).run(lambda: calls.append(here()))
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


# Replicas without examples


def counted(strategy, size):
    (batch,) = strategy.distribute_dataset([torch.arange(float(size))])
    return batch


def test_replicas_without_examples_sit_the_step_out(make_strategy):
    strategy = make_strategy(4)
    called = []

    def fn(x):
        called.append(here())
        assert len(x) == 1
        return x.sum()

    result = strategy.run(fn, args=(counted(strategy, 2),))
    assert called == [0, 1]
    assert values(strategy, result) == [0.0, 1.0]
    assert strategy.reduce("sum", result).item() == 1.0
    assert strategy.reduce("mean", result).item() == 0.5


def test_collectives_span_the_replicas_that_take_part(make_strategy):
    strategy = make_strategy(4)

    def fn(x):
        context = mirror.get_replica_context()
        return (
            context.all_reduce("sum", torch.ones(())),
            context.all_reduce("mean", x.sum()),
            context.all_gather(x),
            context.merge_call(lambda s, v: s.reduce("sum", v), args=(x.sum(),)),
        )

    count, mean, gathered, merged = strategy.run(fn, args=(counted(strategy, 3),))
    assert values(strategy, count) == [3.0] * 3
    assert values(strategy, mean) == [1.0] * 3
    assert [t.tolist() for t in strategy.local_results(gathered)] == [[0.0, 1.0, 2.0]] * 3
    assert values(strategy, merged) == [3.0] * 3


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_idle_replicas_keep_equal_variables_and_optimizer_state(size, where, make_strategy):
    strategy = make_strategy(4)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model = strategy.mirror(copy.deepcopy(plain))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]

    def backward(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    def step(x):
        optimizers[1].zero_grad()
        backward(x)
        optimizers[1].step()

    for length in (size, 8, size, size, 5):
        x = torch.randn(length, 3)
        optimizers[0].zero_grad()
        plain(x).square().mean().backward()
        optimizers[0].step()
        (batch,) = strategy.distribute_dataset([x])
        if where == "inside":
            strategy.run(step, args=(batch,))
        else:
            optimizers[1].zero_grad()
            strategy.run(backward, args=(batch,))
            optimizers[1].step()
        assert strategy.check_replicas() == 4
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())
    whole = strategy.run(lambda: [p.detach().clone() for p in model.parameters()])
    for parameters in strategy.local_results(whole):
        assert_same(parameters, [p.detach() for p in plain.parameters()])


# PerReplica


@pytest.mark.parametrize(
    "use",
    [
        lambda v: v + 1,
        lambda v: 1 + v,
        lambda v: v * v,
        lambda v: v - torch.ones(()),
        lambda v: torch.ones(()) - v,
        lambda v: v @ torch.ones(1, 1),
        lambda v: -v,
        lambda v: v > 0,
        lambda v: torch.add(v, 1),
        lambda v: torch.relu(v),
        lambda v: F.relu(v),
        lambda v: torch.stack([v, v]),
        lambda v: float(v),
        lambda v: abs(v),
        lambda v: v / 2,
        lambda v: 2**v,
    ],
)
def test_a_per_replica_used_as_a_tensor_is_a_type_error_with_advice(use, make_strategy):
    value = ids(make_strategy(2))
    with pytest.raises(TypeError) as error:
        use(value)
    for advice in ("run", "reduce", "local_results"):
        assert advice in str(error.value)


def test_values_is_a_tuple():
    assert mirror.PerReplica([1, 2]).values == (1, 2)
    assert mirror.PerReplica(i for i in range(2)).values == (0, 1)


# reduce, gather, local_results


@pytest.mark.parametrize("op", ["sum", "SUM", "Sum", "mean", "MEAN", "max", "min", "prod"])
def test_reduce_across_replicas_is_elementwise(op, make_strategy):
    strategy = make_strategy(3)
    value = strategy.run(lambda: torch.tensor([1.0, 2.0]) * (here() + 1))
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


@pytest.mark.parametrize("op", ["average", "xor"])
def test_an_unknown_op_is_a_value_error(op, make_strategy):
    strategy = make_strategy(2)
    with pytest.raises(ValueError, match=op):
        strategy.reduce(op, ids(strategy))
    with pytest.raises(ValueError, match=op):
        strategy.run(lambda: mirror.get_replica_context().all_reduce(op, torch.ones(1)))


def test_reduce_keeps_structures(make_strategy):
    strategy = make_strategy(2)

    def fn():
        x = torch.tensor(1.0 + here())
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
        mirror.get_replica_context().weight = 1.0 + 2 * here()
        return torch.tensor(float(here()))

    assert strategy.reduce("mean", strategy.run(fn)).item() == pytest.approx(0.75)
    assert strategy.reduce("mean", ids(strategy)).item() == 0.5  # and is forgotten


def test_mean_over_an_axis_divides_by_the_number_of_elements(make_strategy):
    strategy = make_strategy(3)
    lengths = (4, 2, 1)
    value = strategy.run(lambda: torch.full((lengths[here()], 2), 1.0 + here()))
    expected = torch.cat([torch.full((n, 2), 1.0 + r) for r, n in enumerate(lengths)])
    assert_same(strategy.reduce("mean", value, axis=0), expected.mean(0))
    assert_same(strategy.reduce("sum", value, axis=0), expected.sum(0))
    assert_same(strategy.reduce("max", value, axis=0), expected.amax(0))
    assert_same(strategy.reduce("min", value, axis=0), expected.amin(0))


def test_reduce_over_another_axis(make_strategy):
    strategy = make_strategy(2)
    value = strategy.run(lambda: torch.arange(6.0).view(2, 3) * (here() + 1))
    rows = torch.arange(6.0).view(2, 3)
    whole = torch.cat([rows, rows * 2], dim=1)
    for axis in (1, -1):
        assert_same(strategy.reduce("mean", value, axis=axis), whole.mean(1))
        assert_same(strategy.reduce("sum", value, axis=axis), whole.sum(1))


def test_shapes_must_agree_without_an_axis(make_strategy):
    strategy = make_strategy(2)
    value = strategy.run(lambda: torch.ones(2 + here()))
    with pytest.raises(ValueError, match="shape"):
        strategy.reduce("sum", value)


def test_reduce_of_numbers(make_strategy):
    strategy = make_strategy(3)
    result = strategy.reduce("sum", strategy.run(lambda: here() + 1))
    assert float(result) == 6.0
    assert float(strategy.reduce("mean", strategy.run(lambda: here() + 1.0))) == 2.0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_reduce_of_integers_is_exact(dtype, make_strategy):
    strategy = make_strategy(3)
    value = strategy.run(lambda: torch.tensor([2**24 + 1, here()], dtype=dtype))
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

    value = strategy.run(lambda: make(here()))
    expected = torch.cat([make(r) for r in range(3)], dim=axis)
    assert torch.equal(strategy.gather(value, axis=axis), expected)


def test_gather_refuses_scalars_and_shapes_that_do_not_fit(make_strategy):
    strategy = make_strategy(2)
    with pytest.raises(ValueError, match=r"0-d|scalar|dimension"):
        strategy.gather(ids(strategy))
    value = strategy.run(lambda: torch.ones(2, 3 + here()))
    with pytest.raises(ValueError, match=r"3.*4"):
        strategy.gather(value)
    assert strategy.gather(value, axis=1).shape == (2, 7)


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
    result = strategy.run(lambda: {"a": here(), "p": Pair(here(), "s")})
    assert strategy.local_results(result) == (
        {"a": 0, "p": Pair(0, "s")},
        {"a": 1, "p": Pair(1, "s")},
    )


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


# The replica context


def test_all_reduce_values_are_the_same_bits_everywhere(make_strategy):
    strategy = make_strategy(4)
    parts = [torch.randn(1000) for _ in range(4)]
    for op, expected in (("sum", sum(parts)), ("mean", sum(parts) / 4)):
        result = strategy.run(
            lambda op=op: mirror.get_replica_context().all_reduce(op, parts[here()])
        )
        for value in result.values:
            assert torch.equal(value, result.values[0])
            assert_same(value, expected)


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_all_reduce_knows_the_other_ops(op, make_strategy):
    strategy = make_strategy(3)
    result = strategy.run(
        lambda: mirror.get_replica_context().all_reduce(op, torch.tensor(2.0 + here()))
    )
    assert values(strategy, result) == [{"max": 4.0, "min": 2.0, "prod": 24.0}[op]] * 3


def test_all_reduce_of_a_structure_with_mixed_dtypes(make_strategy):
    strategy = make_strategy(3)

    def fn():
        r = here()
        return mirror.get_replica_context().all_reduce(
            "sum",
            {
                "f": torch.full((2, 3), r + 0.5),
                "d": [torch.tensor(float(r), dtype=torch.float64)],
                "i": (torch.tensor([r, 2**40]), torch.tensor(r, dtype=torch.int32)),
                "b": torch.tensor([1.0, 0.5], dtype=torch.bfloat16),
                "e": torch.ones(0, 4),
            },
        )

    expected = {
        "f": torch.full((2, 3), 4.5),
        "d": [torch.tensor(3.0, dtype=torch.float64)],
        "i": (torch.tensor([3, 3 * 2**40]), torch.tensor(3, dtype=torch.int32)),
        "b": torch.tensor([3.0, 1.5], dtype=torch.bfloat16),
        "e": torch.ones(0, 4),
    }
    for result in strategy.local_results(strategy.run(fn)):
        assert_same(result, expected, tolerance=0)


def test_all_reduce_leaves_its_argument_alone(make_strategy):
    strategy = make_strategy(2)

    def fn():
        x = torch.ones(3)
        y = mirror.get_replica_context().all_reduce("sum", x)
        y += 1
        return x

    assert [x.tolist() for x in strategy.run(fn).values] == [[1.0] * 3] * 2


def test_all_reduce_of_a_strided_tensor(make_strategy):
    strategy = make_strategy(2)
    x = torch.arange(12.0).view(3, 4)
    result = strategy.run(lambda: mirror.get_replica_context().all_reduce("sum", x.t()[::2]))
    for value in result.values:
        assert torch.equal(value, 2 * x.t()[::2])


def test_all_reduce_of_bool_is_a_type_error(make_strategy):
    strategy = make_strategy(2)
    with pytest.raises(TypeError, match="bool"):
        strategy.run(lambda: mirror.get_replica_context().all_reduce("sum", torch.tensor([True])))
    assert values(strategy, ids(strategy)) == [0.0, 1.0]


@pytest.mark.parametrize("axis", [0, 1])
def test_all_gather_allows_sizes_that_differ_along_the_axis(axis, make_strategy):
    strategy = make_strategy(3)

    def make(r):
        shape = [2, 2]
        shape[axis] = r  # replica 0 has nothing
        return torch.full(shape, float(r))

    result = strategy.run(lambda: mirror.get_replica_context().all_gather(make(here()), axis=axis))
    for value in result.values:
        assert torch.equal(value, torch.cat([make(r) for r in range(3)], dim=axis))


def run_gradients(strategy, op, sizes=None, reduction=None):
    """d loss_r / d x_s through an all_reduce, where loss_r = (r + 1) * all_reduce(x)."""

    def fn():
        context = mirror.get_replica_context()
        if sizes is not None:
            context.weight = sizes[here()]
        x = torch.tensor(1.0, requires_grad=True)
        (context.all_reduce(op, x) * (here() + 1.0)).backward()
        return x.grad

    return values(strategy, strategy.run(fn))


def test_backward_of_all_reduce_with_equal_weights_is_tensorflows_rule(make_strategy):
    strategy = make_strategy(3)
    assert run_gradients(strategy, "sum") == pytest.approx([6.0, 6.0, 6.0])
    assert run_gradients(strategy, "mean") == pytest.approx([2.0, 2.0, 2.0])


def test_backward_of_all_reduce_is_weighted_by_the_replicas_shares(make_strategy):
    """Replica s gets sum over r of w_r / w_s times (r + 1)."""
    strategy = make_strategy(3)
    weights = [1.0, 2.0, 4.0]
    total = sum(w * (r + 1) for r, w in enumerate(weights))
    expected = [total / w for w in weights]
    assert run_gradients(strategy, "sum", weights) == pytest.approx(expected)
    expected = [g / 3 for g in expected]
    assert run_gradients(strategy, "mean", weights) == pytest.approx(expected)


def test_backward_of_all_reduce_is_not_weighted_under_sum_reduction(make_strategy):
    strategy = make_strategy(3, gradient_reduction="sum")
    assert run_gradients(strategy, "sum", [1.0, 2.0, 4.0]) == pytest.approx([6.0, 6.0, 6.0])


def test_backward_outside_run_takes_the_plain_sum(make_strategy):
    """Its loss already is the common one."""
    strategy = make_strategy(3)
    leaves = [torch.tensor(1.0, requires_grad=True) for _ in range(3)]

    def fn(x):
        context = mirror.get_replica_context()
        context.weight = 1.0 + here()
        return context.all_reduce("sum", x) * (here() + 1.0)

    result = strategy.run(fn, args=(mirror.PerReplica(leaves),))
    strategy.reduce("sum", result).backward()
    assert [leaf.grad.item() for leaf in leaves] == pytest.approx([6.0, 6.0, 6.0])


def centred(strategy_or_none, model, x):
    """A loss with statistics of the whole batch, as SyncBatchNorm has them."""
    context = mirror.get_replica_context()
    h = model(x)
    count = torch.tensor(float(len(h)))
    total, square, count = context.all_reduce("sum", (h.sum(0), h.square().sum(0), count))
    mean = total / count
    variance = square / count - mean**2
    return ((h - mean) / (variance + 0.1).sqrt()).tanh().square().mean()


def spread(strategy_or_none, model, x):
    """Every example against every other one, as a contrastive loss does."""
    context = mirror.get_replica_context()
    h = model(x)
    everyone = context.all_gather(h)
    return torch.logsumexp(h @ everyone.t(), 1).mean() - h.mean()


@pytest.mark.parametrize("way", [2, 3])
@pytest.mark.parametrize("size", [10, 11, 7, 2])
@pytest.mark.parametrize("loss", [centred, spread])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_loss_through_collectives_has_the_gradient_of_one_device(
    n, loss, size, way, make_strategy
):
    plain = nn.Linear(3, 2)
    strategy = make_strategy(n)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(size, 3)
    expected = loss(None, plain, x)  # in the default context
    expected.backward()

    def forward(part):
        return loss(strategy, model, part)

    def both(part):
        result = forward(part)
        result.backward()
        return result.detach()

    (batch,) = strategy.distribute_dataset([x])
    if way == 2:
        actual = strategy.reduce("mean", strategy.run(forward, args=(batch,)))
        actual.backward()
    else:
        actual = strategy.reduce("mean", strategy.run(both, args=(batch,)))
    assert_same(actual, expected, "loss")
    assert_same(model.weight.grad, plain.weight.grad, "weight")
    assert_same(model.bias.grad, plain.bias.grad, "bias")


@pytest.mark.parametrize("loss", [centred, spread])
def test_collectives_in_a_transparent_call_have_the_gradient_of_one_device(loss, make_strategy):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x):
            return loss(None, self.inner, x)

    plain = WithLoss()
    strategy = make_strategy(3)
    model = strategy.mirror(copy.deepcopy(plain))
    for size in (10, 11, 2):
        x = torch.randn(size, 3)
        for m in (plain, model):
            m.zero_grad()
            m(x).backward()
        assert_same(model.inner.weight.grad, plain.inner.weight.grad, f"{size}")


def test_merge_call_runs_once_with_regrouped_arguments(make_strategy):
    strategy = make_strategy(3)
    calls = []

    def merged(received, value, *, other):
        calls.append(1)
        assert received is strategy
        assert mirror.in_cross_replica_context()
        assert mirror.get_replica_context() is None
        assert value.values == (0, 1, 2)
        assert [t.item() for t in other["k"].values] == [0, 10, 20]
        return {"all": sum(value.values), "own": value}

    def fn():
        context = mirror.get_replica_context()
        return context.merge_call(
            merged, args=(here(),), kwargs={"other": {"k": torch.tensor(here() * 10)}}
        )

    result = strategy.run(fn)
    assert calls == [1]
    assert result["own"].values == (0, 1, 2)
    assert strategy.local_results(result)[2] == {"all": 3, "own": 2}


def test_merge_call_hands_out_the_same_object(make_strategy):
    strategy = make_strategy(3)
    thing = object()
    assert strategy.run(lambda: mirror.get_replica_context().merge_call(lambda s: thing)) is thing


def test_merge_call_works_in_loops_and_conditionals(make_strategy):
    strategy = make_strategy(2)

    def fn():
        context = mirror.get_replica_context()
        total = 0
        for i in range(5):
            if i % 2:
                total += context.merge_call(lambda s, v: sum(v.values), args=(here() + i,))
            else:
                total += context.all_reduce("sum", torch.tensor(i)).item()
        return total

    assert strategy.run(fn).values == (22, 22)


def test_weight_defaults_to_the_number_of_examples(make_strategy):
    strategy = make_strategy(3)
    (batch,) = strategy.distribute_dataset([torch.randn(11, 2)])
    result = strategy.run(lambda x: float(mirror.get_replica_context().weight), args=(batch,))
    first, second, third = result.values
    assert first / third == pytest.approx(4 / 3)
    assert second / third == pytest.approx(4 / 3)


# Gradients: reduction, no_sync, check_replicas


def test_inside_run_every_observer_sees_the_reduced_gradient(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(nn.Linear(1, 1, bias=False))
    (batch,) = strategy.distribute_dataset([torch.arange(7.0).view(7, 1)])

    def fn(x):
        model(x).mean().backward()
        return model.weight.grad.clone()

    result = strategy.run(fn, args=(batch,))
    for gradient in result.values:
        assert gradient.item() == pytest.approx(3.0)
        assert torch.equal(gradient, result.values[0])
    assert model.weight.grad.item() == pytest.approx(3.0)


def test_sum_reduction_sums(make_strategy):
    strategy = make_strategy(3, gradient_reduction="sum")
    model = strategy.mirror(nn.Linear(1, 1, bias=False))

    def fn():
        model(torch.tensor([1.0 + here()])).sum().backward()
        return model.weight.grad.item()

    assert strategy.run(fn).values == (6.0, 6.0, 6.0)


def test_under_no_sync_a_replica_sees_its_own_gradient(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Linear(1, 1, bias=False))

    def fn(scale):
        model(torch.tensor([scale * (1.0 + here())])).sum().backward()

    with strategy.no_sync():
        strategy.run(fn, args=(1.0,))
        strategy.run(fn, args=(10.0,))
    strategy.run(fn, args=(100.0,))
    assert model.weight.grad.item() == pytest.approx(111 * 1.5)


def test_check_replicas_counts_parameters_and_names_what_differs(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    assert strategy.check_replicas() == 4

    def poke():
        if here() == 2:
            with torch.no_grad():
                model[1].weight[0, 1] += 1e-7 + model[1].weight[0, 1].abs()

    strategy.run(poke)
    with pytest.raises(mirror.ReplicaMismatchError, match=r"2") as error:
        strategy.check_replicas()
    assert "1.weight" in str(error.value)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert strategy.check_replicas() == 4


class Unfaithful(torch.optim.SGD):
    """Keeps another momentum on the last replica."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"].add_(here() // 2)


def test_check_replicas_sees_the_optimizer_state(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(nn.Linear(2, 1))
    optimizer = Unfaithful(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()

    strategy.run(step)
    with pytest.raises(mirror.ReplicaMismatchError, match="2"):
        strategy.check_replicas()


# State of the calling thread


def test_grad_mode_and_inference_mode_hold_in_the_replicas(make_strategy):
    strategy = make_strategy(2)

    def fn():
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def state():
        return [v.values for v in strategy.run(fn)]

    assert state() == [(True, True), (False, False)]
    with torch.no_grad():
        assert state() == [(False, False), (False, False)]
        with torch.enable_grad():
            assert state() == [(True, True), (False, False)]
    with torch.inference_mode():
        assert state() == [(False, False), (True, True)]
    assert state() == [(True, True), (False, False)]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_transparent_call_keeps_the_grad_mode(context, make_strategy):
    model = make_strategy(2).mirror(nn.Linear(2, 2))
    with context():
        y = model(torch.ones(4, 2))
    assert not y.requires_grad
    assert y.is_inference() == (context is torch.inference_mode)
    assert model(torch.ones(4, 2)).requires_grad


def test_autocast_holds_in_the_replicas(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Linear(2, 2))

    def fn():
        return model(torch.ones(1, 2)).dtype == torch.bfloat16

    assert strategy.run(fn).values == (False, False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert strategy.run(fn).values == (True, True)
        assert model(torch.ones(4, 2)).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert strategy.run(fn).values == (False, False)
    assert strategy.run(fn).values == (False, False)


def test_autocast_inside_fn_stays_there(make_strategy):
    strategy = make_strategy(2)

    def fn():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mirror.get_replica_context().all_reduce("sum", torch.ones(1))
            return torch.is_autocast_enabled("cpu")

    assert strategy.run(fn).values == (True, True)
    assert strategy.run(lambda: torch.is_autocast_enabled("cpu")).values == (False, False)
    assert not torch.is_autocast_enabled("cpu")


def test_a_grad_mode_set_by_one_replica_is_its_own(make_strategy):
    """Replicas take turns at merge points; neither sees the other's grad mode."""
    strategy = make_strategy(2)

    def fn():
        context = mirror.get_replica_context()
        with torch.set_grad_enabled(here() == 0):
            context.all_reduce("sum", torch.ones(1))
            return torch.is_grad_enabled()

    assert strategy.run(fn).values == (True, False)
    assert torch.is_grad_enabled()


def test_default_dtype_and_device_hold_in_the_replicas(make_strategy):
    strategy = make_strategy(2)

    def fn():
        x = torch.ones(1)
        return x.dtype == torch.float64, x.device.type == "meta"

    torch.set_default_dtype(torch.float64)
    try:
        assert [v.values for v in strategy.run(fn)] == [(True, True), (False, False)]
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert [v.values for v in strategy.run(fn)] == [(False, False), (True, True)]
    assert [v.values for v in strategy.run(fn)] == [(False, False), (False, False)]


def test_context_variables_of_the_caller_hold_in_the_replicas(make_strategy):
    strategy = make_strategy(3)
    variable = contextvars.ContextVar("variable", default="unset")
    token = variable.set("caller's")
    try:
        result = strategy.run(variable.get)
    finally:
        variable.reset(token)
    assert strategy.local_results(result)[0] == "caller's"
    assert len(set(strategy.local_results(result))) == 1
    assert set(strategy.local_results(strategy.run(variable.get))) == {"unset"}


# Randomness


def test_a_seed_makes_a_run_reproducible_with_unlike_streams(make_strategy):
    strategy = make_strategy(3)

    def draw():
        return [t.tolist() for t in strategy.run(lambda: torch.rand(4)).values]

    torch.manual_seed(5)
    first = [draw(), draw()]
    torch.manual_seed(5)
    assert [draw(), draw()] == first
    rows = [tuple(row) for rows in first for row in rows]
    assert len(set(rows)) == 6
    torch.manual_seed(6)
    assert draw() != first[0]


def test_a_seed_before_another_strategy_gives_the_same_streams(make_strategy):
    drawn = []
    for _ in range(2):
        strategy = make_strategy(2)
        torch.manual_seed(9)
        drawn.append([t.tolist() for t in strategy.run(lambda: torch.rand(4)).values])
    assert drawn[0] == drawn[1]


def test_dropout_masks_differ_between_the_parts_of_a_transparent_call(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5)))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1.0)
    y = model(torch.ones(2, 1))
    assert not torch.equal(y[0], y[1])
    torch.manual_seed(1)
    first = model(torch.ones(2, 1))
    torch.manual_seed(1)
    assert torch.equal(model(torch.ones(2, 1)), first)


# Plug-ins


def test_a_communicator_of_the_users_own_is_used(make_strategy):
    calls = []

    class Slow(mirror.comm.Communicator):
        def all_reduce(self, tensors, op="sum", scale=1.0):
            calls.append(len(tensors))
            assert op == "sum"
            total = torch.stack(list(tensors)).sum(0)
            if scale != 1.0:
                total *= scale
            for t in tensors:
                t.copy_(total)

        def broadcast(self, tensors, root=0):
            for t in tensors:
                t.copy_(tensors[root])

        def reduce_scatter(self, tensors, op="sum"):
            raise NotImplementedError

        def all_gather(self, tensors):
            raise NotImplementedError

        @classmethod
        def unavailable_reason(cls, devices):
            return None

        def close(self):
            calls.append("closed")

    devices = [torch.device("cpu")] * 3
    strategy = make_strategy(3, backend=Slow(devices))
    plain = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    for m in (plain, model):
        m(torch.ones(7, 2) * torch.arange(7.0)[:, None]).square().mean().backward()
    assert_same(model.weight.grad, plain.weight.grad)
    assert 3 in calls


def test_the_error_tree():
    tree = {
        "DeviceError": ValueError,
        "BackendError": RuntimeError,
        "StrategyError": RuntimeError,
        "StructureError": ValueError,
        "BatchError": ValueError,
        "ShapeError": ValueError,
        "DivergenceError": RuntimeError,
        "CollectiveTimeoutError": TimeoutError,
        "ReplicaMismatchError": RuntimeError,
    }
    for name, base in tree.items():
        error = getattr(mirror, name)
        assert issubclass(error, mirror.MirrorError)
        assert issubclass(error, base)
