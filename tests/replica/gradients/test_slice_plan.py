"""The plan of sharded state covers every element once, and is balanced."""

import pytest
import torch

from mirror.comm.packing import chunk_ends
from mirror.replica.gradients.local_reduction import bucket_ends
from mirror.replica.gradients.slice_plan import (
    ParamSlice,
    find_uncovered,
    plan_cut,
    plan_whole,
    shard_sizes,
)


def resnet50():
    """The parameters of ResNet-50: 161, of 25,557,032 elements."""
    sizes = [64 * 3 * 49, 64, 64]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [inputs * width, width, width]
            sizes += [9 * width * width, width, width]
            sizes += [width * 4 * width, 4 * width, 4 * width]
            if block == 0:
                sizes += [inputs * 4 * width, 4 * width, 4 * width]
            inputs = 4 * width
    return [*sizes, 2048 * 1000, 1000]


def gpt2():
    """The parameters of GPT-2 small: 148, of 124,439,808 elements."""
    sizes = [50257 * 768, 1024 * 768]
    for _ in range(12):
        sizes += [768, 768, 768 * 2304, 2304, 768 * 768, 768]
        sizes += [768, 768, 768 * 3072, 3072, 3072 * 768, 768]
    return [*sizes, 768, 768]


def planned(sizes, num_replicas):
    order = list(range(len(sizes)))[::-1]
    ends = bucket_ends([4 * sizes[i] for i in order], 25 * 2**20)
    buckets = [order[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return plan_cut(sizes, buckets, num_replicas), buckets


@pytest.mark.parametrize("make", [resnet50, gpt2])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_shards_of_known_models_are_balanced(make, num_replicas):
    sizes = make()
    slices, buckets = planned(sizes, num_replicas)
    assert (len(sizes), sum(sizes)) in ((161, 25_557_032), (148, 124_439_808))
    assert find_uncovered(slices, sizes) is None
    assert max(shard_sizes(slices, num_replicas)) <= 1.0001 * sum(sizes) / num_replicas
    assert len(slices) <= len(sizes) + (num_replicas - 1) * len(buckets)


def test_a_bucket_is_cut_as_reduce_scatter_cuts_it():
    slices = plan_cut([6, 2, 4], [[0, 1, 2]], 3)
    assert slices == [
        ParamSlice(0, 0, 4, 0),
        ParamSlice(0, 4, 6, 1),
        ParamSlice(1, 0, 2, 1),
        ParamSlice(2, 0, 4, 2),
    ]
    for size in range(12):
        chunks = torch.arange(size).tensor_split(5)
        assert chunk_ends(size, 5) == torch.tensor([len(c) for c in chunks]).cumsum(0).tolist()


@pytest.mark.parametrize("sizes", [[0], [1], [0, 5, 0], [1, 1, 1], [2, 7, 1, 0, 3], []])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_small_and_empty_parameters_are_covered_once(sizes, num_replicas):
    slices = plan_cut(sizes, [range(len(sizes))], num_replicas)
    assert find_uncovered(slices, sizes) is None
    assert {one.param_index for one in slices} == set(range(len(sizes)))


def test_whole_parameters_go_to_the_replica_with_the_fewest_elements():
    sizes = [1, 5, 3, 3]
    slices = plan_whole(sizes, range(4), 2)
    assert find_uncovered(slices, sizes) is None
    assert shard_sizes(slices, 2) == [6, 6]


@pytest.mark.parametrize("num_replicas", [2, 3, 8])
def test_whole_parameters_of_a_model_of_many_are_balanced(num_replicas):
    sizes = resnet50()
    slices = plan_whole(sizes, range(len(sizes)), num_replicas)
    assert find_uncovered(slices, sizes) is None
    assert max(shard_sizes(slices, num_replicas)) <= 1.1 * sum(sizes) / num_replicas


def test_an_element_in_no_slice_or_in_two_is_found():
    assert find_uncovered([ParamSlice(0, 0, 2, 0)], [3]) == (0, 2)
    assert find_uncovered([ParamSlice(0, 0, 2, 0), ParamSlice(0, 1, 3, 1)], [3]) == (0, 1)
    assert find_uncovered([ParamSlice(0, 0, 3, 0)], [3, 1]) == (1, 0)
