"""State and groups that change between steps, or in run, are used by the shared step."""

import sys

import pytest
import torch

import mirror
from tests.oracle import assert_same, assert_same_training, in_run
from tests.replica.optimizers.stepping import (
    SIZE,
    adam,
    batches,
    loss_of,
    momentum,
    pair,
    step_in_run,
)

# State


def test_code_in_run_reads_and_writes_the_state_of_its_replica(strategy):
    (plain, plain_optimizer), (model, optimizer) = pair(strategy, momentum)

    def step(x, model, optimizer):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        buffers = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        for buffer in buffers:
            buffer.mul_(0.5)
        return [buffer.clone() for buffer in buffers]

    for batch in batches(3):
        buffers = in_run(strategy, lambda x: step(x, model, optimizer), batch)
        expected = step(batch, plain, plain_optimizer)
        for replica in strategy.local_results(buffers):
            assert_same(replica, expected)
        strategy.check_replicas()
        assert_same_training(model, optimizer, plain, plain_optimizer)


def test_state_made_to_differ_in_run_is_found(strategy):
    _, (model, optimizer) = pair(strategy, momentum)
    step_in_run(strategy, model, optimizer, torch.randn(6, SIZE))

    def differ():
        r = mirror.get_replica_context().replica_id_in_sync_group
        optimizer.state[model[0].weight]["momentum_buffer"].add_(float(r == 1))

    strategy.run(differ)
    message = "momentum_buffer.*'0.weight'.*replica 1 of 3"
    with pytest.raises(mirror.ReplicaMismatchError, match=message):
        strategy.check_replicas()


def test_parameters_made_to_differ_in_run_are_found(strategy):
    _, (model, optimizer) = pair(strategy, momentum)

    def differ(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        if mirror.get_replica_context().replica_id_in_sync_group == 2:
            with torch.no_grad():
                model[2].bias.add_(1)

    in_run(strategy, differ, torch.randn(6, SIZE))
    with pytest.raises(mirror.ReplicaMismatchError, match=r"'2.bias'.*replica 2 of 3"):
        strategy.check_replicas()


# Groups


def test_code_in_run_sees_the_groups_between_steps(strategy):
    _, (model, optimizer) = pair(strategy, adam)
    weight = model[0].weight

    def step(x):
        for _ in range(3):
            assert [len(group["params"]) for group in optimizer.param_groups] == [4]
            assert optimizer.param_groups[0]["params"][0] is weight
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

    in_run(strategy, step, torch.randn(6, SIZE))


@pytest.mark.replicated_state
@pytest.mark.parametrize("n", [1, 2, 3])
def test_on_one_device_one_step_does_for_all(n, make_strategy, monkeypatch):
    module, steps = sys.modules[torch.optim.SGD.__module__], []
    whole = module.sgd

    def counted(*args, **kwargs):
        steps.append(1)
        whole(*args, **kwargs)

    monkeypatch.setattr(module, "sgd", counted)
    strategy = make_strategy(n)
    _, (model, optimizer) = pair(strategy, momentum)
    step_in_run(strategy, model, optimizer, torch.ones(6, SIZE))
    assert len(steps) == 1


def halved_in_place(options):
    options["lr"].mul_(0.5)


def halved_anew(options):
    options["lr"] = options["lr"] * 0.5


def halved_among_others(options):
    options["rates"][1].mul_(0.5)


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("halve", [halved_in_place, halved_anew, halved_among_others])
def test_a_tensor_that_each_replica_changes_among_the_options_is_refused(
    halve, is_before, make_strategy
):
    strategy = make_strategy(3)
    model = strategy.mirror(torch.nn.Linear(SIZE, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    optimizer.param_groups[0]["rates"] = torch.ones(2)

    def step(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        if is_before:
            halve(optimizer.param_groups[0])
        optimizer.step()
        if not is_before:
            halve(optimizer.param_groups[0])

    name = "rates" if halve is halved_among_others else "lr"
    with pytest.raises(mirror.StrategyError, match=f"'{name}' of parameter group 0 .* N times"):
        in_run(strategy, step, torch.ones(6, SIZE))


def set_alike(options):
    options["lr"].fill_(0.25)


@pytest.mark.parametrize("place", ["in run", "outside", "once"])
def test_an_option_that_all_replicas_set_equally_is_used(place, make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(torch.nn.Linear(SIZE, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(x):
        loss_of(model, x).backward()
        optimizer.step()
        if place == "in run":
            set_alike(optimizer.param_groups[0])
        return float(optimizer.param_groups[0]["lr"])

    in_run(strategy, step, torch.ones(6, SIZE))
    if place == "outside":
        scheduler.step()
    elif place == "once":
        halved_in_place(optimizer.param_groups[0])
    assert strategy.local_results(in_run(strategy, step, torch.ones(6, SIZE))) == (0.25,) * 3
