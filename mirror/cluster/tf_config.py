"""TFConfigResolver: the cluster in the environment variable TF_CONFIG."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mirror.cluster.rendezvous import MAX_TASKS, ClusterSpec, EnvironmentVariables
from mirror.cluster.resolver import ClusterResolver, add_rpc_layer
from mirror.errors import ClusterError, ClusterTypeError, short_repr

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
