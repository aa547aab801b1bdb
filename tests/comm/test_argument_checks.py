"""Arguments that no backend can reduce raise an error and stay unchanged."""

import random

import pytest
import torch

from mirror.comm.communicator import has_own_elements, share_memory
from mirror.errors import BackendError, DeviceError, ShapeError
from tests.pairs import each_once


def ones(n=3, shape=(4,), dtype=torch.float32):
    return [torch.ones(shape, dtype=dtype) for _ in range(n)]


def _shared():
    memory = torch.ones(8)
    return [memory[0:4], torch.ones(4), memory[3:7]]


BAD = {
    "number": (lambda: ones(2), ShapeError, "over 3 replicas .* got 2"),
    "shape": (lambda: [*ones(2), *ones(1, (2, 2))], ShapeError, r"replica 2 has \(2, 2\)"),
    "dtype": (lambda: [*ones(2), *ones(1, dtype=torch.float64)], ShapeError, "torch.float64"),
    "same": (lambda: ones(1) * 3, ShapeError, "those of replicas 0 and 1 do"),
    "overlap": (_shared, ShapeError, "those of replicas 0 and 2 do"),
    "strides": (lambda: [t[::2] for t in ones()], ShapeError, "contiguous"),
    "bool": (lambda: ones(dtype=torch.bool), TypeError, "got torch.bool; convert it"),
    "int8": (lambda: ones(dtype=torch.int8), TypeError, "got torch.int8"),
    "complex": (lambda: ones(dtype=torch.complex64), TypeError, "got torch.complex64"),
    "sparse": (lambda: [t.to_sparse() for t in ones()], TypeError, "dense tensors"),
    "numbers": (lambda: [1.0, 2.0, 3.0], TypeError, "dense tensors.*float"),
    "stacked": (lambda: torch.ones(3, 4), TypeError, "one per replica"),
    "device": (
        lambda: [*ones(2), torch.ones(4, device="meta")],
        DeviceError,
        "replica 2 is on 'meta' instead of 'cpu'",
    ),
}


@pytest.mark.parametrize(("make", "error", "match"), BAD.values(), ids=BAD.keys())
def test_bad_tensors_are_refused_and_stay_as_they_were(three, make, error, match):
    for call in (three.all_reduce, three.broadcast, three.reduce_scatter, three.all_gather):
        tensors = make()
        with pytest.raises(error, match=match):
            call(tensors)
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                assert bool((tensor.to_dense() == 1).all())


@each_once(bad=sorted(BAD.keys() - {"strides", "stacked"}), bytes_per_pack=[0, 100])
def test_bad_lists_are_refused_and_stay_as_they_were(three, bad, bytes_per_pack):
    make, error, _ = BAD[bad]
    tensors = make()
    lists = [[torch.ones(2), tensor] for tensor in tensors]
    with pytest.raises(error):
        three.all_reduce_lists(lists, bytes_per_pack=bytes_per_pack)
    assert all(column[0].tolist() == [1, 1] for column in lists)


def test_expanded_tensors_are_refused(three):
    lists = [[torch.ones(2), torch.ones(1).expand(3)] for _ in range(3)]
    with pytest.raises(ShapeError, match="one of the tensors at 1 do"):
        three.all_reduce_lists(lists)
    assert all(column[0].tolist() == [1, 1] for column in lists)


def test_lazily_negated_tensors_are_refused(three):
    # Their memory holds 2, their value is -2.
    tensors = [torch.tensor([1 + 2j]).conj().imag for _ in range(3)]
    assert all(tensor.is_contiguous() for tensor in tensors)
    with pytest.raises(TypeError, match="resolve_neg"):
        three.all_reduce(tensors)
    with pytest.raises(TypeError, match="resolve_neg"):
        three.all_reduce_lists([[tensor] for tensor in tensors])


def test_lists_of_unequal_length_are_refused(three):
    with pytest.raises(ShapeError, match="replica 0 has 4 tensors and replica 1 has 3"):
        three.all_reduce_lists([ones(4), ones(3), ones(4)])


