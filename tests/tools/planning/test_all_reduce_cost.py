"""All-reduces: their closed forms, and how they grow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.tools.planning.all_reduce_cost import ALGORITHMS, COLLECTIVE_SECONDS, Cluster
from mirror.tools.planning.bandwidths import Bandwidth

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
