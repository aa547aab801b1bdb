"""MultiWorkerMirroredStrategy: what several processes train is what one device would."""

import json
from pathlib import Path

import torch

import mirror
from tests.multi_worker import strategy_of


def made():
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
    contexts = strategy.distribute_values_from_function(
        lambda c: (c.replica_id_in_sync_group, c.num_replicas_in_sync)
    )
    ids = strategy.run(lambda: mirror.get_replica_context().replica_id_in_sync_group)
    names = strategy._group.replicas.names
    return strategy.num_replicas_in_sync, names, str(contexts), int(strategy.local_results(ids)[0])


def test_replicas_are_counted_over_all_workers(worker_pool):
    found = worker_pool(2).run(made)
    assert [n for n, _, _, _ in found] == [2, 2]
    assert found[1][1] == ("replica 1 of 2 (worker 1, cpu)",)
    assert [own for _, _, _, own in found] == [0, 1]


def drawn():
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
    torch.manual_seed(3)
    own = strategy.run(lambda: torch.rand(()))
    return float(strategy.local_results(own)[0]), float(torch.rand(()))


def test_workers_draw_apart_within_runs_and_alike_between_them(worker_pool):
    (own, between), (others, too) = worker_pool(2).run(drawn)
    assert own != others
    assert between == too


def test_one_worker_is_a_mirrored_strategy(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    with mirror.MultiWorkerMirroredStrategy(["cpu"] * 2) as strategy:
        assert strategy.num_replicas_in_sync == 2
        assert strategy.cluster_resolver is None
        assert strategy._group.replicas.names[1] == "replica 1 of 2 (cpu)"


def looked_at(folder):
    with strategy_of((1, 2)) as strategy:
        layer = strategy.mirror(torch.nn.Linear(2, 1))
        with strategy.trace(Path(folder) / "step.json"):
            layer(torch.ones(2, 2)).sum().backward()
            assert layer.weight.grad is not None
            strategy.run(lambda: mirror.get_replica_context().all_reduce("sum", torch.ones(1)))
        report = strategy.report()
        return str(report).splitlines()[0], report.num_replicas


def test_traces_and_reports_are_of_a_worker(worker_pool, tmp_path):
    (first, one), (second, two) = worker_pool(2).run(looked_at, str(tmp_path))
    assert (one, two) == (1, 2)
    assert first.endswith("on 1 replicas of worker 0 of 2")
    assert second.endswith("on 2 replicas of worker 1 of 2")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step.worker0.json",
        "step.worker1.json",
    ]
    trace = json.loads((tmp_path / "step.worker1.json").read_text())
    lanes = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert "replica 2 of 3 (worker 1, cpu)" in lanes
    assert any(event.get("name") == "gradients of all workers" for event in trace["traceEvents"])


def run_within_a_merge():
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])

    def fn():
        merge = mirror.get_replica_context().merge_call
        return merge(lambda strategy: strategy.local_results(strategy.run(lambda: 5)))

    return strategy.local_results(strategy.run(fn))


def test_a_run_within_a_merge_is_the_workers_own(worker_pool):
    assert worker_pool(2).run(run_within_a_merge) == [((5,),)] * 2
