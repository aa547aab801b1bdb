"""Cutting: what a step is cut into, by what it does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirror
from tests.compiler.training import Beside, batches, linear
from tests.pairs import quick_of


def levels_of(beside):
    beside.train(batches([8, 8]))
    (_, program, _) = beside.compiled._programs[0]
    return program.plan.levels


def test_the_usual_step_is_one_program_before_the_reduction_and_one_behind():
    first, second = levels_of(Beside(2))
    assert first.own is not None
    assert first.shared is None
    assert len(first.collectives) == 1
    assert second.shared is not None
    assert second.own is None


def test_one_replica_has_one_program():
    (only,) = levels_of(Beside(1))
    assert only.own is not None
    assert only.shared is None
    assert not only.collectives


@pytest.mark.parametrize("num_replicas", quick_of([1, 2], [2]))
def test_what_is_used_behind_a_write_is_what_it_was_before(num_replicas):
    def make_step(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            context = mirror.get_replica_context()
            count = context.all_reduce("sum", torch.tensor(float(len(x))))
            mean = context.all_reduce("sum", x.sum(0)) / count
            weight = model[0].weight.detach()
            before = F.linear(x - mean, weight, model[0].bias.detach()).square().mean()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()  # does not wait for the mean
            return loss, before

        return step

    beside = Beside(num_replicas, linear, make_step=make_step)
    data = batches([8, 8, 7, 8])
    for batch, own in zip(data, beside.strategy.distribute_dataset(data), strict=True):
        expected = beside.plain_step(*batch)
        found = beside.strategy.reduce("mean", beside.compiled(*own))
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_buffers_may_change_places(num_replicas):
    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)
            for i, name in enumerate("abc"):
                self.register_buffer(name, torch.full((3,), float(i)))

        def forward(self, x):
            old = self.a.clone()
            self.a.copy_(self.b)
            self.b.copy_(self.c)
            self.c.copy_(old)
            return self.linear(x) * self.b

    beside = Beside(num_replicas, Turning)
    beside.train(batches([8, 8, 7, 8]))
    for name in "abc":
        assert torch.equal(beside.model.get_buffer(name), beside.plain.get_buffer(name))


def test_a_collective_in_the_forward_pass_is_a_cut_more():
    def make_step(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            outputs = model(x)
            context = mirror.get_replica_context()
            mean = context.all_reduce("mean", outputs.detach().mean(0))
            loss = F.cross_entropy(outputs - 0 * mean, y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    levels = levels_of(Beside(2, make_step=make_step))
    assert [len(level.collectives) for level in levels] == [1, 1, 0]


class Given(torch.autograd.Function):
    """Has the batch itself as a gradient."""

    @staticmethod
    def forward(ctx, weight, x):
        ctx.save_for_backward(x)
        return (weight * x).sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


class Summed(nn.Module):
    """Has parameters of equal gradients, which are one tensor; and complex ones."""

    def __init__(self, size, dtype):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(size, dtype=dtype))
        self.second = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x):
        return (self.first + self.second).abs().sum() * x.mean()


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(600_000, torch.float32), (3, torch.float32), (3, torch.complex64)],
)
def test_gradients_that_are_one_tensor_are_reduced_once(size, dtype):
    def make_step(model, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            return loss

        return step

    def make(parameters):
        return torch.optim.SGD(parameters, 0.01)

    beside = Beside(2, lambda: Summed(size, dtype), make, make_step)
    beside.train(batches([8] * 3), rtol=1e-4, atol=1e-5)


def test_a_batch_that_is_a_gradient_stays_what_it_is():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)
    with strategy.scope():
        model = nn.ParameterList([nn.Parameter(torch.ones(3))])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        loss = Given.apply(model[0], x)
        loss.backward()
        optimizer.step()
        return loss

    compiled = strategy.compile(step, mode="trace")
    for _ in range(3):
        parts = mirror.PerReplica([torch.ones(3), torch.full((3,), 2.0)])
        compiled(parts)
        assert [part.tolist() for part in parts.values] == [[1.0] * 3, [2.0] * 3]
    strategy.check_replicas()


def test_a_parameter_that_differs_between_replicas_is_refused():
    def make_step(model, optimizer):
        def step(x, y):
            with torch.no_grad():
                model[0].bias.add_(x.mean())
            return model(x).mean()

        return step

    beside = Beside(2, linear, make_step=make_step, fallback="error")
    batch = mirror.PerReplica([torch.ones(4, 6)] * 2), mirror.PerReplica([torch.ones(4)] * 2)
    beside.compiled(*batch)
    with pytest.raises(mirror.CompileError, match=r"all_reduce\('mean', value\)"):
        beside.compiled(*batch)
