"""Advice: the number of devices from which another way is wanted, and which."""

import mirror
from mirror.tools.planning.advice import advice


def sentences(**changes):
    given = {"step_seconds": 0.1, "parameters": 1e6, "tensors": 10, "host_seconds": 0.001}
    return mirror.plan(**(given | changes)).advice


def test_a_long_step_wants_one_process_and_one_per_machine():
    first, second = sentences()
    assert first == "One process is enough for 8 devices: it launches a step in 8 ms of 100 ms."
    assert second.startswith("Beyond the 8 of a machine, one process per machine: torchrun with")
    assert "mirror.MultiWorkerMirroredStrategy" in second


def test_a_step_of_launches_wants_compiled_steps():
    first, second = sentences(host_seconds=0.05)
    assert first.startswith("One process is enough up to 2 devices; for 4 its launches alone make")
    assert "a step of 200 ms out of 100 ms. Use compiled steps then (strategy.compile)" in first
    assert first.endswith("for 4 to 8 devices.")
    assert second.endswith("From 16 devices on: its steps compiled.")


def test_a_step_of_launches_with_much_to_send_wants_a_process_per_device():
    said = sentences(host_seconds=0.1, parameters=86e6, tensors=100, link="pcie3", network="25g")
    assert (
        "Use one process per device: torchrun with mirror.MultiWorkerMirroredStrategy" in said[0]
    )
    assert "DistributedDataParallel" in said[0]
    assert said[1].startswith("Beyond the 8 of a machine, one process per device")
    assert said[-1].startswith("From 16 devices on communication holds the step up")
    assert "backward hides" in said[-1]


def test_one_machine_says_nothing_of_several():
    assert len(sentences(max_devices=8)) == 1
    (only,) = sentences(max_devices=1)
    assert only.startswith("One process is enough for 1 device:")


def test_both_ways_are_named_where_both_are_wanted():
    rows = mirror.plan(
        step_seconds=0.02, parameters=2e8, tensors=100, host_seconds=0.02, link="nvlink2"
    ).rows
    ways = [row.way for row in rows[:4]]
    said = advice(rows, 8)[0]
    assert ("strategy.compile" in said) == ("compiled" in ways)
    assert ("torchrun" in said) == ("process per device" in ways)
