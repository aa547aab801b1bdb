"""For tests: does a program train on several replicas as on one device?

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from torch import Tensor

from mirror.errors import short_repr
from mirror.tools.check.check_result import EQUAL, NOT_COMPARABLE, CheckResult
from mirror.tools.check.record import Record, RecordOptions
from mirror.tools.check.recorded_run import describe_error, recording, seed_all
from mirror.tools.check.run_comparison import RunComparison
from mirror.values import PerReplica, is_int, is_real

__all__ = ["SimulatedDeviceNames", "assert_equal_to_one_device", "compare_with_one_device"]


class _EnoughSteps(BaseException):
    """Ends a program after enough steps; no ``except Exception`` catches it."""


class SimulatedDeviceNames(tuple[str, ...]):
    """Names of simulated devices; a call with a number returns that many.

    ::

        MirroredStrategy(simulated_devices)        two replicas on the CPU
        MirroredStrategy(simulated_devices(4))     four
    """

    def __new__(cls, num_devices: int = 2) -> SimulatedDeviceNames:
        """Returns the names of ``num_devices`` devices.

        Raises:
            ValueError: there are fewer than one.
        """
        if num_devices < 1:
            raise ValueError(f"simulated devices are at least 1, got {num_devices}")
        return super().__new__(cls, ["cpu"] * num_devices)

    def __call__(self, num_devices: int) -> SimulatedDeviceNames:
        """Returns another number of simulated devices."""
        return SimulatedDeviceNames(num_devices)


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
            device and with the scope of a strategy open. All generators have the same seeds each
            time. It is ended after ``steps`` optimizer steps.
        replicas: the number of simulated devices; one number, or several.
        tolerance: the largest relative difference that counts as rounding. ``"auto"``: what
            rounding errors make of this program on one device.
        no_dropout: whether to set all dropout probabilities to 0.
        double: whether to make float64 the default dtype.

    Raises:
        AssertionError: the result of ``mirror check``: the first step, quantity and module that
            differ, the likely cause and the remedy; or why the program cannot be compared.
        ValueError: a number of replicas or steps is below 1, or the tolerance is not a number.
        Exception: what the program raises on one device.
    """
    several = isinstance(replicas, Iterable) and not isinstance(replicas, _SCALARS)
    numbers = list(cast("Iterable[int]", replicas)) if several else [cast("int", replicas)]
    options = _options(numbers, steps, tolerance, no_dropout, double)
    one = _record(program, options)
    for number in numbers:
        result = _compare(program, one, options, number, tolerance)
        if result.exit_code != EQUAL:
            raise AssertionError(f"{number} replica{'s' * (number != 1)}, {result}")


def compare_with_one_device(
    program: Callable[[], object],
    replicas: int = 2,
    steps: int = 20,
    tolerance: float | str = "auto",
    *,
    no_dropout: bool = False,
    double: bool = False,
) -> CheckResult:
    """Returns the result of ``mirror check`` for a program, on one number of replicas.

    The arguments are those of ``assert_equal_to_one_device``.

    Raises:
        ValueError: the number of replicas or steps is below 1, or the tolerance is not a number.
        Exception: what the program raises on one device.
    """
    options = _options([replicas], steps, tolerance, no_dropout, double)
    one = _record(program, options)
    return _compare(program, one, options, replicas, tolerance)


# Values that have elements, and are one argument all the same.
_SCALARS = (str, bytes, Tensor, PerReplica)


def _options(
    replicas: list[int], steps: int, tolerance: float | str, no_dropout: bool, double: bool
) -> RecordOptions:
    for name, numbers in (("replicas", replicas), ("steps", [steps])):
        if not numbers or not all(is_int(n) and n >= 1 for n in numbers):
            raise ValueError(
                f"{name} must be at least 1, got {', '.join(map(short_repr, numbers)) or 'none'}"
            )
    is_auto = isinstance(tolerance, str) and tolerance == "auto"
    if not is_auto and not (is_real(tolerance) and float(tolerance) > 0):
        raise ValueError(f"tolerance is 'auto' or a number above 0, got {short_repr(tolerance)}")
    return RecordOptions(steps=steps, no_dropout=no_dropout, double=double)


def _compare(
    program: Callable[[], object],
    one: Record,
    options: RecordOptions,
    replicas: int,
    tolerance: float | str,
) -> CheckResult:
    if not one.num_steps:
        return CheckResult(
            NOT_COMPARABLE,
            "cannot be compared: the program takes no optimizer step",
            replicas=replicas,
            remedy="build and train inside the function that is passed",
        )

    def record(title: str, options: RecordOptions) -> Record:
        return _record(program, options)

    comparison = RunComparison(record, one, options, replicas=replicas, tolerance=tolerance)
    return comparison.result()


def _record(program: Callable[[], object], options: RecordOptions) -> Record:
    """Runs a program in this process, and returns its record, with the warnings as its output.

    Raises:
        Exception: what the program raises on one device; under a strategy it is recorded.
    """

    def end(record: Record) -> None:
        raise _EnoughSteps

    with warnings.catch_warnings(record=True) as caught, _preserving_rng_states():
        warnings.simplefilter("always")
        seed_all()
        with recording(options, lambda number: None, end) as recorder:
            record = recorder.record
            try:
                program()
            except _EnoughSteps:
                pass
            except Exception as error:
                if not options.replicas:
                    raise
                record.ending, record.error = "error", describe_error(error)
    record.output += "\n".join(f"{w.category.__name__}: {w.message}" for w in caught)
    return record


@contextmanager
def _preserving_rng_states() -> Iterator[None]:
    """Restores the states of all generators at the end."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
