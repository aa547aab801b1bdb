"""``mirror run``: makes the strategy, opens its scope, and runs the script inside."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from mirror.cluster.launchers import launchers
from mirror.devices import is_simulated, resolve
from mirror.errors import StrategyError
from mirror.replica.layers.sync_batch_norm import synchronize_all
from mirror.replica.params.buffer_checks import statistics_are_warnings
from mirror.strategy.mirrored import CentralStorageStrategy, MirroredStrategy, OneDeviceStrategy
from mirror.strategy.multi_worker import MultiWorkerMirroredStrategy
from mirror.strategy.strategy_base import Strategy
from mirror.strategy.strategy_options import Schedule
from mirror.tools.run.script import Script, run_as_main, run_script

STRATEGIES = ("one-device", "mirrored", "central-storage", "multi-worker")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of ``mirror run``.

    Attributes:
        devices: the names of the replicas' devices; ``None``: all GPUs, else one CPU.
        replicas: so many, on the GPUs in turn or all on the CPU, instead of ``devices``.
        strategy: one of ``STRATEGIES``; ``None``: multi-worker where a launcher has started
            several processes, else mirrored.
        backend, schedule: those of the strategy.
        trace: the file for a trace of the whole script.
        report: whether to print at the end where the time of the last steps went.
        sync_batch_norm: whether BatchNorm uses the statistics of the whole batch.
    """

    devices: Sequence[str] | None = None
    replicas: int | None = None
    strategy: str | None = None
    backend: str | None = None
    schedule: Schedule | None = None
    trace: str | None = None
    report: bool = False
    sync_batch_norm: bool = False


def run_command(script: Script, options: RunOptions) -> int:
    """Runs a script under an open scope and returns the exit code of one that simply ends.

    Raises:
        ScriptError: the script cannot be started.
        MirrorError: the options do not fit together, or to this machine.
        BaseException: what the script raises; ``sys.excepthook`` has shown it already.
    """
    script.check()
    strategy = make_strategy(options)
    if options.sync_batch_norm:
        synchronize_all()
    process = os.getpid()
    with ExitStack() as stack:
        stack.enter_context(statistics_are_warnings())
        if options.report:
            stack.callback(_print_report, strategy, process)
        if options.trace is not None:
            stack.enter_context(_open_trace(strategy, options.trace))

        def task() -> None:
            with strategy.scope():
                run_script(script)

        return run_as_main(task)


def make_strategy(options: RunOptions) -> Strategy:
    """Returns the strategy that the options name.

    Raises:
        MirrorError: an option does not fit the strategy, or a device does not exist.
    """
    kind = options.strategy or ("multi-worker" if _is_one_of_several() else "mirrored")
    devices = _devices(options)
    if kind == "one-device":
        return _one_device(options, devices)
    if kind == "central-storage":
        return CentralStorageStrategy(
            devices, backend=options.backend or "auto", schedule=_schedule(options)
        )
    make = MultiWorkerMirroredStrategy if kind == "multi-worker" else MirroredStrategy
    return make(devices, options.backend or "auto", schedule=_schedule(options))


def _one_device(options: RunOptions, devices: Sequence[str] | None) -> Strategy:
    given = [name for name in ("backend", "schedule") if getattr(options, name) is not None]
    if given:
        raise StrategyError(f"--strategy one-device has no --{given[0]}; leave it out")
    names = [str(device) for device in devices or resolve(None)[:1]]
    if len(names) != 1:
        raise StrategyError(
            f"--strategy one-device needs one device, got {len(names)}; name one with --devices, "
            "or leave --strategy out"
        )
    return OneDeviceStrategy(names[0])


def _schedule(options: RunOptions) -> Schedule:
    return options.schedule or "auto"


def _devices(options: RunOptions) -> Sequence[str] | None:
    if options.replicas is None:
        return options.devices
    found = resolve(None)
    if is_simulated(found):
        found = (torch.device("cpu"),)
    return [str(found[i % len(found)]) for i in range(options.replicas)]


def _is_one_of_several() -> bool:
    return bool(launchers())


@contextmanager
def _open_trace(strategy: Strategy, path: str) -> Iterator[None]:
    """Records a trace of what happens inside; the script's own OSErrors pass."""
    with ExitStack() as stack:
        try:
            stack.enter_context(strategy.trace(path))
        except OSError as error:
            reason = error.strerror or error
            raise StrategyError(
                f"--trace {path}: cannot be written: {reason}; name another file"
            ) from None
        yield


def _print_report(strategy: Strategy, process: int) -> None:
    if os.getpid() == process:  # not in a process that the script has forked
        sys.stdout.flush()
        print(strategy.report(), file=sys.stderr)
