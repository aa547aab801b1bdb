"""One recorded run of a script, in a process of its own: ``python -m ...recorded_run``.

Puts a recorder into torch: around module calls, backward passes and optimizer steps.

The wrappers are in torch while a recording lasts, and are taken out afterwards. Optimizers are
wrapped from outside, because mirror steps in another way if there are hooks of torch.
"""

from __future__ import annotations

import functools
import json
import linecache
import logging
import multiprocessing
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from mirror.replica.layers.sync_batch_norm import synchronize_all
from mirror.replica.modules.verified_calls import recording_unequal_calls
from mirror.replica.params.buffer_differences import statistics_are_warnings
from mirror.strategy.mirrored import MirroredStrategy
from mirror.threads.user_frames import line_of
from mirror.tools.check.record import Record, RecordOptions
from mirror.tools.check.recorder import DROPOUT_LAYERS, Recorder
from mirror.tools.check.rounding_noise import RoundingNoise
from mirror.tools.run.run_command import Script, run_script

SEED = 20_177


def main(argv: Sequence[str]) -> int:
    """Runs a script and leaves its record in a folder.

    Args:
        argv: the folder, the options as JSON, "script" or "module", its name, its arguments.
    """
    folder, options, kind, name, *arguments = argv
    run = _RecordedRun(Path(folder), RecordOptions(**json.loads(options)))
    run.run(Script(name, tuple(arguments), kind == "module"))
    return 0


class _RecordedRun:
    """The process that runs the script."""

    def __init__(self, folder: Path, options: RecordOptions) -> None:
        self._folder, self._options = folder, options
        self._process = os.getpid()

    def run(self, script: Script) -> None:
        """Runs a script, and writes the record however it ends."""
        seed_all()
        if self._options.sync_batch_norm:
            synchronize_all()
        with recording(self._options, self._on_step, self._save_and_exit) as recorder:
            try:
                run_script(script)
            except BaseException as error:
                if not isinstance(error, SystemExit) or error.code not in (None, 0):
                    recorder.record.ending = "error"
                    recorder.record.error = describe_error(error)
        if os.getpid() == self._process:
            self._save(recorder.record)

    def _on_step(self, number: int) -> None:
        is_child = os.getpid() != self._process
        name = f"child-{os.getpid()}" if is_child else "steps"
        (self._folder / name).write_text(str(number))

    def _save_and_exit(self, record: Record) -> None:
        """Ends the script after enough steps; its handlers and exit functions do not run."""
        if os.getpid() != self._process:
            return
        self._save(record)
        for process in multiprocessing.active_children():  # workers of a DataLoader
            with suppress(Exception):
                process.terminate()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(0)

    def _save(self, record: Record) -> None:
        children = self._folder.glob("child-*")
        record.processes = {"steps": sum(int(path.read_text()) for path in children)}
        record.save(self._folder)


@contextmanager
def recording(
    options: RecordOptions, on_step: Callable[[int], None], on_enough: Callable[[Record], None]
) -> Iterator[Recorder]:
    """Records what happens inside: on one device, or with the scope of a strategy open.

    Args:
        on_step: called after each optimizer step, with its number.
        on_enough: called after the last step, with the record.
    """
    recorder = Recorder(
        options.steps,
        deep_steps=options.deep_steps,
        on_step=on_step,
        on_enough=on_enough,
        noise=RoundingNoise() if options.rounding_noise else None,
    )
    with ExitStack() as stack:
        stack.enter_context(statistics_are_warnings())  # as under mirror run
        stack.enter_context(_recording_warnings(recorder.record))
        if options.double:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        strategy = None
        if options.replicas or options.devices:
            devices = options.devices or ["cpu"] * options.replicas
            strategy = MirroredStrategy(devices, schedule="lockstep", verify="first")
            stack.enter_context(recording_unequal_calls(recorder.record.unequal_calls.append))
        # The patches go around those of the strategy.
        stack.enter_context(patching_torch(recorder, no_dropout=options.no_dropout))
        if strategy is not None:
            stack.enter_context(strategy.scope())
        yield recorder
        if recorder.is_on:
            recorder.flush()


class _WarningHandler(logging.Handler):
    """Adds warnings to the output of a run."""

    def __init__(self, run: Record) -> None:
        super().__init__(logging.WARNING)
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        """Adds one."""
        self._run.output += f"WARNING: {record.getMessage()}\n"


