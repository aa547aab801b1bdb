"""The conformance suite that every backend passes, against an ordered model in numpy."""

import functools
import itertools

import numpy as np
import pytest
import torch

from mirror.comm.communicator import DTYPES, HALF_DTYPES, OPS

SIZES = (0, 1, 7, 4099)
PACKS = (0, 1, 64, 1000, 25 * 2**20)
FLOATS = tuple(dtype for dtype in DTYPES if dtype.is_floating_point)


def random_tensors(communicator, shape, dtype):
    """Returns one tensor per replica; the values of floating ones do not add up exactly.

    But for NCCL on GPUs, whose order of summation nobody knows: there they do.
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


def clones(tensors):
    return [tensor.clone() for tensor in tensors]


def assert_all_equal(tensors, expected):
    for tensor in tensors:
        assert torch.equal(tensor.cpu(), expected)


# One test for all cases of a communicator and a type: to make and to close it takes longer.
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_has_the_bits_of_the_model(communicator, dtype):
    for op, size in itertools.product(OPS, SIZES):
        tensors = random_tensors(communicator, size, dtype)
        expected = model(communicator, tensors, op)
        communicator.all_reduce(tensors, op)
        assert_all_equal(tensors, expected)


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
    for root in range(len(communicator.devices)):
        for size in SIZES:
            tensors = random_tensors(communicator, size, dtype)
            expected = tensors[root].cpu().clone()
            communicator.broadcast(tensors, root)
            assert_all_equal(tensors, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter_leaves_chunk_i_with_replica_i(communicator, dtype):
    n = len(communicator.devices)
    for op, size in itertools.product(OPS, SIZES):
        tensors = random_tensors(communicator, size, dtype)
        expected = model(communicator, tensors, op).tensor_split(n)
        communicator.reduce_scatter(tensors, op)
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor.tensor_split(n)[i].cpu(), expected[i])


def test_all_gather_gives_all_the_chunk_i_of_replica_i(communicator):
    n = len(communicator.devices)
    for size in SIZES:
        tensors = [torch.full((size,), i, device=d) for i, d in enumerate(communicator.devices)]
        sizes = [len(chunk) for chunk in torch.empty(size).tensor_split(n)]
        communicator.all_gather(tensors)
        assert_all_equal(tensors, torch.arange(n).repeat_interleave(torch.tensor(sizes)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter_then_all_gather_is_all_reduce(communicator, dtype):
    tensors = random_tensors(communicator, (3, 5), dtype)
    expected = model(communicator, tensors, "sum")
    communicator.reduce_scatter(tensors)
    communicator.all_gather(tensors)
    assert_all_equal(tensors, expected)


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
    for bytes_per_pack in PACKS:
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
