"""mirror/data/split_batch.py: the balanced rule, every kind of leaf, and unsplittable leaves."""

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from mirror.data.split_batch import batch_size, split_batch, split_sizes
from mirror.errors import BatchError
from mirror.values import ABSENT, PerReplica

CPU = torch.device("cpu")
Pair = collections.namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = None


def parts_of(value):
    return [None if part is ABSENT else part.tolist() for part in value.values]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("num_examples", [0, 1, 2, 7, 8, 33])
def test_sizes_are_those_of_tensor_split(num_examples, num_replicas):
    chunks = torch.empty(num_examples).tensor_split(num_replicas)
    assert split_sizes(num_examples, num_replicas) == tuple(map(len, chunks))


def test_a_tensor_is_cut_into_parts_in_order():
    value = split_batch(torch.arange(8).view(4, 2), [CPU] * 3)
    assert isinstance(value, PerReplica)
    assert parts_of(value) == [[[0, 1], [2, 3]], [[4, 5]], [[6, 7]]]
    assert value.weights == (2, 1, 1)


def test_replicas_beyond_the_examples_have_no_part():
    value = split_batch(torch.arange(2), [CPU] * 4)
    assert parts_of(value) == [[0], [1], None, None]
    assert value.weights == (1, 1, 0, 0)


def test_of_an_empty_batch_the_first_replica_gets_the_empty_part():
    value = split_batch((torch.empty(0, 3), np.empty((0, 2))), [CPU] * 2)
    assert [leaf.values[0].shape for leaf in value] == [(0, 3), (0, 2)]
    assert all(leaf.values[1] is ABSENT for leaf in value)
    assert value[0].weights == (0, 0)


def test_parts_are_views():
    batch = torch.zeros(3)
    value = split_batch(batch, [CPU] * 2)
    value.values[1].fill_(5)
    assert batch.tolist() == [0, 0, 5]


def test_parts_may_be_written_to_with_autograd():
    batch = torch.ones(4, requires_grad=True)
    first, second = split_batch(batch * 2, [CPU] * 2).values
    first.mul_(3)
    (first.sum() + second.sum()).backward()
    assert batch.grad.tolist() == [6, 6, 2, 2]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(3),
        np.arange(3)[::-1][::-1],
        np.arange(6)[::2] // 2,
        np.arange(3, dtype=">i4"),
        np.arange(3, dtype=np.float16),
        np.arange(2, -1, -1)[::-1],
        np.broadcast_to(np.arange(3), (1, 3))[0],
        np.frombuffer(bytes([0, 1, 2]), np.uint8),
    ],
    ids=["plain", "twice", "strided", "swapped", "half", "reversed", "broadcast", "read-only"],
)
def test_numpy_arrays_become_tensors_without_a_warning(array):
    value = split_batch(array, [CPU] * 2)
    assert all(isinstance(part, torch.Tensor) for part in value.values)
    assert parts_of(value) == [[0, 1], [2]]


def test_writing_to_a_part_of_a_read_only_array_leaves_the_array_alone():
    array = np.zeros(2)
    array.flags.writeable = False
    split_batch(array, [CPU]).values[0].fill_(1)
    assert array.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", ["U4", ">U4", object, "S4", "datetime64[Y]"])
def test_arrays_that_torch_has_no_dtype_for_stay_arrays(dtype):
    array = np.array(["2001", "2002", "2003"]).astype(dtype)
    first, second = split_batch(array, [CPU] * 2).values
    assert np.array_equal(first, array[:2])
    assert np.array_equal(second, array[2:])


def test_what_is_not_batched_goes_to_every_replica():
    sentinel = object()
    batch = {"x": torch.arange(2), "t": torch.tensor(7), "n": 3, "s": "ab", "o": sentinel}
    batch |= {"none": None, "list": [1, 2], "np": np.float32(2), "0-d": np.array(4)}
    value = split_batch(batch, [CPU] * 3)
    assert parts_of(value["t"]) == [7, 7, 7]
    assert value["t"].weights == (1, 1, 0)
    for key in ("n", "s", "o", "none", "np", "0-d"):
        assert value[key] is batch[key]
    assert value["list"] == [1, 2]


