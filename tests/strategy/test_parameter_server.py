"""ParameterServerStrategy: its arguments, its errors, and its repr."""

import copy

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import StrategyError
from mirror.server import FixedShards


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_servers": 0}, "num_servers must be an integer from 1 on, got 0"),
        ({"num_workers": -1}, "num_workers must be an integer from 1 on"),
        ({"num_workers": 1.5}, "num_workers must be an integer"),
        ({"num_workers": True}, "num_workers must be an integer"),
        ({"sync": "yes"}, "sync must be a bool"),
        ({"replicas_to_aggregate": 2}, "pass sync=True"),
        ({"sync": True, "replicas_to_aggregate": 0}, "replicas_to_aggregate must be"),
        ({"sync": True, "max_staleness": 1}, "max_staleness works with asynchronous updates only"),
        ({"max_staleness": -1}, "max_staleness must be an integer from 0 on"),
        ({"partitioner": 3}, "partitioner must be"),
        ({"placement": "anywhere"}, "placement must be one of 'round_robin'"),
        ({"engine": "rpc"}, "engine must be one of 'auto', 'process', 'ray'"),
        ({"cluster": {"ps": [], "worker": ["a:1"]}}, "at least one ps; got none"),
        ({"cluster": {"ps": ["a:1"]}}, "at least one worker; got none"),
        ({"cluster": {"ps": ["a:1"], "worker": ["b:1"], "evaluator": ["c:1"]}}, "'evaluator'"),
        (
            {"cluster": {"ps": ["a:1"], "worker": ["b:1"], "chief": ["c:1", "d:1"]}},
            "at most one chief",
        ),
        (
            {"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "num_workers": 1},
            "give either it or these",
        ),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options, text):
    with pytest.raises(ValueError, match=text):
        mirror.ParameterServerStrategy(**options)


def test_a_cluster_says_how_many_there_are():
    jobs = {"ps": ["a:1", "b:1"], "worker": ["c:1", "d:1", "e:1"], "chief": ["f:1"]}
    for cluster in (
        jobs,
        mirror.cluster.ClusterSpec(jobs),
        mirror.cluster.SimpleResolver(mirror.cluster.ClusterSpec(jobs)),
    ):
        strategy = mirror.ParameterServerStrategy(cluster=cluster)
        assert (strategy.num_servers, strategy.num_workers) == (2, 3)


def test_its_repr_names_its_options():
    strategy = mirror.ParameterServerStrategy(2, 3, sync=True, replicas_to_aggregate=2)
    assert repr(strategy) == "ParameterServerStrategy(num_servers=2, num_workers=3, sync of 2)"
    assert strategy.num_replicas_in_sync == 2
    assert mirror.ParameterServerStrategy().num_replicas_in_sync == 1
    assert strategy.devices == (torch.device("cpu"),)
    assert strategy.backend == "auto"
    assert "steps           0" in str(strategy.report())


def test_scopes_are_of_one_strategy():
    strategy = mirror.ParameterServerStrategy()
    with strategy.scope(), strategy.scope():
        assert mirror.get_strategy() is strategy
        with pytest.raises(StrategyError, match="the scope of ParameterServerStrategy"):
            mirror.MirroredStrategy(["cpu"]).scope().__enter__()
    assert not mirror.has_strategy()
    other = mirror.MirroredStrategy(["cpu"])
    with other.scope(), pytest.raises(StrategyError, match="the scope of MirroredStrategy"):
        strategy.scope().__enter__()
    with other, pytest.raises(StrategyError, match="inside run of another strategy"):
        other.run(lambda: strategy.scope().__enter__())
    strategy.close()
    with pytest.raises(StrategyError, match="closed"):
        strategy.scope().__enter__()


def test_run_and_reduce_outside_of_a_step_warn():
    strategy = mirror.ParameterServerStrategy()
    with pytest.warns(UserWarning, match=r"strategy\.run was called outside of a step"):
        assert strategy.run(lambda x, y: x + y, (1,), {"y": 2}) == 3
    with pytest.warns(UserWarning, match=r"strategy\.reduce was called outside"):
        assert strategy.reduce("mean", torch.tensor([1.0, 3.0]), axis=0) == 2
    with pytest.warns(UserWarning, match="outside"), pytest.raises(ValueError, match="op must be"):
        strategy.reduce("median", torch.ones(2), axis=0)
    with pytest.warns(UserWarning, match=r"strategy\.gather"):
        assert strategy.gather(5) == 5
    assert strategy.local_results(5) == (5,)


@pytest.mark.parametrize(
    "name",
    "compile distribute_dataset distribute_dataset_from_function "
    "distribute_values_from_function no_sync check_replicas trace".split(),
)
def test_members_of_replicas_are_refused_with_what_to_do(name):
    with pytest.raises(StrategyError, match=f"has no {name}, which concerns replicas; "):
        getattr(mirror.ParameterServerStrategy(), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mirror.ParameterServerStrategy().nothing


def test_it_is_not_copied():
    with pytest.raises(TypeError, match="belongs to the process"):
        copy.copy(mirror.ParameterServerStrategy())


def test_a_placement_function_of_an_unknown_server_is_named_when_steps_begin():
    with mirror.ParameterServerStrategy(placement=lambda *question: 7) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1)
        coordinator = mirror.ClusterCoordinator(strategy)
        with pytest.raises(ValueError, match=r"0 to 0; for weight it has returned 7"):
            coordinator.schedule(lambda: model.bias.item())


def test_a_model_made_elsewhere_is_taken_and_the_report_counts(recwarn):
    options = {"num_servers": 2, "partitioner": FixedShards(2)}
    with mirror.ParameterServerStrategy(**options) as strategy:
        model = strategy.mirror(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(TypeError, match=r"mirror takes a torch\.nn\.Module"):
            strategy.mirror(5)
        coordinator = mirror.ClusterCoordinator(strategy)

        def step():
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

        for _ in range(5):
            coordinator.schedule(step)
        coordinator.join()
        report = strategy.report()
        assert (report.num_steps, report.num_updates, report.num_dropped) == (5, 5, 0)
        assert report.staleness == {0: 5}
        assert report.server_bytes == (32, 32)
        assert report.pulled_bytes == 5 * 64
        assert report.pushed_bytes == 5 * 64
        text = str(report)
        assert "        0       5" in text
        assert 0 < report.pull_seconds + report.push_seconds < report.step_seconds
    assert not recwarn.list


def test_what_is_too_stale_is_dropped():
    with mirror.ParameterServerStrategy(num_workers=1, max_staleness=0) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        coordinator = mirror.ClusterCoordinator(strategy)

        def step():
            loss = model(torch.ones(1, 1)).sum()
            loss.backward()
            optimizer.step()  # which makes the gradient of the next one stale
            optimizer.step()

        start = model.weight.item()
        coordinator.schedule(step)
        coordinator.join()
        assert model.weight.item() == pytest.approx(start - 2)
        assert strategy.report().staleness == {0: 2}
