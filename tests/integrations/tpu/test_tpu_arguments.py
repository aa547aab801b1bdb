"""Arguments of a run as arrays: padded, with the true sizes, and put together again."""

import numpy as np
import pytest
import torch

from mirror.errors import StructureError
from mirror.integrations.tpu.tpu_arguments import is_static, make_arguments
from mirror.values import ABSENT, PerReplica


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
def test_parts_of_unlike_kinds_are_refused(other):
    with pytest.raises(StructureError, match="differ in dtype or number of dimensions"):
        make_arguments((PerReplica([torch.ones(2), other]),), [0, 1], None, 2)


def test_what_can_be_compared():
    assert is_static([1, ("a", None)])
    assert not is_static([1, torch.ones(1)])
