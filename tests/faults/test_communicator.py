"""A communicator that fails, delays, corrupts or hangs in any call: nothing is lost."""

import pytest

import mirror
from tests.faults.communicators import FAULTS, Faulty, InjectedError
from tests.faults.trials import Trials, all_trials, setups

# What the step raises, and whether it counts.
EXPECTED = {
    "raises before": (InjectedError, "before"),
    "raises after": (InjectedError, "before"),
    "delays": (None, "after"),
    "hangs": (mirror.CollectiveTimeoutError, "before"),
}
# One of each way: in the forward pass, beside the backward pass, at the look at a gradient.
HANGS = [(setups()[0], 0), (setups()[3], 2), (setups()[4], 4)]


def check(fault, outcome):
    """Asserts what holds after a fault, whichever call it was at."""
    assert outcome.are_equal
    assert outcome.num_threads == 0
    assert outcome.seconds < Faulty.longest_hang / 2
    if fault == "corrupts":  # not detectable: all replicas have the same wrong sum
        assert outcome.error is None
        return
    assert (outcome.error, outcome.state) == EXPECTED[fault], outcome.text
    assert outcome.goes_on


@pytest.mark.parametrize("setup", setups(), ids=str)
def test_a_fault_loses_nothing(setup):
    trials = Trials(setup)
    assert trials.num_calls >= 4
    for i, fault in enumerate(FAULTS):
        if fault != "hangs":
            check(fault, trials.try_fault(fault, i % trials.num_calls))


@pytest.mark.parametrize(("setup", "at"), HANGS)
def test_a_hang_ends_and_reports_the_line_of_every_replica(setup, at):
    outcome = Trials(setup).try_fault("hangs", at)
    check("hangs", outcome)
    for part in ("all_reduce of float32 [", "3 replicas (cpu, cpu, cpu)", 'thread "MainThread"'):
        assert part in outcome.text
    for replica in range(setup.num_replicas):
        assert f'thread "mirror replica {replica} of 3 (cpu)"' in outcome.text
    assert "communicators.py" in outcome.text  # the call that hangs


@pytest.mark.slow
@pytest.mark.parametrize("setup", setups(), ids=str)
def test_every_fault_at_every_call(setup):
    tried = 0
    for fault, _, outcome in all_trials(setup):
        check(fault, outcome)
        tried += 1
    assert tried >= 4 * len(FAULTS)
