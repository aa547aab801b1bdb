"""Behaviour of all backends: values, dtypes, layouts, packing."""

import functools
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mirror.comm.communicator import DTYPES, HALF_DTYPES, OPS
from mirror.comm.host_backends import NaiveCommunicator
from mirror.comm.packing import (
    ALIGNMENT_BYTES,
    copy_back,
    flatten,
    move_into_flats,
    plan_packs,
    view_in_memory_order,
)
from mirror.values import are_identical

SIZES = (0, 1, 7, 4099)
PACKS = (0, 1, 64, 1000, 25 * 2**20)
FLOATS = tuple(dtype for dtype in DTYPES if dtype.is_floating_point)


def random_tensors(communicator, shape, dtype):
    """Returns one tensor per replica; the values of floating ones do not add up exactly.

    Except for NCCL on GPUs, with an unknown order of summation: there they do.
    """
    tensors = []
    for device in communicator.devices:
        values = torch.randn(shape) * 3
        if communicator.name == "nccl" and device.type == "cuda":
            values = 2.0 ** values.clamp(-1, 1).round() * values.sign()
        if not dtype.is_floating_point:
            values = values.abs() * 30
        tensors.append(values.to(device, dtype))
    return tensors


def model(communicator, tensors, op, scale=1.0):
    """Reduces in the backend's order, half types in float32 and rounded once; on the CPU."""
    combine = {"sum": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}[op]
    dtype = tensors[0].dtype
    arrays = [(t.float() if dtype in HALF_DTYPES else t).cpu().numpy() for t in tensors]
    n = len(arrays)
    if communicator.name == "ring":
        # Chunk c goes around from replica c + 1 to replica c.
        flat = [np.array_split(array.reshape(-1), n) for array in arrays]
        chunks = [
            functools.reduce(combine, [flat[(c + 1 + i) % n][c] for i in range(n)])
            for c in range(n)
        ]
        total = np.concatenate(chunks).reshape(arrays[0].shape)
    elif communicator.name == "hierarchical":
        islands = [[arrays[i] for i in island] for island in communicator.islands]
        total = functools.reduce(combine, [functools.reduce(combine, i) for i in islands])
    else:
        total = functools.reduce(combine, arrays)
    return torch.from_numpy(np.asarray(total * total.dtype.type(scale))).to(dtype)


def ops_and_sizes(dtype):
    """Yields every operation with the largest size and a small one: over all types with each."""
    *small, largest = SIZES
    for i, op in enumerate(OPS, DTYPES.index(dtype)):
        yield op, largest
        yield op, small[i % len(small)]


def clones(tensors):
    return [tensor.clone() for tensor in tensors]


def assert_all_equal(tensors, expected):
    for tensor in tensors:
        assert torch.equal(tensor.cpu(), expected)


# One test for all cases of a communicator and a type: to make and to close it takes longer.
@pytest.mark.full_product  # each backend has kernels of its own for each dtype
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_has_the_bits_of_the_model(communicator, dtype):
    for op, size in ops_and_sizes(dtype):
        tensors = random_tensors(communicator, size, dtype)
        expected = model(communicator, tensors, op)
        communicator.all_reduce(tensors, op)
        assert_all_equal(tensors, expected)


