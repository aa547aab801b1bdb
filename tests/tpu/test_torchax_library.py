"""Devices of jax by name, and the versions of the extra [tpu]."""

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mirror
from mirror.errors import BackendError, DeviceError
from mirror_tpu import torchax_library
from mirror_tpu.torchax_library import (
    PINS,
    load_jax,
    resolve_jax_devices,
    to_torch_device,
    unavailable_reason,
)


class Device:
    def __init__(self, platform, index):
        self.platform, self.id = platform, index

    def __str__(self):
        return f"{self.platform}:{self.id}"


class Config:
    jax_num_cpu_devices = 1

    def update(self, name, value):
        raise RuntimeError("too late")


def jax_with(tpus=0, cpus=1):
    there = {
        "tpu": [Device("tpu", i) for i in range(tpus)],
        "cpu": [Device("cpu", i) for i in range(cpus)],
    }

    def local_devices(backend):
        if not there[backend]:
            raise RuntimeError(f"unknown backend {backend}")
        return there[backend]

    return SimpleNamespace(local_devices=local_devices, Device=Device, config=Config())


def test_none_are_all_tpus():
    assert [*map(str, resolve_jax_devices(jax_with(tpus=2), None))] == ["tpu:0", "tpu:1"]
    assert [*map(str, resolve_jax_devices(jax_with(tpus=2), ["TPU:1"]))] == ["tpu:1"]


def test_without_a_tpu_it_says_how_to_simulate():
    with pytest.raises(DeviceError, match=r'sees no TPU .*TPUStrategy\(\["cpu"\] \* 4\)'):
        resolve_jax_devices(jax_with(), None)


def test_simulated_devices_are_as_many_as_named():
    jax = jax_with(cpus=4)
    assert [*map(str, resolve_jax_devices(jax, ["cpu"] * 3))] == ["cpu:0", "cpu:1", "cpu:2"]
    with pytest.raises(DeviceError, match=r"5 simulated .* has 4; .*device_count=5"):
        resolve_jax_devices(jax, ["cpu"] * 5)


@pytest.mark.parametrize(
    ("devices", "rule"),
    [
        ("tpu", "a sequence of names"),
        (["cuda:0"], "'tpu:0', ... or 'cpu'; got 'cuda:0'"),
        (["tpu:0", "cpu"], "all 'tpu' or all 'cpu'"),
        (["tpu:2"], "'tpu:2' does not exist; jax sees 2"),
        (["tpu:0", "tpu:0"], "each device of jax is one replica's"),
        ([3], "or jax.Device; got 3"),
    ],
)
def test_what_is_none_is_refused(devices, rule):
    with pytest.raises(DeviceError, match=rule):
        resolve_jax_devices(jax_with(tpus=2), devices)


def test_devices_of_jax_are_taken():
    jax = jax_with(tpus=2)
    own = jax.local_devices("tpu")
    assert resolve_jax_devices(jax, own) == tuple(own)
    assert [to_torch_device(own[1]), to_torch_device(Device("cpu", 3))] == [
        torch.device("xla", 1),
        torch.device("cpu"),
    ]


ROOT = Path(__file__).parents[2]


def installed(monkeypatch, versions):
    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(torchax_library, "version", version)


def test_what_is_missing_is_named_with_the_extra(monkeypatch):
    installed(monkeypatch, {"jax": PINS["jax"]})
    said = r"not installed: torchax, jaxlib; pip install 'mirror-strategy\[tpu\]'"
    assert re.fullmatch(said, unavailable_reason())
    with pytest.raises(ModuleNotFoundError, match=said) as info:
        load_jax()
    assert info.value.name == "torchax"


def test_other_versions_are_refused(monkeypatch):
    installed(monkeypatch, {**PINS, "jax": "0.4.1"})
    with pytest.raises(BackendError, match=rf"jax {PINS['jax']}.* only; installed: jax 0\.4\.1"):
        load_jax()


def test_the_pinned_versions_can_be_used(monkeypatch):
    installed(monkeypatch, PINS)
    assert unavailable_reason() is None


def test_pyproject_pins_the_same_versions():
    text = (ROOT / "extras" / "tpu" / "pyproject.toml").read_text()
    own = {"mirror-strategy": mirror.__version__}
    assert dict(re.findall(r'"([a-z-]+)==([^";]+)"', text)) == own | PINS
    assert f'version = "{mirror.__version__}"' in text
    extra = f'tpu = ["mirror-strategy-tpu=={mirror.__version__}"]'
    assert extra in (ROOT / "pyproject.toml").read_text()
