"""``mirror doctor``: examines devices, backends, torch, the GIL and workers; runs self-tests.

Of several workers it reports the cluster, by the variables of launchers, and measured links.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from time import perf_counter

import torch

from mirror.base.torch_private import PrivateName, private_names, range_warnings
from mirror.cluster.launchers import launchers, resolver_of
from mirror.cluster.rendezvous import ClusterSpec, EnvironmentVariables, Rendezvous
from mirror.comm import registry, self_test, subprocess_probe
from mirror.comm.nccl import libnccl
from mirror.comm.registry import Choice, Facts, facts_of, pick
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.devices import is_simulated, model_name, num_cuda_devices, resolve
from mirror.errors import ClusterError, DivergenceError, WorkerLostError
from mirror.execution.parallel_runs import is_gil_enabled
from mirror.integrations import tpu


@dataclass(frozen=True)
class ClusterReport:
    """The cluster of this process.

    Attributes:
        launchers: the launchers with variables in the environment, the decisive one first.
        rendezvous: the rank of this process and the address of rank 0; ``None`` if unknown.
        tasks: the number of tasks of each job.
        failure: the error in the variables; ``None`` if there is none.
        warnings: possible problems.
    """

    launchers: tuple[str, ...]
    rendezvous: Rendezvous | None = None
    tasks: tuple[tuple[str, int], ...] = ()
    failure: str | None = None
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Returns the report as values for JSON."""
        place = None if self.rendezvous is None else asdict(self.rendezvous)
        values = {**asdict(self), "tasks": dict(self.tasks), "place": place}
        del values["rendezvous"]
        return values

    def render(self) -> Iterator[str]:
        """Yields the lines for a terminal."""
        if not self.launchers:
            yield "one process: no variables of torchrun, TF_CONFIG, Slurm or Kubernetes are set"
            return
        first, *others = self.launchers
        if self.failure is not None:
            yield f"{first}: WRONG: {self.failure}"
        elif self.rendezvous is not None:
            jobs = ", ".join(f"{count} {job}" for job, count in self.tasks)
            yield f"{first}: {_describe_rank(self.rendezvous)}{f'; tasks: {jobs}' if jobs else ''}"
        yield from self.warnings
        if others:
            yield f"the variables of {' and '.join(others)} are set, too; those of {first} count"


ONE_PROCESS = ClusterReport(())


def examine_cluster(environ: MutableMapping[str, str] | None = None) -> ClusterReport:
    """Returns the report from the variables of launchers; changes none of them.

    Args:
        environ: replaces this process's environment.
    """
    environ = os.environ if environ is None else environ
    found = tuple(launchers(environ))
    if not found:
        return ONE_PROCESS
    try:
        resolver = resolver_of(found[0], environ)
        rendezvous, spec = resolver.rendezvous(), resolver.cluster_spec()
    except ClusterError as error:
        return ClusterReport(found, failure=str(error))
    warnings = tuple(_warnings(found[0], rendezvous, spec, EnvironmentVariables(environ)))
    tasks = tuple((job, spec.num_tasks(job)) for job in spec.jobs)
    return ClusterReport(found, rendezvous, tasks, warnings=warnings)


def _describe_rank(place: Rendezvous) -> str:
    if place.world_size == 1:
        return "this process is alone"
    where = f"all meet at {place.master_address}:{place.master_port}"
    if place.local_rank is not None and place.local_world_size is not None:
        where += f"; local rank {place.local_rank} of {place.local_world_size}"
    chief = ", the chief" if place.is_chief else ""
    return f"rank {place.rank} of {place.world_size}{chief}; {where}"


def _warnings(
    launcher: str, place: Rendezvous, spec: ClusterSpec, env: EnvironmentVariables
) -> Iterator[str]:
    is_step = env.find_first("SLURM_STEP_ID", "SLURM_STEPID") is not None
    if launcher == "Slurm" and not is_step and place.world_size > 1:
        yield (
            "SLURM_STEP_ID is not set: this may be the batch script itself, which runs once; "
            f"start the {place.world_size} workers with srun"
        )
    if launcher == "TF_CONFIG" and not spec:
        yield "TF_CONFIG has no cluster"


_LINK_SECONDS = 30.0
_NUM_EXCHANGES, _NUM_SUMS = 50, 5
_SUM_BYTES = 10 * 10**6


