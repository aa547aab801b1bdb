"""mirror/cluster/resolver.py: what all resolvers have, and apply()."""

import json
import os

import pytest
import torch

from mirror.cluster import ClusterError, ClusterResolver, ClusterSpec, SimpleResolver

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


def test_apply_is_for_this_process_unless_told_otherwise(monkeypatch):
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
def test_two_processes_meet_by_what_apply_sets(launcher, port, forks):
    programs = []
    for rank in range(2):
        resolver, variables = launcher(port, rank)
        variables["GLOO_SOCKET_IFNAME"] = "lo"
        programs.append(WORKER.format(resolver=resolver, variables=variables, cleared=LAUNCHERS))
    done = forks.run_all(programs)
    assert [one.stdout for one in done] == ["0 2 3.0\n", "1 2 3.0\n"], done
