"""GradScaler in compiled steps: steps with infinities are skipped, and the scale is updated."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirror
from tests.compiler.training import batches, mlp
from tests.pairs import each_once

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


def step_of(model, optimizer, scaler, *, clips):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def build(kind, make_optimizer, clips):
    torch.manual_seed(0)
    model = mlp()
    optimizer = make_optimizer(model.parameters())
    scaler = kind("cpu", init_scale=8.0, growth_interval=2)
    return model, optimizer, scaler, step_of(model, optimizer, scaler, clips=clips)


def data_with_infinities():
    data = batches([6, 6, 6, 5, 6, 6, 6, 6])
    for i in (0, 3, 4):
        data[i][0][-1, 0] = float("inf")
    return data


@each_once(name=OPTIMIZERS, num_replicas=[1, 2, 3], clips=[False, True])
def test_a_scaled_step_equals_one_device(name, clips, num_replicas):
    data = data_with_infinities()
    model, optimizer, scaler, plain = build(torch.amp.GradScaler, OPTIMIZERS[name], clips)
    with mirror.MirroredStrategy(["cpu"] * num_replicas) as strategy:
        with strategy.scope():
            own, own_optimizer, own_scaler, step = build(
                mirror.amp.GradScaler, OPTIMIZERS[name], clips
            )
        compiled = strategy.compile(step, mode="trace")
        for (x, y), batch in zip(data, strategy.distribute_dataset(data), strict=True):
            plain(x, y)
            compiled(*batch)
            assert own_scaler.get_scale() == scaler.get_scale()
            for a, b in zip(own.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)
        assert own_scaler.state_dict() == scaler.state_dict()
        theirs, ours = (o.state_dict()["state"] for o in (optimizer, own_optimizer))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert compiled.num_traces == 1
        strategy.check_replicas()


def test_uncompiled_and_compiled_steps_share_one_scale():
    data = data_with_infinities()
    _, _, scaler, plain = build(torch.amp.GradScaler, OPTIMIZERS["sgd"], False)
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy, strategy.scope():
        _, _, own_scaler, step = build(mirror.amp.GradScaler, OPTIMIZERS["sgd"], False)
        compiled = strategy.compile(step, mode="trace")
        for i, ((x, y), batch) in enumerate(
            zip(data, strategy.distribute_dataset(data), strict=True)
        ):
            plain(x, y)
            strategy.run(step, batch) if i % 3 == 2 else compiled(*batch)
            assert own_scaler.state_dict() == scaler.state_dict()


def test_an_interval_that_changes_is_guarded():
    data = batches([6] * 6)
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy, strategy.scope():
        _, _, scaler, step = build(mirror.amp.GradScaler, OPTIMIZERS["sgd"], False)
        compiled = strategy.compile(step, mode="trace")
        for i, batch in enumerate(strategy.distribute_dataset(data)):
            if i == 2:
                scaler.set_growth_interval(1)
            compiled(*batch)
        assert scaler.get_scale() == 16.0 * 2**4  # then doubled by every call
        assert compiled.num_traces == 2


def test_a_scaler_that_is_not_updated_in_the_step_is_refused():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy, strategy.scope():
        model, optimizer, scaler, _ = build(mirror.amp.GradScaler, OPTIMIZERS["sgd"], False)

        def step(x, y):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)

        compiled = strategy.compile(step, mode="trace")
        first, second = strategy.distribute_dataset(batches([6, 6]))
        compiled(*first)
        scaler.update()
        with pytest.raises(mirror.CompileError, match=r"call scaler.update\(\) at the end"):
            compiled(*second)
