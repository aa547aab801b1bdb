"""``mirror run``: makes the strategy, opens its scope, and runs the script inside.

A script, or a module, runs as under ``python SCRIPT`` or ``python -m MODULE``. It is the module
``__main__``; ``sys.argv``, ``sys.path[0]`` and the working directory are those that Python would
have set. So pickles name its classes rightly, and processes that start by spawn or forkserver
import the same file again, under the name ``__mp_main__``, without a strategy.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

import torch

from mirror.cluster.launchers import launchers
from mirror.devices import is_simulated, resolve
from mirror.errors import MirrorError, StrategyError
from mirror.replica.layers.sync_batch_norm import synchronize_all
from mirror.replica.params.buffer_differences import statistics_are_warnings
from mirror.strategy.mirrored import CentralStorageStrategy, MirroredStrategy, OneDeviceStrategy
from mirror.strategy.multi_worker import MultiWorkerMirroredStrategy
from mirror.strategy.strategy_base import Strategy
from mirror.strategy.strategy_options import Schedule, Verify

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_kept: list[ModuleType | None] = []  # keeps the globals of an earlier __main__


class ScriptError(MirrorError):
    """A script that cannot be started: it is missing, or is not Python."""

    exit_code = 2  # Python's own for a missing script


@dataclass(frozen=True)
class Script:
    """What to run.

    Attributes:
        name: the path of the script, or the dotted name of the module.
        arguments: what follows it on the command line.
        is_module: whether ``name`` is a module, as after ``python -m``.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def check(self) -> None:
        """Raises ScriptError if there is no such script or module."""
        if self.is_module:
            _find_module(self.name)
        elif not os.path.exists(self.name):
            raise ScriptError(
                f"can't open file {os.path.abspath(self.name)!r}: there is no such file; the "
                "script comes after mirror's own options"
            )
        elif os.path.isdir(self.name) and not os.path.isfile(f"{self.name}/__main__.py"):
            raise ScriptError(
                f"can't find '__main__' module in {self.name!r}; name a script in this folder"
            )

    def command(self) -> list[str]:
        """Returns the words of a command line that name this script."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]

    def __str__(self) -> str:
        return " ".join(self.command())


def run_script(script: Script) -> None:
    """Runs a script in this process, as ``__main__``.

    Raises:
        ScriptError: it cannot be started.
        BaseException: what it raises.
    """
    script.check()
    _set_path(script)
    if (not script.is_module and os.path.isdir(script.name)) or script.name.endswith(".zip"):
        sys.argv[:] = [script.name, *script.arguments]
        runpy.run_path(script.name, run_name="__main__")
        return
    spec, code, origin = _load_module(script.name) if script.is_module else _load_file(script.name)
    sys.argv[:] = [origin if script.is_module else script.name, *script.arguments]
    main = _make_main(spec, origin)
    exec(code(), main.__dict__)


def run_as_main(task: Callable[[], None]) -> int:
    """Calls a task; its errors end the process as errors of a script do.

    ``sys.excepthook`` gets the error, without the frames of this package. The exit code is then 1,
    and after Ctrl-C the process ends by SIGINT, which shells show as 130. Returns 0.
    """
    is_interrupted: list[bool] = []
    atexit.register(_end_by_sigint, is_interrupted)  # before the script's, so that it runs last
    try:
        task()
    except (SystemExit, ScriptError):
        raise
    except BaseException as error:
        error.__traceback__ = drop_our_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        is_interrupted += [True] * isinstance(error, KeyboardInterrupt)
        raise SystemExit(1) from None
    return 0


def _end_by_sigint(is_interrupted: Sequence[bool]) -> None:
    """Ends the process as Python does after an interrupt that nothing handles."""
    if is_interrupted:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def drop_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Returns a traceback that begins with the first frame outside this package."""
    while traceback is not None and _is_ours(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    return traceback


def _is_ours(filename: str) -> bool:
    return os.path.abspath(filename).startswith(_OURS) or filename.startswith("<frozen runpy")


def _set_path(script: Script) -> None:
    """Puts the script's folder, or the working directory, at the head of ``sys.path``."""
    if getattr(sys.flags, "safe_path", False):
        return
    if script.is_module:
        sys.path[0] = os.getcwd()
    elif os.path.isdir(script.name) or script.name.endswith(".zip"):
        del sys.path[0]  # runpy puts it there
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(script.name))


