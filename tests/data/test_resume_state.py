"""mirror/data/resume_state.py: what a state may hold when it is sent to other workers."""

import math

import numpy as np
import pytest
import torch

from mirror.data.resume_state import gather_states, select_own_state
from tests.data.pretended import Pretended

STATE = {
    "numbers": [1, True, None, 0.1, math.inf, np.int64(3), np.float32(0.5)],
    "nested": ({"x": b"\0\xff"}, "text", (), {}),
    3: {(1, 2): "a key that JSON has not", 0.5: None},
    "empty": torch.empty(0, 3),
}


def test_states_arrive_as_they_are():
    state = gather_states(STATE, Pretended(1, (1, 1)))
    for rank in range(2):
        found = select_own_state(state, Pretended(rank, (1, 1)))
        assert torch.equal(found.pop("empty"), torch.empty(0, 3))
        assert found == {k: v for k, v in STATE.items() if k != "empty"}
        assert type(found["nested"]) is tuple


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.bfloat16, torch.bool])
def test_tensors_and_arrays_keep_their_bits(dtype):
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    state = {"t": tensor, "a": np.arange(3, dtype=np.uint32), "s": torch.tensor(2.5)}
    found = select_own_state(gather_states(state, Pretended(0, (1, 1))), Pretended(0, (1, 1)))
    assert torch.equal(found["t"], tensor)
    assert found["t"].dtype == dtype
    assert found["a"].tolist() == [0, 1, 2]
    assert found["a"].dtype == np.uint32
    assert float(found["s"]) == 2.5


def test_what_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match=r"plain values, tensors and arrays; .*state\.x.*slice"):
        gather_states({"x": slice(3)}, Pretended(0, (1, 1)))


def test_what_is_no_state_is_refused():
    with pytest.raises(TypeError, match="returned; got 3"):
        select_own_state(3, Pretended(0, (1, 1)))
    with pytest.raises(ValueError, match="of 2 workers; this one is of 3 workers"):
        select_own_state({"workers": [{}] * 3}, Pretended(0, (1, 1)))
