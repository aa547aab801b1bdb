"""Probes in a child process: whether a backend hangs or crashes on the GPUs of this machine.

Problem: behind host bridges, with ACS or an IOMMU on, the driver may report peer access between
GPUs that does not work. The self-test finds wrong data and lost flags. But a load that never
returns hangs the process forever, and an illegal access ends its use of CUDA.
Rule: a backend that reads the memory of other GPUs is first run in a child process, which reports
its progress, has a deadline for each step, and is killed at the end.
Consequence: the result is cached for this machine, so only its first strategy pays. If no process
can be started, only the self-test in this process runs, and a warning says so.
"""

from __future__ import annotations

import hashlib
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
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic, time
from typing import IO

import torch

from mirror.base.safe_files import private_folder, read_private, replace_atomically
from mirror.comm.communicator import Communicator
from mirror.comm.topology import link_matrix, peer_matrix
from mirror.device.host import facts_of_machine

PROBE = ("-m", "mirror.comm.subprocess_probe_main")
"""The child's program; its arguments are a token, the backend's class and the devices."""

# The states of a child, as it reports them, and how long each may take. Importing torch is slow on
# a cold disk, and compiling kernels on a busy machine.
_SECONDS = {"being started": 300.0, "started": 60.0, "made": 300.0, "prepared": 60.0}
_POLL_SECONDS = 0.05
# A process that is blocked in the driver does not end even when it is killed.
_KILL_SECONDS = 5.0
_MAX_OUTPUT_BYTES = 1 << 20
# Environment variables that change how memory is shared.
_VARIABLES = ("CUDA_MODULE_LOADING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_logger = logging.getLogger("mirror")
_results: dict[tuple[type[Communicator], tuple[torch.device, ...]], str | None] = {}


class ProbeUnavailable(Exception):
    """No other process can run the probe; the message has the reason."""


def unsafe_reason(
    kind: type[Communicator], devices: Sequence[torch.device], *, retry: bool = False
) -> str | None:
    """Returns why a backend must not be tested in this process; ``None`` if it may be.

    Does nothing for CPU devices, a single GPU, and backends that are not risky.

    Args:
        retry: ignores the results of earlier probes.
    """
    if not kind.risky or len({device for device in devices if device.type == "cuda"}) < 2:
        return None
    key = kind, tuple(devices)
    if retry or key not in _results:
        _results[key] = _reason(kind, key[1], retry)
    return _results[key]


def _reason(
    kind: type[Communicator], devices: tuple[torch.device, ...], retry: bool
) -> str | None:
    facts = _facts(kind, devices)
    verdict = None if retry else load_verdict(facts)
    if verdict is not None:
        if verdict.reason is None:
            return None
        return (
            f"{verdict.reason} (found less than a day ago; `mirror doctor` tries it again, and "
            f"{FOLDER_VARIABLE}= forgets it)"
        )
    try:
        reason = run_probe(kind, devices)
    except ProbeUnavailable as unavailable:
        _logger.warning(
            "the self-test of backend %r runs in this process, where GPUs that cannot reach each "
            "other's memory may hang it; a process of its own cannot try it: %s",
            kind.name,
            unavailable,
        )
        return None
    store(facts, Verdict(reason))
    return reason


def run_probe(kind: type[Communicator], devices: Sequence[torch.device]) -> str | None:
    """Tests a backend in another process; returns how that failed, or ``None``.

    Raises:
        ProbeUnavailable: the process could not start.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        raise ProbeUnavailable("this program is not a Python that can be started again")
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
                return _wait_for_result(child, out, errors, token)
            finally:
                _kill(child)
    except OSError as error:
        raise ProbeUnavailable(f"{sys.executable} does not start: {error}") from None


def _wait_for_result(
    child: subprocess.Popen[bytes], out: IO[bytes], errors: IO[bytes], token: str
) -> str | None:
    """Returns the reason that the child reports, or how it ended without a report."""
    state, deadline = "being started", monotonic() + _SECONDS["being started"]
    while True:
        with suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_SECONDS)
        code = child.poll()  # first: if it has ended, the lines below are complete
        for line in _lines(out, token):
            if "result" in line:
                reason = line["result"]
                return None if reason is None else str(reason)
            if "unavailable" in line:
                raise ProbeUnavailable(str(line["unavailable"]))
            if list(_SECONDS).index(line["state"]) > list(_SECONDS).index(state):
                state, deadline = line["state"], monotonic() + _SECONDS[line["state"]]
        if code is not None:
            how = _exit_text(code, errors)
            if code >= 0 and state == "being started":
                raise ProbeUnavailable(f"the process {how}")  # no GPU has been touched
            return f"a process that tried it {how}"
        if monotonic() > deadline:
            return (
                f"a process that tried it hung, and was killed: after it was {state}, nothing "
                f"came for {_SECONDS[state]:g} s"
            )


def _lines(out: IO[bytes], token: str) -> list[dict[str, str]]:
    """Returns the child's own lines, without what libraries print."""
    # Not read(): the child writes at the file's position, which both processes share.
    text = os.pread(out.fileno(), _MAX_OUTPUT_BYTES, 0).decode(errors="replace")
    lines = []
    for match in re.finditer(rf"{token} (\{{.*\}})$", text, re.MULTILINE):
        with suppress(ValueError):  # the line is incomplete
            lines.append(json.loads(match[1]))
    return lines


def _exit_text(code: int, errors: IO[bytes]) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"died of {signal.Signals(-code).name}"
    size = os.fstat(errors.fileno()).st_size
    text = os.pread(errors.fileno(), _MAX_OUTPUT_BYTES, max(size - _MAX_OUTPUT_BYTES, 0))
    last = text.decode(errors="replace").strip().rpartition("\n")[2]
    return f"ended with code {code} and without a verdict" + (f": {last}" if last else "")


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    try:
        child.wait(_KILL_SECONDS)
    except subprocess.TimeoutExpired:
        _logger.warning("process %d was killed, but does not end: see the driver", child.pid)


def _environment() -> Mapping[str, str]:
    """Returns the environment of the child; it imports from the same folders as this process."""
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _facts(kind: type[Communicator], devices: tuple[torch.device, ...]) -> dict[str, object]:
    """Returns the facts on which the result may depend."""
    try:
        mirror = version("mirror-strategy")
    except PackageNotFoundError:  # not installed
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


FOLDER_VARIABLE = "MIRROR_CACHE_DIR"
"""The variable with the cache folder; if it is empty, nothing is stored."""

# A failure may have another cause, such as a GPU in use by another program.
_FAILURE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Verdict:
    """The result of a probe.

    Attributes:
        reason: how it failed; ``None`` if it passed.
    """

    reason: str | None


def load_verdict(facts: Mapping[str, object]) -> Verdict | None:
    """Returns the stored result for exactly these facts, or ``None``.

    A failure is valid for a day. A damaged or unreadable file counts as missing, and so does
    one that another user can change.
    """
    try:
        file = _file(facts)
        entry = json.loads(read_private(file)) if file is not None else None
        if entry is None or entry["facts"] != _normalize_facts(facts):
            return None
        reason, age = entry["reason"], time() - float(entry["when"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if reason is None or (isinstance(reason, str) and 0 <= age < _FAILURE_SECONDS):
        return Verdict(reason)
    return None


def store(facts: Mapping[str, object], verdict: Verdict) -> None:
    """Stores a result in place of an earlier one, if the folder is writable."""
    text = json.dumps({"facts": _normalize_facts(facts), "reason": verdict.reason, "when": time()})
    try:
        file = _file(facts, create=True)
        if file is None:
            return
        # Another process that reads or writes the same file never finds a partial one.
        with replace_atomically(file, 0o600) as new:
            new.write(text.encode())
    except OSError as error:
        _logger.debug("the result of a probe is not stored: %s", error)


def _file(facts: Mapping[str, object], *, create: bool = False) -> Path | None:
    name = hashlib.sha256(json.dumps(_normalize_facts(facts)).encode()).hexdigest()
    folder = _folder()
    if folder is None:
        return None
    return private_folder(folder, create=create) / f"{name}.json"


def _normalize_facts(facts: Mapping[str, object]) -> dict[str, object]:
    """Returns the facts as JSON decodes them, in a fixed order."""
    plain: dict[str, object] = json.loads(json.dumps(facts, sort_keys=True, default=str))
    return plain


def _folder() -> Path | None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        return Path(folder) / "trials" if folder else None
    # The specification of XDG_CACHE_HOME says to ignore relative paths.
    caches = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(caches) if os.path.isabs(caches) else Path.home() / ".cache"
    except RuntimeError:  # the user has no home directory
        return None
    return base / "mirror" / "trials"
