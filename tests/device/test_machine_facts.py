"""mirror/device/machine_facts.py: the facts that tell machines from each other."""

import json
from types import SimpleNamespace

import pytest
import torch

from mirror.device import machine_facts
from mirror.device.machine_facts import facts_of_machine

GPUS = [torch.device("cuda", i) for i in range(2)]


@pytest.fixture
def properties(monkeypatch):
    found = [
        SimpleNamespace(name="H100", uuid=f"GPU-{i}", total_memory=80, pci_bus_id=i)
        for i in range(2)
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found[device.index])
    return found


def test_gpus_are_told_apart_and_by_their_order(properties):
    facts = facts_of_machine(GPUS)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["gpus"] == [
        ["H100", "GPU-0", "80", "", "0", ""],
        ["H100", "GPU-1", "80", "", "1", ""],
    ]
    assert facts_of_machine(GPUS) == facts
    assert facts_of_machine(GPUS[::-1]) != facts
    properties[1].uuid = "GPU-7"
    assert facts_of_machine(GPUS) != facts


def test_another_driver_or_command_line_is_another_machine(properties, monkeypatch, tmp_path):
    files = {name: tmp_path / name for name in machine_facts._FILES}
    monkeypatch.setattr(machine_facts, "_FILES", files)
    seen = [facts_of_machine(GPUS)]  # nothing is there
    assert seen[0]["driver"] == ""
    for name in files:
        files[name].write_text("560.1")
        seen.append(facts_of_machine(GPUS))
    assert seen[0] != seen[1] != seen[2]


def test_the_cpu_has_a_name_only():
    assert facts_of_machine([torch.device("cpu")] * 2)["gpus"] == [["cpu"], ["cpu"]]
