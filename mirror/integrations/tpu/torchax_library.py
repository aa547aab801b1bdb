"""The extra ``[tpu]``: torchax and jax, in the tested versions, imported when needed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mirror.errors import BackendError

# The versions that pyproject.toml pins; no others were tested.
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
