"""GradScaler: the scale and parameters of one device; misuse is an error."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import mirror
from mirror.amp import GradScaler
from mirror.threads import schedule
from tests.oracle import assert_same, finishes
from tests.pairs import each_once

OPTIONS = {"init_scale": 8.0, "growth_interval": 2}
SIZES = [7, 4, 9, 1, 6, 2, 8]
BAD = {1: 0, 4: 5}  # step: the example with an infinite loss
CONTEXTS = ["cross", "run"]


def data():
    """Batches of features and factors of the losses, one of which is inf in a bad step."""
    made = []
    for i, size in enumerate(SIZES):
        factors = torch.ones(size)
        if i in BAD:
            factors[BAD[i]] = torch.inf
        made.append((torch.randn(size, 3), factors))
    return made


def loss_of(model, batch):
    x, factors = batch
    return (model(x).square().mean(1) * factors).mean()


def plain_step(scaler, model, optimizers, batch, clip=False):
    """What a training script does; on one device the oracle, on replicas the test."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss_of(model, batch)).backward()
    if clip:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def pair(strategy, plain):
    return strategy.mirror(copy.deepcopy(plain))


REPLICAS = [1, 2, 3, 4]
OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
}


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(5, 2, sparse=True)

    def forward(self, x):
        return self.embedding((x.abs() * 10).long() % 5)


def train(context, strategy, scaler, model, optimizers, clip=False):
    """Trains in one of the contexts; returns the state of the scaler after each step."""
    states = []
    batches = data()
    distributed = strategy.distribute_dataset(batches) if context == "run" else batches
    for batch in distributed:
        if context == "run":
            strategy.run(plain_step, args=(scaler, model, optimizers, batch, clip))
        else:
            plain_step(scaler, model, optimizers, batch, clip)
        strategy.check_replicas()
        states.append(scaler.state_dict())
    return states


def expected(make_scaler, plain, optimizers, clip=False):
    scaler, states = make_scaler(), []
    for batch in data():
        plain_step(scaler, plain, optimizers, batch, clip)
        states.append(scaler.state_dict())
    return states


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@each_once(context=CONTEXTS, n=REPLICAS)
def test_training_with_planted_infs_is_that_of_one_device(
    make_strategy, context, n, optimizer, clip
):
    strategy = make_strategy(n)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model = pair(strategy, plain)
    optimizers = optimizer(model.parameters()), optimizer(plain.parameters())
    torch.manual_seed(1)
    wanted = expected(lambda: torch.amp.GradScaler("cpu", **OPTIONS), plain, optimizers[1:], clip)
    torch.manual_seed(1)
    scaler = GradScaler("cpu", **OPTIONS)
    assert train(context, strategy, scaler, model, optimizers[:1], clip) == wanted
    assert [state["scale"] for state in wanted] == [8, 4, 4, 8, 4, 4, 8]
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(optimizers[0].state_dict(), optimizers[1].state_dict())


@each_once(context=CONTEXTS, n=REPLICAS)
def test_several_optimizers_skip_each_for_itself(make_strategy, context, n):
    """As in torch: the optimizer with finite gradients steps; the scale backs off once."""
    strategy = make_strategy(n)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    plain = Two()
    model = pair(strategy, plain)
    optimizers = {
        m: [torch.optim.SGD(part.parameters(), lr=0.1) for part in (m.left, m.right)]
        for m in (model, plain)
    }

    def step(scaler, m, batch):
        x, factors = batch
        for optimizer in optimizers[m]:
            optimizer.zero_grad()
        left, right = m.left(x).square().mean(1), m.right(x).square().mean(1)
        scaler.scale((left * factors).mean()).backward()
        scaler.scale(right.mean()).backward()
        for optimizer in optimizers[m]:
            scaler.step(optimizer)
        scaler.update()

    batches = data()
    scalers = GradScaler("cpu", **OPTIONS), torch.amp.GradScaler("cpu", **OPTIONS)
    distributed = strategy.distribute_dataset(batches)
    for batch, part in zip(batches, distributed, strict=True):
        step(scalers[1], plain, batch)
        if context == "run":
            strategy.run(step, args=(scalers[0], model, part))
        else:
            step(scalers[0], model, batch)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert_same(model.state_dict(), plain.state_dict())
        strategy.check_replicas()


