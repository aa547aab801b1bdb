"""Cluster resolvers: their base class, clusters from arguments and TF_CONFIG, and unions."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from mirror.cluster.rendezvous import (
    MAX_PORT,
    MAX_TASKS,
    ClusterSpec,
    EnvironmentVariables,
    Rendezvous,
    rendezvous_of,
)
from mirror.devices import num_cuda_devices
from mirror.errors import ClusterError, ClusterTypeError, short_repr

_IDENTITY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class ClusterResolver(ABC):
    """Returns the cluster and the task of this process, as ``tf.distribute.cluster_resolver``.

    Each call reads the source again. ``task_type`` (the job), ``task_id`` (the index in it) and
    ``rpc_layer`` (the protocol in ``master()``) can be set; then they replace the values of the
    source. A subclass must implement ``cluster_spec()``; it returns the values of its source in
    ``_read_task_type``, ``_read_task_id`` and ``_read_rpc_layer``.
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the current cluster, which is empty if there is only this process."""

    @property
    def task_type(self) -> str | None:
        """The job of this process; None if it is unknown."""
        return self._read_task_type() if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if it is unknown."""
        return self._read_task_id() if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol in front of the address in ``master()``; torch.distributed uses none."""
        return self._read_rpc_layer() if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _read_task_type(self) -> str | None:
        return None

    def _read_task_id(self) -> int | None:
        return None

    def _read_rpc_layer(self) -> str | None:
        return None

    @property
    def environment(self) -> str | None:
        """The name of the environment, for programs that ask for it."""
        return ""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default of this process; "" if that is unknown.

        The name is TensorFlow's. The address of rank 0 is ``rendezvous().master_address``.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return add_rpc_layer(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> Mapping[str, int]:
        """Returns the number of devices that this process sees: ``{"GPU": 4}`` or ``{}``.

        Raises:
            ClusterError: the arguments are those of another task.
        """
        for argument, own in ((task_type, self.task_type), (task_id, self.task_id)):
            if argument is not None and argument != own:
                raise ClusterError(
                    f"this is task {self.task_id} of job {self.task_type!r}, which sees only its "
                    f"own devices; got task {task_id} of job {task_type!r}"
                )
        num_gpus = num_cuda_devices()
        return {"GPU": num_gpus} if num_gpus else {}

    def rendezvous(self) -> Rendezvous:
        """Returns this process's rank and the address of rank 0; see ``rendezvous.py``.

        Raises:
            ClusterError: the source is wrong or incomplete.
        """
        return rendezvous_of(self.cluster_spec(), self.task_type, self.task_id)

    def apply(self, environ: MutableMapping[str, str] | None = None) -> Rendezvous:
        """Sets the variables of torch.distributed: RANK, WORLD_SIZE, MASTER_ADDR and others.

        MASTER_ADDR and MASTER_PORT keep their values if they are set, since the script that starts
        the workers often sets them.

        Args:
            environ: the mapping to change; None changes this process's environment.

        Returns:
            The rendezvous that the variables now describe.

        Raises:
            ClusterError: another rank or number of workers is set already, or the address is
                invalid; nothing is changed.
        """
        environ = os.environ if environ is None else environ
        rendezvous = self.rendezvous()
        port = EnvironmentVariables(environ).integer("MASTER_PORT", most=MAX_PORT)
        rendezvous = replace(
            rendezvous,
            master_address=environ.get("MASTER_ADDR") or rendezvous.master_address,
            master_port=rendezvous.master_port if port is None else port,
        )
        variables = rendezvous.variables()
        for name in _IDENTITY:
            value = environ.get(name, "")
            if value and name in variables and value != variables[name]:
                raise ClusterError(
                    f"{type(self).__name__} says {name}={variables[name]}, but the environment "
                    f"has {name}={value}; let one launcher start the workers, or "
                    "use TorchrunResolver"
                )
        environ.update(variables)
        return rendezvous


def add_rpc_layer(address: str, rpc_layer: str | None) -> str:
    """Returns an address with its protocol in front, if it has one."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


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
        return add_rpc_layer(address, rpc_layer or self.rpc_layer)

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
        self._rpc_layer = rpc_layer or None
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

    def _read_task_type(self) -> str | None:
        return self._resolvers[0].task_type

    def _read_task_id(self) -> int | None:
        return self._resolvers[0].task_id

    def _read_rpc_layer(self) -> str | None:
        return self._resolvers[0].rpc_layer

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
        return add_rpc_layer(address, rpc_layer or self._rpc_layer)

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


