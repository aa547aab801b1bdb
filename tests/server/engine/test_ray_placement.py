"""Places: actors go to machines with CPUs, one after another."""

import pytest

pytest.importorskip("ray")

from mirror.server.engine import ray_engine


def node(name, alive=True, **resources):
    return {"NodeID": name, "Alive": alive, "Resources": resources}


A, B = "a" * 56, "b" * 56  # as Ray names them
HEAD, GONE = node("c" * 56, memory=1.0), node("d" * 56, alive=False, CPU=8.0)
MACHINES = [HEAD, node(B, CPU=4.0), GONE, node(A, CPU=2.0)]


def test_actors_go_where_there_are_cpus():
    assert ray_engine.nodes_for_actors(MACHINES) == [A, B]
    assert ray_engine.nodes_for_actors([HEAD, GONE]) == ["c" * 56]
    assert ray_engine.nodes_for_actors([GONE]) == []


def test_one_machine_after_another_gets_actors(monkeypatch):
    monkeypatch.setattr(ray_engine.ray, "nodes", lambda: MACHINES)
    chosen = [ray_engine.scheduling_strategy(number) for number in range(4)]
    assert [place.node_id for place in chosen] == [A, B, A, B]
    assert all(place.soft for place in chosen)
    monkeypatch.setattr(ray_engine.ray, "nodes", lambda: [GONE])
    assert ray_engine.scheduling_strategy(0) == "SPREAD"
