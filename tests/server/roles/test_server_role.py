"""ServerRole: what a server says beside values."""

import pickle

import numpy as np
import pytest
import torch

from mirror.server.roles.server_role import ServerRole
from mirror.server.shard import PieceSpec


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
    set_up(server, 2, 3)  # whose versions begin anew
    third, values = pull(server)
    assert third["version"] == first["version"]
    assert third["once"] not in (first["once"], second["once"])
    assert values[0].view(np.float32).tolist() == [3] * 4


@pytest.mark.parametrize(("to_aggregate", "known"), [(None, -1), (2, 1)])
def test_what_one_worker_pulls_or_has_goes_to_it_alone(to_aggregate, known):
    header, values = pull(role(to_aggregate), known)
    assert "once" not in header
    assert bool(values) == (known == -1)
