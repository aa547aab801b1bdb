"""The extra [tpu]: what is said where it is missing, or of other versions; it is pinned once."""

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from mirror.errors import BackendError
from mirror.integrations.tpu import torchax_library
from mirror.integrations.tpu.torchax_library import PINS, load_jax, unavailable_reason

ROOT = Path(__file__).parents[3]


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
    (line,) = re.findall(r"(?m)^tpu = \[(.*)\]", (ROOT / "pyproject.toml").read_text())
    pinned = dict(re.findall(r'"([a-z]+)==([^";]+)', line))
    assert pinned == PINS
