"""What a compiled module returns, and backward passes through it, are as they are uncompiled."""

import pytest
import torch
from torch import nn

import mirror
from mirror.replica.modules.module_owner import interceptor_of


class Heads(nn.Module):
    """Two outputs, whose graphs have nothing in common."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return self.left(x), self.right(x)


class Viewed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(x).view(-1, 2, 2).transpose(1, 2)


class Twice(Viewed):
    def forward(self, x):
        y = self.layer(x)
        return y, y


class Overlapping(Viewed):
    def forward(self, x):
        y = self.layer(x)
        return y, y[:, :2]


class Halves(Viewed):
    def forward(self, x):
        return self.layer(x).chunk(2, 1)


def train(program, make, n, compiles, num_steps=6):
    """Returns what a program has kept, and the number of traces."""
    torch.manual_seed(0)
    kept = []
    with mirror.MirroredStrategy(["cpu"] * n, verify="off") as strategy:
        model = strategy.mirror(make())
        if compiles:
            strategy.compile(model)
        for i in range(num_steps):
            model.zero_grad()
            program(model, torch.randn(6, 6), i, kept)
            kept += [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
        return kept, interceptor_of(model).compiled.num_traces if compiles else 0


def compare(program, make, n):
    """Compares a program with itself compiled; returns the number of traces."""
    (expected, _), (found, num_traces) = (train(program, make, n, c) for c in (False, True))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
        else:
            assert one == other
    return num_traces


def writing(model, x, i, kept):
    y = model(x)
    kept.append(y.clone())
    y.mul_(2)
    y += 1
    y.square().sum().backward()


def returning_twice(model, x, i, kept):
    y, z = model(x)
    kept.append(y is z)
    (y.sum() + z.square().sum()).backward()


def changing_one(model, x, i, kept):
    with torch.no_grad():
        outputs = model(x)
        outputs[0].mul_(2)
        kept.extend(output.clone() for output in outputs)
    model(x)[1].sum().backward()


def passing_through_each(model, x, i, kept):
    left, right = model(x)
    left.square().sum().backward()
    right.square().sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        right.square().sum().backward()


def reaching_one_at_first(model, x, i, kept):
    left, right = model(x)
    loss = left.square().sum() + (right.square().sum() if i > 2 else 0.0)
    loss.backward()


def changing_parameters(model, x, i, kept):
    """A linear layer does not read its weight in the backward pass."""
    y = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    y.square().sum().backward()


@pytest.mark.parametrize(
    ("program", "make", "num_traces"),
    [
        (writing, Viewed, 1),
        (returning_twice, Twice, 1),
        (returning_twice, Halves, 1),
        (changing_one, Halves, 2),
        (reaching_one_at_first, Heads, 2),
        (changing_parameters, Viewed, 1),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_program_leaves_what_it_leaves_uncompiled(program, make, num_traces, n, caplog):
    assert compare(program, make, n) == num_traces
    assert not caplog.records


@pytest.mark.parametrize(
    ("program", "make", "reason"),
    [
        (changing_one, Overlapping, "two of its outputs share memory"),
        (passing_through_each, Heads, "in several backward passes"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_what_no_program_can_do_runs_uncompiled_with_one_warning(program, make, reason, n, caplog):
    compare(program, make, n)
    (warning,) = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert reason in warning


@pytest.mark.parametrize("n", [1, 2])
def test_a_pass_that_calls_forward_again_notices_a_changed_argument(n):
    with mirror.MirroredStrategy(["cpu"] * n) as strategy:
        model = strategy.compile(strategy.mirror(Heads()))
        for _ in range(3):
            model(torch.ones(6, 6))[0].sum().backward()
        x = torch.ones(6, 6)
        _, right = model(x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            right.sum().backward()
