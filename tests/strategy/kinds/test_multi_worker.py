"""MultiWorkerMirroredStrategy: what several processes train is what one device would."""

import torch

import mirror


def made():
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
    contexts = strategy.distribute_values_from_function(
        lambda c: (c.replica_id_in_sync_group, c.num_replicas_in_sync)
    )
    ids = strategy.run(lambda: mirror.get_replica_context().replica_id_in_sync_group)
    names = strategy._group.replicas.names
    return strategy.num_replicas_in_sync, names, str(contexts), int(strategy.local_results(ids)[0])


def test_replicas_are_counted_over_all_workers(crew):
    found = crew(2).run(made)
    assert [n for n, _, _, _ in found] == [2, 2]
    assert found[1][1] == ("replica 1 of 2 (worker 1, cpu)",)
    assert [own for _, _, _, own in found] == [0, 1]


def drawn():
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])
    torch.manual_seed(3)
    own = strategy.run(lambda: torch.rand(()))
    return float(strategy.local_results(own)[0]), float(torch.rand(()))


def test_workers_draw_apart_within_runs_and_alike_between_them(crew):
    (own, between), (others, too) = crew(2).run(drawn)
    assert own != others
    assert between == too


def test_one_worker_is_a_mirrored_strategy(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    with mirror.MultiWorkerMirroredStrategy(["cpu"] * 2) as strategy:
        assert strategy.num_replicas_in_sync == 2
        assert strategy.cluster_resolver is None
        assert strategy._group.replicas.names[1] == "replica 1 of 2 (cpu)"
