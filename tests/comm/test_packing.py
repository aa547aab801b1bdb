"""mirror/comm/packing.py: plans as data, and buffers that go there and back."""

import pytest
import torch

from mirror.comm.packing import copy_back, flatten, plan_packs

F, L = torch.float32, torch.int64
MIB = 2**20


def test_packs_are_filled_in_order_up_to_the_limit():
    assert plan_packs([4, 4, 8, 4, 4], [F] * 5, 8) == ((0, 1), (2,), (3, 4))


def test_a_pack_holds_one_dtype():
    assert plan_packs([4, 4, 8, 4], [F, F, L, F], 8) == ((0, 1), (3,), (2,))
    assert plan_packs([8, 4, 8, 4], [L, F, L, F], 100) == ((0, 2), (1, 3))


def test_a_large_tensor_is_a_pack_of_its_own():
    assert plan_packs([4, 100, 4, 4], [F] * 4, 8) == ((0,), (1,), (2, 3))


def test_the_first_pack_is_small():
    assert plan_packs([MIB // 2] * 6, [F] * 6, 25 * MIB) == ((0, 1), (2, 3, 4, 5))
    assert plan_packs([2 * MIB] * 4, [F] * 4, 4 * MIB) == ((0,), (1, 2), (3,))


def test_nothing_packed_means_tensor_by_tensor():
    assert plan_packs([4, 0, 8], [F, F, L], 0) == ((0,), (1,), (2,))


def test_no_tensors_need_no_packs():
    assert plan_packs([], [], 100) == ()
    assert plan_packs([], [], 0) == ()


def test_empty_tensors_join_any_pack():
    assert plan_packs([0, 8, 0, 0], [F] * 4, 8) == ((0, 1, 2, 3),)


@pytest.mark.parametrize("bytes_per_pack", [1, 5, 16, 100])
def test_every_tensor_is_in_one_pack_that_keeps_the_rules(bytes_per_pack):
    sizes = [(7 * i) % 23 for i in range(40)]
    dtypes = [(F, L, torch.float16)[i % 3] for i in range(40)]
    packs = plan_packs(sizes, dtypes, bytes_per_pack)
    assert sorted(i for pack in packs for i in pack) == list(range(40))
    for pack in packs:
        assert list(pack) == sorted(pack)
        assert len({dtypes[i] for i in pack}) == 1
        assert len(pack) == 1 or sum(sizes[i] for i in pack) <= bytes_per_pack


def test_tensors_of_any_strides_come_back_as_they_went():
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.tensor(6.0), torch.empty(0, 2)]
    buffer = flatten(tensors)
    assert buffer.tolist() == [0, 3, 1, 4, 2, 5, 6]
    copy_back(buffer * 10, tensors)
    assert tensors[0].tolist() == [[0, 30], [10, 40], [20, 50]]
    assert tensors[0].stride() == (1, 3)
    assert tensors[1].item() == 60
