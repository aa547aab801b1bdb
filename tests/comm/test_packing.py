"""mirror/comm/packing.py: plans as data, and buffers that go there and back."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mirror.comm.host.naive_backend import NaiveCommunicator
from mirror.comm.packing import (
    ALIGNMENT_BYTES,
    copy_back,
    flatten,
    in_memory_order,
    move_into_flats,
    plan_packs,
)
from mirror.values import are_identical

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


class Copies(TorchDispatchMode):
    """Notes copies of single tensors, and copies of lists between unlike strides."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name == "_foreach_copy_":
            unlike = [a.shape for a, b in zip(*args[:2], strict=True) if a.stride() != b.stride()]
            self.found += [(name, shape) for shape in unlike]
        elif name in ("clone", "contiguous"):
            self.found.append((name, args[0].shape))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("bytes_per_pack", [0, 100, MIB])
def test_gradients_in_channels_last_layout_travel_without_copies_of_their_own(bytes_per_pack):
    columns = []
    for _ in range(3):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 2)).to(
            memory_format=torch.channels_last
        )
        x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
        net(x).square().sum().backward()
        columns.append([p.grad for p in net.parameters()])
    assert not all(grad.is_contiguous() for grad in columns[0])
    expected = [sum(grads) for grads in zip(*columns, strict=True)]
    strides = [grad.stride() for grad in columns[0]]
    with Copies() as copies:
        NaiveCommunicator(["cpu"] * 3).all_reduce_checked(columns, "sum", 1.0, bytes_per_pack)
    assert copies.found == []
    for column in columns:
        assert [grad.stride() for grad in column] == strides
        assert all(map(torch.equal, column, expected))


def test_tensors_that_do_not_lie_alike_travel_row_by_row():
    x = torch.arange(6.0).view(2, 3)
    rows = {
        "one transposed": (x.t().contiguous().t(), x.clone()),
        "with gaps": tuple(torch.zeros(2, 4)[:, :3].copy_(x) for _ in range(2)),
        "contiguous": (x.clone(), x.clone()),
    }
    for name, row in rows.items():
        travelling = in_memory_order([[tensor] for tensor in row])
        assert all(a is b for (a,), b in zip(travelling, row, strict=True)), name
    both = [[x.clone().t()], [x.clone().t()]]
    (flat,), _ = in_memory_order(both)
    assert flat.tolist() == list(range(6))
    assert flat.data_ptr() == both[0][0].data_ptr()


class Writes(TorchDispatchMode):
    """Counts the operations that touch elements, by name."""

    VIEWS = ("view", "as_strided", "as_strided_", "slice", "unsafe_split_with_sizes")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.found += [] if name in self.VIEWS else [name]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_moving_into_flats_is_one_copy_for_a_pack_and_a_replica(memory_format):
    shapes = [(4, 8, 2, 2), (8,), (4, 4, 2, 2), (16,), (4,)]
    columns = [
        [torch.randn(s).to(memory_format=memory_format) if len(s) == 4 else torch.randn(s)
         for s in shapes]
        for _ in range(2)
    ]  # fmt: skip
    before = [list(column) for column in columns]
    with Writes() as writes:
        buffers, staying = move_into_flats(columns, 600)
    assert writes.found == ["cat"] * 4  # two packs on each of two replicas
    assert staying == []
    for column, old, flats in zip(columns, before, buffers, strict=True):
        for view, tensor in zip(column, old, strict=True):
            assert torch.equal(view, tensor)
            assert view.stride() == tensor.stride()
            assert view is not tensor
        flats[0].zero_()
        assert [bool(view.any()) for view in column] == [False, False, True, True, True]


def test_what_does_not_lie_alike_or_would_be_alone_stays():
    x = torch.arange(6.0).view(2, 3)
    columns = [
        [x.clone(), x.t().contiguous().t(), torch.ones(9), x.double(), torch.ones(3)],
        [x.clone(), x.clone(), torch.ones(9), x.double(), torch.ones(3)],
    ]
    before = [list(column) for column in columns]
    _, staying = move_into_flats(columns, 2**20)
    assert sorted(staying) == [1, 3]
    for column, old in zip(columns, before, strict=True):
        kept = [i for i, (a, b) in enumerate(zip(column, old, strict=True)) if a is b]
        assert kept == [1, 3]
        assert all(view.data_ptr() % ALIGNMENT_BYTES == 0 for view in column)
    before = [list(column) for column in columns]
    assert move_into_flats(columns, 0) == ([[], []], [1, 0, 2, 3, 4])
    assert all(map(are_identical, columns, before))
