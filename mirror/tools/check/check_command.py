"""``mirror check``: trains a script on one device and on several replicas, and compares the two.

How a check is made, from here down::

    check_command.py    runs the script in processes of its own, shows progress, prints the result
    recorded_run.py     one such process: seeds, opens the scope, records, ends after N steps
    recorder.py         records inputs, outputs, losses, gradients, parameters and buffers; and
                        the functions of tensors inside modules, with their lines
    fingerprint.py      joins the replicas' parts of a tensor, and keeps a small part of its values
    record.py           the events of a run, as files
    rounding_noise.py   adds rounding errors, to see how far they carry one device
    run_comparison.py   decides: equal, different, or not comparable
    differences.py      finds what differs first beyond rounding
    causes.py           finds the likely cause and the remedy
    check_result.py     the sentence, the table and the JSON; the exit codes
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mirror.errors import MirrorError
from mirror.tools.check.check_result import (
    FAILS,
    MISSING,
    NEEDS_ARGUMENTS,
    NOT_COMPARABLE,
    OTHER_PROCESSES,
    TIMED_OUT,
    CheckResult,
)
from mirror.tools.check.record import Record, RecordOptions
from mirror.tools.check.run_comparison import RunComparison
from mirror.tools.run_command import Script, ScriptError

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL
_MAX_SHOWN = 4000  # characters of a failed script's output


class _TimedOutError(Exception):
    """A run took no optimizer step for too long."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """The options of ``mirror check``.

    Attributes:
        replicas: the number of simulated devices.
        devices: names of real devices, instead of simulated ones.
        steps: the number of optimizer steps after which the script is ended.
        tolerance: the largest relative difference that counts as rounding; ``"auto"``: measured.
        timeout: seconds without an optimizer step after which a run is ended.
        no_dropout: whether to set all dropout probabilities to 0 in all runs.
        double: whether to make float64 the default dtype in all runs.
        sync_batch_norm: whether BatchNorm uses the statistics of the whole batch.
        json: the file for the result.
    """

    replicas: int = 2
    devices: Sequence[str] | None = None
    steps: int = 20
    tolerance: float | str = "auto"
    timeout: float = 600.0
    no_dropout: bool = False
    double: bool = False
    sync_batch_norm: bool = False
    json: str | None = None


def check_command(script: Script, options: CheckOptions) -> int:
    """Checks a script, prints the result, and returns its exit code.

    Raises:
        MirrorError: the JSON file cannot be written.
    """
    if options.json is not None:
        _write(options.json, "")
    with _sigterm_exits():
        result = check_script(script, options)
    print(result, flush=True)
    if options.json is not None:
        _write(options.json, result.to_json())
    return result.exit_code


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        reason = error.strerror or error
        raise MirrorError(
            f"--json {path}: cannot be written: {reason}; name another file"
        ) from None


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Has SIGTERM raise SystemExit inside, so that the script's processes are ended, too."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_script(script: Script, options: CheckOptions) -> CheckResult:
    """Returns whether a script trains on several replicas as on one device.

    Raises:
        MirrorError: there is no place for temporary files.
    """
    try:
        script.check()
    except ScriptError as error:
        return CheckResult(MISSING, f"cannot be compared: {error}")
    try:
        folder = tempfile.TemporaryDirectory(prefix="mirror-check-", ignore_cleanup_errors=True)
    except OSError as error:
        raise MirrorError(f"{error}; set TMPDIR to a folder that can be written") from None
    with folder:
        return _ScriptRuns(script, options, Path(folder.name)).compare()


class _ScriptRuns:
    """The runs of one script, each made when it is needed."""

    def __init__(self, script: Script, options: CheckOptions, folder: Path) -> None:
        self._script, self._options, self._folder = script, options, folder
        self._plain = RecordOptions(
            steps=options.steps,
            no_dropout=options.no_dropout,
            double=options.double,
            sync_batch_norm=options.sync_batch_norm,
        )

    def compare(self) -> CheckResult:
        """Makes the runs that are needed, and compares them."""
        try:
            one = self._record("on one device", self._plain)
            if (problem := self._problem_on_one_device(one)) is not None:
                return problem
            comparison = RunComparison(
                self._record,
                one,
                self._plain,
                replicas=self._options.replicas,
                devices=self._options.devices,
                tolerance=self._options.tolerance,
            )
            return comparison.result()
        except _TimedOutError as error:
            return CheckResult(
                TIMED_OUT,
                f"cannot be compared: {self._script.name} took no optimizer step {error}",
                remedy="check a script that trains, or allow more with --timeout SECONDS",
            )

    def _record(self, title: str, options: RecordOptions) -> Record:
        """Runs the script in a process of its own and returns its record.

        Raises:
            _TimedOutError: it took no optimizer step for too long.
        """
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        kind = "module" if self._script.is_module else "script"
        command = [
            *(sys.executable, "-m", "mirror.tools.check.recorded_run", str(folder)),
            *(options.to_json(), kind, self._script.name, *self._script.arguments),
        ]
        environment = {"PYTHONHASHSEED": "0", **os.environ}
        if not self._options.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with (folder / "output").open("wb") as printed:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that the script's own processes can be ended, too
            )
            try:
                self._wait(process, title, folder / "steps", options.steps)
            finally:
                _end_session(process)
        output = (folder / "output").read_text(errors="replace")
        if (folder / "record.json").exists():
            record = Record.load(folder)
            record.output += output
            return record
        code = process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        error = {"type": "", "message": f"the process ended with {how}", "line": "", "code": code}
        steps = _number(folder / "steps")
        return Record(num_steps=steps, ending="error", error=error, output=output)

    def _wait(
        self, process: subprocess.Popen[bytes], title: str, steps: Path, num_steps: int
    ) -> None:
        """Waits for a run, and shows its progress on standard error."""
        is_terminal = sys.stderr.isatty()
        shown, since = -1, time.monotonic()
        if not is_terminal:
            print(f"mirror check: {title} ...", file=sys.stderr, flush=True)
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            number = _number(steps)
            if number != shown:
                shown, since = number, time.monotonic()
                if is_terminal:
                    line = f"\rmirror check: {title}: step {number} of {num_steps}".ljust(70)
                    print(line, end="", file=sys.stderr, flush=True)
            if time.monotonic() - since > self._options.timeout:
                raise _TimedOutError(f"for {self._options.timeout:g} seconds, {title}")
        if is_terminal:
            print("\r" + " " * 70 + "\r", end="", file=sys.stderr, flush=True)

    def _problem_on_one_device(self, one: Record) -> CheckResult | None:
        """Returns the result for a script that does not train on one device by itself."""
        output, error, name = one.output, one.error, self._script.name
        if one.ending == "error" and error is not None:
            if not one.num_steps and _needs_arguments(error, output):
                return CheckResult(
                    NEEDS_ARGUMENTS,
                    f"cannot be compared: {name} needs other arguments",
                    why=_last_lines(output, 3) or error["message"],
                    remedy="put the script's own arguments after its name: "
                    f"mirror check {self._script} ...",
                )
            what = error["message"]
            if error["type"] == "SystemExit":
                what = f"sys.exit({what})"
            elif error["type"] == "EOFError":
                what += " (in a check, standard input is empty)"
            where = f" at {error['line']}" if error.get("line") else ""
            return CheckResult(
                FAILS,
                f"cannot be compared: {name} fails by itself, on one device, "
                f"{_describe_steps(one.num_steps)}: {what}{where}",
                steps=one.num_steps,
                why=_last_lines(output, 6) if not error.get("line") else "",
                remedy=f"run it with python first: python {self._script}",
            )
        if one.num_steps:
            return None
        if one.processes.get("steps"):
            return CheckResult(
                OTHER_PROCESSES,
                f"cannot be compared: {name} takes no optimizer step in its own process; it "
                "trains in processes that it starts",
                remedy="check the function that those processes run, with mirror.testing, or a "
                "script that trains in one process",
            )
        return CheckResult(
            NOT_COMPARABLE,
            f"cannot be compared: {name} takes no optimizer step",
            why="it ended without a call of step() of a torch.optim.Optimizer",
            remedy="check a script that trains; its own arguments go after its name",
        )


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Ends a run and the processes that it has started."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _needs_arguments(error: dict[str, str], output: str) -> bool:
    """Whether a script's error is that of a parser of arguments, or of ``sys.argv[1]``."""
    if error["type"] == "SystemExit":
        return "usage" in f"{output} {error['message']}".lower()
    return error["type"] == "IndexError" and "argv" in error.get("source", "")


def _describe_steps(steps: int) -> str:
    return f"after {steps} optimizer step{'s' * (steps != 1)}" if steps else "before any step"


def _number(path: Path) -> int:
    try:
        return int(path.read_text() or 0)
    except (OSError, ValueError):
        return 0


def _last_lines(text: str, num: int) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", text[-_MAX_SHOWN:])
    return " | ".join(line.strip() for line in text.strip().splitlines()[-num:])
