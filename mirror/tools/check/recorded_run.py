"""One recorded run of a script, in a process of its own: ``python -m ...recorded_run``.

A recorder is around module calls and backward passes of torch while a recording lasts, and listens
to optimizer steps: see ``StepEnds``.
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

from mirror.base.torch_private import wrapping
from mirror.execution.lifecycle import step_ends
from mirror.replica.layers.sync_batch_norm import synchronize_all
from mirror.replica.modules.verified_calls import recording_unequal_calls
from mirror.replica.optimizers.step_interceptor import watch_optimizer_steps
from mirror.replica.params.buffer_differences import statistics_are_warnings
from mirror.strategy.mirrored import MirroredStrategy
from mirror.threads.user_frames import line_of
from mirror.tools.check.record import Record, RecordOptions
from mirror.tools.check.recorder import DROPOUT_LAYERS, Recorder
from mirror.tools.check.rounding_noise import RoundingNoise
from mirror.tools.run_command import Script, run_script

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


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")
_DROPPING = (  # functions, and where the probability is among their arguments
    *((F, name, 1, "p") for name in (*_DROPOUTS, "feature_alpha_dropout")),
    (torch, "dropout", 1, "p"),
    (F, "scaled_dot_product_attention", 4, "dropout_p"),
)
_PROBABILITIES = ("dropout", "drop_prob", "drop_rate", "dropout_p", "attention_dropout")


@contextmanager
def patching_torch(recorder: Recorder, *, no_dropout: bool = False) -> Iterator[None]:
    """Passes every event in the block to a recorder.

    Args:
        no_dropout: whether to set all dropout probabilities to 0.
    """

    def wrap_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if no_dropout:
                _disable_dropout(self)
            forward = functools.partial(original, self, *args, **kwargs)
            return recorder.call(self, forward, (args, kwargs))

        return __call__

    def wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            roots = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            recorder.record_loss(roots, sys._getframe(1))
            recorder.in_backward += 1
            try:
                return original(tensors, *args, **kwargs)
            finally:
                recorder.in_backward -= 1

        return backward

    with ExitStack() as stack:
        for owner, name, position, argument in _DROPPING if no_dropout else ():
            if hasattr(owner, name):
                zero = functools.partial(_zero_probability, position, argument)
                stack.enter_context(wrapping(owner, name, zero))
        stack.enter_context(wrapping(nn.Module, "__call__", wrap_call))
        stack.enter_context(wrapping(torch.autograd, "backward", wrap_backward))
        watch_optimizer_steps(are_mirrored=False)
        step_ends.before_optimizer.append(recorder.before_optimizer)
        stack.callback(step_ends.before_optimizer.remove, recorder.before_optimizer)
        step_ends.listeners.append(recorder.end_step)
        stack.callback(step_ends.listeners.remove, recorder.end_step)
        yield


def _zero_probability(
    position: int, name: str, original: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function with a probability of 0."""

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
