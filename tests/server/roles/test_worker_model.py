"""WorkerModel: how steps may change the worker's model, and how they may not."""

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import StrategyError
from mirror.server import FixedShards


@pytest.fixture(scope="module")
def session():
    """A strategy that tests make modules under, and its coordinator."""
    with mirror.ParameterServerStrategy(
        num_servers=2, num_workers=1, partitioner=FixedShards(2)
    ) as strategy:
        yield strategy, mirror.ClusterCoordinator(strategy)


def run(coordinator, step, *args):
    value = coordinator.schedule(step, args=args)
    coordinator.join()
    return coordinator.fetch(value)


def test_tables_are_pulled_and_pushed_by_rows(session):
    strategy, coordinator = session
    with strategy.scope():
        table = nn.Embedding(1000, 8, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    alone = nn.Embedding(1000, 8, sparse=True)
    alone.load_state_dict(table.state_dict())
    own = torch.optim.SparseAdam(alone.parameters(), lr=0.1)

    def step(ids, table=table, optimizer=optimizer):
        optimizer.zero_grad()
        loss = table(ids).square().sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    run(coordinator, lambda: None)
    before = strategy.report()
    for ids in (torch.tensor([3, 999, 3]), torch.tensor([[0], [500]]), torch.tensor([3, 0])):
        assert run(coordinator, step, ids) == pytest.approx(step(ids, alone, own), abs=1e-5)
    after = strategy.report()
    assert after.pulled_bytes - before.pulled_bytes < 1000
    assert after.pushed_bytes - before.pushed_bytes < 1000
    assert torch.allclose(table.weight, alone.weight, atol=1e-6)
    assert torch.allclose(table.state_dict()["weight"], alone.weight, atol=1e-6)
    states = optimizer.state_dict()["state"][0], own.state_dict()["state"][0]
    assert torch.allclose(states[0]["exp_avg"], states[1]["exp_avg"], atol=1e-6)


def test_a_table_that_is_read_otherwise_is_whole(session):
    strategy, coordinator = session
    with strategy.scope():
        table = nn.Embedding(50, 2, sparse=True)
    total = table.weight.sum().item()
    assert run(coordinator, lambda: table.weight.sum().item()) == pytest.approx(total, abs=1e-4)


def test_buffers_of_normalization_are_those_of_one_device(session):
    strategy, coordinator = session
    with strategy.scope():
        norm = nn.BatchNorm1d(3)
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
    alone = nn.BatchNorm1d(3)
    own = torch.optim.SGD(alone.parameters(), lr=0.1)

    def step(x, norm=norm, optimizer=optimizer):
        optimizer.zero_grad()
        norm(x).square().sum().backward()
        optimizer.step()

    for _ in range(3):
        x = torch.randn(5, 3) + 2
        run(coordinator, step, x)
        step(x, alone, own)
    run(coordinator, lambda x: norm(x).sum().item(), x)  # without a step of an optimizer
    alone(x)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[name], value, msg=name)


def test_steps_see_the_modes_of_now(session):
    strategy, coordinator = session
    with strategy.scope():
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))

    def read_flags():
        found = model.training, model[1].weight.requires_grad, model[0].p
        model.train()
        return found

    assert run(coordinator, read_flags) == (True, True, 0.5)
    model.eval()
    model[1].requires_grad_(False)
    model[0].p = 0.25
    for _ in range(2):
        assert run(coordinator, read_flags) == (False, False, 0.25)


def test_several_steps_of_optimizers_in_one_see_each_other(session):
    strategy, coordinator = session
    with strategy.scope():
        model = nn.Linear(2, 1)
        one = torch.optim.SGD([model.weight], lr=0.5, momentum=0.5)
        two = torch.optim.Adam([model.bias], lr=0.1)
    alone = nn.Linear(2, 1)
    alone.load_state_dict(model.state_dict())
    own = (torch.optim.SGD([alone.weight], lr=0.5, momentum=0.5),
           torch.optim.Adam([alone.bias], lr=0.1))  # fmt: skip

    def step(x, model, optimizers):
        losses = []
        for optimizer in (*optimizers, *optimizers):
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        return losses

    x = torch.randn(4, 2)
    for _ in range(2):
        found = run(coordinator, step, x, model, (one, two))
        assert found == pytest.approx(step(x, alone, own), abs=1e-5)


def test_a_closure_is_called_once_and_its_loss_returned(session):
    strategy, coordinator = session
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(1, 1)).sum()
            loss.backward()
            return loss

        return optimizer.step(closure).item(), isinstance(optimizer, torch.optim.SGD)

    before = model.weight.item()
    loss, is_kind = run(coordinator, step)
    assert is_kind
    assert model.weight.item() == pytest.approx(before - 0.1)
    assert loss == pytest.approx(before + model.bias.item() + 0.1, abs=1e-5)


def test_what_would_be_lost_is_refused(session):
    strategy, coordinator = session
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clamp():
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        with torch.no_grad():
            model.weight.clamp_(0, 0.01)
        optimizer.step()

    def anneal():
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()

    with pytest.raises(StrategyError, match=r"changed the parameter .*weight in place"):
        run(coordinator, clamp)
    with pytest.raises(StrategyError, match="changed the options of SGD"):
        run(coordinator, anneal)


def test_a_clamp_without_an_optimizers_step_is_refused_too(session):
    strategy, coordinator = session
    with strategy.scope():
        model = nn.Linear(1, 1)

    def clamp():
        with torch.no_grad():
            model.weight.fill_(5)

    with pytest.raises(StrategyError, match=r"changed the parameter .*weight in place"):
        run(coordinator, clamp)


def test_the_strategy_runs_a_function_on_the_worker(session):
    strategy, coordinator = session

    def step(x):
        losses = strategy.run(lambda x: x * 2, args=(x,))
        return strategy.reduce("sum", losses, axis=0), strategy.num_replicas_in_sync

    assert run(coordinator, step, torch.ones(3)) == (6, 1)


def test_a_result_may_name_the_model_and_has_no_graph(session):
    strategy, coordinator = session
    with strategy.scope():
        model = nn.Linear(2, 2)
    found, weight, loss = run(coordinator, lambda: (model, model.weight, model.weight.sum()))
    assert found is model
    assert torch.equal(weight, model.weight)
    assert not loss.requires_grad


def test_a_dataset_may_not_hold_the_model(session):
    strategy, coordinator = session
    with strategy.scope():
        model = nn.Linear(2, 2)
    run(coordinator, lambda: None)
    with pytest.raises(ValueError, match="holds a Linear of the strategy"):
        coordinator.create_per_worker_dataset(lambda: [model(torch.ones(1, 2))])


def test_large_variables_are_received_where_they_are(session):
    strategy, coordinator = session
    with strategy.scope():
        model = nn.Linear(300, 200)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = nn.Linear(300, 200)
    alone.load_state_dict(model.state_dict())
    own = torch.optim.SGD(alone.parameters(), lr=0.1)

    def step(x, model=model, optimizer=optimizer):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    def late():
        loss = model(torch.ones(2, 300)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        model(torch.ones(2, 300))  # pulls
        torch.autograd.grad(loss, model.weight, retain_graph=True)
        x = torch.ones(2, 300, requires_grad=True)
        out = model(x).sum()
        optimizer.step()
        model(x)
        out.backward()

    for _ in range(3):
        x = torch.randn(4, 300)
        assert run(coordinator, step, x) == pytest.approx(step(x, alone, own), rel=1e-4)
    torch.testing.assert_close(model.weight, alone.weight, atol=1e-5, rtol=1e-5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(coordinator, late)
