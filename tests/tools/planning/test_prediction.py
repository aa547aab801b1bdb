"""Predictions: limits, growth, and the advice on the simplest sufficient way."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mirror
from mirror.tools.planning.plan import advice
from mirror.tools.planning.prediction import (
    COMPILED,
    ENOUGH,
    GRAPH_LAUNCH_SECONDS,
    ONE_PROCESS,
    PROCESS_PER_DEVICE,
    SCALINGS,
    WAYS,
    Bandwidth,
    Cluster,
    Predictor,
    link_between_devices,
    link_between_machines,
)
from mirror.tools.planning.workload import make_workload

WIRE = Bandwidth("a wire of no length", 1e21, 0.0, "given")


def predictor(
    *, step=0.1, host=0.0, size=100e6, count=50, scaling="weak", batch=64, cluster=None, update=0.0
):
    workload = make_workload(
        step_seconds=step,
        batch_size=batch,
        sizes_bytes=(size / count,) * count,
        host_seconds=host,
        update_seconds=update,
    )
    links = link_between_devices("nvlink3"), link_between_machines("100g")
    return Predictor(workload, cluster or Cluster(*links, 8), scaling, 25 * 2**20)


def test_sharded_state_shares_the_update_and_gathers_its_values():
    plain = predictor(step=0.1, update=0.04, size=1e9)
    sharded = replace(plain, shards_state=True)
    assert sharded.row(1) == plain.row(1)
    before, after = plain.row(8), sharded.row(8)
    assert after.way == ONE_PROCESS
    gather = plain.cluster.all_reduce_seconds(1e9, num_devices=8) / 2
    assert after.communication_seconds == pytest.approx(before.communication_seconds, rel=0.2)
    saved = before.seconds_by_way[ONE_PROCESS] - after.step_seconds
    assert saved == pytest.approx(0.04 * 7 / 8 - gather, abs=0.005)
    assert "compiled" not in {row.way for row in sharded.rows(64)}


steps = st.builds(
    predictor,
    step=st.floats(1e-3, 1),
    host=st.floats(0, 1e-3),
    size=st.floats(1, 1e10),
    count=st.integers(1, 50),
    scaling=st.sampled_from(SCALINGS),
)


def test_one_device_is_the_step_that_was_measured():
    row = predictor(step=0.1, host=0.02).row(1)
    assert row.step_seconds == pytest.approx(0.1)
    assert row.examples_per_second == pytest.approx(640)
    assert row.efficiency == pytest.approx(1)
    assert (row.hidden_share, row.way, row.bound_by) == (None, ONE_PROCESS, "compute")


@pytest.mark.parametrize("devices", [2, 8, 16, 1024])
def test_links_without_limits_leave_an_efficiency_of_one(devices):
    row = predictor(cluster=Cluster(WIRE, WIRE, 8)).row(devices)
    assert row.efficiency == pytest.approx(1, abs=1e-3)
    assert row.examples_per_second == pytest.approx(640 * devices, rel=1e-3)


def test_a_slow_wire_takes_what_its_bytes_take():
    # 100 MB over 1 GB/s in a ring of two take 0.1 s; of the backward pass's 0.2, one bucket's
    # share of it is over before the first bucket can be sent.
    slow = Bandwidth("slow", 1e9, 0.0, "given")
    row = predictor(step=0.3, cluster=Cluster(slow, slow, 8)).row(2)
    assert row.communication_seconds == pytest.approx(0.1, rel=1e-2)
    assert 0.3 < row.step_seconds < 0.33
    assert row.hidden_share > 0.7


def test_launches_add_up_in_one_process_and_not_in_many():
    row = predictor(step=0.1, host=0.05).row(8)
    assert row.seconds_by_way[ONE_PROCESS] == pytest.approx(0.4)
    assert row.seconds_by_way[PROCESS_PER_DEVICE] < 0.11
    assert row.way == COMPILED
    assert row.host_seconds == pytest.approx(17 * GRAPH_LAUNCH_SECONDS)


def test_a_process_drives_the_devices_of_its_machine_alone():
    many = predictor(step=0.1, host=0.05)
    assert many.row(1024).seconds_by_way[ONE_PROCESS] == pytest.approx(0.4)
    assert many.row(4).seconds_by_way[ONE_PROCESS] == pytest.approx(0.2)


def test_compiled_steps_hide_nothing_so_much_communication_wants_a_process_per_device():
    row = predictor(step=0.1, host=0.1, size=400e6, count=200).row(16)
    assert row.seconds_by_way[COMPILED] > 1.2 * row.seconds_by_way[PROCESS_PER_DEVICE]
    assert (row.way, row.bound_by) == (PROCESS_PER_DEVICE, "launches")


def test_what_bounds_a_step_is_named():
    assert predictor(step=1.0).row(16).bound_by == "compute"
    assert predictor(step=0.01).row(16).bound_by == "communication"
    assert predictor(step=0.01, host=0.01, size=1.0, count=1).row(1).bound_by == "launches"


def test_a_shared_batch_is_computed_in_its_part_of_the_time_and_updated_in_the_whole():
    alone = Cluster(WIRE, WIRE, 8)
    row = predictor(step=0.1, update=0.02, scaling="strong", cluster=alone).row(8)
    assert row.step_seconds == pytest.approx(0.02 + 0.08 / 8, abs=1e-4)
    assert row.efficiency == pytest.approx(0.1 / (8 * 0.03), abs=1e-2)


def test_rows_double_up_to_the_largest_and_to_one_example_each():
    assert [row.devices for row in predictor().rows(1)] == [1]
    assert [row.devices for row in predictor().rows(8)] == [1, 2, 4, 8]
    assert [row.devices for row in predictor().rows(12)] == [1, 2, 4, 8, 12]
    shared = predictor(scaling="strong", batch=6).rows(1024)
    assert [row.devices for row in shared] == [1, 2, 4, 6]
    assert [row.devices for row in predictor().rows(1024)][-1] == 1024


@given(steps)
def test_no_prediction_is_above_what_is_possible(predicted):
    for row in predicted.rows(1024):
        assert 0 < row.efficiency <= 1 + 1e-9
        assert row.hidden_share is None or -1e-9 <= row.hidden_share <= 1
        assert set(row.seconds_by_way) == set(WAYS)
        assert row.step_seconds <= ENOUGH * min(row.seconds_by_way.values())


@given(steps.filter(lambda predicted: predicted.scaling == "weak"))
def test_more_devices_make_a_step_no_shorter_in_any_way(predicted):
    rows = list(predicted.rows(1024))
    for way in WAYS:
        times = [row.seconds_by_way[way] for row in rows]
        assert all(b >= a * (1 - 1e-9) for a, b in pairwise(times))


@given(steps, st.sampled_from([2, 8, 64]), st.floats(1, 100))
def test_a_quicker_network_makes_no_step_longer(predicted, devices, times):
    cluster = predicted.cluster
    links = [
        Bandwidth(link.name, link.bytes_per_second * times, link.hop_seconds, "given")
        for link in (cluster.link, cluster.network)
    ]
    quick = Predictor(
        predicted.workload, Cluster(*links, 8), predicted.scaling, predicted.bucket_bytes
    )
    before, after = predicted.row(devices), quick.row(devices)
    for way in WAYS:
        assert after.seconds_by_way[way] <= before.seconds_by_way[way] * (1 + 1e-9)


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
