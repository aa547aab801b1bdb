"""Makes a program that goes wrong simpler while it goes wrong in the same way."""

import time

from tests.fuzz.run import run_within


def shrunk(drawn, outcome, *, seconds=120):
    """Sets one knob after the other to its simplest value, or a simpler one, while that fails.

    Returns:
        The simplest program found, and its outcome.
    """
    end = time.monotonic() + seconds
    fixed = dict(drawn.knobs.fixed)
    is_smaller = True
    while is_smaller and time.monotonic() < end:
        is_smaller = False
        for name, index in drawn.knobs.differ().items():
            for simpler in (0, 1):
                if simpler >= index or time.monotonic() > end:
                    break
                attempt = drawn.again(fixed | {name: simpler})
                result = run_within(attempt, 15)
                if (result.kind, result.bucket) == (outcome.kind, outcome.bucket):
                    fixed[name] = simpler
                    drawn, is_smaller = attempt, True
                    outcome = result
                    break
    return drawn, outcome
