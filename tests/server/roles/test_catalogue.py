"""The behaviour that TensorFlow's tests of its coordinator and strategy pin, in their order."""

import functools
import threading
import time
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import StepError, StrategyError
from mirror.server import FixedShards

Pair = namedtuple("Pair", "first second")


@pytest.fixture(scope="module")
def coordinator():
    with mirror.ParameterServerStrategy(num_servers=1, num_workers=2) as strategy:
        yield mirror.ClusterCoordinator(strategy)


def plain(x=0):
    return x


def fails(text="it"):
    raise KeyError(text)


# Errors


def test_schedule_raises_the_error_of_a_step_before_and_then_goes_on(coordinator):
    coordinator.schedule(fails)
    with pytest.raises(KeyError, match="it"):
        while True:
            coordinator.schedule(plain)
    coordinator.join()
    assert coordinator.fetch(coordinator.schedule(plain, args=(3,))) == 3


def test_of_many_errors_at_once_one_is_raised(coordinator):
    values = [coordinator.schedule(fails) for _ in range(2)]
    with pytest.raises(KeyError):
        coordinator.join()
    for value in values:
        with pytest.raises((KeyError, StrategyError)):
            value.fetch()
    assert coordinator.done()
    coordinator.join()


def test_what_waited_for_a_failed_step_is_cancelled_and_says_why(coordinator):
    coordinator.schedule(fails)
    values = []
    with pytest.raises(KeyError):
        while True:
            values.append(coordinator.schedule(time.sleep, args=(0.01,)))
    cancelled = []
    for value in values:
        try:
            value.fetch()
        except StrategyError as error:
            cancelled.append(error)
    for error in cancelled:
        assert isinstance(error.__cause__, KeyError)
    coordinator.join()


class CodedError(Exception):
    """Cannot be made of its ``args``, as pickle would; many libraries' errors are like that."""

    def __init__(self, code, what):
        super().__init__(f"{what} has code {code}")
        self.code = code


def test_errors_are_of_the_class_that_was_raised(coordinator):
    def step():
        raise CodedError(7, "this")

    value = coordinator.schedule(step)
    for call in (coordinator.join, value.fetch):
        with pytest.raises(CodedError, match="this has code 7") as raised:
            call()
        assert raised.value.code == 7


# Values


def test_structures_are_fetched_as_they_are(coordinator):
    value = coordinator.schedule(lambda: {"a": [1, (2, None)]})
    structure = OrderedDict(b=Pair(value, "text"), c=[value, (value,)], d=torch.ones(2))
    found = coordinator.fetch(structure)
    assert found["b"] == ({"a": [1, (2, None)]}, "text")
    assert type(found["b"]) is Pair
    assert found["c"] == [found["b"].first, (found["b"].first,)]
    assert found["d"] is structure["d"]
    assert coordinator.fetch(5) == 5
    assert value.get() == value.fetch() == {"a": [1, (2, None)]}


def test_done_tells_whether_all_have_ended(coordinator, tmp_path):
    def step():
        while not (tmp_path / "go").exists():
            time.sleep(0.01)

    value = coordinator.schedule(step)
    assert not coordinator.done()
    assert not value.done()
    (tmp_path / "go").touch()
    coordinator.join()
    assert coordinator.done()
    assert value.done()


# Arguments


@dataclass
class Both:
    one: object
    other: object = None


def test_datasets_are_anywhere_among_the_arguments_and_in_closures(coordinator):
    data = [coordinator.create_per_worker_dataset([k] * 1000) for k in range(3)]
    iterator = iter(data[2])

    def step(first, *, nested, both):
        return first, nested["x"][0], both.one, next(both.other), next(iterator)

    values = [
        coordinator.schedule(
            step,
            args=(data[0],),
            kwargs={"nested": {"x": [data[1]]}, "both": Both(data[2], iterator)},
        )
        for _ in range(10)
    ]
    assert coordinator.fetch(values) == [(0, 1, 2, 2, 2)] * 10


class Trainer:
    def __init__(self):
        self.by = 2

    def times(self, x):
        return x * self.by

    def __call__(self, x):
        return x + self.by


@pytest.mark.parametrize(
    "fn",
    [Trainer().times, Trainer(), functools.partial(plain, 6), lambda x: x + 3, (3).__add__],
    ids=["method", "object", "partial", "lambda", "of a builtin"],
)
def test_every_kind_of_function_is_a_step(coordinator, fn):
    args = () if isinstance(fn, functools.partial) else (3,)
    assert coordinator.fetch(coordinator.schedule(fn, args)) in (5, 6)


async def waits():
    pass


def yields():
    yield


@pytest.mark.parametrize("fn", [waits, yields, functools.partial(yields), Trainer, None])
def test_what_is_no_step_is_refused(coordinator, fn):
    with pytest.raises(TypeError, match="schedule takes"):
        coordinator.schedule(fn)


