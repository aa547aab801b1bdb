"""mirror/cluster/launchers.py: which launcher counts where several have left their variables."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.cluster import (
    ClusterError,
    KubernetesResolver,
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
@settings(max_examples=300, deadline=None)
def test_whatever_is_set_is_a_place_or_an_error_that_says_what_is_wrong(environ):
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
