"""Shards: updates, optimizer states and values as bytes equal one optimizer on the whole."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.errors import StrategyError
from mirror.replica.optimizers.optimizer_traits import describe
from mirror.server.server_messages import (
    Update,
    as_tensor,
    cut_state,
    decode_states,
    dtype_name,
    encode_states,
    join_states,
    mean_of_updates,
    pack,
    parse_dtype,
    unpack,
)
from mirror.server.shard import PieceSpec, PushMessage, Shard
from mirror.server.variable_placement import FixedShards
from tests.server.shards import Servers

SHAPES = [(5, 3), (), (4,), (1, 2)]
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, amsgrad=True),
    "adam of groups": lambda ps: torch.optim.Adam(
        [{"params": ps[:2], "lr": 0.3}, {"params": ps[2:]}], lr=0.1
    ),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
}


def make(name, dtype=torch.float32):
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    return parameters, OPTIMIZERS[name](parameters)


def step(parameters, optimizer, gradients):
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient.clone()
    optimizer.step()


def close(found, expected, tolerance=1e-6):
    return all(
        torch.allclose(a, b.detach(), atol=tolerance) for a, b in zip(found, expected, strict=True)
    )


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_gradients_that_arrive_are_steps_of_one_optimizer(name, num_servers, shards, dtype):
    parameters, optimizer = make(name, dtype)
    servers = Servers(parameters, optimizer, num_servers, FixedShards(shards))
    for k in range(4):
        gradients = [torch.randn_like(p) for p in parameters]
        assert set(servers.push(gradients, k, k + 1).values()) == {"applied"}
        step(parameters, optimizer, gradients)
    assert close(servers.pull(), parameters)
    states = servers.states()
    for i, p in enumerate(parameters):
        assert states[i].keys() == optimizer.state[p].keys()
        for key, value in optimizer.state[p].items():
            if isinstance(value, torch.Tensor):
                assert close([states[i][key]], [value])
    other = Servers(parameters, optimizer, 4 - num_servers)
    other.set_states(states)
    assert all(
        close([v], [states[i][k]])
        for i, state in other.states().items()
        for k, v in state.items()
        if isinstance(v, torch.Tensor)
    )


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_a_synchronous_update_is_the_mean_by_examples(name, num_servers, shards, examples):
    parameters, optimizer = make(name)
    servers = Servers(
        parameters, optimizer, num_servers, FixedShards(shards), to_aggregate=len(examples)
    )
    number = 0
    for update in range(3):
        based_on = servers.shards[0].updates()[0]
        gradients = [[torch.randn_like(p) for p in parameters] for _ in examples]
        for each, count in zip(gradients, examples, strict=True):
            servers.push(each, number, based_on, examples=count)
            number += 1
        late = servers.push(gradients[0], number, based_on)
        number += 1
        assert late[0] == "dropped"
        means = [
            sum(e[i] * n for e, n in zip(gradients, examples, strict=True)) / sum(examples)
            for i in range(len(parameters))
        ]
        step(parameters, optimizer, means)
        assert close(servers.pull(), parameters, 1e-5), update
    assert (
        servers.shards[0].counts
        == {
            "gathered": 3 * (len(examples) - 1),
            "applied": 3,
            "dropped": 3,
        }
        or len(examples) == 1
    )


def test_servers_average_the_same_steps_whatever_reaches_them_first():
    parameters, optimizer = make("sgd")
    servers = Servers(parameters, optimizer, 2, to_aggregate=2)
    based_on = servers.shards[0].updates()[0]
    one, two, three = ([torch.full_like(p, n) for p in parameters] for n in (1.0, 2.0, 3.0))
    servers.push(three, 3, based_on, only=[1])  # lost before it has reached the leader
    servers.push(one, 1, based_on)
    servers.push(two, 2, based_on)
    step(parameters, optimizer, [torch.full_like(p, 1.5) for p in parameters])
    assert close(servers.pull(), parameters)


def test_a_step_that_two_workers_push_counts_once():
    for options in {}, {"to_aggregate": 2}:
        parameters, optimizer = make("sgd")
        servers = Servers(parameters, optimizer, 2, **options)
        based_on = servers.shards[0].updates()[0] if options else 1
        ones = [torch.ones_like(p) for p in parameters]
        others = [torch.full_like(p, 7.0) for p in parameters]
        if options:
            servers.push(ones, 1, based_on)
            assert servers.push(others, 1, based_on, attempt=1)[0] == "repeated"
            servers.push(ones, 2, based_on)
        else:
            servers.push(ones, 1, based_on, only=[1])  # the worker is lost in between
            said = servers.push(ones, 1, based_on, attempt=1)
            assert said == {0: "applied", 1: "repeated"}
        step(parameters, optimizer, ones)
        assert close(servers.pull(), parameters)


def test_what_is_too_stale_is_dropped_and_counted():
    parameters, optimizer = make("sgd")
    servers = Servers(parameters, optimizer, 1, max_staleness=1)
    ones = [torch.ones_like(p) for p in parameters]
    assert [servers.push(ones, k, 1)[0] for k in range(4)] == ["applied"] * 2 + ["dropped"] * 2
    assert servers.shards[0].staleness == {0: 1, 1: 1, 2: 2}
    assert servers.push(ones, 3, 3)[0] == "dropped"  # the same step again
    assert servers.push(ones, 4, 3)[0] == "applied"


def test_values_travel_only_when_they_have_changed():
    parameters, optimizer = make("sgd")
    shard = Servers(parameters, optimizer, 1).shards[0]
    version, values = shard.pull(-1)
    assert [len(found) for found in values] == [len(shard.values)]
    assert shard.pull(version) == (version, [])
    _, (rest, large) = shard.pull(-1, large=[0])
    assert len(rest) == len(shard.values) - 64
    assert large.tobytes() == shard.tensors[0].numpy().tobytes()


def test_what_is_set_makes_older_gradients_late():
    parameters, optimizer = make("sgd")
    servers = Servers(parameters, optimizer, 1, to_aggregate=2)
    based_on = servers.shards[0].updates()[0]
    ones = [torch.ones_like(p) for p in parameters]
    servers.push(ones, 0, based_on)
    shard = servers.shards[0]
    shard.assign([1], torch.tensor([5.0]).view(torch.uint8).numpy())
    assert servers.push(ones, 1, based_on)[0] == "dropped"
    assert shard.counts["dropped"] == 2
    assert servers.pull()[1] == 5


def test_rows_of_a_table_and_changes_of_buffers():
    pieces = [PieceSpec(0, (4, 2), torch.float32, 0), PieceSpec(1, (3,), torch.float32, 32, True)]
    shard = Shard([*pieces, PieceSpec(2, (), torch.bool, 48, True)], 64, 64)
    shard.tensors[0].copy_(torch.arange(8.0).view(4, 2))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4, 2))], lr=1.0)
    shard.add_optimizer(describe(optimizer, lambda p: 0))
    rows = torch.tensor([1, 3, 1]), torch.ones(3, 2)
    changes = {1: torch.tensor([1.0, 2.0, 3.0]), 2: torch.tensor(True)}
    shard.push(PushMessage(0, 0, 0, 0, 0, 1.0), Update({}, {0: rows}, changes))
    assert shard.tensors[0].tolist() == [[0, 1], [0, 1], [4, 5], [5, 6]]
    assert shard.pull_rows(0, torch.tensor([3, 0])).tolist() == [[5, 6], [0, 1]]
    assert shard.tensors[1].tolist() == [1, 2, 3]
    assert shard.tensors[2].item() is True
    with pytest.raises(RuntimeError, match=r"size is inconsistent|out of bounds|found index"):
        shard.push(
            PushMessage(1, 0, 0, 0, 0, 1.0), Update({}, {0: (torch.tensor([4]), torch.ones(1, 2))})
        )


@given(st.integers(1, 9), st.integers(1, 4))
def test_a_state_that_is_cut_and_joined_is_the_same(rows, parts):
    starts = [rows * k // parts for k in range(parts + 1)]
    spans = list(pairwise(starts))
    state = {"step": torch.tensor(3.0), "m": torch.randn(rows, 2), "n": 4, "none": None}
    pieces = cut_state(state, (rows, 2), spans)
    sent = [decode_states(*encode_states({7: piece}))[7] for piece in pieces]
    found = join_states("w", sent, [(end - begin, 2) for begin, end in spans])
    assert found.keys() == state.keys()
    assert torch.equal(found["m"], state["m"])
    assert found["step"] == 3
    assert (found["n"], found["none"]) == (4, None)


def test_what_cannot_be_joined_or_sent_is_named():
    with pytest.raises(StrategyError, match="state 'norm' of w differs"):
        join_states("w", [{"norm": torch.tensor(1.0)}, {"norm": torch.tensor(2.0)}], [(2,), (2,)])
    with pytest.raises(StrategyError, match="state 'history' is a list"):
        encode_states({0: {"history": [torch.zeros(2)]}})


def test_a_message_has_it_all():
    update = Update(
        {0: torch.ones(2, 2)},
        {1: (torch.tensor([3, 1]), torch.ones(2, 2, dtype=torch.float64))},
        {2: torch.tensor(5)},
    )
    pieces = [((2, 2), torch.float32), ((4, 2), torch.float64), ((), torch.int64)]
    found = Update.from_message(*update.message(), pieces)
    assert torch.equal(found.gradients[0], update.gradients[0])
    assert all(torch.equal(a, b) for a, b in zip(found.rows[1], update.rows[1], strict=True))
    assert found.changes == {2: torch.tensor(5)}


def test_large_gradients_travel_in_their_own_memory():
    large, small = torch.randn(200, 100), torch.randn(3)
    header, buffers = Update({0: large, 1: small}).message()
    assert (header["large"], header["gradients"]) == ([0], [1])
    assert buffers[1].ctypes.data == large.data_ptr()
    specs = [((200, 100), torch.float32), ((3,), torch.float32)]
    found = Update.from_message(header, buffers, specs)
    assert torch.equal(found.gradients[0], large)
    assert torch.equal(found.gradients[1], small)


def test_means_are_weighted_and_what_is_missing_counts_as_zeros():
    one = Update({0: torch.ones(2)}, {1: (torch.tensor([0]), torch.ones(1, 2))},
                 {2: torch.tensor(4.0), 3: torch.tensor(1)})  # fmt: skip
    two = Update({0: torch.full((2,), 3.0), 4: torch.ones(1)}, {}, {2: torch.tensor(8.0)})
    found = mean_of_updates([one, two], [3, 1])
    assert found.gradients[0].tolist() == [1.5, 1.5]
    assert found.gradients[4].tolist() == [0.25]
    assert found.rows[1][1].tolist() == [[0.75, 0.75]]
    assert found.changes == {2: torch.tensor(5.0), 3: torch.tensor(1)}


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
SPECS = st.lists(
    st.tuples(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(DTYPES))
)


@given(SPECS, st.booleans())
def test_what_is_packed_comes_out(specs, is_read_only):
    tensors = [(torch.arange(99)[: torch.Size(s).numel()].view(s) % 2).to(d) for s, d in specs]
    packed = pack(tensors)
    packed.flags.writeable = not is_read_only
    for found, tensor in zip(unpack(packed, specs), tensors, strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_views_are_packed_as_they_are_seen():
    whole = torch.arange(12.0).view(3, 4)
    views = [whole.t(), whole[:, 1], torch.tensor([1 + 2j]).conj()]
    found = unpack(pack(views), [(tuple(v.shape), v.dtype) for v in views])
    assert all(torch.equal(a, b) for a, b in zip(found, views, strict=True))


def test_bytes_of_any_kind_are_taken():
    values = np.arange(3, dtype=np.float32)
    for array in values, values.tobytes(), memoryview(values), values[::-1][::-1]:
        assert as_tensor(array, torch.float32).tolist() == [0, 1, 2]


def test_dtypes_have_names():
    assert all(parse_dtype(dtype_name(dtype)) is dtype for dtype in DTYPES)
    with pytest.raises(ValueError, match="no dtype 'load'"):
        parse_dtype("load")
