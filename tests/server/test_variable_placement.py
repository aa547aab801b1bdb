"""Placement: every row has one place, by the rule that was asked for."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mirror.server.partitioners import FixedShards, MinSize
from mirror.server.variable_placement import ALIGNMENT, VariableSpec, place

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
        pieces = layout.of_variable(i)
        starts = [piece.begin for piece in pieces]
        assert starts[0] == 0
        assert pieces[-1].end == (variable.shape[0] if variable.shape else 1)
        assert all(a.end == b.begin for a, b in pairwise(pieces))
        assert sum(piece.num_bytes for piece in pieces) == variable.num_bytes
        assert len(pieces) == 1 or not variable.is_whole
    for server in range(servers):
        end = 0
        filled = [piece for piece in layout.of_server(server) if piece.num_bytes]
        for piece in sorted(filled, key=lambda piece: piece.offset):
            assert piece.offset % ALIGNMENT == 0
            assert piece.offset >= end
            end = piece.offset + piece.num_bytes
            assert (piece.offset >= layout.dense_sizes[server]) >= variables[
                piece.variable
            ].by_rows
        assert end <= layout.sizes[server]
