"""Gradients of compiled steps: p.grad between steps, and non-finite gradients."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.compiler.training import batches, mlp, usual_step
from tests.pairs import each_once, quick_of

OPTIMIZERS = {
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "SGD foreach": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, foreach=True
    ),
    "decay": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, maximize=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.05, maximize=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, weight_decay=0.1),
}


def train(n, optimizer, zero, *, waits, calls=4):
    """Trains on one device (``n`` = 0) or by compiled steps; returns gradients and parameters."""
    torch.manual_seed(0)
    strategy = mirror.MirroredStrategy(["cpu"] * n) if n else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        optimizer = OPTIMIZERS[optimizer](model.parameters())
        batches = [(torch.randn(6, 3).double(), torch.randint(2, (6,))) for _ in range(calls)]

        def accumulate(batch):
            x, y = batch
            F.cross_entropy(model(x), y).backward()

        def step(batch):
            if zero == "first":
                optimizer.zero_grad()
            accumulate(batch)
            optimizer.step()
            if zero == "last":
                optimizer.zero_grad()

        def grads():
            return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

        seen = []
        if strategy is None:
            for batch in batches:
                if waits:
                    accumulate(batch)
                step(batch)
                seen.append(grads())
        else:
            compiled = strategy.compile(step, mode="trace")
            for i, batch in enumerate(strategy.distribute_dataset(batches)):
                if waits:
                    with strategy.no_sync():
                        strategy.run(accumulate, args=(batch,))
                compiled(batch)
                seen.append(grads() if i != 1 else None)  # once without a read in between
            assert compiled.num_traces
            strategy.check_replicas()
            strategy.close()
    return seen, [p.detach().clone() for p in model.parameters()]


def assert_equal(mine, expected):
    (seen, parameters), (expected_seen, expected_parameters) = mine, expected
    torch.testing.assert_close(parameters, expected_parameters, rtol=1e-6, atol=1e-6)
    for grads, others in zip(seen, expected_seen, strict=True):
        for grad, other in zip(grads or (), others if grads else (), strict=True):
            assert (grad is None) == (other is None)
            if grad is not None:
                torch.testing.assert_close(grad, other, rtol=1e-6, atol=1e-6)


@each_once(zero=["first", "last", "never"], n=[1, 2, 3])
def test_a_compiled_step_finds_what_no_sync_left(n, zero):
    expected = train(0, "AdamW", zero, waits=True)
    assert_equal(train(n, "AdamW", zero, waits=True), expected)


@each_once(optimizer=OPTIMIZERS, n=[1, 2])
def test_a_compiled_step_leaves_the_gradients_that_an_uncompiled_one_leaves(n, optimizer):
    zero = "first" if optimizer in ("Rprop", "SGD foreach") else "never"
    assert_equal(train(n, optimizer, zero, waits=False), train(0, optimizer, zero, waits=False))


@pytest.mark.parametrize("num_replicas", quick_of([1, 2, 3], [3]))
def test_a_gradient_that_is_not_finite_is_an_error_that_names_it(num_replicas):
    guards = mirror.Guards(finite_gradients=True)
    strategy = mirror.MirroredStrategy(["cpu"] * num_replicas, guards=guards)
    with strategy.scope():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiled = strategy.compile(usual_step(model, optimizer), mode="trace")
    first, second, (x, y), last = batches([9] * 4)
    x[-1, 0] = float("nan")  # of the last replica
    data = strategy.distribute_dataset([first, second, (x, y), last])
    for i, batch in enumerate(data):
        before = [p.detach().clone() for p in model.parameters()]
        if i != 2:
            compiled(*batch)
            continue
        name = rf"'0.weight' on replica {num_replicas - 1} of {num_replicas}"
        with pytest.raises(mirror.GradientError, match=name):
            compiled(*batch)
        for parameter, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.detach(), value)
    assert compiled.num_traces == 1
    strategy.check_replicas()


@pytest.mark.parametrize("weights", [(3.0, 0.0), (0.0, 3.0), (2.0, 0.0, 1.0)])
def test_a_replica_that_counts_nothing_may_be_nan(weights):
    data = batches([3] * len(weights))
    parts = [
        x if weight else x * float("nan") for (x, _), weight in zip(data, weights, strict=True)
    ]
    x = mirror.PerReplica(parts, weights=weights)
    y = mirror.PerReplica([y for _, y in data], weights=weights)

    def trained(mode):
        torch.manual_seed(0)
        with mirror.MirroredStrategy(["cpu"] * len(weights)) as strategy:
            with strategy.scope():
                model = mlp()
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
            step = usual_step(model, optimizer)
            compiled = strategy.compile(step, mode=mode) if mode else None
            for _ in range(3):
                compiled(x, y) if compiled else strategy.run(step, (x, y))
            assert compiled is None or compiled.num_traces == 1
            return [parameter.detach().clone() for parameter in model.parameters()]

    torch.testing.assert_close(trained("trace"), trained(None))


def train_with_constant_gradients(strategy, inside):
    """Trains; one gradient is a constant of the step, one is left from before for good."""
    torch.manual_seed(0)
    with contextlib.ExitStack() as scopes:
        if inside and strategy is not None:
            scopes.enter_context(strategy.scope())
        net = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 2)]).double()
        if strategy is not None:
            strategy.mirror(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for p in net[1].parameters():
            p.grad = torch.full_like(p, 0.5)

        def step(x, y):
            net[0].zero_grad()
            loss = F.cross_entropy(net[0](x), y)
            loss.backward()
            net[0].bias.grad.zero_()
            optimizer.step()
            return loss.detach()

        compiled = strategy and strategy.compile(step, mode="trace")
        for x, y in batches([4, 4, 1, 1, 4, 1]):  # a lone example is the second replica's
            x, y = x[:, :3].double(), y % 2
            if strategy is None:
                step(x, y)
                continue
            options = mirror.InputOptions(weights=range(1, len(strategy.devices) + 1))
            for batch in strategy.distribute_dataset([(x, y)], options):
                compiled(*batch)
            strategy.check_replicas()
        return [t.detach().clone() for p in net.parameters() for t in (p, p.grad)]


@each_once(num_replicas=[1, 2, 3], inside=[False, True])
def test_an_idle_first_replica_has_the_gradients_that_no_example_changes(num_replicas, inside):
    expected = train_with_constant_gradients(None, inside)
    with mirror.MirroredStrategy(["cpu"] * num_replicas) as strategy:
        found = train_with_constant_gradients(strategy, inside)
    torch.testing.assert_close(found, expected)
