"""Tasks: which clusters are of parameter servers, and where their tasks are."""

from typing import Any

import pytest

from mirror.cluster import ClusterSpec, SimpleResolver
from mirror.errors import ClusterError, StrategyError
from mirror.server.cluster_tasks import host_and_port, tasks_of

JOBS: Any = {"ps": ["a:1", "b:2"], "worker": {0: "c:3", 2: "[::1]:4"}, "chief": ["d:5"]}


@pytest.mark.parametrize(
    "cluster", [JOBS, ClusterSpec(JOBS), SimpleResolver(ClusterSpec(JOBS), task_type="chief")]
)
def test_tasks_have_names_and_addresses(cluster):
    assert tasks_of(cluster).by_name() == {
        "server 0": ("a", 1),
        "server 1": ("b", 2),
        "worker 0": ("c", 3),
        "worker 1": ("::1", 4),
    }


@pytest.mark.parametrize("address", ["a", "a:", ":1", "a:b", "a:65536", "::1:3", "a b:1", "a:1:2"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ClusterError, match="an address is 'host:port'"):
        host_and_port(address)
    with pytest.raises(ValueError, match="an address is"):
        tasks_of({"ps": [address], "worker": ["w:1"]})


def test_two_tasks_at_one_address_are_refused():
    with pytest.raises(ValueError, match="an address of its own; got 'a:1'"):
        tasks_of({"ps": ["a:1"], "worker": ["a:1"]})


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_a_process_that_serves_has_no_strategy(job):
    resolver = SimpleResolver(ClusterSpec(JOBS), task_type=job, task_id=0)
    with pytest.raises(StrategyError, match=f"task 0 of job '{job}'.*Server"):
        tasks_of(resolver)