@dataclass(frozen=True)
class LinkReport:
    """The measured links between workers.

    Attributes:
        seconds_per_exchange: the median time of an exchange of envelopes.
        seconds_per_sum: the best time of an all-reduce of ``sum_bytes``.
        missing: the reason why the other workers did not connect, as they need not run a doctor;
            ``None`` if they did.
        failure: the error; ``None`` if there is none.
    """

    seconds_per_exchange: float | None = None
    seconds_per_sum: float | None = None
    sum_bytes: int = _SUM_BYTES
    missing: str | None = None
    failure: str | None = None

    def render(self) -> Iterator[str]:
        """Yields the lines for a terminal."""
        if self.failure is not None:
            yield f"FAILED: {self.failure}"
        elif self.missing is not None:
            yield f"not tested: {self.missing}"
        elif self.seconds_per_exchange is not None and self.seconds_per_sum is not None:
            yield f"an exchange of all workers takes {self.seconds_per_exchange * 1e6:.0f} us"
            rate = self.sum_bytes / self.seconds_per_sum / 1e9
            yield (
                f"an all-reduce of {self.sum_bytes / 1e6:.0f} MB takes "
                f"{self.seconds_per_sum * 1e3:.1f} ms, {rate:.2f} GB/s"
            )


def measure_links(num_workers: int, tell: Callable[[str], None] | None = None) -> LinkReport:
    """Connects to the other workers, which also run ``mirror doctor``, and measures the links.

    torch.distributed reads the address from the environment.

    Args:
        tell: called with a line before it waits for the other workers, for up to 30 s.
    """
    if not torch.distributed.is_available():
        return LinkReport(failure="this torch was built without torch.distributed")
    from mirror.comm.workers.distributed_group import DistributedWorkerGroup  # needs it

    if tell is not None:
        tell(f"waiting up to {_LINK_SECONDS:g} s for the doctors of the other workers")
    try:
        workers = DistributedWorkerGroup(1, lambda: "mirror doctor", _LINK_SECONDS)
    except WorkerLostError as error:
        return LinkReport(
            missing=f"{str(error).splitlines()[0]} (mirror doctor tests the links if all "
            f"{num_workers} workers run it at once)"
        )
    try:
        return _measure(workers)
    except (WorkerLostError, DivergenceError) as error:
        return LinkReport(failure=str(error))
    finally:
        workers.close()


