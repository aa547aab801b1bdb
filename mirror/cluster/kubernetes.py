"""KubernetesResolver: the cluster of a pod, from its environment or from a client's list of pods.

The variables in a container depend on what created its pod. Reading them needs no network.

=====================  ================================  =====================================
pod created by         rank and number of workers        address of rank 0
=====================  ================================  =====================================
Kubeflow TrainJob      PET_NODE_RANK, PET_NNODES         PET_MASTER_ADDR, PET_MASTER_PORT
Kubeflow PyTorchJob    the same, or RANK, WORLD_SIZE     the same, or MASTER_ADDR, MASTER_PORT
indexed Job            JOB_COMPLETION_INDEX; WORLD_SIZE  MASTER_ADDR, or JOB-0.SUBDOMAIN: JOB is
                       in the manifest                   HOSTNAME without its index
JobSet                 the same in each Job; with        MASTER_ADDR; the default subdomain is
                       several Jobs, RANK                the JobSet's name
=====================  ================================  =====================================

PET_* are torchrun's options. A process that torchrun started has RANK and LOCAL_RANK, which take
precedence. A program that a pod starts directly is one process with all GPUs of the pod, and RANK
is the rank of the pod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mirror.cluster.rendezvous import (
    LOCALHOST,
    MAX_PORT,
    ClusterSpec,
    EnvironmentVariables,
    Rendezvous,
)
from mirror.cluster.resolver import ClusterResolver
from mirror.errors import ClusterError, short_repr

CLIENT_PORT = 8470
"""Default port of pods that a client lists."""
DEFAULT_PORT = 29500
"""Default port of rank 0 in the environment of a pod."""

_WHY = "set it in the manifest of the pods"
_SIBLING = re.compile("(.*)-[0-9]+")


class KubernetesResolver(ClusterResolver):
    """Reads a pod's environment, or lists pods with a client.

    ::

        KubernetesResolver()                                       # in a pod of a Job: no network
        KubernetesResolver({"worker": ["job-name=train"]}, override_client=CoreV1Api())

    With a client, the resolver works as TensorFlow's ``KubernetesClusterResolver``. The program
    must then set this process's task: ``resolver.task_type``, ``resolver.task_id``.

    Args:
        job_to_label_mapping: the label selectors of each job's pods. With a client, the default is
            TensorFlow's, ``{"worker": ["job-name=tensorflow"]}``.
        port: of every worker. The default is MASTER_PORT or 29500; with a client, 8470.
        override_client: an object with ``list_pod_for_all_namespaces(label_selector=)``.
        num_workers: for an indexed Job, if its manifest does not set WORLD_SIZE.
        subdomain: the headless Service, if MASTER_ADDR is not set.
        environ: read in place of this process's environment.

    Raises:
        ClusterError: there are label selectors but no client.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        port: int | None = None,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        *,
        num_workers: int | None = None,
        subdomain: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        if job_to_label_mapping and override_client is None:
            raise ClusterError(
                "pods are listed by a client; pass override_client=kubernetes.client.CoreV1Api(), "
                "or leave the label selectors out: a pod's environment is enough"
            )
        self._selectors = job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        self._port = port
        self._rpc_layer = rpc_layer
        self._client = override_client
        self._num_workers = num_workers
        self._subdomain = subdomain
        self._variables = EnvironmentVariables(environ)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the workers; with a client, the current pods.

        Raises:
            ClusterError: a pod is not running, or the environment is wrong or incomplete.
        """
        if self._client is not None:
            return ClusterSpec({job: self._list_pods(job) for job in self._selectors})
        rendezvous = self._check_environment()
        hosts = [rendezvous.master_address] + [""] * (rendezvous.world_size - 1)
        own_job = self._read_rank()[2]
        first, _, subdomain = rendezvous.master_address.partition(".")
        if subdomain and first == f"{own_job}-0":
            hosts = [f"{own_job}-{i}.{subdomain}" for i in range(rendezvous.world_size)]
        return ClusterSpec({"worker": [h and f"{h}:{rendezvous.master_port}" for h in hosts]})

    def _read_task_type(self) -> str | None:
        return "worker" if self._client is None else None

    def _read_task_id(self) -> int | None:
        return self._check_environment().rank if self._client is None else None

    def rendezvous(self) -> Rendezvous:
        """Returns the rendezvous of the environment; with a client, that of the listed pods."""
        is_set = self._task_type is not None or self._task_id is not None
        return (
            super().rendezvous()
            if is_set or self._client is not None
            else self._check_environment()
        )

    def _check_environment(self) -> Rendezvous:
        env = self._variables
        rank, size, own_job = self._read_rank()
        if rank >= size:
            raise ClusterError(
                f"{env.find_first('PET_NODE_RANK', 'RANK', 'JOB_COMPLETION_INDEX')} makes this "
                f"worker {rank}, but there are {size} workers, from 0; they must be as many as "
                "the pods"
            )
        port = self._port
        if port is None:
            port = env.integer("MASTER_PORT", "PET_MASTER_PORT", least=1, most=MAX_PORT)
        master = env.text("MASTER_ADDR", "PET_MASTER_ADDR")
        if master is None:
            master = LOCALHOST if size == 1 else self._first_pod(own_job)
        else:
            _check_same_job(own_job, master)
        local = env.integer("LOCAL_RANK"), env.integer("LOCAL_WORLD_SIZE", least=1)
        if local == (None, None):
            local = 0, 1
        return Rendezvous(rank, size, master, DEFAULT_PORT if port is None else port, *local)

    def _read_rank(self) -> tuple[int, int, str | None]:
        """Returns rank, number of workers, and the Job in which the rank counts, or None."""
        env = self._variables
        is_started_by_torchrun = env.find_first("LOCAL_RANK") is not None
        if env.find_first("PET_NODE_RANK") and not is_started_by_torchrun:
            rank = env.require_integer("PET_NODE_RANK", why=_WHY)
            return rank, self._size("PET_NNODES"), None
        global_rank = env.integer("RANK")
        if global_rank is not None:
            return global_rank, self._size("WORLD_SIZE"), None
        index = env.require_integer(
            "JOB_COMPLETION_INDEX",
            why="Kubernetes sets it in Jobs with completionMode: Indexed, Kubeflow sets "
            "PET_NODE_RANK; any other pod needs RANK",
        )
        name = env.text("HOSTNAME") or ""
        job = name.removesuffix(f"-{index}") if name.endswith(f"-{index}") else None
        return index, self._size("WORLD_SIZE", "PET_NNODES"), job

    def _size(self, *names: str) -> int:
        if self._num_workers is not None:
            return self._num_workers
        why = f"{_WHY}, to the number of pods, or pass num_workers"
        return self._variables.require_integer(*names, least=1, why=why)

    def _first_pod(self, own_job: str | None) -> str:
        if own_job is None or not self._subdomain:
            raise ClusterError(
                "MASTER_ADDR is not set; set it in the manifest to JOB-0.SUBDOMAIN, pod 0 of the "
                "Job under its headless Service, or pass subdomain"
            )
        return f"{own_job}-0.{self._subdomain}"

    def _list_pods(self, job: str) -> list[str]:
        addresses = []
        for selector in self._selectors[job]:
            pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
            for pod in sorted(pods, key=lambda pod: str(pod.metadata.name)):
                if pod.status.phase != "Running":
                    raise ClusterError(
                        f'Pod "{pod.metadata.name}" is not running; phase: "{pod.status.phase}"; '
                        "wait until all pods run"
                    )
                addresses.append(f"{_host_of(pod)}:{self._port or CLIENT_PORT}")
        return addresses


def _host_of(pod: Any) -> str:
    """Returns the pod's address, or its node's if it has none."""
    # TensorFlow uses the node's address, where no pod listens, unless pods use the node's network.
    for name in ("pod_ip", "host_ip"):
        address = getattr(pod.status, name, None)
        if isinstance(address, str) and address:
            return address
    raise ClusterError(f'Pod "{pod.metadata.name}" is running, but has no address')


def _check_same_job(own_job: str | None, master: str) -> None:
    """Raises ClusterError if rank 0 is a pod of another Job of the same JobSet."""
    first = _SIBLING.fullmatch(master.partition(".")[0])
    if own_job is None or first is None or first[1] == own_job:
        return
    siblings = _SIBLING.fullmatch(first[1]), _SIBLING.fullmatch(own_job)
    if all(siblings) and len({match[1] for match in siblings if match}) == 1:
        raise ClusterError(
            f"JOB_COMPLETION_INDEX counts the pods of {short_repr(own_job)}, but rank 0 is in "
            f"{short_repr(first[1])}, another Job of the same JobSet; set RANK in the manifest, "
            "from the label jobset.sigs.k8s.io/job-index and the pods of each Job"
        )
