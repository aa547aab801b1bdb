"""The cost of all-reduces: closed forms, bandwidths of links, and overlap with computation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.tools.planning.prediction import (
    ALGORITHMS,
    COLLECTIVE_SECONDS,
    LINKS,
    NETWORKS,
    Bandwidth,
    Cluster,
    buckets_of,
    link_between_devices,
    link_between_machines,
    reduce_after_backward,
    reduce_during_backward,
)
from mirror.tools.planning.workload import PlanError

C = COLLECTIVE_SECONDS
INSIDE = Bandwidth("inside", 100e9, 2e-6, "given")
BETWEEN = Bandwidth("between", 10e9, 20e-6, "given")
S = 1e9

sizes = st.floats(1, 1e11)
counts = st.integers(1, 1024)
links = st.builds(
    Bandwidth, st.just("x"), st.floats(1e6, 1e13), st.floats(0, 1e-3), st.just("given")
)
clusters = st.builds(Cluster, links, links, st.integers(1, 16), st.sampled_from(ALGORITHMS))


def seconds(algorithm, devices, *, per_machine=8, size=S):
    return Cluster(INSIDE, BETWEEN, per_machine, algorithm).all_reduce_seconds(size, devices)


def test_a_ring_in_a_machine():
    # 2 (n - 1) hops, each of S / n bytes
    assert seconds("ring", 2) == pytest.approx(C + 2 * 2e-6 + S / 100e9)
    assert seconds("ring", 8) == pytest.approx(C + 14 * (2e-6 + S / 8 / 100e9))


def test_a_ring_over_machines_is_as_quick_as_their_network():
    # 16 devices on 2 machines: 2 of the 30 hops are between them, in each direction
    assert seconds("ring", 16) == pytest.approx(C + 28 * 2e-6 + 2 * 20e-6 + 30 / 16 * S / 10e9)


def test_a_tree_has_as_many_levels_as_machines_have_doublings():
    assert seconds("tree", 32) == pytest.approx(
        C + 14 * 2e-6 + 2 * 2 * 20e-6 + 2 * S / (0.92 * 10e9)
    )
    assert seconds("tree", 1024, size=0) - seconds("tree", 512, size=0) == pytest.approx(2 * 20e-6)


def test_a_hierarchy_sends_every_byte_over_the_network_once_each_way():
    inside = 2 * C + 14 * 2e-6 + 14 / 8 * S / 100e9
    assert seconds("hierarchical", 8) == pytest.approx(inside)
    between = C + 2 * 20e-6 + S / 10e9
    assert seconds("hierarchical", 16) == pytest.approx(inside + between)


def test_machines_of_one_device_know_no_link_inside():
    assert seconds("ring", 4, per_machine=1) == pytest.approx(C + 6 * (20e-6 + S / 4 / 10e9))
    assert seconds("hierarchical", 4, per_machine=1) == pytest.approx(
        C + 6 * 20e-6 + 6 / 4 * S / 10e9
    )


@given(sizes, counts, clusters)
def test_auto_is_the_quicker_of_ring_and_tree(size, devices, cluster):
    def by(algorithm):
        return Cluster(
            cluster.link, cluster.network, cluster.devices_per_machine, algorithm
        ).all_reduce_seconds(size, devices)

    assert by("auto") == min(by("ring"), by("tree"))


def test_many_machines_take_a_tree_for_little_and_a_ring_for_much():
    assert seconds("auto", 1024, size=1e4) == seconds("tree", 1024, size=1e4)
    assert seconds("auto", 16, size=1e9) == seconds("ring", 16, size=1e9)


@given(sizes, clusters)
def test_one_device_reduces_nothing(size, cluster):
    assert cluster.all_reduce_seconds(size, 1) == 0


@given(sizes, sizes, counts, clusters)
def test_more_bytes_take_longer(one, other, devices, cluster):
    less, more = sorted((one, other))
    assert cluster.all_reduce_seconds(less, devices) <= cluster.all_reduce_seconds(more, devices)


@given(sizes, st.integers(2, 1024), clusters, st.floats(1, 1e3))
def test_quicker_links_take_less(size, devices, cluster, times):
    def quicker(link):
        return Bandwidth("y", link.bytes_per_second * times, link.hop_seconds / times, "given")

    quick = Cluster(
        quicker(cluster.link),
        quicker(cluster.network),
        cluster.devices_per_machine,
        cluster.algorithm,
    )
    least = quick.all_reduce_seconds(size, devices)
    assert 0 < least <= cluster.all_reduce_seconds(size, devices) * (1 + 1e-12)


@pytest.mark.parametrize(("devices", "machines"), [(1, 1), (8, 1), (9, 2), (1024, 128)])
def test_devices_fill_machines(devices, machines):
    assert Cluster(INSIDE, BETWEEN, 8).num_machines(devices) == machines


ALL = (*LINKS.values(), *map(link_between_machines, NETWORKS))


@pytest.mark.parametrize("link", ALL, ids=lambda link: link.name)
def test_every_named_link_has_a_source(link):
    assert "NVIDIA/nccl 2.30.7 (2026), src/graph/topo.h" in link.source
    assert link.bytes_per_second > 0
    assert link.hop_seconds > 0


def test_an_nvlink_has_as_many_gigabytes_as_its_links_have_together():
    assert LINKS["nvlink3"].bytes_per_second == 12 * 20e9
    assert LINKS["nvlink4"].bytes_per_second == pytest.approx(370.8e9)
    assert LINKS["pcie5"].bytes_per_second == 4 * LINKS["pcie3"].bytes_per_second


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("25g", 3), ("100g", 12), ("4x100g", 48), ("32x100g", 384)]
)
def test_a_network_is_adapters_times_gigabits(name, gigabytes):
    link = link_between_machines(name)
    assert link.name == name
    assert link.bytes_per_second == pytest.approx(gigabytes * 1e9)


@pytest.mark.parametrize("find", [link_between_devices, link_between_machines])
@pytest.mark.parametrize("numbers", [(50, 2), [50.0, 2.0]])
def test_a_measured_link_is_two_numbers(find, numbers):
    link = find(numbers)
    assert (link.bytes_per_second, link.hop_seconds) == (50e9, pytest.approx(2e-6))
    assert link.source == "given"


@pytest.mark.parametrize(
    ("find", "what", "message"),
    [
        (link_between_devices, "nvlink9", r"link must be one of nvlink1, .* got 'nvlink9'"),
        (link_between_devices, 300, r"link must be a name or \(gigabytes .* got 300"),
        (link_between_devices, (1, 2, 3), r"got \(1, 2, 3\)"),
        (link_between_devices, (0, 2), r"link: gigabytes per second must be above 0, got 0"),
        (link_between_devices, (1, -2), r"link: microseconds per hop must not be below 0, got -2"),
        (link_between_devices, ("x", 2), r"gigabytes per second must be a finite number, got 'x'"),
        (link_between_machines, "100", r"network must be like '100g' or '8x400g'.* got '100'"),
        (link_between_machines, "0x100g", "got '0x100g'"),
        (link_between_machines, "-1g", "got '-1g'"),
        (link_between_machines, "", "got ''"),
        (link_between_machines, (float("inf"), 0), "must be a finite number, got inf"),
        (link_between_machines, None, "got None"),
    ],
)
def test_what_is_no_link_is_refused(find, what, message):
    with pytest.raises(PlanError, match=message):
        find(what)


bucket_sizes = st.lists(st.floats(1, 1e9), min_size=1, max_size=40)


def one_second_each(num_bytes):
    return 1.0


def a_second_a_byte(num_bytes):
    return num_bytes


def test_buckets_are_cut_from_the_last_parameter_on():
    assert buckets_of([4, 3, 1, 1], 3) == [(0.5, 2), (0.75, 3), (1.0, 4)]


def test_a_gradient_larger_than_a_bucket_has_one_of_its_own():
    assert buckets_of([1, 9, 1], 3) == [(1 / 3, 1), (2 / 3, 9), (1.0, 1)]


@given(bucket_sizes, st.floats(1, 1e10))
def test_buckets_hold_every_gradient_once_and_at_most_so_much(sizes_bytes, most):
    buckets = buckets_of(sizes_bytes, most)
    assert sum(size for _, size in buckets) == pytest.approx(sum(sizes_bytes))
    assert max(size for _, size in buckets) <= max(most, *sizes_bytes, 0)
    assert [when for when, _ in buckets] == sorted(when for when, _ in buckets)
    assert buckets[-1][0] == 1


def test_what_fits_into_the_backward_pass_is_hidden_but_for_the_last():
    # 8 seconds of backward, a bucket every 2, each reduced in 1: |..[1]..[1]..[1]..|[1]
    buckets = buckets_of([1, 1, 1, 1], 1)
    taken = reduce_during_backward(buckets, 8.0, one_second_each)
    assert (taken.seconds, taken.exposed_seconds) == (4, 1)
    assert taken.hidden_share == 0.75


def test_a_channel_that_cannot_keep_up_is_never_idle():
    # The first arrives after 1 of 4 seconds, and four of 3 seconds follow each other: to 13.
    buckets = buckets_of([3, 3, 3, 3], 3)
    taken = reduce_during_backward(buckets, 4.0, a_second_a_byte)
    assert (taken.seconds, taken.exposed_seconds) == (12, 9)


def test_one_reduction_behind_hides_nothing():
    taken = reduce_after_backward(7, a_second_a_byte)
    assert (taken.seconds, taken.exposed_seconds, taken.hidden_share) == (7, 7, 0)


def test_without_a_reduction_nothing_is_said_to_be_hidden():
    assert reduce_during_backward([(1.0, 5)], 1.0, lambda _: 0.0).hidden_share is None


@given(bucket_sizes, st.floats(1, 1e9), st.floats(0, 10), st.floats(1e-12, 1e-3))
def test_buckets_never_take_longer_than_the_same_behind(sizes_bytes, most, backward, slope):
    def all_reduce(num_bytes):
        return slope * num_bytes  # without a latency, which every bucket pays

    beside = reduce_during_backward(buckets_of(sizes_bytes, most), backward, all_reduce)
    behind = reduce_after_backward(sum(sizes_bytes), all_reduce)
    assert 0 <= beside.exposed_seconds <= behind.exposed_seconds * (1 + 1e-9)
    assert -1e-9 <= beside.hidden_share <= 1


@given(bucket_sizes, st.floats(0, 10), st.floats(0, 10))
def test_a_longer_backward_pass_hides_no_less(sizes_bytes, one, other):
    buckets = buckets_of(sizes_bytes, 1e8)
    short, long = sorted((one, other))

    def exposed(backward):
        return reduce_during_backward(buckets, backward, lambda size: 1e-9 * size).exposed_seconds

    assert exposed(long) <= exposed(short) + 1e-9
