"""Server: a parameter server or worker on a machine of its own."""

from __future__ import annotations

from typing import Any

from mirror.base.process_bound import NoCopy
from mirror.errors import ClusterError, short_repr
from mirror.server.cluster_tasks import SERVING, host_and_port, spec_of
from mirror.server.engine.node_agents import NodeAgent
from mirror.server.engine.socket_client import key_of_environment
from mirror.server.roles.actor_pool import SERVER_ROLE, WORKER_ROLE

_ROLES = (SERVER_ROLE, WORKER_ROLE)


class Server(NoCopy):
    """A parameter server or worker for another machine's program, as ``tf.distribute.Server``.

    ::

        resolver = mirror.cluster.TFConfigResolver()
        if resolver.task_type in ("ps", "worker"):
            mirror.server.Server(resolver).join()
        else:
            strategy = mirror.ParameterServerStrategy(cluster=resolver)

    The server listens as soon as it is constructed. When a ``ClusterCoordinator`` connects, the
    server belongs to that program until the program ends or closes its strategy; then it serves
    the next program. All processes need the same key in MIRROR_ENGINE_KEY. ``mirror serve
    HOST:PORT`` does the same.

    Args:
        cluster: as for ParameterServerStrategy, or an address, ``"host:port"``.
        job, index: the task of this process; None takes the resolver's.
        host: the address to listen on; None takes that of the task, ``"0.0.0.0"`` listens on all
            networks.

    Raises:
        ClusterError: there is no such task, or its address is invalid.
        WireError: there is no key.
        ListenError: the process cannot listen at the address; an OSError, too.
    """

    _instead = "create one in every process"

    def __init__(
        self,
        cluster: Any,
        job: str | None = None,
        index: int | None = None,
        *,
        host: str | None = None,
    ) -> None:
        own, port = host_and_port(
            cluster if isinstance(cluster, str) else _address_of(cluster, job, index)
        )
        key = key_of_environment()
        self._agent = NodeAgent(own if host is None else host, port, key, _ROLES)
        self._host = own

    @property
    def address(self) -> str:
        """The address of this server, ``"host:port"``."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._agent.port}"

    def join(self) -> None:
        """Waits until the server is closed; raises the error for which it has stopped serving."""
        self._agent.join()

    def close(self) -> None:
        """Stops serving; may be called again."""
        self._agent.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _address_of(cluster: Any, job: str | None, index: int | None) -> str:
    spec = spec_of(cluster)
    job = getattr(cluster, "task_type", None) if job is None else job
    index = getattr(cluster, "task_id", None) if index is None else index
    if job not in SERVING or index is None:
        raise ClusterError(
            "a Server is a task of job 'ps' or 'worker', and has an index; got job "
            f"{short_repr(job)} and index {short_repr(index)}; the chief makes a "
            "ParameterServerStrategy"
        )
    return spec.task_address(job, index)