def _load_file(name: str) -> tuple[None, Callable[[], CodeType], str]:
    path = os.path.abspath(name)

    def code() -> CodeType:
        with io.open_code(path) as file:
            compiled = pkgutil.read_code(file)  # of a .pyc
        if isinstance(compiled, CodeType):
            return compiled
        with io.open_code(path) as file:
            return compile(file.read(), path, "exec", dont_inherit=True)

    return None, code, path


def _load_module(name: str) -> tuple[Any, Callable[[], CodeType], str]:
    spec = _find_module(name)

    def code() -> CodeType:
        loaded = spec.loader.get_code(spec.name)
        if loaded is None:
            raise ScriptError(f"no code object is available for {spec.name}; it is not Python")
        assert isinstance(loaded, CodeType)
        return loaded

    return spec, code, spec.origin or name


def _find_module(name: str) -> Any:
    before = sys.path[0]
    try:
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.getcwd()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                raise ScriptError(
                    f"No module named {name}.__main__; {name!r} is a package and cannot be "
                    "executed directly"
                )
    except (ImportError, ValueError) as error:
        raise ScriptError(f"No module named {name} can be imported: {error}") from error
    finally:
        sys.path[0] = before
    if spec is None or (
        not isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        and (not hasattr(spec.loader, "get_code"))
    ):
        raise ScriptError(f"No module named {name}; a file goes without -m")
    return spec


def _make_main(spec: Any, origin: str) -> ModuleType:
    """Returns a new ``__main__`` in place of the command's own."""
    _kept.append(sys.modules.get("__main__"))
    main = ModuleType("__main__")
    main.__dict__.update(
        __builtins__=builtins,
        __file__=origin,
        __spec__=spec,
        __loader__=None if spec is None else spec.loader,
        __package__=None if spec is None else spec.parent,
        __cached__=None,
    )
    if spec is None:
        main.__dict__["__loader__"] = importlib.machinery.SourceFileLoader("__main__", origin)
    main.__dict__.setdefault("__annotations__", {})
    sys.modules["__main__"] = main
    return main


STRATEGIES = ("one-device", "mirrored", "central-storage", "multi-worker")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of ``mirror run``.

    Attributes:
        devices: the names of the replicas' devices; ``None``: all GPUs, else one CPU.
        replicas: so many, on the GPUs in turn or all on the CPU, instead of ``devices``.
        strategy: one of ``STRATEGIES``; ``None``: multi-worker where a launcher has started
            several processes, else mirrored.
        backend, schedule, verify: those of the strategy; ``None`` for its defaults.
        trace: the file for a trace of the whole script.
        report: whether to print at the end where the time of the last steps went.
        sync_batch_norm: whether BatchNorm uses the statistics of the whole batch.
        compile: whether models that are called in training are compiled.
    """

    devices: Sequence[str] | None = None
    replicas: int | None = None
    strategy: str | None = None
    backend: str | None = None
    schedule: Schedule | None = None
    verify: Verify | None = None
    trace: str | None = None
    report: bool = False
    sync_batch_norm: bool = False
    compile: bool = False


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
    if options.compile:
        strategy._group.compile_called()
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
    kind = options.strategy or ("multi-worker" if launchers() else "mirrored")
    devices = _devices(options)
    if kind == "one-device":
        return _one_device(options, devices)
    if kind == "central-storage":
        make: Any = CentralStorageStrategy
    else:
        make = MultiWorkerMirroredStrategy if kind == "multi-worker" else MirroredStrategy
    given = {name: getattr(options, name) for name in ("backend", "schedule", "verify")}
    made: Strategy = make(devices, **{k: v for k, v in given.items() if v is not None})
    return made


def _one_device(options: RunOptions, devices: Sequence[str] | None) -> Strategy:
    names = "backend", "schedule", "verify"
    given = [name for name in names if getattr(options, name) is not None]
    if given:
        raise StrategyError(f"--strategy one-device has no --{given[0]}; leave it out")
    found = [str(device) for device in devices or resolve(None)[:1]]
    if len(found) != 1:
        raise StrategyError(
            f"--strategy one-device needs one device, got {len(found)}; name one with --devices, "
            "or leave --strategy out"
        )
    return OneDeviceStrategy(found[0])


def _devices(options: RunOptions) -> Sequence[str] | None:
    if options.replicas is None:
        return options.devices
    found = resolve(None)
    if is_simulated(found):
        found = (torch.device("cpu"),)
    return [str(found[i % len(found)]) for i in range(options.replicas)]


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
