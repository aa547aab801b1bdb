"""SimpleResolver and UnionResolver: a cluster from arguments, and the union of clusters."""

from __future__ import annotations

from collections.abc import Mapping

from mirror.cluster.resolver import ClusterResolver, with_layer
from mirror.cluster.spec import ClusterSpec
from mirror.errors import ClusterTypeError, short_repr


class SimpleResolver(ClusterResolver):
    """Returns its arguments, as ``tf.distribute.cluster_resolver.SimpleClusterResolver``.

    Args:
        cluster_spec: the whole cluster.
        master: the result of ``master()`` without a task.
        num_accelerators: the result of ``num_accelerators()`` for every task.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise ClusterTypeError(
                f"cluster_spec is a ClusterSpec; got {short_repr(cluster_spec)}"
            )
        if not isinstance(master, str):
            raise ClusterTypeError(f"master is a string; got {short_repr(master)}")
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = num_accelerators
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the argument."""
        return self._cluster_spec

    @property
    def environment(self) -> str | None:
        """The argument."""
        return self._environment

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task; without a task, the argument ``master``."""
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return with_layer(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> Mapping[str, int]:
        """Returns the argument, for every task."""
        return {} if self._num_accelerators is None else self._num_accelerators


class UnionResolver(ClusterResolver):
    """Returns the union of the clusters of several resolvers, as TensorFlow's ``UnionResolver``.

    Task, protocol, devices and environment are those of the first resolver, unless they are
    arguments.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError("a UnionResolver is made of at least one resolver; got none")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise ClusterTypeError(
                    f"a UnionResolver is made of ClusterResolvers; got {short_repr(resolver)}"
                )
        self._resolvers = resolvers
        self._rpc_layer = rpc_layer
        self._task_type = task_type
        self._task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        """Returns the union of all clusters.

        Jobs of the same name are merged. Their lists are concatenated in the order of the
        resolvers. If one of these jobs is sparse, all tasks keep their indices.

        Raises:
            KeyError: a job with indices has one of them twice.
        """
        parts = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        merged: dict[str, list[str] | dict[int, str]] = {}
        for job in dict.fromkeys(job for part in parts for job in part):
            named = [part[job] for part in parts if job in part]
            lists = [tasks for tasks in named if isinstance(tasks, list)]
            if len(lists) == len(named):
                merged[job] = [address for tasks in lists for address in tasks]
            else:
                merged[job] = _merge_by_index(job, named)
        return ClusterSpec(merged)

    @property
    def task_type(self) -> str | None:
        """The argument, or the first resolver's value."""
        return self._resolvers[0].task_type if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The argument, or the first resolver's value."""
        return self._resolvers[0].task_id if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The argument, or the first resolver's value."""
        return self._rpc_layer or self._resolvers[0].rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        """The first resolver's value."""
        return self._resolvers[0].environment

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task in the union, or the first resolver's master.

        As in TensorFlow, the first resolver's protocol applies only to its own master.
        """
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        address = self.cluster_spec().task_address(task_type, task_id)
        return with_layer(address, rpc_layer or self._rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> Mapping[str, int]:
        """Returns the first resolver's result."""
        return self._resolvers[0].num_accelerators(task_type, task_id)


def _merge_by_index(job: str, parts: list[list[str] | dict[int, str]]) -> dict[int, str]:
    merged: dict[int, str] = {}
    for tasks in parts:
        indexed = dict(enumerate(tasks)) if isinstance(tasks, list) else tasks
        twice = sorted(merged.keys() & indexed.keys())
        if twice:
            raise KeyError(
                f"several resolvers have tasks {short_repr(twice)} of job {job!r}, some by index; "
                "an index is one task's"
            )
        merged.update(indexed)
    return merged
