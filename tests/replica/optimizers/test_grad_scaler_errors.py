"""Calls of a GradScaler out of order, on one replica alone, or of torch's own in run."""

import pytest
import torch
from torch import nn

import mirror
from mirror.amp import GradScaler
from tests.oracle import assert_same
from tests.replica.optimizers.scaled import CONTEXTS, OPTIONS, data, loss_of, pair, plain_step


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (("unscale_", "unscale_"), "already been called"),
        (("step", "unscale_"), "is being called after step"),
        (("step", "step"), "already been called since the last update"),
    ],
)
def test_calls_out_of_order_are_refused_as_in_torch(make_strategy, context, calls, message):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", **OPTIONS)

    def step():
        scaler.scale(model(torch.ones(2, 3)).mean()).backward()
        for call in calls:
            getattr(scaler, call)(optimizer)

    with pytest.raises(RuntimeError, match=message):
        strategy.run(step) if context == "run" else step()


def test_update_on_one_replica_alone_diverges(make_strategy):
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))

    def step():
        if mirror.get_replica_context().replica_id_in_sync_group == 0:
            scaler.update(2.0)

    with pytest.raises(mirror.DivergenceError, match=r"GradScaler\.update"):
        make_strategy(2).run(step)


def test_a_closure_is_refused(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        strategy.run(lambda: scaler.step(optimizer, closure=lambda: 0.0))


def test_torchs_own_scaler_in_run_names_ours(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    batch = torch.ones(4, 3), torch.ones(4)
    (part,) = strategy.distribute_dataset([batch])
    calls = [
        lambda: strategy.run(plain_step, args=(scaler, model, [optimizer], part)),
        lambda: strategy.run(scaler.unscale_, args=(optimizer,)),
        lambda: strategy.run(scaler.update),
    ]
    for call in calls:
        with pytest.raises(mirror.StrategyError, match=r"mirror\.amp\.GradScaler"):
            call()
    # Disabled, or over parameters of a replica's own, there is nothing to say.
    strategy.run(plain_step, args=(torch.amp.GradScaler(enabled=False), model, [optimizer], part))
    strategy.check_replicas()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("way", [1, 2])
def test_torchs_own_scaler_works_outside_run(make_strategy, way, clip):
    strategy = make_strategy(3)
    plain = nn.Linear(3, 2)
    model = pair(strategy, plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    scalers = [torch.amp.GradScaler("cpu", **OPTIONS) for _ in range(2)]
    for batch in data():
        plain_step(scalers[0], plain, optimizers[:1], batch, clip)
        if way == 1:
            plain_step(scalers[1], model, optimizers[1:], batch, clip)
        else:
            (part,) = strategy.distribute_dataset([batch])
            optimizers[1].zero_grad()
            losses = strategy.run(lambda part: scalers[1].scale(loss_of(model, part)), (part,))
            strategy.reduce("mean", losses).backward()
            if clip:
                scalers[1].unscale_(optimizers[1])
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scalers[1].step(optimizers[1])
            scalers[1].update()
        strategy.check_replicas()
        assert scalers[1].state_dict() == scalers[0].state_dict()
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())