@contextmanager
def _recording_warnings(record: Record) -> Iterator[None]:
    """Takes the warnings that mirror logs into the output of a run."""
    handler = _WarningHandler(record)
    logger = logging.getLogger("mirror")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Returns the type, message, line, source line and exit code of an error."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return {"type": "SystemExit", "message": str(error.code), "line": "", "code": code}
    frames = traceback.extract_tb(error.__traceback__)
    source = linecache.getline(frames[-1].filename, frames[-1].lineno or 0) if frames else ""
    return {
        "type": type(error).__name__,
        "message": "".join(traceback.format_exception_only(type(error), error)).strip(),
        "line": line_of(error),
        "source": source.strip(),
        "code": 1,
    }


def seed_all() -> None:
    """Seeds Python's, NumPy's and torch's generators."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


_DROPPING = {  # functions of F, and where p is among the arguments
    "dropout": 1,
    "dropout1d": 1,
    "dropout2d": 1,
    "dropout3d": 1,
    "alpha_dropout": 1,
    "feature_alpha_dropout": 1,
}
_PROBABILITIES = ("dropout", "drop_prob", "drop_rate", "dropout_p", "attention_dropout")


@contextmanager
def patching_torch(recorder: Recorder, *, no_dropout: bool = False) -> Iterator[None]:
    """Has a recorder note what happens inside.

    Args:
        no_dropout: whether to set all dropout probabilities to 0.
    """
    with ExitStack() as stack:
        if no_dropout:
            _stop_dropout(stack)
        _replace(stack, nn.Module, "__call__", _wrap_call(recorder, no_dropout))
        _replace(stack, torch.autograd, "backward", _wrap_backward(recorder))
        for kind in _kinds_of(Optimizer):
            if getattr(kind.__dict__.get("step"), "hooked", False):  # one was made before
                _replace(stack, kind, "step", functools.partial(_wrap_step, recorder))
        patch = functools.partial(_wrap_profile_hook, recorder, stack)
        _replace(stack, Optimizer, "profile_hook_step", patch)
        yield


def _replace(stack: ExitStack, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    original = owner.__dict__[name]
    is_static = isinstance(original, staticmethod)
    wrapped = wrapper(original.__func__ if is_static else original)
    setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)
    stack.callback(setattr, owner, name, original)


def _wrap_call(recorder: Recorder, no_dropout: bool) -> Callable[[Any], Any]:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if no_dropout:
                _disable_dropout(self)
            call = functools.partial(original, self)
            return recorder.call(self, call, args, kwargs)

        return __call__

    return wrapper


def _wrap_backward(recorder: Recorder) -> Callable[[Any], Any]:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            roots = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            recorder.record_loss(roots, sys._getframe(1))
            recorder.in_backward += 1
            try:
                return original(tensors, *args, **kwargs)
            finally:
                recorder.in_backward -= 1

        return backward

    return wrapper


def _wrap_step(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_step(self, functools.partial(original, self), args, kwargs)

    return step


def _wrap_profile_hook(
    recorder: Recorder, stack: ExitStack, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps what torch wraps the step of an optimizer's class in, at its first instance."""

    @functools.wraps(original)
    def profile_hook_step(func: Any) -> Any:
        profiled = original(func)
        wrapped = _wrap_step(recorder, profiled)

        def restore() -> None:
            for kind in _kinds_of(Optimizer):
                if kind.__dict__.get("step") is wrapped:
                    profiled.hooked = True
                    kind.step = profiled  # type: ignore[method-assign]

        stack.callback(restore)
        return wrapped

    return profile_hook_step


def _kinds_of(kind: type[Optimizer]) -> Iterator[type[Optimizer]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds_of(child)


def _stop_dropout(stack: ExitStack) -> None:
    for name, position in _DROPPING.items():
        if hasattr(F, name):
            _replace(stack, F, name, functools.partial(_zero_probability, position, "p"))
    attention = functools.partial(_zero_probability, 4, "dropout_p")
    _replace(stack, F, "scaled_dot_product_attention", attention)
    _replace(stack, torch, "dropout", functools.partial(_zero_probability, 1, "p"))


def _zero_probability(
    position: int, name: str, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function with a probability of 0."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], 0.0, *args[position + 1 :])
        else:
            kwargs[name] = 0.0
        return original(*args, **kwargs)

    return call


def _disable_dropout(module: nn.Module) -> None:
    """Sets the probabilities among a module's attributes to 0."""
    attributes: dict[str, Any] = vars(module)
    for name in _PROBABILITIES:
        if isinstance(attributes.get(name), float) and attributes[name]:
            setattr(module, name, 0.0)
    kind = type(module).__name__
    is_dropping = isinstance(module, DROPOUT_LAYERS) or "DropPath" in kind
    if (is_dropping or kind == "StochasticDepth") and attributes.get("p"):
        module.p = 0.0  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
