"""mirror/cluster/rendezvous.py: ranks, and where workers meet."""

import pytest

from mirror.cluster import ClusterError, ClusterSpec, Rendezvous
from mirror.cluster.rendezvous import rendezvous_of, single_process, split_address

CLUSTER = {
    "worker": ["a:1", "a:2", "b:3"],
    "evaluator": ["e:1"],
    "chief": ["b:9"],
    "ps": ["p:1"],
}


def of(cluster, task_type, task_id):
    return rendezvous_of(ClusterSpec(cluster), task_type, task_id)


def test_the_chief_is_rank_0_and_workers_follow_in_order():
    found = [of(CLUSTER, *task) for task in (("chief", 0), *(("worker", i) for i in range(3)))]
    assert found == [
        Rendezvous(0, 4, "b", 9, 0, 2),
        Rendezvous(1, 4, "b", 9, 0, 2),
        Rendezvous(2, 4, "b", 9, 1, 2),
        Rendezvous(3, 4, "b", 9, 1, 2),
    ]
    assert [each.is_chief for each in found] == [True, False, False, False]


def test_without_a_chief_worker_0_is_it():
    assert of({"worker": ["a:1", "b:2"]}, "worker", 0) == Rendezvous(0, 2, "a", 1, 0, 1)
    assert of({"worker": ["a:1", "b:2"]}, "worker", 1) == Rendezvous(1, 2, "a", 1, 0, 1)


def test_an_evaluator_and_a_process_without_a_cluster_have_no_others():
    assert (
        of(CLUSTER, "evaluator", 0)
        == of({}, "worker", 0)
        == of({}, None, None)
        == single_process()
    )
    assert of({"worker": ["a:1", "b:1"]}, "evaluator", 0) == single_process()
    assert single_process().is_chief


def test_addresses_that_nobody_told_leave_the_place_on_the_machine_open():
    assert of({"worker": ["a:1", "", ""]}, "worker", 1) == Rendezvous(1, 3, "a", 1, None, None)
    assert "LOCAL_RANK" not in of({"worker": ["a:1", ""]}, "worker", 1).variables()


@pytest.mark.parametrize(
    ("cluster", "task", "words"),
    [
        (CLUSTER, ("ps", 0), "parameter server"),
        (CLUSTER, ("worker", 3), "no task 3; it has 0 to 2"),
        (CLUSTER, ("evaluator", 1), "no task 1"),
        (CLUSTER, (None, None), "4 workers, and this process's task is unknown; pass"),
        (CLUSTER, ("worker", None), "4 workers, and this process's task is unknown; pass"),
        ({"worker": ["a:1"]}, ("chief", 0), "no job 'chief'"),
        ({"worker": {1: "a:1"}}, ("worker", 1), "numbered from 0 without gaps"),
        ({"worker": {0: "a:1", 2: "b:1"}}, ("worker", 0), "without gaps"),
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), "there is one chief; got 2"),
        ({**CLUSTER, "evaluator": ["a", "b"]}, ("worker", 0), "one evaluator; got 2"),
        ({"ps": ["a:1"]}, ("worker", 0), "neither a chief nor workers"),
        ({"master": ["a:1"]}, ("master", 0), "got 'master'; call it 'chief'"),
        ({"worker": ["a:1"], "x": ["b"]}, ("worker", 0), "got 'x'$"),
        ({"worker": ["a", "b:1"]}, ("worker", 1), "'host:port'; got 'a'"),
        ({"worker": ["a:0", "b:1"]}, ("worker", 1), "port of rank 0 is 1 to 65535; got 0"),
        ({"worker": ["a:x", "b:1"]}, ("worker", 1), "port of 'a:x' is a number.*got 'x'"),
        ({"worker": ["a:1", "b c:1"]}, ("worker", 0), "an address is.*got 'b c:1'"),
    ],
)
def test_a_cluster_or_task_without_ranks_is_an_error(cluster, task, words):
    with pytest.raises(ClusterError, match=words):
        of(cluster, *task)


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("a:1", ("a", 1)),
        ("node-1.x_y:65535", ("node-1.x_y", 65535)),
        ("10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("[::1]:2222", ("::1", 2222)),
        ("[fe80::1%eth0]", ("fe80::1%eth0", None)),
        ("host", ("host", None)),
    ],
)
def test_an_address_is_split(address, found):
    assert split_address(address) == found


@pytest.mark.parametrize(
    "address", ["", ":1", "a:", "a:-1", "a:65536", "a:1\n", "a:1:2", "[]:1", "::1", "a/b:1", "a b"]
)
def test_what_is_no_address_is_an_error(address):
    with pytest.raises(ClusterError, match=r"address is 'host:port'|the port of"):
        split_address(address)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((2, 2, "a", 1), "2 workers have ranks 0 to 1; got 2"),
        ((-1, 2, "a", 1), "got -1"),
        ((0, 0, "a", 1), "1 to .* workers; got a world size of 0"),
        ((0, 2**21, "a", 1), "got a world size"),
        ((0, 2, "", 1), "a host's name or number; got ''"),
        ((0, 2, "a b", 1), "got 'a b'"),
        ((0, 2, "a", 0), "1 to 65535; got 0"),
        ((0, 1, "a", 65536), "0 to 65535; got 65536"),
        ((0, 2, "a", 1, 2, 2), "LOCAL_RANK=2, but LOCAL_WORLD_SIZE=2"),
        ((0, 2, "a", 1, 2, None), "LOCAL_RANK=2, but LOCAL_WORLD_SIZE=2"),
        ((0, 2, "a", 1, 0, 3), "LOCAL_WORLD_SIZE=3, but WORLD_SIZE=2"),
    ],
)
def test_a_meeting_that_cannot_be_is_an_error(numbers, words):
    with pytest.raises(ClusterError, match=words):
        Rendezvous(*numbers)
