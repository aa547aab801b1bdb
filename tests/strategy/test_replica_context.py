"""The replica context: collectives, merge_call, weight."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same
from tests.pairs import pairwise
from tests.strategy.programs import values
from tests.toy_models import replica_id


def test_all_reduce_values_are_the_same_bits_everywhere(make_strategy):
    strategy = make_strategy(4)
    parts = [torch.randn(1000) for _ in range(4)]
    for op, expected in (("sum", sum(parts)), ("mean", sum(parts) / 4)):
        result = strategy.run(
            lambda op=op: mirror.get_replica_context().all_reduce(op, parts[replica_id()])
        )
        for value in result.values:
            assert torch.equal(value, result.values[0])
            assert_same(value, expected)


@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_all_reduce_knows_the_other_ops(op, make_strategy):
    strategy = make_strategy(3)
    result = strategy.run(
        lambda: mirror.get_replica_context().all_reduce(op, torch.tensor(2.0 + replica_id()))
    )
    assert values(strategy, result) == [{"max": 4.0, "min": 2.0, "prod": 24.0}[op]] * 3


def test_all_reduce_of_a_structure_with_mixed_dtypes(make_strategy):
    strategy = make_strategy(3)

    def fn():
        r = replica_id()
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


@pytest.mark.parametrize("axis", [0, 1])
def test_all_gather_allows_sizes_that_differ_along_the_axis(axis, make_strategy):
    strategy = make_strategy(3)

    def make(r):
        shape = [2, 2]
        shape[axis] = r  # replica 0 has nothing
        return torch.full(shape, float(r))

    result = strategy.run(
        lambda: mirror.get_replica_context().all_gather(make(replica_id()), axis=axis)
    )
    for value in result.values:
        assert torch.equal(value, torch.cat([make(r) for r in range(3)], dim=axis))


def run_gradients(strategy, op, sizes=None, reduction=None):
    """d loss_r / d x_s through an all_reduce, where loss_r = (r + 1) * all_reduce(x)."""

    def fn():
        context = mirror.get_replica_context()
        if sizes is not None:
            context.weight = sizes[replica_id()]
        x = torch.tensor(1.0, requires_grad=True)
        (context.all_reduce(op, x) * (replica_id() + 1.0)).backward()
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
        context.weight = 1.0 + replica_id()
        return context.all_reduce("sum", x) * (replica_id() + 1.0)

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


@pairwise(n=[1, 2, 3, 4], loss=[centred, spread], size=[10, 11, 7, 2], way=[2, 3])
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
            merged, args=(replica_id(),), kwargs={"other": {"k": torch.tensor(replica_id() * 10)}}
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
                total += context.merge_call(lambda s, v: sum(v.values), args=(replica_id() + i,))
            else:
                total += context.all_reduce("sum", torch.tensor(i)).item()
        return total

    assert strategy.run(fn).values == (22, 22)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((None,), "merge_call takes the function itself, which it calls, got a NoneType"),
        ((print, "ab"), "args must be a tuple or a list, got a str"),
        ((print, torch.ones(2)), "args must be a tuple or a list, got a Tensor"),
        ((print, (), [1]), "kwargs must be a mapping of names, got a list"),
    ],
)
def test_merge_call_says_what_it_takes(make_strategy, arguments, says):
    strategy = make_strategy(2)
    with pytest.raises(TypeError, match=says):
        strategy.run(lambda: mirror.get_replica_context().merge_call(*arguments))


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), None, "x", torch.ones(2)])
def test_a_weight_is_one_finite_number(make_strategy, value):
    strategy = make_strategy(2)

    def fn():
        mirror.get_replica_context().weight = value

    with pytest.raises(ValueError, match="weight is one finite number >= 0; got "):
        strategy.run(fn)


def test_weight_defaults_to_the_number_of_examples(make_strategy):
    strategy = make_strategy(3)
    (batch,) = strategy.distribute_dataset([torch.randn(11, 2)])
    result = strategy.run(lambda x: float(mirror.get_replica_context().weight), args=(batch,))
    first, second, third = result.values
    assert first / third == pytest.approx(4 / 3)
    assert second / third == pytest.approx(4 / 3)
