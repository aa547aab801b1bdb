"""What the tests run in a process of its own: programs, interrupted at many points in turn.

Prints a line for each program, and one per finding, which begins with a dash. A hang ends the
process, and says where all threads stand.

    python -m tests.interrupts.drive points|signals PROGRAM... --times K [--seed S]
"""

import argparse
import faulthandler
import os
import random
import signal
import sys

import torch

from mirror.threads import schedule
from tests.interrupts.programs import programs
from tests.interrupts.trial import Injector, Trial

HANG_SECONDS = 60.0
ERRORS = (KeyboardInterrupt, SystemExit, MemoryError, torch.OutOfMemoryError)


def interrupted_at_points(trial, times, rng):
    """Interrupts at every k-th event of a step, ``times`` in all; at all events with 0."""
    points = trial.points()
    stride = max(1, len(points) // times) if times else 1
    for i, point in enumerate(points[rng.randrange(stride) :: stride]):
        yield point, *trial.interrupt(point, ERRORS[i % len(ERRORS)]("injected"))


def interrupted_by_signals(trial, times, rng):
    """Interrupts by a signal that comes at any moment of a step."""

    def handle(number, frame):
        if trial.injector._is_watching:
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handle)
    for i in range(times):
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.03))
        yield i, *trial.interrupt(None, KeyboardInterrupt())
        signal.setitimer(signal.ITIMER_REAL, 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=["points", "signals"])
    parser.add_argument("programs", nargs="+", type=int)
    parser.add_argument("--times", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    schedule.LONG_TURN_SECONDS, schedule.NUM_TURNS = -1.0, 1  # at once, where that may be
    sys.unraisablehook = lambda unraisable: None  # of what strikes a finalizer
    injector, rng = Injector(), random.Random(args.seed)
    interrupted = interrupted_at_points if args.how == "points" else interrupted_by_signals
    for i in args.programs:
        trial = Trial(programs()[i](), injector)
        num = 0
        for point, where, wrong in interrupted(trial, args.times, rng):
            num += 1
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            if wrong:
                print(f"- {trial.program.name} {point} {where}: {'; '.join(wrong)}", flush=True)
        trial.program.strategy.close()
        print(f"{trial.program.name}: {num} of {sum(trial.counts.values())}", flush=True)
    print("done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
