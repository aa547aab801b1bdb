"""Probes in a child process: whether a backend hangs or crashes on the GPUs of this machine.

[Note: GPUs that lie]
Problem: behind host bridges, with ACS or an IOMMU on, the driver may report peer access between
GPUs that does not work. The self-test finds wrong data and lost flags. But a load that never
returns hangs the process forever, and an illegal access ends its use of CUDA.
Rule: a backend that reads the memory of other GPUs is first run in a child process, which reports
its progress, has a deadline for each step, and is killed at the end.
Consequence: the result is cached for this machine, so only its first strategy pays. If no process
can be started, only the self-test in this process runs, and a warning says so.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import IO

import torch

from mirror.comm.communicator import Communicator
from mirror.comm.probe_cache import FOLDER_VARIABLE, Verdict, load, store
from mirror.comm.topology import link_matrix, peer_matrix
from mirror.device.machine_facts import facts_of_machine

PROBE = ("-m", "mirror.comm.subprocess_probe_main")
"""What the child runs; its arguments: a token, the backend's class, and the devices."""

# How far a child is, in the words of its lines, and how long it may take from there. To import
# torch takes long on a cold disk, and to compile kernels on a busy machine.
_SECONDS = {"being started": 300.0, "started": 60.0, "made": 300.0, "prepared": 60.0}
_LOOK_SECONDS = 0.05
# A process that stands in the driver does not even end when it is killed.
_KILL_SECONDS = 5.0
_MOST_BYTES = 1 << 20
# What of the environment changes how memory is shared.
_VARIABLES = ("CUDA_MODULE_LOADING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_logger = logging.getLogger("mirror")
_found: dict[tuple[type[Communicator], tuple[torch.device, ...]], str | None] = {}


class ProbeUnavailable(Exception):
    """No other process can try it, and why."""


def unsafe_reason(
    kind: type[Communicator], devices: Sequence[torch.device], *, anew: bool = False
) -> str | None:
    """Returns why a backend must not be tried in this process; ``None`` if it may be.

    Costs nothing for CPU devices, a single GPU, and backends that risk nothing.

    Args:
        anew: ignores the results of earlier probes.
    """
    if not kind.risky or len({device for device in devices if device.type == "cuda"}) < 2:
        return None
    place = kind, tuple(devices)
    if anew or place not in _found:
        _found[place] = _reason(kind, place[1], anew)
    return _found[place]


def _reason(kind: type[Communicator], devices: tuple[torch.device, ...], anew: bool) -> str | None:
    facts = _facts(kind, devices)
    verdict = None if anew else load(facts)
    if verdict is not None:
        if verdict.reason is None:
            return None
        return (
            f"{verdict.reason} (found less than a day ago; `mirror doctor` tries it anew, and "
            f"{FOLDER_VARIABLE}= forgets it)"
        )
    try:
        reason = run_probe(kind, devices)
    except ProbeUnavailable as untried:
        _logger.warning(
            "the self-test of backend %r runs in this process, where GPUs that cannot reach each "
            "other's memory may hang it; a process of its own cannot try it: %s",
            kind.name,
            untried,
        )
        return None
    store(facts, Verdict(reason))
    return reason


def run_probe(kind: type[Communicator], devices: Sequence[torch.device]) -> str | None:
    """Has another process try a backend; returns how that failed, ``None`` if it did not.

    Raises:
        Untried: it could not even begin.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        raise ProbeUnavailable("this program is no Python that can be started again")
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ProbeUnavailable(
            f"no other process can import {kind.__qualname__} of {kind.__module__}"
        )
    token = secrets.token_hex(8)
    name = f"{kind.__module__}:{kind.__qualname__}"
    command = [sys.executable, *PROBE, token, name, *map(str, devices)]
    try:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=_environment()
            )
            try:
                return _answer(child, out, errors, token)
            finally:
                _end(child)
    except OSError as error:
        raise ProbeUnavailable(f"{sys.executable} does not start: {error}") from None


def _answer(
    child: subprocess.Popen[bytes], out: IO[bytes], errors: IO[bytes], token: str
) -> str | None:
    """Returns what the child finds, or how it ends without having found anything."""
    state, deadline = "being started", monotonic() + _SECONDS["being started"]
    while True:
        with suppress(subprocess.TimeoutExpired):
            child.wait(_LOOK_SECONDS)
        code = child.poll()  # before its lines are read: then those are all
        for said in _lines(out, token):
            if "found" in said:
                found = said["found"]
                return None if found is None else str(found)
            if "untried" in said:
                raise ProbeUnavailable(str(said["untried"]))
            if list(_SECONDS).index(said["state"]) > list(_SECONDS).index(state):
                state, deadline = said["state"], monotonic() + _SECONDS[said["state"]]
        if code is not None:
            how = _ending(code, errors)
            if code >= 0 and state == "being started":
                raise ProbeUnavailable(f"the process {how}")  # no GPU has been touched
            return f"a process that tried it {how}"
        if monotonic() > deadline:
            return (
                f"a process that tried it hung, and was killed: after it was {state}, nothing "
                f"came for {_SECONDS[state]:g} s"
            )


def _lines(out: IO[bytes], token: str) -> list[dict[str, str]]:
    """Returns what the child itself has said; libraries may print what they like."""
    # Not by reading: the child writes where the file's one position is.
    text = os.pread(out.fileno(), _MOST_BYTES, 0).decode(errors="replace")
    said = []
    for match in re.finditer(rf"{token} (\{{.*\}})$", text, re.MULTILINE):
        with suppress(ValueError):  # half a line
            said.append(json.loads(match[1]))
    return said


def _ending(code: int, errors: IO[bytes]) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"died of {signal.Signals(-code).name}"
    size = os.fstat(errors.fileno()).st_size
    text = os.pread(errors.fileno(), _MOST_BYTES, max(size - _MOST_BYTES, 0))
    last = text.decode(errors="replace").strip().rpartition("\n")[2]
    return f"ended with code {code} and without a verdict" + (f": {last}" if last else "")


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    try:
        child.wait(_KILL_SECONDS)
    except subprocess.TimeoutExpired:
        _logger.warning("process %d was killed, but does not end: see the driver", child.pid)


def _environment() -> Mapping[str, str]:
    """Returns this process's, with what it imports from, and not where it happens to be."""
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _facts(kind: type[Communicator], devices: tuple[torch.device, ...]) -> dict[str, object]:
    """Returns all that a verdict may depend on."""
    try:
        mirror = version("mirror-strategy")
    except PackageNotFoundError:  # used from a folder
        mirror = ""
    return {
        **facts_of_machine(devices),
        "backend": f"{kind.__module__}:{kind.__qualname__}",
        "mirror": mirror,
        "torch": torch.__version__,
        "peers": peer_matrix(devices),
        "links": link_matrix(devices),
        "environment": {name: os.environ.get(name, "") for name in _VARIABLES},
    }
