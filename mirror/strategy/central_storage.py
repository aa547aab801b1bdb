"""CentralStorageStrategy: parameters and optimizer state once, on a device of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirror.base.migration_hints import call_with_hints, signposted_keywords
from mirror.comm.communicator import Communicator
from mirror.devices import is_simulated, resolve
from mirror.errors import DeviceError
from mirror.strategy.mirrored import MirroredStrategy
from mirror.strategy.one_device import check_one
from mirror.strategy.strategy_options import (
    CommunicationOptions,
    Fallback,
    GradientReduction,
    Guards,
    Mode,
    Schedule,
)


@call_with_hints
class CentralStorageStrategy(MirroredStrategy):
    """Keeps parameters and optimizer state once, on one device; replicas compute on copies.

    ::

        strategy = mirror.CentralStorageStrategy()   # state in the host's memory, all GPUs compute

    It computes what ``MirroredStrategy`` computes. Gradients are reduced between the compute
    devices and go to the parameter device once, where the optimizer steps; its result goes to all
    copies. So N GPUs keep no optimizer state, for a transfer of gradients and parameters per
    step. ``p``, ``p.grad`` and state are on the parameter device in the cross-replica context;
    inside ``run`` a replica sees its copy, on its own. Buffers stay with the replicas. See
    ``mirror/replica/params/central_param.py``.

    Simulated compute devices stand for others than the parameter device: their copies have memory
    of their own, as on GPUs.

    Args:
        compute_devices: where the replicas are, as the devices of ``MirroredStrategy``; ``None``:
            all visible CUDA devices, else one CPU.
        parameter_device: where parameters and optimizer state are. One GPU that is both is that
            of ``OneDeviceStrategy``.
        backend, communication_options, guards, gradient_reduction, schedule: see
            ``MirroredStrategy``.

    Raises:
        DeviceError: a device does not exist, there is no compute device, the parameter device is
            several.
        As ``MirroredStrategy``.
    """

    def __init__(
        self,
        compute_devices: Sequence[torch.device | str | int] | None = None,
        parameter_device: torch.device | str | int = "cpu",
        *,
        backend: str | Communicator = "auto",
        communication_options: CommunicationOptions | None = None,
        guards: Guards | None = None,
        gradient_reduction: GradientReduction = "mean",
        schedule: Schedule = "auto",
    ) -> None:
        if compute_devices is not None and not isinstance(compute_devices, (str, int)):
            if not tuple(compute_devices):
                raise DeviceError(
                    "compute_devices has one entry per replica; got none; leave it out for all "
                    "GPUs, or pass ['cpu'] * n to simulate n"
                )
        check_one("parameter_device", parameter_device, "compute_devices")
        (self._parameter_device,) = resolve([parameter_device])
        super().__init__(
            compute_devices,
            backend,
            communication_options=communication_options,
            guards=guards,
            gradient_reduction=gradient_reduction,
            schedule=schedule,
        )

    @property
    def parameter_device(self) -> torch.device:
        """Where parameters and optimizer state are."""
        return self._parameter_device

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, parameter_device='{self._parameter_device}')"

    @signposted_keywords("MirroredStrategy.compile")
    def compile(
        self, step: Callable[..., Any], *, fallback: Fallback = "error", mode: Mode = "auto"
    ) -> Any:
        """Returns a step that runs as it is, for ``fallback="eager"``.

        Raises:
            CompileError: there is no fallback: compiled steps have the optimizer's step on the
                replicas' devices, where this strategy keeps no state.
        """
        return super().compile(step, fallback=fallback, mode=mode)

    def _rows(self, devices: Any) -> Sequence[Sequence[torch.device]]:
        return [(device,) for device in resolve(devices)]

    def _home(self, devices: Sequence[torch.device]) -> torch.device | None:
        is_one = tuple(devices) == (self._parameter_device,) and not is_simulated(devices)
        return None if is_one else self._parameter_device