def test_one_string_per_example_is_split():
    batch = (torch.arange(3), ["a", "b", "c"], ("d", "e", "f"), [b"g", b"h", b"i"])
    _, one, two, three = split_batch(batch, [CPU] * 2)
    assert one.values == (["a", "b"], ["c"])
    assert two.values == (("d", "e"), ("f",))
    assert three.values == ([b"g", b"h"], [b"i"])
    assert one.weights == (2, 1)


def test_other_lists_go_to_every_replica():
    batch = (torch.arange(3), ["a", "b"], ["a", 1, "c"], [])
    assert split_batch(batch, [CPU] * 2)[1:] == (["a", "b"], ["a", 1, "c"], [])


def test_what_the_default_collate_function_makes_is_split():
    examples = [(torch.tensor([i]), str(i), {"y": float(i)}) for i in range(3)]
    x, names, rest = split_batch(torch.utils.data.default_collate(examples), [CPU] * 2)
    assert parts_of(x) == [[[0], [1]], [[2]]]
    assert [list(part) for part in names.values] == [["0", "1"], ["2"]]
    assert parts_of(rest["y"]) == [[0, 1], [2]]


def test_structures_keep_their_classes():
    batch = collections.OrderedDict(
        pair=Pair(torch.arange(2), [torch.arange(2)]), sample=Sample(torch.arange(2))
    )
    value = split_batch(batch, [CPU] * 2)
    assert type(value) is collections.OrderedDict
    assert type(value["pair"]) is Pair
    assert type(value["sample"]) is Sample
    for leaf in (value["pair"].x, value["pair"].y[0], value["sample"].image):
        assert parts_of(leaf) == [[0], [1]]
    assert value["sample"].label is None
    assert isinstance(batch["pair"].x, torch.Tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_parts_are_on_their_replicas_devices():
    places = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] * 2
    value = split_batch({"x": torch.arange(20), "y": np.arange(20), "t": torch.tensor(1)}, places)
    for leaf in value.values():
        assert [part.device for part in leaf.values] == places


def test_the_batch_size_is_the_shared_first_dimension():
    assert batch_size({"x": torch.empty(5, 2), "y": [np.empty(5), 3, torch.tensor(1)]}) == 5


def test_leaves_of_different_length_are_named():
    batch = {"image": torch.empty(4, 3), "more": [1, Sample(np.empty(5))]}
    with pytest.raises(BatchError) as error:
        split_batch(batch, [CPU] * 2)
    assert "batch['image'] of shape (4, 3)" in str(error.value)
    assert "batch['more'][1].image of shape (5,)" in str(error.value)


@pytest.mark.parametrize("batch", [None, 3, "text", [], ["a", "b"], {"t": torch.tensor(1)}])
def test_a_batch_without_a_batched_leaf_is_refused(batch):
    with pytest.raises(BatchError, match="without any; collate"):
        split_batch(batch, [CPU])


UNSPLITTABLE = {
    "a PackedSequence": lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]),
    "a sparse_coo tensor": lambda: torch.eye(2).to_sparse(),
    "a sparse_csr tensor": lambda: torch.sparse_csr_tensor(
        [0, 1, 2], [0, 1], [1.0, 1.0], (2, 2), check_invariants=True
    ),
    "a nested tensor": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(1)], layout=torch.jagged
    ),
    "a PerReplica": lambda: split_batch(torch.ones(2), [CPU] * 2),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(("what", "make"), UNSPLITTABLE.items(), ids=UNSPLITTABLE.keys())
def test_what_cannot_be_split_is_refused_with_advice(what, make):
    with pytest.raises(BatchError, match=rf"{what} cannot be split .*; batch\[1\] is one; pass"):
        split_batch((torch.ones(2), make()), [CPU] * 2)