@pytest.mark.full_product
@pytest.mark.parametrize("dtype", FLOATS)
def test_scale_multiplies_before_the_one_rounding(communicator, dtype):
    tensors = random_tensors(communicator, 37, dtype)
    expected = model(communicator, tensors, "sum", 1 / 3)
    communicator.all_reduce(tensors, scale=1 / 3)
    assert_all_equal(tensors, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_integer_values_add_up_exactly(communicator, dtype):
    n = len(communicator.devices)
    tensors = [
        torch.full((5,), i + 1, device=d).to(dtype) for i, d in enumerate(communicator.devices)
    ]
    communicator.all_reduce(tensors)
    assert_all_equal(tensors, torch.full((5,), n * (n + 1) // 2).to(dtype))


def test_shapes_stay(communicator):
    tensors = [torch.ones(2, 3, 4, device=device) for device in communicator.devices]
    communicator.all_reduce(tensors)
    assert_all_equal(tensors, torch.full((2, 3, 4), float(len(tensors))))


def test_a_nan_or_inf_of_one_replica_reaches_all(communicator):
    tensors = [torch.zeros(2, device=device) for device in communicator.devices]
    tensors[-1][0] = torch.nan
    tensors[-1][1] = torch.inf
    for op in ("sum", "max"):
        communicator.all_reduce(tensors, op)
        for tensor in tensors:
            assert tensor[0].isnan()
            assert tensor[1].isinf()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_accumulated_in_float32(three, dtype):
    # In bfloat16 alone, 256 + 1 is 256; in float16, 2048 + 1 is 2048.
    large = 256 if dtype is torch.bfloat16 else 2048
    tensors = [torch.tensor([value]).to(dtype) for value in (large, 1, 1)]
    three.all_reduce(tensors)
    assert_all_equal(tensors, torch.tensor([large + 2]).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_copies_any_root(communicator, dtype):
    roots = range(len(communicator.devices))
    own = DTYPES.index(dtype) % len(roots)
    for root, size in [(r, SIZES[-1]) for r in roots] + [(own, size) for size in SIZES[:-1]]:
        tensors = random_tensors(communicator, size, dtype)
        expected = tensors[root].cpu().clone()
        communicator.broadcast(tensors, root)
        assert_all_equal(tensors, expected)


@pytest.mark.full_product
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter_leaves_chunk_i_with_replica_i_for_all_gather(communicator, dtype):
    n = len(communicator.devices)
    for op, size in ops_and_sizes(dtype):
        tensors = random_tensors(communicator, size, dtype)
        expected = model(communicator, tensors, op)
        communicator.reduce_scatter(tensors, op)
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor.tensor_split(n)[i].cpu(), expected.tensor_split(n)[i])
    tensors = random_tensors(communicator, (3, 5), dtype)
    expected = model(communicator, tensors, "sum")
    communicator.reduce_scatter(tensors)
    communicator.all_gather(tensors)
    assert_all_equal(tensors, expected)


def test_all_gather_gives_all_the_chunk_i_of_replica_i(communicator):
    n = len(communicator.devices)
    for size in SIZES:
        tensors = [torch.full((size,), i, device=d) for i, d in enumerate(communicator.devices)]
        sizes = [len(chunk) for chunk in torch.empty(size).tensor_split(n)]
        communicator.all_gather(tensors)
        assert_all_equal(tensors, torch.arange(n).repeat_interleave(torch.tensor(sizes)))


def mixed_lists(communicator):
    """Returns lists of all dtypes in turn, with every kind of strides, sizes 0, 1, odd, large.

    Sums are exact where they would else depend on what is reduced together.
    """
    divisors = (1, 2) if communicator.name in ("ring", "nccl") else (1, 3)
    columns = []
    for device in communicator.devices:
        column = []
        for divisor in divisors:
            for dtype in DTYPES:
                values = torch.randint(-9 * dtype.is_signed, 9, (6, 2, 4, 5)) / divisor
                values = values.to(device, dtype)
                column += [
                    values.to(memory_format=torch.channels_last),
                    values.clone().transpose(0, 3),
                    values.clone()[::2, :, 1:],
                    values.clone()[0, 0, 0, 0],
                    values.clone()[:0],
                ]
        columns.append(column)
    return columns


def test_lists_of_any_strides_and_dtypes_have_the_bits_of_the_model(communicator):
    expected = None
    # Of more than three replicas two sizes of packs, if there are so many.
    packs = PACKS if len(communicator.devices) <= 3 else PACKS[1::2] or PACKS
    for bytes_per_pack in packs:
        torch.manual_seed(0)
        lists = mixed_lists(communicator)
        strides = [[tensor.stride() for tensor in column] for column in lists]
        expected = expected or [
            model(communicator, tensors, "sum") for tensors in zip(*lists, strict=True)
        ]
        communicator.all_reduce_lists(lists, bytes_per_pack=bytes_per_pack)
        for column in lists:
            for tensor, wanted in zip(column, expected, strict=True):
                assert torch.equal(tensor.cpu(), wanted)
        assert strides == [[tensor.stride() for tensor in column] for column in lists]


@pytest.mark.parametrize("op", OPS)
def test_lists_take_every_op(three, op):
    lists = mixed_lists(three)
    expected = [model(three, tensors, op) for tensors in zip(*lists, strict=True)]
    three.all_reduce_lists(lists, op)
    for column in lists:
        assert all(map(torch.equal, column, expected))


def test_lists_may_have_other_strides_on_other_replicas(three):
    rows, columns = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).t()
    tensors = [rows, columns, torch.ones(2, 3)]
    three.all_reduce_lists([[tensor] for tensor in tensors])
    for tensor in tensors:
        assert tensor.tolist() == [[1, 4, 7], [5, 8, 11]]


def test_lists_are_scaled(three):
    lists = [[torch.full((2,), 2.0), torch.full((1,), 4.0, dtype=torch.float16)] for _ in range(3)]
    three.all_reduce_lists(lists, scale=0.5)
    for one, other in lists:
        assert one.tolist() == [3, 3]
        assert other.tolist() == [6]


def test_empty_lists_are_nothing_to_do(three):
    three.all_reduce_lists([[], [], []])


def test_parameters_are_reduced_unseen_by_autograd(three):
    tensors = [torch.nn.Parameter(torch.full((2,), float(i))) for i in range(3)]
    versions = [tensor._version for tensor in tensors]
    three.all_reduce(tensors)
    three.all_reduce_lists([[tensor] for tensor in tensors])
    for tensor, version in zip(tensors, versions, strict=True):
        assert tensor.tolist() == [9, 9]
        assert tensor.is_leaf
        assert tensor.requires_grad
        assert tensor._version > version


def test_inference_mode_and_its_tensors_work(three):
    outside = [torch.ones(2) for _ in range(3)]
    with torch.inference_mode():
        inside = [torch.ones(2) for _ in range(3)]
        for tensors in (inside, outside):
            three.all_reduce(tensors)
            three.all_reduce_lists([[tensor] for tensor in tensors])
            three.broadcast(tensors)
            three.reduce_scatter(tensors)
            three.all_gather(tensors)
    three.all_reduce(inside)  # written to by a caller that has left inference mode
    three.all_reduce_lists([[tensor, torch.ones(1)] for tensor in inside])
    assert_all_equal(outside, torch.full((2,), 27.0))
    assert_all_equal(inside, torch.full((2,), 243.0))
    assert not any(tensor.is_inference() for tensor in outside)


def test_one_tensor_of_inference_mode_among_others_works(three):
    with torch.inference_mode():
        tensors = [torch.ones(2)]
    tensors = [torch.ones(2), torch.ones(2), *tensors]
    three.all_reduce_lists([[tensor] for tensor in tensors])
    three.all_reduce(tensors)
    assert_all_equal(tensors, torch.full((2,), 9.0))


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
    """Records copies of single tensors, and copies of lists between different strides."""

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


def test_tensors_of_different_layouts_travel_row_by_row():
    x = torch.arange(6.0).view(2, 3)
    rows = {
        "one transposed": (x.t().contiguous().t(), x.clone()),
        "with gaps": tuple(torch.zeros(2, 4)[:, :3].copy_(x) for _ in range(2)),
        "contiguous": (x.clone(), x.clone()),
    }
    for name, row in rows.items():
        travelling = view_in_memory_order([[tensor] for tensor in row])
        assert all(a is b for (a,), b in zip(travelling, row, strict=True)), name
    both = [[x.clone().t()], [x.clone().t()]]
    (flat,), _ = view_in_memory_order(both)
    assert flat.tolist() == list(range(6))
    assert flat.data_ptr() == both[0][0].data_ptr()


class Writes(TorchDispatchMode):
    """Counts the operations that touch elements, by name."""

    VIEWS = ("view", "as_strided_", "unsafe_split_with_sizes")

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
    assert writes.found == ["new_empty", "_foreach_copy_"] * 4  # two packs on two replicas
    assert staying == []
    for column, old, flats in zip(columns, before, buffers, strict=True):
        for view, tensor in zip(column, old, strict=True):
            assert torch.equal(view, tensor)
            assert view.stride() == tensor.stride()
            assert view is not tensor
        flats[0].zero_()
        assert [bool(view.any()) for view in column] == [False, False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_views_in_a_flat_have_the_strides_of_their_tensors_and_gaps_are_zero(dtype):
    """Also where replicas differ in the strides of dimensions of one element, which are free."""
    x = torch.arange(1, 7)
    tensors = [
        [
            x.to(dtype).as_strided((3, 2, 1, 1), (2, 1, one, one)),
            x.to(dtype).as_strided((1,), (one,)),
            torch.ones((), dtype=dtype),
            torch.empty(0, 3, dtype=dtype),
            x.to(dtype)[:5].clone(),
            x.to(dtype).view(3, 2).t().contiguous().t(),
        ]
        for one in (1, 7)
    ]
    columns = [list(column) for column in tensors]
    buffers, staying = move_into_flats(columns, 2**20)
    assert staying == []
    for column, old, (flat,) in zip(columns, tensors, buffers, strict=True):
        for view, tensor in zip(column, old, strict=True):
            assert torch.equal(view, tensor)
            assert view.stride() == tensor.stride()
            assert view.data_ptr() % ALIGNMENT_BYTES == 0 or not view.numel()
            assert not view._is_view()
        held = sum(view.count_nonzero() for view in column)
        assert flat.count_nonzero() == held == 6 + 1 + 1 + 5 + 6
        versions = [view._version for view in column]
        column[0].add_(1)
        assert [view._version for view in column] == [versions[0] + 1, *versions[1:]]


def test_a_flat_is_planned_anew_for_other_shapes_dtypes_strides_and_packs():
    def moved(shape, dtype, turned, pack):
        tensors = [torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype)]
        columns = [[t.t() if turned else t for t in tensors]]
        buffers, staying = move_into_flats(columns, pack)
        return columns[0], buffers[0], staying

    for shape, dtype, turned, pack in product(
        [(4, 8), (8, 4)], [torch.float32, torch.float64], [False, True], [2**20, 0]
    ):
        for _ in range(2):
            column, buffers, staying = moved(shape, dtype, turned, pack)
            assert len(staying) == (2 if pack == 0 else 0)
            assert [buffer.numel() for buffer in buffers] == ([] if pack == 0 else [64])
            for view in column:
                assert view.dtype == dtype
                assert view.shape == (shape[::-1] if turned else shape)
                assert view.is_contiguous() != turned


def test_tensors_of_different_layouts_and_lone_ones_are_not_packed():
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
