"""Sharded optimizer state over the local devices of each of several workers."""

import os

import pytest
import torch
from torch import nn

import mirror
from tests.multi_worker import both, strategy_of
from tests.oracle import assert_same
from tests.pairs import each_once
from tests.replica.optimizers.test_sharded_state import Counting

SIZES = (11, 8, 5)


def trained(counts, way, state):
    """Returns, for each local replica, the losses, the values and the state after some steps."""
    with strategy_of(counts, optimizer_state=state) as strategy:
        with strategy.scope():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(1)
        batches = [torch.randn(size, 4, generator=generator) for size in SIZES]

        def loss_of(x):
            return (model(x) - 1).square().mean()

        def step(x):
            optimizer.zero_grad()
            loss_of(x).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        for part in strategy.distribute_dataset(batches):
            if way == 3:
                strategy.run(step, args=(part,))
            else:
                optimizer.zero_grad()
                strategy.reduce("mean", strategy.run(loss_of, args=(part,))).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            strategy.check_replicas()
        mirrored = optimizer._mirror
        held = mirrored.states.bytes_of_replicas()
        result = (model.state_dict(), optimizer.state_dict(), held)
        return [result for _ in strategy.devices]


@each_once(way=[2, 3], counts=[pytest.param(value, id=str(value)) for value in [(2, 2), (3, 3)]])
def test_workers_with_sharded_state_train_as_one_process(worker_pool, counts, way):
    of_workers, of_one = both(worker_pool, trained, counts, way, "sharded")
    (expected, *_) = trained((sum(counts),), way, "replicated")
    for model, state, _ in (*of_workers, *of_one):
        assert_same((model, state), expected[:2])


def refusal(counts):
    with pytest.raises(mirror.StrategyError) as refused:
        strategy_of(counts, optimizer_state="sharded")
    return str(refused.value)


def test_workers_with_unlike_numbers_of_devices_are_refused(worker_pool):
    # Their pieces would have other sizes, and the last bits of an update depend on the size.
    for message in worker_pool(2).run(refusal, (1, 3)):
        assert "needs as many devices on each worker, and these have 1, 3" in message


def mismatch(counts, name, values):
    with pytest.raises(mirror.StrategyError) as refused:
        strategy_of(counts, **{name: values[int(os.environ["RANK"])]})
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [("optimizer_state", ("sharded", "replicated")), ("gradient_reduction", ("mean", "sum"))],
)
def test_workers_with_different_options_are_refused_at_the_start(worker_pool, name, values):
    for message in worker_pool(2).run(mismatch, (2, 2), name, values):
        assert message == (
            f"{name} must be the same on all workers, and it is {values[0]!r} on worker 0, "
            f"{values[1]!r} on worker 1; pass the same value on each"
        )


def test_each_device_of_a_worker_holds_its_share(worker_pool):
    for own in worker_pool(2).run(trained, (2, 2), 3, "sharded"):
        _, state, held = own[0]
        whole = sum(v.nbytes for entry in state["state"].values() for v in entry.values())
        assert len(held) == 2
        assert max(held) <= (1 / 2 + 0.15) * whole  # a model of 43 elements


def sent(counts, state):
    """Returns the bytes that a local replica sends to others of its worker in the third step."""
    communicator = Counting(counts[0])
    with strategy_of(counts, backend=communicator, optimizer_state=state) as strategy:
        with strategy.scope():
            model = nn.Linear(8, 30)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for part in strategy.distribute_dataset([torch.ones(8, 8)] * 3):
            communicator.sent = 0.0

            def step(x):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()

            strategy.run(step, args=(part,))
        return communicator.sent


def test_inside_a_worker_a_step_sends_half_as_much_again(worker_pool):
    replicated, *_ = worker_pool(2).run(sent, (2, 2), "replicated")
    sharded, *_ = worker_pool(2).run(sent, (2, 2), "sharded")
    assert sharded == pytest.approx(1.5 * replicated, rel=0.05)


def test_a_worker_with_one_device_has_nothing_to_shard(worker_pool):
    of_workers, _ = both(worker_pool, trained, (1, 1), 3, "replicated")
    (expected, *_) = trained((2,), 3, "replicated")
    for model, state, _ in of_workers:
        assert_same((model, state), expected[:2])
    assert mirror.MirroredStrategy(["cpu"], optimizer_state="sharded").num_replicas_in_sync == 1
