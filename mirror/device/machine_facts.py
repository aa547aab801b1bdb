"""Facts that identify a machine and its GPUs, and that change with its configuration."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

# IOMMU and ACS, which decide whether GPUs reach each other, are set on the kernel's command line.
_FILES = {"driver": "/proc/driver/nvidia/version", "command line": "/proc/cmdline"}
# Older versions of torch lack some of them.
_PROPERTIES = ("name", "uuid", "total_memory", "pci_domain_id", "pci_bus_id", "pci_device_id")


def facts_of_machine(devices: Sequence[torch.device]) -> dict[str, object]:
    """Returns the kernel, the driver, and the GPUs behind the devices, in words and numbers.

    An unknown fact is an empty string.
    """
    facts: dict[str, object] = {name: _text(path) for name, path in _FILES.items()}
    facts |= {"kernel": platform.release(), "cuda": _version_of_driver()}
    return facts | {"gpus": [facts_of_gpu(device) for device in devices]}


def facts_of_gpu(device: torch.device) -> list[str]:
    """Returns the identifying properties of a GPU; for the CPU, its name."""
    if device.type != "cuda":
        return [str(device)]
    properties = torch.cuda.get_device_properties(device)
    return [str(getattr(properties, name, "")) for name in _PROPERTIES]


def _version_of_driver() -> int:
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
