"""Replicas are compared bit for bit, and parameters are named by their paths."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import mirror
from mirror.base import bitwise
from mirror.base.bitwise import (
    are_equal,
    have_equal_numbers,
    same_bits,
    same_values,
    sum_of_bits,
)
from mirror.replica.params.mirrored_tensor import path_of

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e5m2,
]  # fmt: skip
DENSE = torch.tensor([[0.0, 2.0, 0.0, 1.0], [3.0, 0.0, 0.0, 4.0]])
OTHER = torch.tensor([[0.0, 2.0, 0.0, 1.0], [3.0, 0.0, 0.0, 5.0]])
ELSEWHERE = torch.tensor([[0.0, 2.0, 0.0, 1.0], [3.0, 0.0, 4.0, 0.0]])


def uncoalesced(tensor):
    half = (tensor / 2).to_sparse()
    return half + half


KINDS = {
    "dense": lambda tensor: tensor.clone(),
    "transposed": lambda tensor: tensor.clone().t(),
    "integers": lambda tensor: tensor.int(),
    "bools": lambda tensor: tensor % 5 > 3.5,
    "complex": lambda tensor: tensor + 1j,
    "conjugate": lambda tensor: (tensor + 1j * tensor).conj(),
    "negative": lambda tensor: (tensor + 1j * tensor).conj().imag,
    "sparse": lambda tensor: tensor.to_sparse(),
    "uncoalesced": uncoalesced,
    "hybrid": lambda tensor: tensor.to_sparse(1),
    "csr": lambda tensor: tensor.to_sparse_csr(),
    "csc": lambda tensor: tensor.to_sparse_csc(),
    "bsr": lambda tensor: tensor.to_sparse_bsr((1, 2)),
    "bsc": lambda tensor: tensor.to_sparse_bsc((1, 2)),
    "mkldnn": lambda tensor: tensor.to_mkldnn(),
    "half": lambda tensor: tensor.half(),
    "parameter": lambda tensor: nn.Parameter(tensor.clone()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_any_layout_are_compared(kind):
    make = KINDS[kind]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse .* tensor support is in beta")
        assert same_bits(make(DENSE), make(DENSE))
        for different in (OTHER, ELSEWHERE):
            assert not same_bits(make(DENSE), make(different))
        assert same_values({"a": [make(DENSE)]}, {"a": [make(DENSE)]})
        assert not same_values({"a": [make(DENSE)]}, {"a": [make(OTHER)]})


def test_the_order_of_sparse_entries_does_not_count():
    assert same_bits(uncoalesced(DENSE), DENSE.to_sparse())
    assert not same_bits(DENSE, DENSE.to_sparse())


def sparse_training(strategy):
    """Two steps by which every replica gets momentum that is sparse."""
    model = strategy.mirror(nn.Embedding(9, 3, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_post_hook(lambda *args: None)  # so that replicas step themselves

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        strategy.run(step, args=(torch.arange(6),))
    return model, optimizer


def test_sparse_optimizer_state_is_compared(make_strategy):
    strategy = make_strategy(3)
    model, optimizer = sparse_training(strategy)
    assert optimizer.state[model.weight]["momentum_buffer"].is_sparse
    strategy.check_replicas()

    def differ():
        replica_id = mirror.get_replica_context().replica_id_in_sync_group
        optimizer.state[model.weight]["momentum_buffer"].mul_(1 + (replica_id == 2))

    strategy.run(differ)
    with pytest.raises(mirror.ReplicaMismatchError, match=r"momentum_buffer.*replica 2 of 3"):
        strategy.check_replicas()


def test_tensors_in_a_list_of_the_state_are_compared(make_strategy):
    strategy = make_strategy(2)
    model, optimizer = sparse_training(strategy)
    strategy.run(lambda: optimizer.state[model.weight].update(kept=[torch.zeros(2)]))
    strategy.check_replicas()

    def differ():
        replica_id = mirror.get_replica_context().replica_id_in_sync_group
        optimizer.state[model.weight]["kept"][0].fill_(replica_id)

    strategy.run(differ)
    with pytest.raises(mirror.ReplicaMismatchError, match="kept"):
        strategy.check_replicas()


def test_the_path_is_from_the_outermost_module():
    block = nn.Sequential(nn.Linear(2, 2))
    weight = block[0].weight
    assert path_of(weight, "") == "0.weight"
    model = nn.ModuleDict({"body": nn.ModuleList([block])})
    assert path_of(weight, "") == "body.0.0.weight"
    del model
    assert path_of(weight, "") == "0.weight"


def test_modules_made_in_a_scope_one_by_one_have_paths(make_strategy):
    with make_strategy().scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert path_of(model[1][0].bias, "") == "1.0.bias"


def test_what_is_in_no_module_or_gone_has_the_name_that_was_known():
    assert path_of(torch.ones(1), "known") == "known"
    assert path_of(None, "known") == "known"


def test_a_module_inside_itself_is_no_endless_path():
    layer = nn.Linear(1, 1)
    layer.me = nn.Sequential(layer)
    assert path_of(layer.weight, "").endswith("weight")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_is_another_one_for_every_bit_of_every_element(dtype):
    x = torch.arange(6).reshape(2, 3).t().to(dtype)
    before = sum_of_bits(x)
    assert before.dtype == torch.int64
    assert before.dim() == 0
    size = x.element_size()
    for i in range(x.numel() * size * 8):
        if dtype is torch.bool and i % 8:
            continue  # others are no bits of a bool
        y = x.clone(memory_format=torch.contiguous_format)
        y.view(-1).view(torch.uint8)[i // 8] ^= 1 << i % 8
        assert sum_of_bits(y) != before
    assert sum_of_bits(x.contiguous()) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [2, 16, 1000])
def test_roundings_up_and_down_do_not_cancel_out(dtype, numel):
    """As kernels that add in another order leave them."""
    generator = torch.Generator().manual_seed(numel)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for x in (torch.ones(numel), torch.randn(numel, generator=generator)):
        mine = x.to(dtype).view(kind)
        for _ in range(20):
            steps = torch.randint(2, (numel // 2,), generator=generator) * 2 - 1
            other = mine + torch.cat([steps, -steps]).to(kind)  # as many up as down
            assert sum_of_bits(other.view(dtype)) != sum_of_bits(mine.view(dtype))


def test_a_large_tensor_is_summed_in_parts(monkeypatch):
    x = torch.randn(5, 7)
    whole = sum_of_bits(x)
    monkeypatch.setattr(bitwise, "_SUMMED_AT_ONCE", 4)
    assert sum_of_bits(x) == whole


def test_a_sum_of_nothing_and_of_a_number():
    assert sum_of_bits(torch.empty(0, 3)) == 0
    assert sum_of_bits(torch.tensor(1, dtype=torch.int32)) == 3


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (float("nan"), float("nan"), True),
        ("a", "b", False),
        (np.float32(2), np.float32(2), True),
        (np.array([1, 2]), np.array([1, 2]), True),
        (np.array([1, 2]), np.array([1.0, 2.0]), False),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), True),
        ([np.array([1, 2])], [np.array([1, 2])], False),  # == has no truth value
    ],
)
def test_values_are_equal_by_bits_or_by_their_own_comparison(a, b, expected):
    assert are_equal(a, b) is expected


def test_equal_numbers_may_have_other_bits():
    assert have_equal_numbers(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert not have_equal_numbers(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not have_equal_numbers(torch.ones(1), torch.ones(2))
