"""What a PerReplica is, and is not."""

import pytest
import torch
import torch.nn.functional as F

import mirror
from mirror.values import ABSENT
from tests.strategy.programs import ids


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


@pytest.mark.parametrize(
    "use",
    [
        lambda loss: f"{loss:.3f}",
        lambda loss: loss == 0,
        lambda loss: loss != torch.ones(()),
        lambda loss: divmod(loss, 2),
        lambda loss: divmod(2, loss),
    ],
)
def test_per_replica_values_refuse_numbers_business_with_advice(make_strategy, use):
    # Formatting a loss spoke of "PerReplica.__format__", and `loss == 0` was False in silence.
    strategy = make_strategy(2)
    loss = strategy.run(lambda: torch.ones(()))
    with pytest.raises(TypeError, match="holds one value per replica"):
        use(loss)
    assert loss == loss
    assert loss != "loss"
    assert loss in {loss}
    assert f"{loss}" == repr(loss)


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
    """Parts unlike in shape, with weights, and none of the last replica."""
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