_NAME = "TF_CONFIG"
_DIGITS = re.compile("[0-9]{1,20}")


class TFConfigResolver(ClusterResolver):
    """Reads TF_CONFIG, as ``tf.distribute.cluster_resolver.TFConfigClusterResolver``.

    ::

        {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}

    Without the variable, or without a cluster in it, there is only this process. Every value is
    checked: a wrong one raises ClusterError, with its key.

    Args:
        task_type, task_id, rpc_layer, environment: replace the values of the variable.
        environ: read in place of this process's environment.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._variables = EnvironmentVariables(environ)
        self._task_type = None if task_type is None else str(task_type)
        self._task_id = None if task_id is None else int(task_id)  # as TensorFlow converts it
        self._rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Returns the value of ``cluster``."""
        cluster = self._entry("cluster", dict)
        try:
            spec = ClusterSpec(cluster or {})
        except ClusterError as error:
            raise type(error)(f"{_NAME}, cluster: {error}") from error
        addresses = Counter(
            address for job in spec.jobs for address in spec.job_tasks(job) if address is not None
        )
        twice = [address for address, count in addresses.items() if count > 1]
        if twice:
            raise ClusterError(
                f"{_NAME}, cluster: every task has an address of its own; got {short_repr(twice)} "
                "more than once"
            )
        return spec

    def _read_task_type(self) -> str | None:
        task = self._entry("task", dict) or {}
        if "type" not in task:
            return None
        job = task["type"]
        if isinstance(job, bool) or not isinstance(job, (str, int)):
            raise _type_error("task, type", "the name of a job", job)
        return str(job)

    def _read_task_id(self) -> int | None:
        task = self._entry("task", dict) or {}
        return _index(task["index"]) if "index" in task else None

    def _read_rpc_layer(self) -> str | None:
        rpc_layer: str | None = self._entry("rpc_layer", str)
        return rpc_layer

    @property
    def environment(self) -> str | None:
        """The argument, or the value of ``environment``."""
        return self._entry("environment", str) if self._environment is None else self._environment

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default this process's.

        The result is the value of ``session_master`` for any task, if there is one, and "" if the
        cluster has only one task.
        """
        session_master: str | None = self._entry("session_master", str)
        if session_master is not None:
            return session_master
        spec = self.cluster_spec()
        if not spec or (len(spec.jobs) == 1 and len(spec.job_tasks(spec.jobs[0])) == 1):
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise ClusterError(
                f"{_NAME} has a cluster, but not which task of it this process is; add "
                '"task": {"type": "worker", "index": 0}, or pass task_type and task_id'
            )
        layer = self.rpc_layer if rpc_layer is None else rpc_layer
        return add_rpc_layer(spec.task_address(task_type, task_id), layer)

    def _entry(self, key: str, kind: type) -> Any:
        """Returns the value of a key after a check of its type, or None if there is none."""
        config = self._config()
        value = config.get(key)
        is_missing = key not in config or (value is None and kind is str)
        if not is_missing and not isinstance(value, kind):
            raise _type_error(key, "a JSON object" if kind is dict else "a string", value)
        return value

    def _config(self) -> dict[str, Any]:
        text = self._variables.environ.get(_NAME)
        if text is None:
            return {}
        try:
            config = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
        except ClusterError:
            raise
        except (ValueError, RecursionError) as error:
            raise ClusterError(
                f"{_NAME} is a JSON object; got {short_repr(text)}: {error}"
            ) from error
        if not isinstance(config, dict):
            raise ClusterTypeError(f"{_NAME} is a JSON object; got {short_repr(config)}")
        return config


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = [key for key, count in counts.items() if count > 1]
        raise ClusterError(f"{_NAME} has {short_repr(twice)} more than once in one object")
    return entries


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _index(value: object) -> int:
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    rule = f"a number from 0 to {MAX_TASKS - 1}"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _type_error("task, index", rule, value)
    if not isinstance(value, int) or not 0 <= value < MAX_TASKS:
        raise ClusterError(f"{_NAME}, task, index: this is {rule}; got {short_repr(value)}")
    return value


def _type_error(key: str, rule: str, value: object) -> ClusterTypeError:
    return ClusterTypeError(f"{_NAME}, {key}: this is {rule}; got {short_repr(value)}")
