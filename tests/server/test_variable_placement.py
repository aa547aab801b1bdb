"""The placement of variables on servers: tasks of the cluster, partitioners, rules."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mirror.cluster import ClusterSpec, SimpleResolver
from mirror.errors import ClusterError, StrategyError
from mirror.server.cluster_tasks import host_and_port, tasks_of
from mirror.server.variable_placement import (
    ALIGNMENT,
    FixedShards,
    MaxSize,
    MinSize,
    VariableSpec,
    num_pieces,
    place,
)

VARIABLES = st.lists(
    st.builds(
        VariableSpec,
        st.just("w"),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.float64, torch.uint8, torch.bfloat16]),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
)


def test_round_robin_goes_on_over_pieces():
    variables = [VariableSpec(name, (4,)) for name in "abcde"]
    assert [p.server for p in place(variables, 2).pieces] == [0, 1, 0, 1, 0]
    cut = place(variables[:2], 3, partitioner=FixedShards(2)).pieces
    assert [(p.variable, p.begin, p.end, p.server) for p in cut] == [
        (0, 0, 2, 0),
        (0, 2, 4, 1),
        (1, 0, 2, 2),
        (1, 2, 4, 0),
    ]


def test_the_largest_goes_first_to_the_emptiest():
    sizes = [1, 9, 4, 6, 4]
    variables = [VariableSpec(str(n), (n * 4,)) for n in sizes]
    layout = place(variables, 2, placement="largest_first")
    assert [p.server for p in layout.pieces] == [1, 0, 1, 1, 0]
    assert layout.sizes == (13 * 16, 11 * 16)


def test_a_function_is_asked_by_name():
    asked = []

    def placement(*question):
        asked.append(question)
        return len(asked) % 2

    layout = place([VariableSpec("w", (5, 2)), VariableSpec("b", ())], 2, placement=placement,
                   partitioner=FixedShards(2))  # fmt: skip
    assert asked == [
        ("w/part_0", (3, 2), torch.float32, 2),
        ("w/part_1", (2, 2), torch.float32, 2),
        ("b", (), torch.float32, 2),
    ]
    assert [p.server for p in layout.pieces] == [1, 0, 1]


@pytest.mark.parametrize("server", [2, -1, None, "0", True, 1.0])
def test_an_unknown_server_is_named(server):
    with pytest.raises(ValueError, match=r"0 to 1; for w it has returned"):
        place([VariableSpec("w", (3,))], 2, placement=lambda *question: server)


def test_an_unknown_placement_is_refused():
    with pytest.raises(ValueError, match="'round_robin', 'largest_first', or a function"):
        place([], 2, placement="fair")


@given(
    VARIABLES,
    st.integers(1, 4),
    st.sampled_from([None, FixedShards(3), MinSize(8, 5)]),
    st.sampled_from(["round_robin", "largest_first", lambda name, shape, dtype, n: n - 1]),
)
def test_every_row_has_one_place_and_no_two_share_bytes(
    variables, servers, partitioner, placement
):
    layout = place(variables, servers, partitioner=partitioner, placement=placement)
    for i, variable in enumerate(variables):
        pieces = layout.pieces_of_variable(i)
        starts = [piece.begin for piece in pieces]
        assert starts[0] == 0
        assert pieces[-1].end == (variable.shape[0] if variable.shape else 1)
        assert all(a.end == b.begin for a, b in pairwise(pieces))
        assert sum(piece.num_bytes for piece in pieces) == variable.num_bytes
        assert len(pieces) == 1 or not variable.is_whole
    for server in range(servers):
        end = 0
        filled = [piece for piece in layout.pieces_of_server(server) if piece.num_bytes]
        for piece in sorted(filled, key=lambda piece: piece.offset):
            assert piece.offset % ALIGNMENT == 0
            assert piece.offset >= end
            end = piece.offset + piece.num_bytes
            assert (piece.offset >= layout.dense_sizes[server]) >= variables[
                piece.variable
            ].by_rows
        assert end <= layout.sizes[server]


JOBS: Any = {"ps": ["a:1", "b:2"], "worker": {0: "c:3", 2: "[::1]:4"}, "chief": ["d:5"]}


@pytest.mark.parametrize(
    "cluster", [JOBS, ClusterSpec(JOBS), SimpleResolver(ClusterSpec(JOBS), task_type="chief")]
)
def test_tasks_have_names_and_addresses(cluster):
    assert tasks_of(cluster).addresses_by_name() == {
        "server 0": ("a", 1),
        "server 1": ("b", 2),
        "worker 0": ("c", 3),
        "worker 1": ("::1", 4),
    }


@pytest.mark.parametrize("address", ["a", "a:", ":1", "a:b", "a:65536", "::1:3", "a b:1", "a:1:2"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ClusterError, match="an address is 'host:port'"):
        host_and_port(address)
    with pytest.raises(ValueError, match="an address is"):
        tasks_of({"ps": [address], "worker": ["w:1"]})


def test_two_tasks_at_one_address_are_refused():
    with pytest.raises(ValueError, match="an address of its own; got 'a:1'"):
        tasks_of({"ps": ["a:1"], "worker": ["a:1"]})


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_a_process_that_serves_has_no_strategy(job):
    resolver = SimpleResolver(ClusterSpec(JOBS), task_type=job, task_id=0)
    with pytest.raises(StrategyError, match=f"task 0 of job '{job}'.*Server"):
        tasks_of(resolver)


SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)


@pytest.mark.parametrize(
    ("partitioner", "shape", "pieces"),
    [
        (FixedShards(2), (10, 3), [2, 1]),
        (FixedShards(8), (3, 3), [3, 1]),
        (FixedShards(1), (3,), [1]),
        (FixedShards(2), (), []),
        (MinSize(4, 2), (6, 1), [2, 1]),
        (MinSize(4, 10), (6, 1), [6, 1]),
        (MinSize(8, 10), (5, 1), [3, 1]),
        (MinSize(), (10_000_000,), [1]),
        (MinSize(1 << 20, 10), (3, 3), [1, 1]),
        (MaxSize(4), (6, 1), [6, 1]),
        (MaxSize(4, 2), (6, 1), [2, 1]),
        (MaxSize(1024), (6, 1), [1, 1]),
        (MaxSize(10), (6, 1), [3, 1]),
        (MaxSize(1), (6, 100), [6, 1]),
    ],
)
def test_numbers_are_those_of_tensorflow(partitioner, shape, pieces):
    assert partitioner(shape, torch.float32) == pieces


@given(
    SHAPES, st.integers(1, 500), st.integers(1, 9), st.sampled_from([torch.float64, torch.int8])
)
def test_pieces_keep_their_limits(shape, limit, most, dtype):
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    for partitioner in FixedShards(most), MinSize(limit, most), MaxSize(limit, most):
        count = num_pieces(partitioner, "w", shape, dtype)
        assert 1 <= count <= max(1, min(most, shape[0]))
    count = num_pieces(MaxSize(limit), "w", shape, dtype)
    largest = -(-shape[0] // count) * row_bytes
    assert largest <= limit or row_bytes > limit or shape[0] <= count


@pytest.mark.parametrize("returned", [[1, 2], [2], [0, 1], "2", [1.5, 1], None, True])
def test_what_a_users_partitioner_may_not_return(returned):
    with pytest.raises(ValueError, match=r"it has returned|for w of shape"):
        num_pieces(lambda shape, dtype: returned, "w", (4, 4), torch.float32)


def test_a_users_partitioner_may_return_a_number():
    assert num_pieces(lambda shape, dtype: 3, "w", (4, 4), torch.float32) == 3
    assert num_pieces(lambda shape, dtype: [9, 1], "w", (4, 4), torch.float32) == 4


@pytest.mark.parametrize(
    "make",
    [lambda: FixedShards(0), lambda: MinSize(0), lambda: MinSize(4, -1), lambda: MaxSize(True)],
)
def test_numbers_that_are_not_positive_are_refused(make):
    with pytest.raises(ValueError, match="must be an integer from 1 on"):
        make()
