"""For tests: does a program train on several devices as on one?

::

    def train():
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in batches():
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()

    def test_trains_as_on_one_device():
        mirror.testing.assert_equal_to_one_device(train)

It is ``mirror check`` for a function, in this process, on simulated devices. The package brings
the pytest fixture ``simulated_devices``.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from mirror.tools.check.judge import Judge, Runs
from mirror.tools.check.record import Record, RecordOptions
from mirror.tools.check.recorded_run import describe_error, recording, seed_all
from mirror.tools.check.verdict import EQUAL, NOT_COMPARABLE, CheckVerdict

__all__ = ["SimulatedDevices", "assert_equal_to_one_device", "compare_with_one_device"]


class _EnoughSteps(BaseException):
    """Ends a program after enough steps; no ``except Exception`` catches it."""


class SimulatedDevices(tuple[str, ...]):
    """Names of simulated devices; called with a number, so many of them.

    ::

        MirroredStrategy(simulated_devices)        two replicas on the CPU
        MirroredStrategy(simulated_devices(4))     four
    """

    def __new__(cls, num_devices: int = 2) -> SimulatedDevices:
        """Makes so many.

        Raises:
            ValueError: fewer than one.
        """
        if num_devices < 1:
            raise ValueError(f"simulated devices are at least 1, got {num_devices}")
        return super().__new__(cls, ["cpu"] * num_devices)

    def __call__(self, num_devices: int) -> SimulatedDevices:
        """Returns so many simulated devices."""
        return SimulatedDevices(num_devices)


def assert_equal_to_one_device(
    program: Callable[[], object],
    replicas: int | Iterable[int] = (1, 2, 3),
    steps: int = 20,
    tolerance: float | str = "auto",
    *,
    no_dropout: bool = False,
    double: bool = False,
) -> None:
    """Raises AssertionError unless a program trains on replicas as on one device.

    Args:
        program: builds and trains: model, optimizer and loop. It is called several times, on one
            device and with the scope of a strategy open, with all generators seeded alike, and
            ended after ``steps`` optimizer steps.
        replicas: how many simulated devices; one number, or several.
        tolerance: the largest relative difference that counts as rounding. ``"auto"``: what
            rounding errors make of this program on one device.
        no_dropout: whether to set all dropout probabilities to 0.
        double: whether to make float64 the default dtype.

    Raises:
        AssertionError: the verdict of ``mirror check``: the first step, quantity and module that
            differ, the likely cause and the remedy; or why it cannot be compared.
        ValueError: a number of replicas or steps is below 1, or the tolerance is no number.
        BaseException: what the program raises on one device.
    """
    counts = [replicas] if isinstance(replicas, int) else list(replicas)
    for verdict in _verdicts(program, counts, steps, tolerance, no_dropout, double):
        if verdict.code != EQUAL:
            raise AssertionError(f"{verdict.replicas} replicas, {verdict}")


def compare_with_one_device(
    program: Callable[[], object],
    replicas: int = 2,
    steps: int = 20,
    tolerance: float | str = "auto",
    *,
    no_dropout: bool = False,
    double: bool = False,
) -> CheckVerdict:
    """Returns the verdict of ``assert_equal_to_one_device`` for one number of replicas.

    Raises:
        ValueError: a number of replicas or steps is below 1, or the tolerance is no number.
        BaseException: what the program raises on one device.
    """
    return next(iter(_verdicts(program, [replicas], steps, tolerance, no_dropout, double)))


def _verdicts(
    program: Callable[[], object],
    counts: Sequence[int],
    steps: int,
    tolerance: float | str,
    no_dropout: bool,
    double: bool,
) -> Iterator[CheckVerdict]:
    for what, numbers in (("replicas", counts), ("steps", [steps])):
        if not all(isinstance(n, int) and n >= 1 for n in numbers):
            raise ValueError(f"{what} must be at least 1, got {numbers}")
    if tolerance != "auto" and not (isinstance(tolerance, (int, float)) and tolerance > 0):
        raise ValueError(f"tolerance is 'auto' or a number above 0, got {tolerance!r}")
    given = None if isinstance(tolerance, str) else float(tolerance)
    options = RecordOptions(steps=steps, no_dropout=no_dropout, double=double)
    one, _ = _record(program, options)
    for count in counts:
        if not one.num_steps:
            yield CheckVerdict(
                NOT_COMPARABLE,
                "cannot be compared: the program takes no optimizer step",
                replicas=count,
                remedy="build and train inside the function that is passed",
            )
            continue
        many, messages = _record(program, replace(options, replicas=count))

        def with_errors(number: int) -> Record:
            return _record(program, replace(options, steps=number, perturb=True))[0]

        def again(number: int) -> Record:
            return _record(program, replace(options, steps=number))[0]

        runs = Runs(one, many, with_errors, again)
        yield Judge(runs, replicas=count, tolerance=given, messages=messages).verdict()


def _record(program: Callable[[], object], options: RecordOptions) -> tuple[Record, str]:
    """Runs a program in this process; an error on one device is raised."""

    def end() -> None:
        raise _EnoughSteps

    with warnings.catch_warnings(record=True) as caught, _generators_kept():
        warnings.simplefilter("always")
        seed_all()
        with recording(options, lambda number: None, end) as recorder:
            try:
                program()
            except _EnoughSteps:
                pass
            except Exception as error:
                if not options.replicas:
                    raise
                recorder.record.ending = "error"
                recorder.record.error = describe_error(error)
    messages = "\n".join(f"{w.category.__name__}: {w.message}" for w in caught)
    return recorder.record, messages


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Puts the states of all generators back at the end."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
