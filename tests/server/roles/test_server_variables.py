"""Variables on servers: read, written, saved, restored; ServerRole."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import mirror
from mirror.errors import StrategyError
from mirror.server import FixedShards
from mirror.server.shard import PieceSpec, ServerRole


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batches(num=6, rows=6):
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator))
        for _ in range(num)
    ]


def alone(make_optimizer, data):
    model = net()
    optimizer = make_optimizer(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


class Trained:
    """A strategy, and a step over a model made under its scope."""

    def __init__(self, make_optimizer=adam, **options):
        self.strategy = mirror.ParameterServerStrategy(**options)
        with self.strategy.scope():
            self.model = net()
            self.optimizer = make_optimizer(self.model.parameters())
        self.coordinator = mirror.ClusterCoordinator(self.strategy)

    def step(self):
        model, optimizer = self.model, self.optimizer

        def step(x, y):
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    def train(self, data):
        for batch in data:
            self.coordinator.schedule(self.step(), args=batch)
        self.coordinator.join()


@pytest.fixture
def make():
    made = []

    def make(*args, **options):
        made.append(Trained(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.strategy.close()


def assert_equal(model, other, tolerance=1e-5):
    for (name, a), (_, b) in zip(
        model.state_dict().items(), other.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, msg=name)


def test_one_worker_is_one_device_however_variables_are_placed(make):
    expected, optimizer = alone(adam, batches())
    for options in (
        {"num_servers": 3, "partitioner": FixedShards(2)},
        {"num_servers": 2, "placement": "largest_first", "sync": True},
        {"num_servers": 2, "placement": lambda name, shape, dtype, n: int("weight" in name)},
    ):
        one = make(**options)
        one.train(batches())
        assert_equal(one.model, expected)
        found = one.optimizer.state_dict()
        torch.testing.assert_close(found["state"], optimizer.state_dict()["state"])
        assert found["param_groups"] == optimizer.state_dict()["param_groups"]


def test_synchronous_workers_are_one_device_on_the_whole_batch(make):
    expected, _ = alone(adam, batches())
    one = make(num_servers=2, num_workers=2, sync=True, partitioner=FixedShards(2))
    for x, y in batches():
        for part in (slice(0, 4), slice(4, 6)):  # weighted by examples
            one.coordinator.schedule(one.step(), args=(x[part], y[part]))
        one.coordinator.join()
    assert_equal(one.model, expected)
    report = one.strategy.report()
    assert (report.num_updates, report.num_dropped, report.num_waiting) == (6, 0, 0)


def test_every_way_to_read_the_model_sees_what_the_servers_have(make):
    expected, _ = alone(adam, batches())
    one = make(num_servers=2)
    held = list(one.model.parameters())
    for batch in batches():
        value = one.coordinator.schedule(one.step(), args=batch)
    value.fetch()  # no join
    assert torch.allclose(one.model[0].weight, expected[0].weight, atol=1e-5)
    assert torch.allclose(one.model(batches()[0][0]), expected(batches()[0][0]), atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(held, expected.parameters(),
                                                              strict=True))  # fmt: skip


def test_what_the_program_writes_reaches_the_servers(make):
    one = make(num_servers=2)
    one.train(batches(2))
    with torch.no_grad():
        one.model[2].bias.fill_(7.0)
        held = one.model[0].bias
        held.zero_()
    model = one.model

    def read_biases():
        return model[2].bias.sum().item(), model[0].bias.sum().item()

    assert one.coordinator.fetch(one.coordinator.schedule(read_biases)) == (21.0, 0.0)
    one.model.load_state_dict(net().state_dict())
    one.optimizer.load_state_dict(adam(net().parameters()).state_dict())
    one.train(batches())
    assert_equal(one.model, alone(adam, batches())[0])


def test_a_schedule_of_rates_holds_on_the_servers(make):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)

    model = net()
    optimizer = sgd(model.parameters())
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3)
    one = make(sgd, num_servers=2, sync=True)
    their_rates = torch.optim.lr_scheduler.StepLR(one.optimizer, 2, gamma=0.3)
    for x, y in batches():
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        rates.step()
        one.coordinator.schedule(one.step(), args=(x, y))
        one.coordinator.join()
        their_rates.step()
    assert_equal(one.model, model)


def test_a_step_in_this_process_counts_between_steps(make):
    one = make(num_servers=2)
    data = batches()
    one.train(data[:2])
    Trained.step(one)(*data[2])
    one.train(data[3:])
    assert_equal(one.model, alone(adam, data)[0])


def test_a_checkpoint_goes_into_any_number_of_servers(make, tmp_path):
    data = batches()
    one = make(num_servers=4, partitioner=FixedShards(4))
    one.train(data[:3])
    mirror.Checkpoint(model=one.model, optimizer=one.optimizer).save(tmp_path / "c")
    one.strategy.close()
    expected, _ = alone(adam, data)
    two = make(num_servers=2, partitioner=FixedShards(2))
    mirror.Checkpoint(model=two.model, optimizer=two.optimizer).restore(tmp_path / "c")
    two.train(data[3:])
    assert_equal(two.model, expected)
    mirror.Checkpoint(model=two.model, optimizer=two.optimizer).restore(tmp_path / "c")
    two.train(data[3:])  # restored where it has been trained
    assert_equal(two.model, expected)
    plain = net()
    optimizer = adam(plain.parameters())
    mirror.Checkpoint(model=plain, optimizer=optimizer).restore(tmp_path / "c")
    for x, y in data[3:]:
        optimizer.zero_grad()
        mse_loss(plain(x), y).backward()
        optimizer.step()
    assert_equal(plain, expected)


def test_modules_made_later_are_placed_too(make):
    one = make(num_servers=2, partitioner=FixedShards(2))
    one.train(batches(3))
    with one.strategy.scope():
        later = nn.Linear(3, 1)
    with torch.no_grad():
        later.bias.fill_(2.5)
    assert one.coordinator.fetch(one.coordinator.schedule(lambda: later.bias.item())) == 2.5
    one.train(batches()[3:])
    assert_equal(one.model, alone(adam, batches())[0])


def test_optimizers_that_cannot_be_apart_are_refused_by_name(make):
    one = make(
        lambda ps: torch.optim.Adafactor(ps, lr=0.01), num_servers=2, partitioner=FixedShards(2)
    )
    with pytest.raises(StrategyError, match=r"Adafactor.*partitioner="):
        one.train(batches(1))
    two = make(lambda ps: torch.optim.LBFGS(ps), num_servers=1)
    with pytest.raises(StrategyError, match="LBFGS cannot be stepped"):
        two.train(batches(1))


def test_an_optimizer_of_others_variables_too_is_refused(make):
    one = make(num_servers=1)
    extra = nn.Parameter(torch.zeros(2))
    one.optimizer.add_param_group({"params": [extra]})
    with pytest.raises(StrategyError, match="1 other tensors"):
        one.train(batches(1))


def test_what_travels_by_value_and_is_large_is_warned_of_once_by_name(make):
    one = make(num_servers=1)
    plain = nn.Linear(2, 2)
    table = torch.zeros(1 << 19)
    with pytest.warns(UserWarning, match="holds 'plain', a Linear that is not on the servers"):
        one.coordinator.schedule(lambda: plain.weight.shape)
    with pytest.warns(UserWarning, match=r"holds 'args\[0\]', a float32 tensor .* of 2 MiB"):
        one.coordinator.schedule(torch.sum, args=(table,))
    one.coordinator.schedule(lambda: plain.weight.shape)
    one.coordinator.join()


def role(to_aggregate):
    server = ServerRole(0)
    set_up(server, to_aggregate, 1)
    return server


def set_up(server, to_aggregate, value):
    held = [PieceSpec(0, (4,), torch.float32, 0)]
    header = {
        "num_bytes": 16,
        "dense_bytes": 16,
        "to_aggregate": to_aggregate,
        "max_staleness": None,
    }
    server.set_up(header, [pickle.dumps(held)])
    server.assign({"pieces": [0]}, [np.full(4, value, np.float32).view(np.uint8)])


def pull(server, known=-1, **more):
    return server.pull({"known": known, **more}, [])


def test_values_that_all_workers_pull_are_told_apart_by_what_they_are():
    server = role(2)
    first, values = pull(server)
    assert pull(server)[0]["once"] == first["once"]
    assert pull(server, large=[0])[0]["once"] != first["once"]
    assert values[0].view(np.float32).tolist() == [1] * 4
    server.assign({"pieces": [0]}, [np.full(4, 2, np.float32).view(np.uint8)])
    second, _ = pull(server, known=first["version"])
    assert second["once"] != first["once"]
    set_up(server, 2, 3)  # its versions start at 0 again
    third, values = pull(server)
    assert third["version"] == first["version"]
    assert third["once"] not in (first["once"], second["once"])
    assert values[0].view(np.float32).tolist() == [3] * 4


@pytest.mark.parametrize(("to_aggregate", "known"), [(None, -1), (2, 1)])
def test_what_one_worker_pulls_or_has_goes_to_it_alone(to_aggregate, known):
    header, values = pull(role(to_aggregate), known)
    assert "once" not in header
    assert bool(values) == (known == -1)