def test_steps_cannot_schedule_steps(coordinator):
    with pytest.raises((StepError, TypeError), match="cannot schedule others"):
        coordinator.schedule(lambda: coordinator.schedule(plain))
    coordinator.join()


@pytest.mark.parametrize(
    "value", [threading.Lock, lambda: [(i for i in range(3))]], ids=["a lock", "in a list"]
)
def test_a_result_that_cannot_be_sent_is_named(coordinator, value):
    coordinator.schedule(lambda: value())
    with pytest.raises(StepError, match=r"has returned .*cannot be sent.*cannot pickle"):
        coordinator.join()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_values_for_another_number_of_workers_are_refused(coordinator, count):
    values = mirror.server.PerWorkerValues(range(count))
    for args in ((values,), ([{"x": values}],)):
        with pytest.raises(ValueError, match=f"each of 2 workers; got {count}"):
            coordinator.schedule(plain, args=args)


def test_a_coordinators_things_are_no_others(coordinator):
    data = coordinator.create_per_worker_dataset([1])
    with mirror.ParameterServerStrategy() as strategy:
        other = mirror.ClusterCoordinator(strategy)
        other.create_per_worker_dataset([2])
        for argument in (data, iter(data)):
            with pytest.raises(ValueError, match="another coordinator's; call create_per_worker"):
                other.schedule(plain, args=(argument,))
        foreign = coordinator.strategy
        with foreign.scope():
            model = nn.Linear(1, 1)
        with pytest.warns(UserWarning, match="holds 'model', a Linear that is not on the servers"):
            value = other.schedule(lambda: model.weight.item())
        other.join()
        assert value.fetch() == model.weight.item()
        with pytest.raises(StepError, match="a ParameterServerStrategy, cannot be pickled"):
            other.schedule(lambda: foreign.num_servers)


def test_an_optimizer_whose_steps_are_lost_is_warned_of(coordinator):
    own = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)

    def step():
        own(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    lost = "'optimizer', a SGD of other parameters, so its steps on a worker are lost"
    with pytest.warns(UserWarning, match="'own', a Linear"), pytest.warns(UserWarning, match=lost):
        coordinator.schedule(step)
    coordinator.join()


# Threads and scopes


def test_several_threads_schedule_at_once(coordinator):
    found = {}

    def many(k):
        found[k] = [coordinator.schedule(plain, args=((k, n),)) for n in range(10)]

    threads = [threading.Thread(target=many, args=[k]) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    coordinator.join()
    assert coordinator.fetch(found) == {k: [(k, n) for n in range(10)] for k in range(4)}


def test_steps_are_scheduled_in_the_scope_of_another_strategy_but_not_in_its_run(coordinator):
    with mirror.MirroredStrategy(["cpu"] * 2) as other:
        with other.scope():
            value = coordinator.schedule(mirror.has_strategy)
            coordinator.join()
            assert value.fetch() is False
        for call in (
            lambda: coordinator.schedule(plain),
            coordinator.join,
            lambda: coordinator.create_per_worker_dataset([1]),
        ):
            with pytest.raises(StrategyError, match="inside run of another strategy"):
                other.run(call)


# Variables


MORE = [pytest.param(pieces, marks=[pytest.mark.slow]) for pieces in [(2, 5), (3, 1)]]


@pytest.mark.parametrize("pieces", [(4, 2), *MORE])
def test_pieces_of_variables_are_restored_into_other_numbers(tmp_path, pieces):
    weights = []
    for number, shards in enumerate(pieces):
        options = {"num_servers": shards, "partitioner": FixedShards(shards)}
        with mirror.ParameterServerStrategy(**options) as strategy:
            with strategy.scope():
                model = nn.Linear(3, 7)
                optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

            def step(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).square().sum().backward()
                optimizer.step()

            coordinator = mirror.ClusterCoordinator(strategy)
            checkpoint = mirror.Checkpoint(model=model, optimizer=optimizer)
            if number:
                checkpoint.restore(tmp_path / "saved")
            coordinator.schedule(step)
            coordinator.join()
            if not number:
                checkpoint.save(tmp_path / "saved")
                coordinator.schedule(step)
                coordinator.join()
            weights.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*weights, strict=True):
        torch.testing.assert_close(a, b)


def test_an_update_may_need_more_gradients_than_there_are_workers():
    options = {"num_workers": 2, "sync": True, "replicas_to_aggregate": 3}
    with mirror.ParameterServerStrategy(**options) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            model.weight.zero_()

        def step():
            optimizer.zero_grad()
            model(-torch.ones(1, 1)).sum().backward()
            optimizer.step()

        coordinator = mirror.ClusterCoordinator(strategy)
        for _ in range(9):
            coordinator.schedule(step)
        coordinator.join()
        report = strategy.report()
        given = 3 * report.num_updates + report.num_dropped + report.num_waiting
        assert given == 9
        assert model.weight.item() == report.num_updates >= 1
