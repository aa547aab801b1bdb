"""torchax and jax, the extra ``[tpu]``: tested versions, imported when needed; jax devices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from mirror.errors import BackendError, DeviceError, short_repr

# The versions that extras/tpu/pyproject.toml pins; no others were tested.
PINS = {"torchax": "0.0.14.dev20261026", "jax": "0.10.2", "jaxlib": "0.10.2"}
INSTALL = "pip install 'mirror-strategy[tpu]'"


@dataclass(frozen=True)
class Library:
    """The parts of the extra that mirror uses.

    Attributes:
        jax: the module.
        env: torchax's environment of one strategy, which computes like torch.
        tensor: torchax's class of tensors.
        not_found: the error that torchax raises for an operation that it lacks.
    """

    jax: Any
    env: Any
    tensor: Any
    not_found: Any


def unavailable_reason() -> str | None:
    """Returns why TPUStrategy cannot be made here; ``None`` if it can. Imports nothing."""
    found = {name: _version(name) for name in PINS}
    lacking = [name for name, own in found.items() if own is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}; {INSTALL}"
    others = [f"{name} {own}" for name, own in found.items() if own != PINS[name]]
    if others:
        wanted = ", ".join(f"{name} {pin}" for name, pin in PINS.items())
        return f"it was seen to work with {wanted} only; installed: {', '.join(others)}; {INSTALL}"
    return None


def load_jax() -> Any:
    """Imports jax, which does not search for devices yet.

    Raises:
        ModuleNotFoundError: the extra is not installed.
        BackendError: the extra is installed in other versions.
    """
    reason = unavailable_reason()
    if reason is not None:
        text = f"mirror.TPUStrategy needs torchax and jax; {reason}"
        if any(_version(name) is None for name in PINS):
            raise ModuleNotFoundError(text, name="torchax")
        raise BackendError(text)
    return import_module("jax")


def load() -> Library:
    """Imports the whole extra; jax fixes its devices at this point."""
    jax, tensors = load_jax(), import_module("torchax.tensor")
    env = tensors.Environment()
    env.config.internal_respect_torch_return_dtypes = True
    # A 0-d tensor from outside the step would silently become a constant of the program.
    env.config.allow_mixed_math_with_scalar_tensor = False
    return Library(jax, env, tensors.Tensor, tensors.OperatorNotFound)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


_NAME = re.compile(r"/?(cpu|tpu)(?::(\d+))?", re.IGNORECASE)
_SIMULATE = 'TPUStrategy(["cpu"] * 4) simulates four'


def resolve_jax_devices(jax: Any, devices: Sequence[Any] | None) -> tuple[Any, ...]:
    """Returns jax's devices.

    Args:
        devices: names, ``"tpu:0"``, ``"tpu:1"``, or ``"cpu"`` for each simulated device; or jax's
            own devices; ``None`` or an empty sequence for all TPU devices of this process.

    Raises:
        DeviceError: a device does not exist, is given twice, or kinds are mixed.
    """
    if isinstance(devices, (str, torch.device)):
        raise DeviceError(f"devices is a sequence of names, such as ['tpu:0']; got {devices!r}")
    if not devices:
        return tuple(_tpus(jax))
    if not any(isinstance(device, (str, torch.device)) for device in devices):
        found = tuple(devices)
        unlike = [device for device in found if not isinstance(device, jax.Device)]
        if unlike:
            raise DeviceError(
                f"devices are names, such as 'tpu:0' or 'cpu', or jax.Device; got "
                f"{short_repr(unlike[0])}"
            )
        return _check_distinct(found)
    names = [_parse(device) for device in devices]
    kinds = {kind for kind, _ in names}
    if len(kinds) > 1:
        raise DeviceError(f"devices are all 'tpu' or all 'cpu'; got {short_repr(list(devices))}")
    if kinds == {"cpu"}:
        return _simulate_devices(jax, len(names))
    tpus = _tpus(jax)
    for _, index in names:
        if index >= len(tpus):
            raise DeviceError(f"'tpu:{index}' does not exist; jax sees {len(tpus)}; {_SIMULATE}")
    return _check_distinct(tuple(tpus[index] for _, index in names))


def to_torch_device(device: Any) -> torch.device:
    """Returns torch's name for a device of jax; torch calls a TPU ``xla``."""
    if device.platform == "cpu":
        return torch.device("cpu")
    return torch.device("xla", device.id)


def _parse(device: Any) -> tuple[str, int]:
    name = _NAME.fullmatch(str(device))
    if name is None:
        raise DeviceError(f"a device is 'tpu:0', ... or 'cpu'; got {short_repr(device)}")
    return name[1].lower(), int(name[2] or 0)


def _check_distinct(found: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(found)) < len(found):
        raise DeviceError(f"each device of jax is one replica's; got {list(map(str, found))}")
    return found


def _tpus(jax: Any) -> list[Any]:
    try:
        return list(jax.local_devices(backend="tpu"))
    except RuntimeError as error:  # no such platform
        raise DeviceError(f"jax sees no TPU ({error}); {_SIMULATE}") from None


def _simulate_devices(jax: Any, number: int) -> tuple[Any, ...]:
    """Returns ``number`` CPU devices of jax; jax fixes their total when it is first used."""
    try:
        if jax.config.jax_num_cpu_devices < number:
            jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:  # jax is already in use: the number is fixed
        pass
    found = jax.local_devices(backend="cpu")
    if len(found) < number:
        raise DeviceError(
            f"{number} simulated devices were requested, but jax, which is already in use, has "
            f"{len(found)}; create this strategy first, or run the program with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={number}"
        )
    return tuple(found[:number])
