"""Arguments and results of a run as arrays: padded, and cut to their true sizes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mirror.errors import StrategyError, StructureError
from mirror.values import ABSENT, PerReplica
from mirror_tpu.arguments import (
    ProgramOutput,
    TpuArguments,
    TpuCopies,
    from_numpy,
    is_static,
    make_arguments,
    regroup_outputs,
    to_numpy,
)


def uneven():
    parts = PerReplica(
        [torch.full((n, 2), float(n)) for n in (3, 2)] + [ABSENT], weights=[3, 2, 0]
    )
    return ({"x": parts}, torch.tensor(7.0)), {"flag": True}


def test_parts_are_padded_and_their_sizes_kept():
    found = make_arguments(uneven(), [0, 1], [3, 2, 0], 3)
    assert found.sizes == (((3, 2),), ((2, 2),), None)
    assert found.which == (0, 1, 2)
    assert found.counts == (3.0, 2.0, 0.0)
    (part,) = found.parts
    assert part.shape == (3, 3, 2)
    assert part[:, :, 0].tolist() == [[3, 3, 3], [2, 2, 0], [0, 0, 0]]
    assert found.shared[0] == 7.0


def test_the_structure_comes_back_with_other_leaves():
    found = make_arguments(uneven(), [0, 1], None, 3)
    args, kwargs = found.rebuild(["part"], ["shared"])
    assert args == ({"x": "part"}, "shared")
    assert kwargs == {"flag": True}
    assert found.counts == (1.0, 1.0, 0.0)


def test_only_sizes_and_plain_values_make_another_program():
    same = make_arguments(uneven(), [0, 1], None, 3)
    assert make_arguments(uneven(), [0, 1], None, 3).key == same.key
    args, _ = uneven()
    assert make_arguments((args, {"flag": False}), [0, 1], None, 3).key != same.key
    even = PerReplica([torch.ones(2)] * 3)
    assert make_arguments((even,), [0, 1, 2], None, 3).sizes == (((2,),),)


def test_memory_is_not_shared():
    x = torch.zeros(2)
    found = make_arguments((x, np.zeros(2)), [0], None, 1)
    x += 1
    assert not found.shared[0].any()


@pytest.mark.parametrize("values", [["a", "b"], [1, 2]])
def test_what_differs_and_is_no_tensor_is_refused(values):
    with pytest.raises(StructureError, match="differ between replicas must be tensors"):
        make_arguments((PerReplica(values),), [0, 1], None, 2)


@pytest.mark.parametrize("other", [torch.ones(2, 1), torch.ones(2, dtype=torch.float64)])
def test_parts_of_different_kinds_are_refused(other):
    with pytest.raises(StructureError, match="differ in dtype or number of dimensions"):
        make_arguments((PerReplica([torch.ones(2), other]),), [0, 1], None, 2)


def test_what_can_be_compared():
    assert is_static([1, ("a", None)])
    assert not is_static([1, torch.ones(1)])


ARGUMENTS = TpuArguments(None, (), (((2,),), ((1,),), None), (0, 1, 2), [], [], (2.0, 1.0, 0.0))
OUTPUTS = [
    ProgramOutput({"y": 0, "n": 0}, [np.empty(2), [2]]),
    ProgramOutput({"y": 0, "n": 0}, [np.empty(1), [1]]),
    None,
]
PADDED = [np.array([[1, 2], [3, 0], [0, 0]], "float32")]


def test_results_are_split_and_idle_replicas_have_none():
    found = regroup_outputs(OUTPUTS, PADDED, ARGUMENTS, None)
    assert [value.tolist() for _, value in found["y"].parts()] == [[1.0, 2.0], [3.0]]
    assert dict(found["n"].parts()) == {0: 2, 1: 1}
    assert found["y"].weights == (2.0, 1.0, 0.0)


def test_a_backward_pass_from_results_says_where_it_belongs():
    found = regroup_outputs(OUTPUTS, PADDED, ARGUMENTS, "into run")
    with pytest.raises(StrategyError, match="backward outside of run: into run"):
        found["y"].values[0].sum().backward()
    with torch.no_grad():
        assert found["y"].values[0].sum() == 3


jax = SimpleNamespace(device_put=lambda array, sharding: array)


def test_a_tensor_is_sent_when_its_bits_have_changed():
    copies, x = TpuCopies(jax, None), torch.zeros(2)
    first = copies.device_copy("x", x)
    assert copies.device_copy("x", x) is first
    x.data[0] = -0.0  # no version is counted, and 0.0 == -0.0
    assert np.signbit(copies.device_copy("x", x)).tolist() == [True, False]
    x[1] = torch.nan
    copies.device_copy("x", x)
    copies.device_copy("x", x)
    assert copies.sent == 3


def test_what_a_run_has_changed_is_read_back_in_place():
    copies, x = TpuCopies(jax, None), torch.nn.Parameter(torch.zeros(2))
    address = x.data_ptr()
    copies.device_copy("x", x)
    copies.put("x", np.ones(2, "float32"), x)
    assert x.tolist() == [1.0, 1.0]
    assert x.data_ptr() == address
    copies.device_copy("x", x)
    assert copies.sent == 1
    copies.clear()
    assert copies.arrays() == {}


def test_copies_do_not_share_memory():
    x = torch.zeros(2)
    array = to_numpy(x)
    x += 1
    assert not array.any()
    values = from_numpy(array)
    array += 5
    assert not values.any()
    assert to_numpy(torch.tensor(3)).shape == ()
