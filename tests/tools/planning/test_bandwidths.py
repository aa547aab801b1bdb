"""Links: named ones have a source, others are numbers, anything else is refused."""

import pytest

from mirror.tools.planning.bandwidths import (
    LINKS,
    NETWORKS,
    link_between_devices,
    link_between_machines,
)
from mirror.tools.planning.plan_error import PlanError

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