def test_an_unknown_op_is_refused_with_the_known_ones(three):
    for call in (three.all_reduce, three.reduce_scatter):
        with pytest.raises(ValueError, match="one of sum, min, max, prod; got 'mean'"):
            call(ones(), "mean")
    with pytest.raises(ValueError, match="one of sum, min, max, prod; got 'mean'"):
        three.all_reduce_lists([ones()] * 3, "mean")


def test_a_scale_is_for_floating_dtypes(three):
    with pytest.raises(TypeError, match=r"scale=0.5 with torch.int64"):
        three.all_reduce(ones(dtype=torch.int64), scale=0.5)
    lists = [[torch.ones(2), torch.ones(2, dtype=torch.int32)] for _ in range(3)]
    with pytest.raises(TypeError, match=r"scale=0.5 with torch.int32"):
        three.all_reduce_lists(lists, scale=0.5)
    assert all(column[0].tolist() == [1, 1] for column in lists)


@pytest.mark.parametrize("root", [-1, 3])
def test_a_root_is_a_replica(three, root):
    with pytest.raises(ValueError, match=f"0 to 2; got {root}"):
        three.broadcast(ones(), root)


def test_a_negative_pack_is_refused(three):
    with pytest.raises(ValueError, match="got -1"):
        three.all_reduce_lists([ones() for _ in range(3)], bytes_per_pack=-1)


def test_a_closed_communicator_says_so(three):
    three.close()
    three.close()
    for call in (three.all_reduce, three.broadcast, three.reduce_scatter, three.all_gather):
        with pytest.raises(BackendError, match=f"{three.name}.* was closed"):
            call(ones())
    with pytest.raises(BackendError, match="was closed"):
        three.all_reduce_lists([ones() for _ in range(3)])


def drawn_view(draw, memory):
    """Returns a view of some dtype, with up to three dimensions, gaps and overlaps."""
    typed = memory.view(draw.choice([torch.uint8, torch.float16, torch.float32, torch.float64]))
    begin = draw.randrange(len(typed))
    shape, strides, room = [], [], len(typed) - begin - 1
    for _ in range(draw.randint(0, 3)):
        stride = draw.randint(0 if draw.random() < 0.1 else 1, 6)
        size = draw.randint(0 if draw.random() < 0.05 else 1, 4)
        if stride * (size - 1) <= room:
            room -= max(stride * (size - 1), 0)
            shape.append(size)
            strides.append(stride)
    return typed.as_strided(shape, strides, begin)


def bytes_of(tensor):
    """Returns the addresses of its elements' bytes, one by one."""
    addresses = [tensor.data_ptr()]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        step = stride * tensor.element_size()
        addresses = [address + i * step for address in addresses for i in range(size)]
    return [address + i for address in addresses for i in range(tensor.element_size())]


def test_shared_memory_is_found_as_by_comparing_every_byte():
    draw, outcomes = random.Random(0), []
    for _ in range(1500):
        memory = torch.zeros(8 * draw.choice([8, 32, 128]), dtype=torch.uint8)
        views = [drawn_view(draw, memory) for _ in range(draw.randint(1, 4))]
        for view in views:
            assert has_own_elements(view) == (len(set(bytes_of(view))) == len(bytes_of(view)))
        views = [view for view in views if has_own_elements(view)]
        together = [address for view in views for address in bytes_of(view)]
        outcomes.append(len(set(together)) != len(together))
        assert share_memory(views) == outcomes[-1]
    assert 0.1 < sum(outcomes) / len(outcomes) < 0.8


def test_lists_with_gaps_may_lie_in_each_others_gaps_but_no_closer(three):
    table = torch.ones(4, 8)
    lists = [[table[:, i], table[:, i + 3]] for i in range(3)]
    three.all_reduce_lists(lists)
    assert table.tolist() == [[3.0] * 6 + [1.0] * 2] * 4
    lists = [[table[:, i], table[i]] for i in range(3)]
    with pytest.raises(ShapeError, match="two of these do"):
        three.all_reduce_lists(lists)
    assert table.tolist() == [[3.0] * 6 + [1.0] * 2] * 4
