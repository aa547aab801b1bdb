"""What all resolvers have, apply(), ranks, the rendezvous, and errors in environment variables."""

import json
import os

import pytest
import torch

from mirror.cluster import ClusterError, ClusterResolver, ClusterSpec, Rendezvous, SimpleResolver
from mirror.cluster.rendezvous import (
    MAX_PROCESSES,
    EnvironmentVariables,
    integer,
    rendezvous_of,
    single_process,
    split_address,
)

SPEC = ClusterSpec({"worker": ["a:2222", "b:2222"]})


class Own(ClusterResolver):
    """What a user's class has at least."""

    def cluster_spec(self):
        return SPEC


def test_a_class_of_ones_own_has_all_members():
    resolver = Own()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert resolver.environment == ""
    assert resolver.master() == ""
    assert resolver.master("worker", 1) == "b:2222"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, "grpc"
    assert resolver.master() == "grpc://a:2222"
    assert resolver.master("worker", 1, "http") == "http://b:2222"
    assert resolver.rendezvous().variables() == {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "2222",
    }
    assert Own().task_type is None  # nothing of one is another's


def test_num_accelerators_are_this_process_own(monkeypatch):
    resolver = SimpleResolver(SPEC, task_type="worker", task_id=0)
    assert resolver.num_accelerators("worker", 1) == {}  # it says what it was given: nothing
    own = Own()
    own.task_type, own.task_id = "worker", 0
    for count, found in ((0, {}), (4, {"GPU": 4})):
        monkeypatch.setattr(torch.cuda, "is_available", lambda count=count: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert own.num_accelerators() == own.num_accelerators("worker", 0) == found
    with pytest.raises(ClusterError, match="sees only its own devices; got task 1"):
        own.num_accelerators("worker", 1)


def worker(task_id):
    return SimpleResolver(SPEC, task_type="worker", task_id=task_id)


def test_apply_sets_what_torch_distributed_reads():
    environ = {"OTHER": "1", "RANK": ""}
    found = worker(1).apply(environ)
    assert environ == {"OTHER": "1", **found.variables()}
    assert environ["RANK"] == "1"
    assert worker(1).apply(environ) == found  # again


def test_apply_leaves_the_address_that_a_script_has_set():
    environ = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    found = worker(0).apply(environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.1", "1234")
    assert (found.master_address, found.master_port) == ("10.0.0.1", 1234)
    assert environ == found.variables()


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"MASTER_PORT": "x"}, "^MASTER_PORT is a number"),
        ({"MASTER_PORT": "0"}, "1 to 65535; got 0"),
        ({"MASTER_ADDR": "a b"}, "host's name or number; got 'a b'"),
    ],
)
def test_apply_changes_nothing_where_the_script_has_set_no_address(environ, words):
    before = dict(environ)
    with pytest.raises(ClusterError, match=words):
        worker(0).apply(environ)
    assert environ == before


@pytest.mark.parametrize(("name", "said"), [("RANK", "1"), ("WORLD_SIZE", "3")])
def test_apply_changes_nothing_where_another_rank_is_set(name, said):
    environ = {name: said}
    with pytest.raises(ClusterError, match=f"SimpleResolver says {name}=.*has {name}={said}"):
        worker(0).apply(environ)
    assert environ == {name: said}


def test_apply_is_for_this_process_unless_another_is_given(monkeypatch):
    for name in worker(0).rendezvous().variables():
        monkeypatch.setenv(name, "")
    worker(1).apply()
    assert os.environ["RANK"] == "1"


WORKER = """
import os, torch, torch.distributed as dist, mirror
for name in {cleared}:
    os.environ.pop(name, None)
os.environ.update({variables})
{resolver}.apply()
dist.init_process_group("gloo")
sums = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(sums)
print(dist.get_rank(), dist.get_world_size(), sums.item())
dist.destroy_process_group()
"""
LAUNCHERS = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()


def tf_config(port, rank):
    cluster = {"chief": [f"127.0.0.1:{port}"], "worker": ["127.0.0.1:1"]}
    task = {"type": ("chief", "worker")[rank], "index": 0}
    return "mirror.cluster.TFConfigResolver()", {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": task})
    }


def slurm(port, rank):
    return f"mirror.cluster.SlurmResolver(port_base={port})", {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "127.0.0.[1-1]",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }


