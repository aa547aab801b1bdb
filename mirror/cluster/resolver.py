"""ClusterResolver: who says which cluster this process is in, and as whom."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from dataclasses import replace

from mirror.cluster.rendezvous import Rendezvous, rendezvous_of
from mirror.cluster.spec import ClusterSpec
from mirror.cluster.variables import MAX_PORT, EnvironmentVariables
from mirror.devices import num_cuda_devices
from mirror.errors import ClusterError

_IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class ClusterResolver(ABC):
    """Says which cluster this process is in, as ``tf.distribute.cluster_resolver`` does.

    What it says is read anew each time it is asked. ``task_type`` (the job), ``task_id`` (the
    index in it) and ``rpc_layer`` (what stands before addresses in ``master()``) can be set, and
    then count instead of what was found. A class of your own has ``cluster_spec()`` at least.
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster as it is now; an empty one where this process is alone."""

    @property
    def task_type(self) -> str | None:
        """The job that this process belongs to; ``None`` where nobody says."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """This process's index in its job; ``None`` where nobody says."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that ``master()`` puts before an address; torch.distributed has none."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        """The name of the surroundings, for programs that ask for it."""
        return ""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default this process's; empty where it has none.

        As TensorFlow has it: the name is older than rank 0, whose address is
        ``rendezvous().master_address``.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return with_layer(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> Mapping[str, int]:
        """Returns how many devices of which type this process sees: ``{"GPU": 4}`` or ``{}``.

        Raises:
            ClusterError: asked for another task, whose devices are not known here.
        """
        for asked, own in ((task_type, self.task_type), (task_id, self.task_id)):
            if asked is not None and asked != own:
                raise ClusterError(
                    f"this is task {self.task_id} of job {self.task_type!r}, which knows its own "
                    f"devices alone; asked for task {task_id} of job {task_type!r}"
                )
        num_gpus = num_cuda_devices()
        return {"GPU": num_gpus} if num_gpus else {}

    def rendezvous(self) -> Rendezvous:
        """Returns as whom, and where, this process meets the other workers.

        Raises:
            ClusterError: what was found is wrong, or does not say it. See [Note: Ranks].
        """
        return rendezvous_of(self.cluster_spec(), self.task_type, self.task_id)

    def apply(self, environ: MutableMapping[str, str] | None = None) -> Rendezvous:
        """Sets what torch.distributed reads: RANK, WORLD_SIZE, MASTER_ADDR and the like.

        MASTER_ADDR and MASTER_PORT stay as they are where they are set: they are often given by
        the script that starts all workers.

        Args:
            environ: where to set it; ``None`` for this process's environment.

        Returns:
            What is set then.

        Raises:
            ClusterError: another rank, or number of workers, is set already, or what is set is
                no address; nothing is changed.
        """
        environ = os.environ if environ is None else environ
        found = self.rendezvous()
        port = EnvironmentVariables(environ).integer("MASTER_PORT", most=MAX_PORT)
        found = replace(
            found,
            master_address=environ.get("MASTER_ADDR") or found.master_address,
            master_port=found.master_port if port is None else port,
        )
        variables = found.variables()
        for name in _IDENTITY:
            there = environ.get(name, "")
            if there and name in variables and there != variables[name]:
                raise ClusterError(
                    f"{type(self).__name__} says {name}={variables[name]}, but the environment "
                    f"has {name}={there}; let one launcher start the workers, or "
                    "use TorchrunResolver"
                )
        environ.update(variables)
        return found


def with_layer(address: str, rpc_layer: str | None) -> str:
    """Returns an address with its protocol before it, if there is one."""
    return f"{rpc_layer}://{address}" if rpc_layer else address
