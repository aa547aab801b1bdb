"""KubernetesResolver: the cluster of a pod, by its environment or by the pods that a client lists.

[Note: Pods]
What a container is told depends on who made its pod. Nothing is asked of the network.

=====================  ================================  =====================================
who                    rank and number of workers        where rank 0 is
=====================  ================================  =====================================
Kubeflow TrainJob      PET_NODE_RANK, PET_NNODES         PET_MASTER_ADDR, PET_MASTER_PORT
Kubeflow PyTorchJob    the same, or RANK, WORLD_SIZE     the same, or MASTER_ADDR, MASTER_PORT
indexed Job            JOB_COMPLETION_INDEX; WORLD_SIZE  MASTER_ADDR, or JOB-0.SUBDOMAIN: JOB is
                       in the manifest                   HOSTNAME without its index
JobSet                 the same in each of its Jobs; if  MASTER_ADDR; the subdomain is the
                       these are several, RANK           JobSet's name unless it says another
=====================  ================================  =====================================

PET_* are torchrun's options. What torchrun starts has RANK and LOCAL_RANK, which come first; a
program that a pod starts itself is one process, all GPUs of the pod in it: RANK is then the pod's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mirror.cluster.rendezvous import LOCALHOST, Rendezvous
from mirror.cluster.resolver import ClusterResolver
from mirror.cluster.spec import ClusterSpec
from mirror.cluster.variables import MAX_PORT, EnvironmentVariables
from mirror.errors import ClusterError, short_repr

LISTED_PORT = 8470
TOLD_PORT = 29500

_WHY = "set it in the manifest of the pods"
_SIBLING = re.compile("(.*)-[0-9]+")


class KubernetesResolver(ClusterResolver):
    """Says what a pod's environment tells (see [Note: Pods]), or which pods a client lists.

    ::

        KubernetesResolver()                                       # in a pod of a Job: no network
        KubernetesResolver({"worker": ["job-name=train"]}, override_client=CoreV1Api())

    A client is asked as ``tf.distribute.cluster_resolver.KubernetesClusterResolver`` asks it; who
    this process is must then be set: ``resolver.task_type``, ``resolver.task_id``.

    Args:
        job_to_label_mapping: the label selectors of each job's pods; ``None``, with a client:
            ``{"worker": ["job-name=tensorflow"]}``, TensorFlow's.
        port: of every worker; ``None``: MASTER_PORT, else 29500; 8470 for pods that are listed.
        override_client: has ``list_pod_for_all_namespaces(label_selector=)``.
        num_workers: of an indexed Job whose manifest does not set WORLD_SIZE.
        subdomain: the headless Service, where MASTER_ADDR does not tell.
        environ: read instead of this process's environment.

    Raises:
        ClusterError: label selectors without a client.
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
                "or leave the label selectors out: a pod's environment says enough"
            )
        self._selectors = job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        self._port = port
        self._rpc_layer = rpc_layer
        self._client = override_client
        self._num_workers = num_workers
        self._subdomain = subdomain
        self._variables = EnvironmentVariables(environ)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the workers; with a client, the pods as they are now.

        Raises:
            ClusterError: a pod is not running, or the environment is wrong or says too little.
        """
        if self._client is not None:
            return ClusterSpec({job: self._listed(job) for job in self._selectors})
        found = self._check_environment()
        hosts = [found.master_address] + [""] * (found.world_size - 1)
        own_job = self._place()[2]
        first, _, subdomain = found.master_address.partition(".")
        if subdomain and first == f"{own_job}-0":
            hosts = [f"{own_job}-{i}.{subdomain}" for i in range(found.world_size)]
        return ClusterSpec({"worker": [h and f"{h}:{found.master_port}" for h in hosts]})

    @property
    def task_type(self) -> str | None:
        """``"worker"``; ``None`` until it is set, where pods are listed."""
        is_told = self._task_type is None and self._client is None
        return "worker" if is_told else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """This worker's rank; ``None`` until it is set, where pods are listed."""
        is_told = self._task_id is None and self._client is None
        return self._check_environment().rank if is_told else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def rendezvous(self) -> Rendezvous:
        """Returns what the environment tells, or what follows from the pods that are listed."""
        is_set = self._task_type is not None or self._task_id is not None
        return (
            super().rendezvous()
            if is_set or self._client is not None
            else self._check_environment()
        )

    def _check_environment(self) -> Rendezvous:
        told = self._variables
        rank, size, own_job = self._place()
        if rank >= size:
            raise ClusterError(
                f"{told.first('PET_NODE_RANK', 'RANK', 'JOB_COMPLETION_INDEX')} makes this worker "
                f"{rank}, but there are {size} workers, from 0; they must be as many as the pods"
            )
        port = self._port
        if port is None:
            port = told.integer("MASTER_PORT", "PET_MASTER_PORT", least=1, most=MAX_PORT)
        master = told.text("MASTER_ADDR", "PET_MASTER_ADDR")
        if master is None:
            master = LOCALHOST if size == 1 else self._first_pod(own_job)
        else:
            _one_job(own_job, master)
        local = told.integer("LOCAL_RANK"), told.integer("LOCAL_WORLD_SIZE", least=1)
        if local == (None, None):
            local = 0, 1
        return Rendezvous(rank, size, master, TOLD_PORT if port is None else port, *local)

    def _place(self) -> tuple[int, int, str | None]:
        """Rank and number of workers; and the name of this pod's Job, where the rank is by it."""
        told = self._variables
        is_started_by_torchrun = told.first("LOCAL_RANK") is not None
        if told.first("PET_NODE_RANK") and not is_started_by_torchrun:
            rank = told.needed_integer("PET_NODE_RANK", why=_WHY)
            return rank, self._size("PET_NNODES"), None
        rank_said = told.integer("RANK")
        if rank_said is not None:
            return rank_said, self._size("WORLD_SIZE"), None
        index = told.needed_integer(
            "JOB_COMPLETION_INDEX",
            why="Kubernetes sets it in Jobs with completionMode: Indexed, Kubeflow sets "
            "PET_NODE_RANK; any other pod needs RANK",
        )
        name = told.text("HOSTNAME") or ""
        job = name.removesuffix(f"-{index}") if name.endswith(f"-{index}") else None
        return index, self._size("WORLD_SIZE", "PET_NNODES"), job

    def _size(self, *names: str) -> int:
        if self._num_workers is not None:
            return self._num_workers
        why = f"{_WHY}, to the number of pods, or pass num_workers"
        return self._variables.needed_integer(*names, least=1, why=why)

    def _first_pod(self, own_job: str | None) -> str:
        if own_job is None or not self._subdomain:
            raise ClusterError(
                "MASTER_ADDR is not set; set it in the manifest to JOB-0.SUBDOMAIN, pod 0 of the "
                "Job under its headless Service, or pass subdomain"
            )
        return f"{own_job}-0.{self._subdomain}"

    def _listed(self, job: str) -> list[str]:
        addresses = []
        for selector in self._selectors[job]:
            pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
            for pod in sorted(pods, key=lambda pod: str(pod.metadata.name)):
                if pod.status.phase != "Running":
                    raise ClusterError(
                        f'Pod "{pod.metadata.name}" is not running; phase: "{pod.status.phase}"; '
                        "wait until all pods run"
                    )
                addresses.append(f"{_host_of(pod)}:{self._port or LISTED_PORT}")
        return addresses


def _host_of(pod: Any) -> str:
    """The pod's own address, or its node's: they differ unless pods use the node's network."""
    # TensorFlow takes the node's, where pods of one node have one address and nobody listens.
    for name in ("pod_ip", "host_ip"):
        address = getattr(pod.status, name, None)
        if isinstance(address, str) and address:
            return address
    raise ClusterError(f'Pod "{pod.metadata.name}" is running, but has no address')


def _one_job(own_job: str | None, master: str) -> None:
    """Raises ClusterError for a pod of another Job of the JobSet that rank 0 is of."""
    first = _SIBLING.fullmatch(master.partition(".")[0])
    if own_job is None or first is None or first[1] == own_job:
        return
    siblings = _SIBLING.fullmatch(first[1]), _SIBLING.fullmatch(own_job)
    if all(siblings) and len({match[1] for match in siblings if match}) == 1:
        raise ClusterError(
            f"JOB_COMPLETION_INDEX counts the pods of {short_repr(own_job)}, but rank 0 is of "
            f"{short_repr(first[1])}, another Job of the same JobSet; set RANK in the manifest, "
            "from the label jobset.sigs.k8s.io/job-index and the pods of each Job"
        )
