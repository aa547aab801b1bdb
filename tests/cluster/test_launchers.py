"""Which launcher counts if several have set variables, and what torchrun sets."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.cluster import (
    ClusterError,
    ClusterSpec,
    KubernetesResolver,
    Rendezvous,
    SlurmResolver,
    TFConfigResolver,
    TorchrunResolver,
)
from mirror.cluster.launchers import launchers, resolver_of

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "n1"}
POD = {"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "2"}
PYTORCH_JOB = {"PET_NODE_RANK": "0", "PET_NNODES": "2", "RANK": "0", "WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, []),
        ({"MASTER_ADDR": "a", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "HOSTNAME": "a-1"}, []),
        (TORCHRUN, ["torchrun"]),
        ({"WORLD_SIZE": "2"}, ["torchrun, without RANK"]),
        ({"TF_CONFIG": ""}, ["TF_CONFIG"]),
        (SLURM, ["Slurm"]),
        (POD, ["Kubernetes"]),
        (PYTORCH_JOB, ["Kubernetes"]),
        (PYTORCH_JOB | {"LOCAL_RANK": "0"}, ["torchrun", "Kubernetes"]),
        (
            TORCHRUN | SLURM | POD | {"TF_CONFIG": "{}"},
            ["torchrun", "TF_CONFIG", "Slurm", "Kubernetes"],
        ),
        (SLURM | {"TF_CONFIG": "{}"}, ["TF_CONFIG", "Slurm"]),
    ],
)
def test_the_launchers_whose_variables_are_set_are_found_in_order(environ, found):
    assert launchers(environ) == found


@pytest.mark.parametrize(
    ("launcher", "environ", "kind"),
    [
        ("torchrun", TORCHRUN, TorchrunResolver),
        ("torchrun, without RANK", {"WORLD_SIZE": "2"}, TorchrunResolver),
        ("TF_CONFIG", {"TF_CONFIG": "{}"}, TFConfigResolver),
        ("Slurm", SLURM | {"CUDA_VISIBLE_DEVICES": "0,1"}, SlurmResolver),
        ("Kubernetes", POD, KubernetesResolver),
    ],
)
def test_a_launcher_has_a_resolver_that_reads_its_variables(launcher, environ, kind):
    before = dict(environ)
    resolver = resolver_of(launcher, environ)
    assert type(resolver) is kind
    if kind is SlurmResolver:
        resolver.cluster_spec()  # which would set CUDA_VISIBLE_DEVICES
    assert environ == before


CONFIG = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
VALUES = {
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE SLURM_PROCID SLURM_NTASKS SLURM_NODEID "
    "SLURM_LOCALID SLURM_JOB_ID SLURM_STEP_ID SLURM_GPUS_ON_NODE SLURM_GPUS_PER_TASK "
    "SLURM_DIST_PLANESIZE JOB_COMPLETION_INDEX PET_NNODES PET_NODE_RANK": "0 1 2 3 x -1".split(),
    "MASTER_ADDR PET_MASTER_ADDR": ["a", "a.b", "a-0.b", "a-0-0.b", "a b", "::1"],
    "MASTER_PORT PET_MASTER_PORT": ["0", "1", "65535", "65536", "x"],
    "SLURM_JOB_NODELIST SLURM_STEP_NODELIST": ["n1", "n[1-2]", "n[1-", "n1,n1", "n[1-3]"],
    "SLURM_TASKS_PER_NODE SLURM_STEP_TASKS_PER_NODE": ["1", "2(x2)", "1(x2),2", "x", "0"],
    "SLURM_DISTRIBUTION": ["block", "cyclic", "plane", "plane=2", "plane=x", "arbitrary", "x"],
    "HOSTNAME": ["a-0", "a-1", "a-1-0", "b"],
    "TF_CONFIG": ["", "{}", "x", json.dumps(CONFIG)],
    "CUDA_VISIBLE_DEVICES": ["0,1", "0,1,2,3", "5,6"],
}
TEXTS = {name: texts for names, texts in VALUES.items() for name in names.split()}
GOOD = [
    TORCHRUN | {"MASTER_PORT": "1"},
    {"TF_CONFIG": json.dumps(CONFIG)},
    SLURM | {"SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "n[1-3]", "CUDA_VISIBLE_DEVICES": "0,1"},
    POD | {"MASTER_ADDR": "a-0.b", "HOSTNAME": "a-0"},
    PYTORCH_JOB | {"MASTER_ADDR": "a-0.b"},
]
CHANGES = st.sampled_from([(name, text) for name, texts in TEXTS.items() for text in ["", *texts]])
ENVIRONS = st.tuples(st.sampled_from(GOOD), st.lists(CHANGES, max_size=3)).map(
    lambda parts: {"CUDA_VISIBLE_DEVICES": ""} | parts[0] | dict(parts[1])
)


@given(ENVIRONS)
@settings(max_examples=300)
def test_any_environment_gives_a_rank_or_an_error_with_the_reason(environ):
    for launcher in launchers(environ):
        try:
            resolver = resolver_of(launcher, environ)
            place, spec = resolver.rendezvous(), resolver.cluster_spec()
            task = resolver.task_type, resolver.task_id
            applied = resolver.apply(dict.fromkeys(["RANK"], ""))
        except ClusterError:
            continue
        assert place == applied
        assert place.world_size == (spec.num_tasks("worker") if spec else 1)
        assert task == (("worker", place.rank) if spec else task)


GOOD_TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_it_reports_the_values_of_torchrun():
    resolver = TorchrunResolver(environ=GOOD_TORCHRUN)
    assert resolver.rendezvous() == Rendezvous(3, 4, "node0", 29500, 1, 2)
    assert resolver.rendezvous().variables() == GOOD_TORCHRUN
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 3, None)
    spec = resolver.cluster_spec()
    assert spec.num_tasks("worker") == 4
    assert spec.job_tasks("worker") == ["node0:29500", "", "", ""]
    assert resolver.master("worker", 0) == "node0:29500"


def test_it_reads_this_process_environment_again_each_time(monkeypatch):
    for name, text in GOOD_TORCHRUN.items():
        monkeypatch.setenv(name, text)
    resolver = TorchrunResolver()
    assert resolver.task_id == 3
    monkeypatch.setenv("RANK", "2")
    assert resolver.task_id == 2


def test_what_is_set_counts():
    resolver = TorchrunResolver(environ=GOOD_TORCHRUN)
    resolver.task_id = 1
    assert resolver.rendezvous() == Rendezvous(1, 4, "node0", 29500)
    with pytest.raises(ClusterError, match=r"TorchrunResolver says RANK=1, but .* RANK=3"):
        resolver.apply(dict(GOOD_TORCHRUN))
    resolver.task_type, resolver.task_id = "evaluator", 0
    assert resolver.rendezvous().world_size == 1


def test_without_torchrun_a_process_is_alone():
    resolver = TorchrunResolver(environ={"MASTER_ADDR": "node0"})
    assert resolver.rendezvous() == Rendezvous(0, 1, "127.0.0.1", 0, 0, 1)
    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")


def test_one_process_needs_neither_an_address_nor_a_local_rank():
    assert TorchrunResolver(environ={"RANK": "0", "WORLD_SIZE": "1"}).rendezvous().world_size == 1
    by_hand = {name: text for name, text in GOOD_TORCHRUN.items() if not name.startswith("LOCAL")}
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
    resolver = TorchrunResolver(environ=GOOD_TORCHRUN | change)
    for ask in (resolver.rendezvous, resolver.cluster_spec, lambda: resolver.task_id):
        with pytest.raises(ClusterError, match=words):
            ask()
