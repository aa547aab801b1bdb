"""Tries all faults of a communicator and prints the table of ``docs/faults.md``.

``python -m tests.faults`` takes some minutes; ``python -m tests.faults 20`` one setup of 20.
"""

import sys
from collections import Counter

from tests.faults.communicators import FAULTS
from tests.faults.trials import OPTIMIZERS, all_trials, setups


def main(stride=1):
    chosen = setups(
        num_replicas=(2, 3), bytes_per_pack=(0, 64, 25 * 2**20), optimizer=tuple(OPTIMIZERS)
    )[::stride]
    counts = {fault: Counter() for fault in FAULTS}
    errors = {fault: set() for fault in FAULTS}
    for setup in chosen:
        for fault, _, outcome in all_trials(setup):
            count = counts[fault]
            count["tried"] += 1
            errors[fault].add(outcome.error.__name__ if outcome.error else "no error")
            is_right = outcome.goes_on and outcome.state != "neither"
            kept = is_right and outcome.are_equal and not outcome.num_threads
            count["survived" if kept else "lost"] += 1
            count[outcome.state] += 1
    print("| fault | tried | the step | survived | lost | before | after | neither |")
    print("|---|---|---|---|---|---|---|---|")
    columns = ("survived", "lost", "before", "after", "neither")
    for fault, count in counts.items():
        ended = ", ".join(sorted(errors[fault]))
        numbers = " | ".join(str(count[column]) for column in columns)
        print(f"| {fault} | {count['tried']} | {ended} | {numbers} |")
    print(f"{len(chosen)} setups, {sum(count['tried'] for count in counts.values())} faults")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
