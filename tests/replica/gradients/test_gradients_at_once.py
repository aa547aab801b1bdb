"""Replicas that run at once set, drop, read and change their gradients, as they do in turns.

A thread that reads another replica's ``.grad`` while that replica frees it, or computes it, may
crash Python: the programs run in processes of their own.
"""

import threading

import pytest
import torch
from torch import nn

import mirror

PROGRAM = """
import faulthandler, random, sys

import torch
from torch import nn

import mirror

faulthandler.enable()
torch.set_num_threads(1)


def backward(model, optimizer, x):
    model(x).square().mean().backward()


def set_all(model, optimizer, x):
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def set_one(model, optimizer, x):
    p = list(model.parameters())[5]
    p.grad = torch.full_like(p, 0.5)


def drop_some(model, optimizer, x):
    for p in list(model.parameters())[3:9]:
        p.grad = None


def read_all(model, optimizer, x):
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def scale(model, optimizer, x):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def clip(model, optimizer, x):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def zero(model, optimizer, x):
    optimizer.zero_grad()


def step(model, optimizer, x):
    optimizer.step()


def drawn(seed):
    generator = random.Random(seed)
    actions = backward, set_all, set_one, drop_some, read_all, scale, clip, zero, step
    several = generator.choices(actions, (3, 2, 2, 2, 1, 1, 1, 1, 1), k=generator.randint(2, 5))
    return [zero, *several, step]


def train(strategy, seed):
    sizes = torch.Generator().manual_seed(seed)
    with strategy.scope():
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(6))
        model = nn.Sequential(nn.Embedding(10, 8), *blocks, nn.Linear(8, 2))
        optimizer = (torch.optim.SGD, torch.optim.Adam)[seed % 2](model.parameters(), lr=0.01)
        for i in range(30):
            x = torch.randint(0, 10, (8, 3), generator=sizes)
            (part,) = strategy.distribute_dataset([x])
            actions = drawn(1000 * seed + i)
            strategy.run(lambda x: [act(model, optimizer, x) for act in actions], (part,))
    strategy.check_replicas()
    return [p.detach() for p in model.parameters()]


for seed in map(int, sys.argv[3:]):
    options = {"optimizer_state": sys.argv[1]}
    options["communication_options"] = mirror.CommunicationOptions(bytes_per_pack=int(sys.argv[2]))
    in_turns = mirror.MirroredStrategy(["cpu"] * 4, schedule="lockstep", **options)
    expected = train(in_turns, seed)
    sys.setswitchinterval(1e-6)
    for _ in range(2):
        at_once = mirror.MirroredStrategy(["cpu"] * 4, schedule="parallel", **options)
        torch.testing.assert_close(train(at_once, seed), expected)
    sys.setswitchinterval(5e-3)
"""


@pytest.mark.parametrize(
    ("optimizer_state", "bytes_per_pack", "seeds"),
    [
        ("replicated", 600, [0]),
        ("sharded", 25_000_000, [1]),
        pytest.param("replicated", 25_000_000, [2, 3], marks=pytest.mark.slow),
        pytest.param("sharded", 600, [4, 5], marks=pytest.mark.slow),
    ],
)
def test_replicas_at_once_have_the_gradients_of_turns(
    optimizer_state, bytes_per_pack, seeds, script_pool
):
    done = script_pool.run(PROGRAM, optimizer_state, bytes_per_pack, *seeds)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("schedule", ["lockstep", "parallel"])
@pytest.mark.parametrize("source", ["made before", "read outside", "set outside"])
def test_replicas_that_set_one_tensor_have_one_each(source, schedule):
    strategy = mirror.MirroredStrategy(["cpu"] * 3, schedule=schedule)
    layer = strategy.mirror(nn.Linear(2, 2))
    given = torch.ones(2, 2)
    if source == "read outside":
        layer(torch.ones(6, 2)).sum().backward()
        given = layer.weight.grad
        given.fill_(1.0)
    elif source == "set outside":
        layer.weight.grad = given
    strategy.run(lambda: None)  # the first run takes turns
    barrier = threading.Barrier(3, timeout=60)

    def set_gradient():
        is_first = mirror.get_replica_context().replica_id_in_sync_group == 0
        if not is_first or source == "made before":  # otherwise the first replica has it
            layer.weight.grad = given
        if schedule == "parallel":
            barrier.wait()  # all replicas have theirs at one time
        return layer.weight.grad.data_ptr()

    for _ in range(3):
        addresses = strategy.local_results(strategy.run(set_gradient))
        assert len(set(addresses)) == 3
        assert torch.equal(layer.weight.grad, torch.ones(2, 2))
        given = layer.weight.grad if source == "read outside" else given