@pytest.mark.parametrize("context", CONTEXTS)
def test_sparse_gradients_are_unscaled(make_strategy, context):
    strategy = make_strategy(3)
    plain = Sparse()
    model = pair(strategy, plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    torch.manual_seed(1)
    wanted = expected(lambda: torch.amp.GradScaler("cpu", **OPTIONS), plain, optimizers[1:])
    torch.manual_seed(1)
    scaler = GradScaler("cpu", **OPTIONS)
    assert train(context, strategy, scaler, model, optimizers[:1]) == wanted
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("n", [2, 3])
def test_steps_may_be_split_between_the_contexts(make_strategy, n):
    """Gradients unscaled inside run are known to be outside it, and the other way round."""
    strategy = make_strategy(n)
    plain = nn.Linear(3, 2)
    model = pair(strategy, plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    scalers = GradScaler("cpu", **OPTIONS), torch.amp.GradScaler("cpu", **OPTIONS)

    def backward(batch):
        optimizers[0].zero_grad()
        scalers[0].scale(loss_of(model, batch)).backward()
        scalers[0].unscale_(optimizers[0])

    def step():
        scalers[0].step(optimizers[0])

    batches = data()
    for i, (batch, part) in enumerate(
        zip(batches, strategy.distribute_dataset(batches), strict=True)
    ):
        plain_step(scalers[1], plain, optimizers[1:], batch)
        if i % 2:
            strategy.run(backward, args=(part,))
            step()
        else:
            backward(batch)
            strategy.run(step)
        scalers[0].update()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert_same(model.state_dict(), plain.state_dict())
        strategy.check_replicas()


def test_accumulation_is_that_of_one_device(make_strategy):
    strategy = make_strategy(3)
    plain = nn.Linear(3, 2)
    model = pair(strategy, plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    scalers = GradScaler("cpu", **OPTIONS), torch.amp.GradScaler("cpu", **OPTIONS)

    def backward(scaler, m, batch):
        scaler.scale(loss_of(m, batch)).backward()

    def finish(scaler, m, optimizer, batch):
        backward(scaler, m, batch)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for first, second in zip(data(), data(), strict=True):
        backward(scalers[1], plain, first)
        finish(scalers[1], plain, optimizers[1], second)
        parts = list(strategy.distribute_dataset([first, second]))
        with strategy.no_sync():
            strategy.run(backward, args=(scalers[0], model, parts[0]))
        strategy.run(finish, args=(scalers[0], model, optimizers[0], parts[1]))
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert_same(model.state_dict(), plain.state_dict())


def test_one_scaler_per_replica_works_too(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scalers = strategy.distribute_values_from_function(lambda _: GradScaler("cpu", **OPTIONS))
    for batch in strategy.distribute_dataset([(torch.randn(4, 3), torch.ones(4))] * 2):
        strategy.run(plain_step, args=(scalers, model, [optimizer], batch))
    assert [scaler.get_scale() for scaler in scalers.values] == [16.0, 16.0]


def test_a_new_scale_is_set_once_for_all(make_strategy):
    strategy = make_strategy(2)
    scaler = GradScaler("cpu")
    scaled = strategy.run(lambda: scaler.scale([torch.ones(1), torch.ones(2)]))
    assert [part.values[0][0].item() for part in scaled] == [65536.0, 65536.0]
    strategy.run(lambda: scaler.update(4.0))
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("context", CONTEXTS)
def test_disabled_it_only_steps(make_strategy, context):
    strategy = make_strategy(3)
    plain = nn.Linear(3, 2)
    model = pair(strategy, plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    batches = [(torch.randn(7, 3), torch.ones(7))]
    plain_step(torch.amp.GradScaler("cpu", enabled=False), plain, optimizers[1:], batches[0])
    scaler = GradScaler("cpu", enabled=False)
    if context == "run":
        (batch,) = strategy.distribute_dataset(batches)
        strategy.run(plain_step, args=(scaler, model, optimizers[:1], batch))
    else:
        plain_step(scaler, model, optimizers[:1], batches[0])
    assert_same(model.state_dict(), plain.state_dict())
    assert (scaler.state_dict(), scaler.get_scale()) == ({}, 1.0)


def test_without_a_strategy_it_is_torchs():
    models = [nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    scalers = GradScaler("cpu", **OPTIONS), torch.amp.GradScaler("cpu", **OPTIONS)
    batches = data()
    for model, scaler in zip(models, scalers, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            plain_step(scaler, model, [optimizer], batch)
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert_same(models[0].state_dict(), models[1].state_dict(), tolerance=0.0)


def test_its_state_loads_into_torchs_and_back():
    ours, theirs = GradScaler("cpu", **OPTIONS), torch.amp.GradScaler("cpu", init_scale=2.0)
    assert isinstance(ours, torch.amp.GradScaler)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    again = GradScaler("cpu")
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == ours.state_dict()


@pytest.mark.parametrize("n", [1, 2])
def test_it_is_copied_and_pickled_after_a_run(make_strategy, n):
    strategy = make_strategy(n)
    model = strategy.mirror(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", **OPTIONS)
    (batch,) = strategy.distribute_dataset([(torch.randn(4, 3), torch.ones(4))])
    strategy.run(plain_step, args=(scaler, model, [optimizer], batch))
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert type(twin) is GradScaler
        assert twin.state_dict() == scaler.state_dict()
        strategy.run(plain_step, args=(twin, model, [optimizer], batch))
        assert twin.get_scale() == 2 * scaler.get_scale()


def test_replicas_of_gpus_need_not_be_seen_to_wait_for_what_is_inf(make_strategy, monkeypatch):
    # Whether to step is read from the device: N replicas waited for it one after the other.
    strategy = make_strategy(3, schedule="lockstep")
    strategy._group.runner.locksteps.schedule = (
        "staggered"  # the schedule of GPUs, without stall detection
    )
    monkeypatch.setattr(schedule, "FIRST_SECONDS", 1e6)
    monkeypatch.setattr(schedule, "LAST_SECONDS", 1e6)
    model = pair(strategy, nn.Linear(3, 2))
    together = threading.Barrier(3, timeout=20)

    class Slow(torch.Tensor):
        def item(self):
            together.wait()
            return super().item()

    class Waiting(GradScaler):
        def unscale_(self, optimizer):
            super().unscale_(optimizer)
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            found.update({device: value.as_subclass(Slow) for device, value in found.items()})

    def use():
        scaler, optimizer = Waiting("cpu", **OPTIONS), torch.optim.SGD(model.parameters(), lr=0.1)
        (batch,) = strategy.distribute_dataset(data()[:1])
        strategy.run(plain_step, args=(scaler, model, [optimizer], batch))

    _, error, _ = finishes(use, hang_after=60)
    assert error is None


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
