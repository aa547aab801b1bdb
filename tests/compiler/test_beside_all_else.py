"""Compiled steps together with other parts of programs: each equals the plain loop."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mirror
from tests.compiler.training import batches, mlp
from tests.pairs import quick_of

ON = pytest.mark.parametrize("num_replicas", quick_of([1, 2, 3], [3]))
SIZES = [6, 6, 5, 6, 3, 6]


def pair(num_replicas, build):
    """Returns a strategy, what ``build`` makes in its scope, and the same without strategy."""
    torch.manual_seed(0)
    plain = build()
    strategy = mirror.MirroredStrategy(["cpu"] * num_replicas)
    torch.manual_seed(0)
    with strategy.scope():
        own = build()
    return strategy, own, plain


def check(own, plain):
    for a, b in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)


def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@ON
def test_two_compiled_steps_train_the_two_models_of_a_gan(num_replicas):
    class Gan:
        def __init__(self):
            self.maker, self.critic = nn.Linear(6, 6), nn.Linear(6, 1)
            self.of_maker = torch.optim.Adam(self.maker.parameters(), 0.01, betas=(0.5, 0.9))
            self.of_critic = torch.optim.Adam(self.critic.parameters(), 0.01, betas=(0.5, 0.9))

        def train_critic(self, x):
            fake = self.maker(x).detach()
            loss = F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(fake)).mean()
            return update(self.of_critic, loss)

        def train_maker(self, x):
            return update(self.of_maker, F.softplus(-self.critic(self.maker(x))).mean())

    strategy, own, plain = pair(num_replicas, Gan)
    steps = [strategy.compile(one, mode="trace") for one in (own.train_critic, own.train_maker)]
    data = [x for x, _ in batches(SIZES)]
    for x, part in zip(data, strategy.distribute_dataset(data), strict=True):
        for step, expected in zip(steps, (plain.train_critic, plain.train_maker), strict=True):
            loss = strategy.reduce("mean", step(part))
            torch.testing.assert_close(loss, expected(x).detach())
    check(own.maker, plain.maker)
    check(own.critic, plain.critic)
    assert [step.num_traces for step in steps] == [1, 1]
    strategy.close()


class Trained:
    """A model with an average of its parameters, a schedule, and a step."""

    def __init__(self):
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.scheduler = OneCycleLR(self.optimizer, 0.2, total_steps=40)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(self, x, y):
        return update(self.optimizer, F.cross_entropy(self.model(x), y))

    def accumulate(self, x, y, is_last):
        loss = F.cross_entropy(self.model(x), y)
        (loss / 2).backward()
        if is_last:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def predict(self, x, y):
        return self.model(x)

    def after_step(self):
        self.scheduler.step()
        self.average.update_parameters(self.model)


@ON
def test_schedules_of_rate_and_momentum_and_averages_of_parameters(num_replicas):
    strategy, own, plain = pair(num_replicas, Trained)
    compiled = strategy.compile(own.step, mode="trace")
    data = batches(SIZES)
    for batch, part in zip(data, strategy.distribute_dataset(data), strict=True):
        loss = strategy.reduce("mean", compiled(*part))
        torch.testing.assert_close(loss, plain.step(*batch).detach())
        own.after_step()
        plain.after_step()
    check(own.model, plain.model)
    check(own.average, plain.average)
    assert compiled.num_traces <= 2
    strategy.close()


@ON
def test_a_compiled_evaluation_between_compiled_steps(num_replicas):
    strategy, own, plain = pair(num_replicas, Trained)
    compiled = strategy.compile(own.step, mode="trace")
    evaluate = strategy.compile(own.predict, mode="trace")
    data = batches(SIZES)
    for batch, part in zip(data, strategy.distribute_dataset(data), strict=True):
        compiled(*part)
        plain.step(*batch)
        own.model.eval()
        with torch.no_grad():
            found = strategy.gather(evaluate(*part))
            torch.testing.assert_close(found, plain.predict(*batch), rtol=1e-5, atol=1e-6)
        own.model.train()
    assert compiled.num_traces == evaluate.num_traces == 1
    strategy.close()


@ON
@pytest.mark.parametrize("is_deferred", [False, True])
def test_gradients_of_several_calls_are_accumulated(num_replicas, is_deferred):
    strategy, own, plain = pair(num_replicas, Trained)
    compiled = strategy.compile(own.accumulate, mode="trace")
    data = batches([6, 6, 5, 6] * 2)
    for i, (batch, part) in enumerate(zip(data, strategy.distribute_dataset(data), strict=True)):
        is_last = i % 2 == 1
        waits = strategy.no_sync() if is_deferred and not is_last else contextlib.nullcontext()
        with waits:
            loss = strategy.reduce("mean", compiled(*part, is_last))
        torch.testing.assert_close(loss, plain.accumulate(*batch, is_last).detach())
    check(own.model, plain.model)
    strategy.close()


@ON
def test_a_checkpoint_in_mid_training_is_restored(num_replicas, tmp_path):
    strategy, own, plain = pair(num_replicas, Trained)
    compiled = strategy.compile(own.step, mode="trace")
    checkpoint = mirror.Checkpoint(model=own.model, optimizer=own.optimizer)
    saved = None
    data = batches([6] * 8)
    for i, (batch, part) in enumerate(zip(data, strategy.distribute_dataset(data), strict=True)):
        if i == 3:
            checkpoint.save(tmp_path / "one")
            saved = copy.deepcopy((plain.model.state_dict(), plain.optimizer.state_dict()))
        if i == 6:
            checkpoint.restore(tmp_path / "one")
            plain.model.load_state_dict(saved[0])
            plain.optimizer.load_state_dict(saved[1])
        compiled(*part)
        plain.step(*batch)
        check(own.model, plain.model)
    assert compiled.num_traces <= 2
    strategy.check_replicas()
    strategy.close()


@ON
def test_a_step_under_autocast_is_the_uncompiled_one(num_replicas):
    found = []
    for is_compiled in (False, True):
        strategy, own, _ = pair(num_replicas, Trained)

        def step(x, y, own=own):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(own.model(x).float(), y)
            return update(own.optimizer, loss)

        compiled = strategy.compile(step, mode="trace")
        for part in strategy.distribute_dataset(batches(SIZES)):
            compiled(*part) if is_compiled else strategy.run(step, part)
        found.append([p.detach().clone() for p in own.model.parameters()])
        strategy.close()
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-3)


@ON
def test_guards_reports_and_traces_cover_compiled_steps(num_replicas, tmp_path):
    guards = mirror.Guards(replicas_every=1, finite_gradients=True)
    with mirror.MirroredStrategy(["cpu"] * num_replicas, guards=guards) as strategy:
        with strategy.scope():
            own = Trained()
        compiled = strategy.compile(own.step, mode="trace")
        loader = list(strategy.distribute_dataset(batches([6] * 4)))
        with strategy.trace(str(tmp_path / "trace.json")):
            for part in loader:
                compiled(*part)
        assert "compiled" in str(strategy.report())
        x, y = loader[0]
        x = mirror.PerReplica([part * float("nan") for part in x.values], weights=x.weights)
        with pytest.raises(mirror.GradientError):
            compiled(x, y)


@ON
def test_losses_of_the_whole_batch_are_summed(num_replicas):
    """The functions of ``tf.nn`` for losses, with ``gradient_reduction="sum"``."""

    def step_of(own, average, scale):
        def step(x, y):
            losses = F.cross_entropy(own.model(x), y, reduction="none")
            decay = 0.01 * sum(p.square().sum() for p in own.model.parameters())
            return update(own.optimizer, average(losses) + scale(decay))

        return step

    torch.manual_seed(0)
    plain = Trained()
    step = step_of(plain, lambda losses: losses.mean(), lambda loss: loss)
    with (
        mirror.MirroredStrategy(["cpu"] * num_replicas, gradient_reduction="sum") as strategy,
        strategy.scope(),
    ):
        torch.manual_seed(0)
        own = Trained()
        functions = mirror.nn.compute_average_loss, mirror.nn.scale_regularization_loss
        compiled = strategy.compile(step_of(own, *functions), mode="trace")
        data = batches([*SIZES, 1, 2])
        for batch, part in zip(data, strategy.distribute_dataset(data), strict=True):
            loss = strategy.reduce("sum", compiled(*part))
            torch.testing.assert_close(loss, step(*batch).detach())
        check(own.model, plain.model)
        assert compiled.num_traces == 1


@pytest.mark.parametrize("num_replicas", quick_of([2, 3], [2]))
def test_batch_norm_over_one_example_per_replica_runs_uncompiled(num_replicas):
    class Normalized(Trained):
        def __init__(self):
            super().__init__()
            layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
            self.model = mirror.nn.convert_sync_batchnorm(nn.Sequential(*layers))
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    strategy, own, plain = pair(num_replicas, Normalized)
    compiled = strategy.compile(own.step, mode="trace")
    data = batches([6, 6, *[num_replicas] * 5, 6])
    for batch, part in zip(data, strategy.distribute_dataset(data), strict=True):
        loss = strategy.reduce("mean", compiled(*part))
        torch.testing.assert_close(loss, plain.step(*batch).detach(), rtol=1e-4, atol=1e-5)
    assert compiled.num_traces == 1
    (only,) = strategy.distribute_dataset(batches([1]))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        compiled(*only)
    strategy.close()


@ON
def test_gradients_that_a_step_only_scales_get_a_new_version(num_replicas):
    """They are inputs that the program writes, and others in every call."""
    with mirror.MirroredStrategy(["cpu"] * num_replicas) as strategy, strategy.scope():
        own = Trained()

        def step(x, y):
            for parameter in own.model.parameters():
                parameter.grad.mul_(0.5)
            return x.sum()

        compiled = strategy.compile(step, mode="trace")
        for i, part in enumerate(strategy.distribute_dataset(batches([6] * 4))):
            for parameter in own.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            compiled(*part)
            for parameter in own.model.parameters():
                assert torch.equal(parameter.grad, torch.full_like(parameter, 0.5))
            if i == 1:
                (_, program, _) = compiled._programs[0]
                program._is_raw = True  # as programs of inductor, which leave versions alone
