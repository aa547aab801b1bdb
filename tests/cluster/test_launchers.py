"""mirror/cluster/launchers.py: which launcher counts where several have left their variables."""

import pytest

from mirror.cluster import (
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
