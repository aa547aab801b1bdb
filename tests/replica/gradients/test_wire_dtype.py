"""Lists of gradients: where they are reduced, and the dtype that they travel in."""

import copy

import pytest
import torch
from torch import nn

import mirror
from mirror.comm.packing import flatten
from mirror.replica.gradients.ready_grads import Reducer

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-6, torch.float64: 1e-6}


@pytest.fixture
def sent(monkeypatch):
    """The dtypes of what the host backend reduces."""
    kinds = []
    kind = type(mirror.comm.create("host", ["cpu"]))
    original = kind.all_reduce

    def all_reduce(self, tensors, op="sum", scale=1.0):
        kinds.append(tensors[0].dtype)
        original(self, tensors, op, scale)

    monkeypatch.setattr(kind, "all_reduce", all_reduce)
    return kinds


def gradients(make_strategy, way, backend, **options):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    strategy = make_strategy(
        3, backend=backend, communication_options=mirror.CommunicationOptions(**options)
    )
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(10, 6)
    plain(x).square().mean().backward()
    if way == "inside":
        (batch,) = strategy.distribute_dataset([x])
        strategy.run(lambda part: model(part).square().mean().backward(), args=(batch,))
    else:
        model(x).square().mean().backward()
    every = strategy.local_results(
        strategy.run(lambda: [p.grad.clone() for p in model.parameters()])
    )
    return every, [p.grad for p in plain.parameters()]


@pytest.mark.parametrize("way", ["inside", "outside"])
@pytest.mark.parametrize("backend", ["host", "ring", "direct", "naive"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_are_rounded_and_equal_on_all_replicas(make_strategy, dtype, backend, way):
    every, expected = gradients(make_strategy, way, backend, wire_dtype=dtype)
    for own in every:
        for mine, first, right in zip(own, every[0], expected, strict=True):
            assert mine.dtype == torch.float32
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_they_travel_in_packs_of_the_wire_dtype(make_strategy, sent):
    gradients(make_strategy, "outside", "host", wire_dtype=torch.bfloat16)
    assert sent == [torch.bfloat16]
    sent.clear()
    gradients(make_strategy, "outside", "host", wire_dtype=torch.bfloat16, bytes_per_pack=0)
    assert sent == [torch.bfloat16] * 4


def test_half_gradients_keep_their_dtype(make_strategy, sent):
    strategy = make_strategy(
        2, communication_options=mirror.CommunicationOptions(wire_dtype=torch.float32)
    )
    model = strategy.mirror(nn.Linear(4, 4).bfloat16())
    model(torch.ones(4, 4, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad.dtype == torch.bfloat16
    assert sent == [torch.bfloat16]


def test_flatten_casts_in_the_same_pass():
    parts = [torch.arange(6.0).view(2, 3).t(), torch.tensor(0.1)]
    assert flatten(parts, torch.bfloat16).tolist() == flatten(parts).bfloat16().tolist()


def columns_of(n):
    return [[torch.full((3, 2), float(r)), torch.ones(5), torch.ones(400)] for r in range(n)]


def reduced(backend, columns, wire_dtype=None, bytes_per_pack=100):
    """Returns what was moved and then reduced."""
    with mirror.MirroredStrategy(["cpu"] * len(columns), backend) as strategy:
        reducer = Reducer(strategy._group.replicas, bytes_per_pack, wire_dtype)
        moved = reducer.move(columns, None)
        reducer.all_reduce(moved, 0.5)
        return moved


@pytest.mark.parametrize(
    ("backend", "wire_dtype", "bytes_per_pack", "staying"),
    [
        ("naive", None, 100, [2]),
        ("naive", None, 2**20, []),
        ("naive", None, 0, [0, 1, 2]),
        ("naive", torch.bfloat16, 100, [0, 1, 2]),
        ("host", None, 100, [0, 1, 2]),
    ],
)
@pytest.mark.parametrize("n", [2, 3])
def test_what_shares_a_pack_is_moved_and_all_is_reduced_in_its_place(
    n, backend, wire_dtype, bytes_per_pack, staying
):
    columns = columns_of(n)
    before = [list(column) for column in columns]
    moved = reduced(backend, columns, wire_dtype, bytes_per_pack)
    assert list(moved.staying) == staying
    total = sum(range(n)) / 2
    for column, old in zip(columns, before, strict=True):
        assert [i for i, (a, b) in enumerate(zip(column, old, strict=True)) if a is b] == staying
        assert torch.equal(column[0], torch.full((3, 2), total))
        assert torch.equal(column[1], torch.full((5,), n / 2))
        assert torch.equal(column[2], torch.full((400,), n / 2))


def test_every_replica_has_buffers_of_its_own():
    moved = reduced("naive", columns_of(3))
    addresses = {buffer.data_ptr() for mine in moved.buffers for buffer in mine}
    assert len(addresses) == 3
