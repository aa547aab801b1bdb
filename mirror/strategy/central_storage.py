"""CentralStorageStrategy: parameters and optimizer state once, on a parameter device.

``replica/gradients/central_param.py`` says how values and gradients travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirror.base.migration_hints import call_with_hints, keywords_with_hints
from mirror.comm.communicator import Communicator
from mirror.devices import is_simulated, resolve
from mirror.errors import DeviceError
from mirror.strategy.mirrored import MirroredStrategy, check_single_device
from mirror.strategy.strategy_options import (
    CommunicationOptions,
    Fallback,
    GradientReduction,
    Guards,
    Mode,
    Schedule,
    Verify,
)


@call_with_hints
class CentralStorageStrategy(MirroredStrategy):
    """Keeps parameters and optimizer state once, on one device; replicas compute on copies.

    ::

        strategy = mirror.CentralStorageStrategy()   # state in the host's memory, all GPUs compute

    It computes the same as ``MirroredStrategy``. Gradients are reduced between the compute devices
    and sent once to the parameter device, where the optimizer steps; the new values go to all
    copies. So GPUs hold no optimizer state, at the cost of one transfer of gradients and
    parameters per step. In the cross-replica context ``p``, ``p.grad`` and state are on the
    parameter device; inside ``run`` a replica uses the copy on its own device. Buffers stay on
    the replicas' devices. See
    ``mirror/replica/gradients/central_param.py``.

    Simulated compute devices differ from the parameter device: their copies have their own memory,
    as on GPUs.

    Args:
        compute_devices: the replicas' devices, as for ``MirroredStrategy``; ``None`` stands for
            all visible CUDA devices, else one CPU.
        parameter_device: the device of parameters and optimizer state. If it is the only compute
            GPU, the strategy works like ``OneDeviceStrategy``.
        backend, communication_options, guards, gradient_reduction, schedule, verify: see
            ``MirroredStrategy``.

    Raises:
        DeviceError: a device does not exist, there is no compute device, or several parameter
            devices are given.
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
        verify: Verify = "first",
    ) -> None:
        if compute_devices is not None and not isinstance(compute_devices, (str, int)):
            if not tuple(compute_devices):
                raise DeviceError(
                    "compute_devices has one entry per replica; got none; leave it out for all "
                    "GPUs, or pass ['cpu'] * n to simulate n"
                )
        check_single_device("parameter_device", parameter_device, "compute_devices")
        (self._parameter_device,) = resolve([parameter_device])
        super().__init__(
            compute_devices,
            backend,
            communication_options=communication_options,
            guards=guards,
            gradient_reduction=gradient_reduction,
            schedule=schedule,
            verify=verify,
        )

    @property
    def parameter_device(self) -> torch.device:
        """The device of parameters and optimizer state."""
        return self._parameter_device

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, parameter_device='{self._parameter_device}')"

    @keywords_with_hints("MirroredStrategy.compile")
    def compile(
        self, step: Callable[..., Any], *, fallback: Fallback = "error", mode: Mode = "auto"
    ) -> Any:
        """Returns a step that runs uncompiled, for ``fallback="eager"``.

        Raises:
            CompileError: ``fallback`` is "error": compiled steps run the optimizer on the
                replicas' devices, where this strategy keeps no state.
        """
        return super().compile(step, fallback=fallback, mode=mode)

    def _resolve_devices(self, devices: Any) -> Sequence[Sequence[torch.device]]:
        return [(device,) for device in resolve(devices)]

    def _choose_parameter_device(self, devices: Sequence[torch.device]) -> torch.device | None:
        is_one = tuple(devices) == (self._parameter_device,) and not is_simulated(devices)
        return None if is_one else self._parameter_device
