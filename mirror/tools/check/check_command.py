"""``mirror check``: runs a script on one device and under the strategy, and compares."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mirror.tools.check.judge import Judge, Runs
from mirror.tools.check.record import Record, RecordOptions
from mirror.tools.check.verdict import (
    DIFFERENT,
    FAILS,
    FORKS,
    MISSING,
    NEEDS_ARGUMENTS,
    NOT_COMPARABLE,
    CheckVerdict,
)
from mirror.tools.run.script import Script, ScriptError

_POLL_SECONDS = 0.05
_MOST_OUTPUT = 4000  # characters of a failed script's messages


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of ``mirror check``.

    Attributes:
        replicas: simulated devices.
        devices: real ones instead.
        steps: optimizer steps after which the script is ended.
        tolerance: the largest relative difference that counts as rounding; ``"auto"``: measured.
        no_dropout: whether to set all dropout probabilities to 0 in all runs.
        double: whether to make float64 the default dtype in all runs.
        sync_batch_norm: whether BatchNorm uses the whole batch.
        json: the file for the verdict.
    """

    replicas: int = 2
    devices: Sequence[str] | None = None
    steps: int = 20
    tolerance: float | str = "auto"
    no_dropout: bool = False
    double: bool = False
    sync_batch_norm: bool = False
    json: str | None = None


def check_command(script: Script, options: CheckOptions) -> int:
    """Checks a script, prints the verdict, and returns its exit code.

    Raises:
        OSError: the JSON file cannot be written.
    """
    if options.json is not None:
        Path(options.json).touch()
    verdict = check_script(script, options)
    print(verdict, flush=True)
    if options.json is not None:
        Path(options.json).write_text(verdict.to_json())
    return verdict.code


def check_script(script: Script, options: CheckOptions) -> CheckVerdict:
    """Returns whether a script trains under a strategy as on one device."""
    try:
        script.check()
    except ScriptError as error:
        return CheckVerdict(MISSING, f"cannot be compared: {error}")
    with tempfile.TemporaryDirectory(prefix="mirror-check-") as folder:
        return _Check(script, options, Path(folder)).verdict()


class _Check:
    """The runs of one check, each made when it is needed."""

    def __init__(self, script: Script, options: CheckOptions, folder: Path) -> None:
        self._script, self._options, self._folder = script, options, folder
        self._plain = RecordOptions(
            steps=options.steps,
            no_dropout=options.no_dropout,
            double=options.double,
            sync_batch_norm=options.sync_batch_norm,
        )
        self._messages: dict[str, str] = {}

    def verdict(self) -> CheckVerdict:
        """Makes the runs that are needed and judges them."""
        one = self._record("on one device", self._plain)
        if (refusal := self._refusal(one)) is not None:
            return refusal
        replicas = len(self._options.devices or ()) or self._options.replicas
        many = self._record(
            f"on {replicas} replicas",
            replace(self._plain, replicas=replicas, devices=self._options.devices),
        )
        runs = Runs(
            one,
            many,
            lambda steps: self._record(
                "on one device, with rounding errors",
                replace(self._plain, steps=steps, perturb=True),
            ),
            lambda steps: self._record("on one device again", replace(self._plain, steps=steps)),
        )
        tolerance = self._options.tolerance
        judge = Judge(
            runs,
            replicas=replicas,
            tolerance=None if isinstance(tolerance, str) else tolerance,
            messages=self._messages.get(f"on {replicas} replicas", ""),
        )
        return judge.verdict()

    def _record(self, what: str, options: RecordOptions) -> Record:
        """Runs the script in a process of its own and returns its record."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        kind = "module" if self._script.is_module else "script"
        command = [
            *(sys.executable, "-m", "mirror.tools.check.recorded_run", str(folder)),
            *(options.to_json(), kind, self._script.name, *self._script.arguments),
        ]
        environment = {"PYTHONHASHSEED": "0", **os.environ}
        if not self._options.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with (folder / "output").open("wb") as output:
            child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                self._wait(child, what, folder / "steps", options.steps)
            finally:
                if child.poll() is None:
                    child.terminate()
                    child.wait()
        self._messages[what] = (folder / "output").read_text(errors="replace")
        if (folder / "record.json").exists():
            return Record.load(folder)
        steps = _number(folder / "steps")
        code = child.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        error = {"type": "", "message": f"the process ended with {how}", "line": "", "code": code}
        return Record(num_steps=steps, ending="error", error=error)

    def _wait(self, child: subprocess.Popen[bytes], what: str, steps: Path, most: int) -> None:
        """Waits for a run, and shows how far it is."""
        is_terminal = sys.stderr.isatty()
        shown = -1
        if not is_terminal:
            print(f"mirror check: {what} ...", file=sys.stderr, flush=True)
        while child.poll() is None:
            time.sleep(_POLL_SECONDS)
            number = _number(steps) if is_terminal else shown
            if number != shown:
                line = f"\rmirror check: {what}: step {number} of {most}".ljust(70)
                print(line, end="", file=sys.stderr, flush=True)
                shown = number
        if is_terminal:
            print("\r" + " " * 70 + "\r", end="", file=sys.stderr, flush=True)

    def _refusal(self, one: Record) -> CheckVerdict | None:
        """Returns the verdict on a script that does not train on one device by itself."""
        message = self._messages["on one device"]
        error = one.error
        trained_elsewhere = one.processes.get("forked_steps", 0) or one.processes.get("started", 0)
        if one.ending == "error" and error is not None:
            if error["type"] == "SystemExit" and error["code"] == 2 and not one.num_steps:
                usage = _last_lines(message, 3)
                return CheckVerdict(
                    NEEDS_ARGUMENTS,
                    f"cannot be compared: {self._script.name} needs other arguments",
                    why=usage,
                    remedy="put the script's own arguments after its name: "
                    f"mirror check {self._script} ...",
                )
            where = f" at {error['line']}" if error.get("line") else ""
            what = (
                error["message"]
                if error["type"] != "SystemExit"
                else (f"sys.exit({error['message']})")
            )
            return CheckVerdict(
                FAILS,
                f"cannot be compared: {self._script.name} fails by itself, on one device, "
                f"{_after(one.num_steps)}: {what}{where}",
                steps=one.num_steps,
                why=_last_lines(message, 6) if not error.get("line") else "",
                remedy=f"run it with python first: python {self._script}",
            )
        if not one.num_steps and trained_elsewhere:
            return CheckVerdict(
                FORKS,
                f"cannot be compared: {self._script.name} takes no optimizer step in its own "
                "process; it trains in processes that it starts",
                remedy="check the function that those processes run, with mirror.testing, or a "
                "script that trains in one process",
            )
        if not one.num_steps:
            return CheckVerdict(
                NOT_COMPARABLE,
                f"cannot be compared: {self._script.name} takes no optimizer step",
                why="it ended without a call of step() of a torch.optim.Optimizer",
                remedy="check a script that trains; arguments go after its name",
            )
        return None


def _after(steps: int) -> str:
    return f"after {steps} optimizer step{'s' * (steps != 1)}" if steps else "before any step"


def _number(path: Path) -> int:
    try:
        return int(path.read_text() or 0)
    except (OSError, ValueError):
        return 0


def _last_lines(text: str, num: int) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", text[-_MOST_OUTPUT:])
    return " | ".join(line.strip() for line in text.strip().splitlines()[-num:])


__all__ = ["DIFFERENT", "CheckOptions", "check_command", "check_script"]
