"""States of optimizers: whole, in pieces, and whole again."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mirror.errors import StrategyError
from mirror.server.optimizer_messages import cut, from_message, join, message_of


@given(st.integers(1, 9), st.integers(1, 4))
def test_a_state_that_is_cut_and_joined_is_the_same(rows, parts):
    starts = [rows * k // parts for k in range(parts + 1)]
    spans = list(pairwise(starts))
    state = {"step": torch.tensor(3.0), "m": torch.randn(rows, 2), "n": 4, "none": None}
    pieces = cut(state, (rows, 2), spans)
    sent = [from_message(*message_of({7: piece}))[7] for piece in pieces]
    found = join("w", sent, [(end - begin, 2) for begin, end in spans])
    assert found.keys() == state.keys()
    assert torch.equal(found["m"], state["m"])
    assert found["step"] == 3
    assert (found["n"], found["none"]) == (4, None)


def test_what_cannot_be_joined_or_sent_is_named():
    with pytest.raises(StrategyError, match="state 'norm' of w differs"):
        join("w", [{"norm": torch.tensor(1.0)}, {"norm": torch.tensor(2.0)}], [(2,), (2,)])
    with pytest.raises(StrategyError, match="state 'history' is a list"):
        message_of({0: {"history": [torch.zeros(2)]}})
