"""Shards: what servers do to values is what one optimizer does to the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.server.partitioners import FixedShards
from mirror.server.server_optimizers import describe
from mirror.server.shard import PieceSpec, PushMessage, Shard
from mirror.server.shard_updates import Update
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
