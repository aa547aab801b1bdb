"""One recorded run of a script, as a process of its own: ``python -m ...recorded_run``."""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mirror.replica.layers.sync_batch_norm import synchronize_all
from mirror.strategy.mirrored import MirroredStrategy
from mirror.threads.user_frames import line_of
from mirror.tools.check.instrument import instrumented
from mirror.tools.check.perturb import Perturbation
from mirror.tools.check.record import Record, RecordOptions
from mirror.tools.check.recorder import Recorder
from mirror.tools.run.script import Script, ScriptError, run_script

SEED = 20_177


def main(argv: Sequence[str]) -> int:
    """Runs a script and leaves its record in a folder.

    Args:
        argv: the folder, the options as JSON, "script" or "module", its name, its arguments.
    """
    folder, options, kind, name, *arguments = argv
    child = _Child(Path(folder), RecordOptions(**json.loads(options)))
    return child.run(Script(name, tuple(arguments), kind == "module"))


class _Child:
    """The process that runs the script."""

    def __init__(self, folder: Path, options: RecordOptions) -> None:
        self._folder, self._options = folder, options
        self._process = os.getpid()
        self._recorder: Recorder | None = None
        self._num_forks = self._num_started = 0

    def run(self, script: Script) -> int:
        """Runs a script, and writes the record however it ends."""
        _seed()
        self._watch_processes()
        if self._options.sync_batch_norm:
            synchronize_all()
        record = Record()
        try:
            with recording(self._options, self._on_step, self._finish) as recorder:
                self._recorder = recorder
                record = recorder.record
                run_script(script)
        except ScriptError:
            raise
        except SystemExit as exit_:
            if exit_.code not in (None, 0):
                record.ending = "error"
                record.error = {"type": "SystemExit", "message": str(exit_.code), "line": ""}
                record.error["code"] = exit_.code if isinstance(exit_.code, int) else 1
        except BaseException as error:
            record.ending = "error"
            record.error = describe_error(error)
        if os.getpid() == self._process:
            self._save(record)
        return 0

    def _on_step(self, number: int) -> None:
        if os.getpid() == self._process:
            (self._folder / "steps").write_text(str(number))
        else:
            (self._folder / f"forked-{os.getpid()}").write_text(str(number))

    def _finish(self) -> None:
        """Ends the script after enough steps, whatever it would catch or do at its end."""
        assert self._recorder is not None
        if os.getpid() != self._process:
            return
        self._save(self._recorder.record)
        import multiprocessing

        for process in multiprocessing.active_children():  # workers of a DataLoader
            with suppress(Exception):
                process.terminate()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(0)

    def _save(self, record: Record) -> None:
        forked = [int(path.read_text()) for path in self._folder.glob("forked-*")]
        record.processes = {
            "forks": self._num_forks,
            "started": self._num_started,
            "forked_steps": sum(forked),
        }
        record.save(self._folder)

    def _watch_processes(self) -> None:
        """Counts the processes that the script starts."""
        import multiprocessing.process

        def before_fork() -> None:
            self._num_forks += 1

        os.register_at_fork(before=before_fork)
        start: Callable[..., None] = multiprocessing.process.BaseProcess.start

        def counted(process: Any) -> None:
            self._num_started += 1
            start(process)

        multiprocessing.process.BaseProcess.start = counted  # type: ignore[method-assign, assignment]


@contextmanager
def recording(
    options: RecordOptions, on_step: Callable[[int], None], on_enough: Callable[[], None]
) -> Iterator[Recorder]:
    """Records what happens inside: on one device, or with the scope of a strategy open."""
    recorder = Recorder(
        options.steps,
        deep_steps=options.deep_steps,
        on_step=on_step,
        on_enough=on_enough,
        perturbation=Perturbation() if options.perturb else None,
    )
    with ExitStack() as stack:
        if options.double:
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            stack.callback(torch.set_default_dtype, before)
        strategy = None
        if options.replicas or options.devices:
            devices = options.devices or ["cpu"] * options.replicas
            strategy = MirroredStrategy(devices, schedule="lockstep")
        # Around what the strategy has put around steps.
        stack.enter_context(instrumented(recorder, no_dropout=options.no_dropout))
        if strategy is not None:
            stack.enter_context(strategy.scope())
        yield recorder
        if recorder.is_on:
            recorder.flush()


def describe_error(error: BaseException) -> dict[str, Any]:
    """Returns what is told of an error."""
    lines = traceback.format_exception_only(type(error), error)
    return {
        "type": type(error).__name__,
        "message": "".join(lines).strip(),
        "line": line_of(error),
        "is_ours": type(error).__module__.startswith("mirror"),
        "code": 1,
    }


def _seed() -> None:
    seed_all()
    sys.dont_write_bytecode = sys.dont_write_bytecode


def seed_all() -> None:
    """Seeds Python's, NumPy's and torch's generators."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


if __name__ == "__main__":
    main_module = sys.modules[__name__]
    assert isinstance(main_module, types.ModuleType)
    sys.exit(main(sys.argv[1:]))