def indexed_job(port, rank):
    return "mirror.cluster.KubernetesResolver()", {
        "JOB_COMPLETION_INDEX": str(rank),
        "HOSTNAME": f"train-{rank}",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [tf_config, slurm, indexed_job])
def test_two_processes_meet_by_what_apply_sets(launcher, port, script_pool):
    programs = []
    for rank in range(2):
        resolver, variables = launcher(port, rank)
        variables["GLOO_SOCKET_IFNAME"] = "lo"
        programs.append(WORKER.format(resolver=resolver, variables=variables, cleared=LAUNCHERS))
    done = script_pool.run_all(programs)
    assert [one.stdout for one in done] == ["0 2 3.0\n", "1 2 3.0\n"], done


CLUSTER = {
    "worker": ["a:1", "a:2", "b:3"],
    "evaluator": ["e:1"],
    "chief": ["b:9"],
    "ps": ["p:1"],
}


def rendezvous_at(cluster, task_type, task_id):
    return rendezvous_of(ClusterSpec(cluster), task_type, task_id)


def test_the_chief_is_rank_0_and_workers_follow_in_order():
    found = [
        rendezvous_at(CLUSTER, *task)
        for task in (("chief", 0), *(("worker", i) for i in range(3)))
    ]
    assert found == [
        Rendezvous(0, 4, "b", 9, 0, 2),
        Rendezvous(1, 4, "b", 9, 0, 2),
        Rendezvous(2, 4, "b", 9, 1, 2),
        Rendezvous(3, 4, "b", 9, 1, 2),
    ]
    assert [each.is_chief for each in found] == [True, False, False, False]


def test_without_a_chief_worker_0_is_it():
    assert rendezvous_at({"worker": ["a:1", "b:2"]}, "worker", 0) == Rendezvous(0, 2, "a", 1, 0, 1)
    assert rendezvous_at({"worker": ["a:1", "b:2"]}, "worker", 1) == Rendezvous(1, 2, "a", 1, 0, 1)


def test_an_evaluator_and_a_process_without_a_cluster_have_no_others():
    assert (
        rendezvous_at(CLUSTER, "evaluator", 0)
        == rendezvous_at({}, "worker", 0)
        == rendezvous_at({}, None, None)
        == single_process()
    )
    assert rendezvous_at({"worker": ["a:1", "b:1"]}, "evaluator", 0) == single_process()
    assert single_process().is_chief


def test_unknown_addresses_leave_the_local_rank_open():
    assert rendezvous_at({"worker": ["a:1", "", ""]}, "worker", 1) == Rendezvous(
        1, 3, "a", 1, None, None
    )
    assert "LOCAL_RANK" not in rendezvous_at({"worker": ["a:1", ""]}, "worker", 1).variables()


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
        rendezvous_at(cluster, *task)


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


def test_the_first_that_is_set_counts_and_empty_is_not_set():
    told = EnvironmentVariables({"A": "", "B": " ", "C": " 7 ", "D": "8"})
    assert told.text("X", "A", "B", "C", "D") == "7"
    assert told.find_first("X", "A", "B", "C", "D") == "C"
    assert told.integer("A", "D") == told.require_integer("D", why="") == 8
    assert told.text("X", "A", "B") is told.find_first("X") is told.integer("A", "B") is None


def test_they_are_those_of_now(monkeypatch):
    told = EnvironmentVariables()
    for text in ("one", "two"):
        monkeypatch.setenv("MIRROR_TEST_VARIABLE", text)
        assert told.require_text("MIRROR_TEST_VARIABLE", why="") == text


def test_what_is_missing_is_named_with_what_to_do():
    told = EnvironmentVariables({"A": ""})
    for needed in (told.require_text, told.require_integer):
        with pytest.raises(ClusterError, match=r"^A or B is not set; use a launcher$"):
            needed("A", "B", why="use a launcher")


@pytest.mark.parametrize(
    "text",
    ["x", "-1", "+1", "1.0", "1e3", "0x1", "1_0", "\u0661", str(MAX_PROCESSES + 1), "9" * 9999],
)
def test_what_is_no_number_in_range_is_named_and_shown(text):
    with pytest.raises(ClusterError, match=f"^A is a number from 0 to {MAX_PROCESSES}; got '"):
        EnvironmentVariables({"A": text}).integer("A")
    with pytest.raises(ClusterError, match=r"^the port is a number from 1 to 3; got '0'$"):
        integer("0", "the port", least=1, most=3)
