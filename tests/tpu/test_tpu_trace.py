"""Steps that cannot be traced raise an error and leave nothing behind."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.errors import StrategyError, StructureError

pytestmark = pytest.mark.slow  # jax compiles


class Steps:
    """Steps by name; ``parts`` is what they have in common."""

    def __init__(self, strategy):
        with strategy.scope():
            self.model = nn.Linear(3, 2)
            self.norm = nn.InstanceNorm1d(1, track_running_stats=True)
        self.other, self.constant = nn.Linear(3, 2), torch.ones(2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.rms = torch.optim.RMSprop(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def loss(self, x):
        return self.model(x).square().mean()

    def trained(self, x):
        self.optimizer.zero_grad()
        loss = self.loss(x)
        loss.backward()
        self.optimizer.step()
        return loss

    def asks_for_a_value(self, x):
        return self.loss(x).item()

    def branches(self, x):
        return x if self.loss(x) > 0 else -x

    def picks(self, x):
        return x[x > 0]

    def accumulates(self, x):
        self.loss(x).backward()
        self.optimizer.step()

    def two_passes(self, x):
        self.loss(x).backward()
        self.loss(x).backward()

    def closure(self, x):
        self.optimizer.step(lambda: self.loss(x))

    def steps_twice(self, x):
        self.trained(x)
        self.optimizer.step()

    def steps_alone(self, x):
        self.optimizer.step()

    def other_optimizer(self, x):
        self.rms.zero_grad()
        self.loss(x).backward()
        self.rms.step()

    def schedules(self, x):
        self.trained(x)
        self.scheduler.step()

    def other_module(self, x):
        return self.other(x)

    def constant_of_numbers(self, x):
        return self.model(x) * self.constant

    def moved_constant(self, x):
        return self.model(x) * self.constant.to(x.device)

    def draws_on_the_host(self, x):
        return x[:, :1] * torch.rand(1, device="cpu")

    def statistics(self, x):
        return self.norm(x[:, None])

    def writes(self, x):
        with torch.no_grad():
            self.model.weight.mul_(0.5)

    def autocasts(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)

    def without_gradients(self, x):
        with torch.no_grad():
            self.loss(x).backward()

    def reduces(self, x):
        return mirror.get_replica_context().all_reduce("sum", x)


REFUSED = {
    "asks_for_a_value": "reads a value",
    "branches": "reads a value",
    "picks": "reads a value",
    "accumulates": r"add up over steps.* call optimizer.zero_grad\(\)",
    "two_passes": "one backward pass; add the losses up",
    "closure": "step with a closure",
    "steps_twice": "an optimizer steps once",
    "steps_alone": "without a backward pass",
    "other_optimizer": "SGD, Adam and AdamW .* RMSprop",
    "schedules": "changed an optimizer's options",
    "other_module": r"tensors with one from outside.* strategy.mirror",
    "constant_of_numbers": "tensors with one from outside",
    "moved_constant": r"a tensor of shape \(2,\) from outside",
    "draws_on_the_host": "tensors with one from outside",
    "statistics": "statistics of instance normalization",
    "writes": "written to .*weight directly",
    "autocasts": "torch.autocast",
    "without_gradients": "leave no_grad out",
    "reduces": "has no all_reduce",
}


def test_each_is_refused_and_the_next_step_trains(tpus):
    steps = Steps(tpus)
    (batch,) = tpus.distribute_dataset([torch.randn(8, 3)])
    before = {name: value.clone() for name, value in steps.model.state_dict().items()}
    for name, rule in REFUSED.items():
        with pytest.raises(StrategyError, match=rule):
            tpus.run(getattr(steps, name), args=(batch,))
        assert type(steps.model.weight) is nn.Parameter, name
        assert steps.optimizer.param_groups[0]["params"][0] is steps.model.weight, name
        assert steps.optimizer.param_groups[0]["lr"] == 0.1, name
        assert not mirror.has_strategy(), name
        assert torch.zeros(1).device.type == "cpu", name
    for name, value in steps.model.state_dict().items():
        assert torch.equal(value, before[name])
    losses = [tpus.reduce("mean", tpus.run(steps.trained, args=(batch,))) for _ in range(2)]
    assert losses[1] < losses[0]


def test_what_the_step_raises_comes_as_it_is(tpus):
    def step(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tpus.run(step, args=(torch.ones(4),))


def test_another_structure_for_another_size_is_refused(tpus):
    def step(x):
        return (x,) if len(x) == 2 else [x]

    (batch,) = tpus.distribute_dataset([torch.ones(6)])
    with pytest.raises(StructureError, match="different structures"):
        tpus.run(step, args=(batch,))


def test_backward_and_steps_outside_are_refused(tpus):
    steps = Steps(tpus)
    (batch,) = tpus.distribute_dataset([torch.randn(8, 3)])
    with pytest.raises(StrategyError, match="backward outside of run: TPUStrategy runs whole"):
        tpus.reduce("mean", tpus.run(steps.loss, args=(batch,))).backward()
    F.mse_loss(steps.model(torch.ones(1, 3)), torch.ones(1, 2)).backward()
    with pytest.raises(StrategyError, match=r"SGD.step\(\) outside of run"):
        steps.optimizer.step()


def test_gradients_may_be_cleared_at_the_end(tpus):
    steps = Steps(tpus)

    def step(x):
        steps.loss(x).backward()
        seen = steps.model.weight.grad.abs().sum()
        steps.optimizer.step()
        steps.optimizer.zero_grad()
        return seen

    seen = tpus.run(step, args=(torch.ones(4, 3),))
    assert seen.values[0] > 0
    assert steps.model.weight.grad is None
