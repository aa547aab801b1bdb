"""mirror/cluster/torchrun.py: what torchrun tells, and what is wrong with it."""

import pytest

from mirror.cluster import ClusterError, ClusterSpec, Rendezvous, TorchrunResolver

GOOD = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_it_says_what_torchrun_tells():
    resolver = TorchrunResolver(environ=GOOD)
    assert resolver.rendezvous() == Rendezvous(3, 4, "node0", 29500, 1, 2)
    assert resolver.rendezvous().variables() == GOOD
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 3, None)
    spec = resolver.cluster_spec()
    assert spec.num_tasks("worker") == 4
    assert spec.job_tasks("worker") == ["node0:29500", "", "", ""]
    assert resolver.master("worker", 0) == "node0:29500"


def test_it_reads_this_process_environment_anew_each_time(monkeypatch):
    for name, text in GOOD.items():
        monkeypatch.setenv(name, text)
    resolver = TorchrunResolver()
    assert resolver.task_id == 3
    monkeypatch.setenv("RANK", "2")
    assert resolver.task_id == 2


def test_what_is_set_counts():
    resolver = TorchrunResolver(environ=GOOD)
    resolver.task_id = 1
    assert resolver.rendezvous() == Rendezvous(1, 4, "node0", 29500)
    with pytest.raises(ClusterError, match=r"TorchrunResolver says RANK=1, but .* RANK=3"):
        resolver.apply(dict(GOOD))
    resolver.task_type, resolver.task_id = "evaluator", 0
    assert resolver.rendezvous().world_size == 1


def test_without_torchrun_a_process_is_alone():
    resolver = TorchrunResolver(environ={"MASTER_ADDR": "node0"})
    assert resolver.rendezvous() == Rendezvous(0, 1, "127.0.0.1", 0, 0, 1)
    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")


def test_one_process_needs_no_address_and_nobody_must_tell_the_local_rank():
    assert TorchrunResolver(environ={"RANK": "0", "WORLD_SIZE": "1"}).rendezvous().world_size == 1
    by_hand = {name: text for name, text in GOOD.items() if not name.startswith("LOCAL")}
    assert TorchrunResolver(environ=by_hand).rendezvous().local_rank is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": ""}, "^RANK is not set; torchrun sets"),
        ({"WORLD_SIZE": ""}, "^WORLD_SIZE is not set"),
        ({"MASTER_ADDR": ""}, "^MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "^MASTER_PORT is not set"),
        ({"RANK": "4"}, "^RANK=4, but WORLD_SIZE=4 has ranks 0 to 3"),
        ({"RANK": "-1"}, "^RANK is a number from 0 to .*got '-1'"),
        ({"RANK": "one"}, "^RANK is a number.*got 'one'"),
        ({"WORLD_SIZE": "0"}, "^WORLD_SIZE is a number from 1 to"),
        ({"WORLD_SIZE": "9" * 30}, "^WORLD_SIZE is a number from 1 to"),
        ({"LOCAL_RANK": "2"}, "^LOCAL_RANK=2, but LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_RANK": "x"}, "^LOCAL_RANK is a number"),
        ({"MASTER_PORT": "0"}, "^MASTER_PORT is a number from 1 to 65535; got '0'"),
        ({"MASTER_PORT": "65536"}, "^MASTER_PORT is a number"),
        ({"MASTER_ADDR": "a b"}, "the address of rank 0.*got 'a b'"),
    ],
)
def test_what_is_wrong_is_named(change, words):
    resolver = TorchrunResolver(environ=GOOD | change)
    for ask in (resolver.rendezvous, resolver.cluster_spec, lambda: resolver.task_id):
        with pytest.raises(ClusterError, match=words):
            ask()