def _measure(workers: LocalWorkerGroup) -> LinkReport:
    exchanges = [_time(lambda: workers.exchange("a test")) for _ in range(_NUM_EXCHANGES)]
    sums = []
    for _ in range(_NUM_SUMS):
        buffer = torch.ones(_SUM_BYTES // 4)
        workers.exchange("a test begins")
        sums.append(_time(partial(workers.all_reduce_sum_, "a test", buffer)))
        if not torch.equal(buffer, torch.full_like(buffer, workers.size)):
            return LinkReport(failure="the sum over the workers is wrong")
    return LinkReport(statistics.median(exchanges), min(sums))


def _time(call: Callable[[], object]) -> float:
    begun = perf_counter()
    call()
    return perf_counter() - begun


# Making an optimizer imports torch's compiler, which imports triton.
_PROGRAM = "import torch; torch.optim.SGD([torch.zeros(1)], lr=0.1)"
_WARNING = re.compile(r"load module '([^']+)'")
_SECONDS = 120.0  # importing torch takes a while on a cold disk


@dataclass(frozen=True)
class GilReport:
    """Whether replicas may run Python at once.

    Attributes:
        can_be_off: whether this interpreter is built for that, as python3.14t is.
        is_on: whether the GIL is on now.
        turned_on_by: the module that turns it on if imported; ``None`` if there is none.
    """

    can_be_off: bool = False
    is_on: bool = True
    turned_on_by: str | None = None

    def render(self) -> str:
        """Returns a line for a terminal."""
        if not self.can_be_off:
            return (
                'on, as in every ordinary Python; replicas under schedule="parallel" share it '
                "(python3.14t has none)"
            )
        if self.turned_on_by is not None:
            now = "on" if self.is_on else "off now"
            return (
                f"{now}; importing {self.turned_on_by}, which making an optimizer does, turns it "
                "on; set PYTHON_GIL=0 to keep it off, at your own risk"
            )
        return "on" if self.is_on else "off; replicas run at once"


ORDINARY = GilReport()


def examine_gil() -> GilReport:
    """Returns what is found; starts a process where the GIL can be off."""
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        return ORDINARY
    turned_on_by = None
    if os.environ.get("PYTHON_GIL") != "0":
        try:
            done = subprocess.run(
                [sys.executable, "-W", "always", "-c", _PROGRAM],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired):
            pass
        else:
            found = _WARNING.search(done.stderr)
            turned_on_by = found[1] if found else None
    return GilReport(can_be_off=True, is_on=is_gil_enabled(), turned_on_by=turned_on_by)


_SIMULATED = ("cpu",) * 4
_LABEL = 12


@dataclass(frozen=True)
class BackendReport:
    """The state of one backend.

    Attributes:
        reason: the reason why it cannot serve the devices; ``None`` if it can.
        failure: the error of its self-test; ``None`` if it passed, or was not run.
    """

    name: str
    reason: str | None
    failure: str | None


@dataclass(frozen=True)
class Diagnosis:
    """The findings of ``mirror doctor``.

    Attributes:
        num_gpus: the number of GPUs that torch sees.
        names: the model of each device.
        nccl: the libnccl in use; ``None`` if there is none.
        nccl_reason: the reason why libnccl cannot be used.
        auto: the choice of ``backend="auto"`` for the devices.
        warnings: possible problems that no test finds.
        lacking: the private names that this torch lacks.
        cluster: the cluster by the variables of launchers.
        links: the links between workers; ``None`` for one process.
        gil: whether replicas may run Python at once.
        tpu_reason: the reason why ``TPUStrategy`` cannot be created; ``None`` if it can.
    """

    num_gpus: int
    facts: Facts
    names: tuple[str, ...]
    nccl: libnccl.NcclLibrary | None
    nccl_reason: str | None
    backends: tuple[BackendReport, ...]
    auto: Choice
    warnings: tuple[str, ...] = ()
    lacking: tuple[PrivateName, ...] = ()
    cluster: ClusterReport = ONE_PROCESS
    links: LinkReport | None = None
    gil: GilReport = ORDINARY
    tpu_reason: str | None = None

    @property
    def healthy(self) -> bool:
        """Whether no test failed, and the variables of launchers are correct."""
        failures = [self.cluster.failure, *(backend.failure for backend in self.backends)]
        if self.links is not None:
            failures.append(self.links.failure)
        return all(failure is None for failure in failures)

    def to_json(self) -> str:
        """Returns the findings as one JSON object."""
        facts = self.facts
        devices = zip(facts.devices, self.names, strict=True)
        nccl = self.nccl
        found = {
            "mirror": _version(),
            "installed": _is_installed(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            "num_gpus": self.num_gpus,
            "devices": [{"device": str(device), "name": name} for device, name in devices],
            "simulated": is_simulated(facts.devices),
            "islands": facts.islands,
            "peers": facts.peers,
            "links": facts.links,
            "libnccl": {
                "path": None if nccl is None else nccl.path,
                "version": None if nccl is None else libnccl.version_name(nccl.version),
                "reason": self.nccl_reason,
            },
            "backends": [
                {**asdict(backend), "can_serve": not (backend.reason or backend.failure)}
                for backend in self.backends
            ],
            "auto": asdict(self.auto),
            "cluster": self.cluster.to_dict(),
            "between_workers": None if self.links is None else asdict(self.links),
            "gil": asdict(self.gil),
            "tpu": {"reason": self.tpu_reason},
            "healthy": self.healthy,
            "warnings": list(self.warnings),
            "torch_lacks": [asdict(name) for name in self.lacking],
        }
        return json.dumps(found, indent=1)

    def to_text(self) -> str:
        """Returns the findings as text for a terminal."""
        paragraphs: list[tuple[str, Iterable[str]]] = [
            ("versions", self._versions()),
            ("WARNING", self.warnings),
            ("GIL", [self.gil.render()]),
            ("this torch", self._lacks()),
            ("devices", self._devices()),
            ("topology", self._topology()),
            ("libnccl", self._libnccl()),
            ("backends", self._backends()),
            ("auto", [f"{self.auto.name}: {self.auto.reason}"]),
            ("cluster", self.cluster.render()),
            ("links", [] if self.links is None else self.links.render()),
            ("TPU", [self._tpu()]),
        ]
        if self.num_gpus == 0:
            simulate = (
                'mirror.MirroredStrategy(["cpu"] * 4) trains on four simulated devices',
                "mirror doctor --devices cpu,cpu examines two",
            )
            paragraphs.append(("simulate", simulate))
        text = []
        for label, lines in paragraphs:
            for line in chain.from_iterable(map(_wrap_line, lines)):
                text.append(f"{label:{_LABEL}}{line}")
                label = ""
        return "\n".join(text)

    def _versions(self) -> Iterator[str]:
        cuda = torch.version.cuda or "none"
        source = "" if _is_installed() else " from a checkout"
        yield (
            f"mirror {_version()}{source}, torch {torch.__version__}, CUDA {cuda}, Python "
            f"{platform.python_version()}, {sys.platform} {platform.machine()}"
        )

    def _lacks(self) -> Iterator[str]:
        if not self.lacking:
            yield f"has all {len(private_names())} private names that mirror uses"
        for name in self.lacking:
            stands_in = f"; {name.instead} stands in" if name.instead else ""
            yield f"lacks {name.path}: lost is {name.lost}{stands_in}"

    def _devices(self) -> Iterator[str]:
        if self.num_gpus == 0:
            why = "" if torch.version.cuda else "; this torch was built without CUDA"
            yield f"no GPU is visible to torch{why}"
        for i, (device, name) in enumerate(zip(self.facts.devices, self.names, strict=True)):
            yield f"replica {i}: {device}" + (", simulated" if name == "cpu" else f", {name}")

    def _topology(self) -> Iterator[str]:
        islands = self.facts.islands
        shown = " | ".join(" ".join(map(str, island)) for island in islands)
        yield f"islands of near replicas: {shown}"
        if is_simulated(self.facts.devices):
            return
        yield "peer access: = one GPU, N by NVLink, P by PCIe, - none"
        n = len(self.facts.devices)
        yield "   " + "".join(f"{j:3}" for j in range(n))
        for i in range(n):
            yield f"{i:3}" + "".join(f"{self._link_symbol(i, j):>3}" for j in range(n))

    def _link_symbol(self, i: int, j: int) -> str:
        facts = self.facts
        if facts.devices[i] == facts.devices[j]:
            return "="
        if not facts.peers[i][j]:
            return "-"
        return "N" if facts.links[i][j] else "P"

    def _tpu(self) -> str:
        if self.tpu_reason is None:
            pins = ", ".join(f"{name} {pin}" for name, pin in tpu.PINS.items())
            return f"TPUStrategy, experimental and never run on a TPU, can be made: {pins}"
        return f"TPUStrategy, experimental, cannot be made: {self.tpu_reason}"

    def _libnccl(self) -> Iterator[str]:
        if self.nccl is not None:
            yield f"{libnccl.version_name(self.nccl.version)}, {self.nccl.path}"
        else:
            yield f"cannot be used: {self.nccl_reason}"

    def _backends(self) -> Iterator[str]:
        for backend in self.backends:
            if backend.reason is not None:
                state = f"cannot serve: {backend.reason}"
            elif backend.failure is not None:
                state = f"FAILED: {backend.failure}"
            else:
                state = "can serve; its self-test passed"
            yield f"{backend.name:14}{state}"


def diagnose(
    devices: Sequence[torch.device | str] | None = None, tell: Callable[[str], None] | None = None
) -> Diagnosis:
    """Examines devices and all backends on them.

    Args:
        devices: ``None`` for all GPUs, or four simulated devices where there is none.
        tell: called with a line before each self-test that may take long.

    Raises:
        DeviceError: a device does not exist.
    """
    num_gpus = num_cuda_devices()
    if devices is None and num_gpus == 0:
        devices = _SIMULATED
    resolved = resolve(devices)
    facts = facts_of(resolved)
    nccl_reason = libnccl.nccl_missing_reason()
    cluster = examine_cluster()
    return Diagnosis(
        num_gpus=num_gpus,
        facts=facts,
        names=tuple(map(model_name, resolved)),
        nccl=libnccl.nccl_library() if nccl_reason is None else None,
        nccl_reason=nccl_reason,
        backends=tuple(_report(name, resolved, tell) for name in registry.names()),
        auto=pick(facts, lambda name: registry.unavailable_reason(name, resolved)),
        gil=examine_gil(),
        warnings=range_warnings(),
        lacking=tuple(name for name in private_names().values() if name.is_lacking),
        cluster=cluster,
        links=_links(cluster, tell),
        tpu_reason=tpu.unavailable_reason(),
    )


def _links(cluster: ClusterReport, tell: Callable[[str], None] | None) -> LinkReport | None:
    """Returns the measured links, if the launcher started several workers."""
    place = cluster.rendezvous
    if place is None or place.world_size == 1:
        return None
    resolver_of(cluster.launchers[0]).apply()
    return measure_links(place.world_size, tell)


def _report(
    name: str, devices: tuple[torch.device, ...], tell: Callable[[str], None] | None
) -> BackendReport:
    kind = registry.check_name(name)
    if kind is None:
        raise KeyError(name)
    reason = kind.unavailable_reason(devices)
    if tell is not None and reason is None and kind.needs_trial and not is_simulated(devices):
        tell(f"{name}: trying it out; what is new on this machine is compiled, or loaded, first")
    failure = None
    if reason is None:
        failure = subprocess_probe.unsafe_reason(kind, devices, retry=True) or self_test.failure(
            kind, devices
        )
    return BackendReport(name, reason, failure)


def _wrap_line(line: str) -> list[str]:
    columns = max(shutil.get_terminal_size((100, 24)).columns, 60) - _LABEL
    return textwrap.wrap(line, columns, subsequent_indent="  ", break_long_words=False)


def _version() -> str:
    found: str = sys.modules[__name__.partition(".")[0]].__version__
    return found


def _is_installed() -> bool:
    """Returns whether the distribution is installed; else the package is used from a checkout."""
    try:
        version("mirror-strategy")
    except PackageNotFoundError:
        return False
    return True
