"""MirroredStrategy: one process trains one model on several devices, as one device would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch

from mirror.base.migration_hints import call_with_hints, signposted_keywords
from mirror.comm.communicator import Communicator
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.data.input_options import or_default
from mirror.device.device_mesh import DeviceMesh
from mirror.devices import is_simulated, resolve_places
from mirror.execution.parallel_runs import is_gil_enabled
from mirror.strategy.make_communicator import communicator_at
from mirror.strategy.strategy_base import Strategy
from mirror.strategy.strategy_options import (
    CommunicationOptions,
    GradientReduction,
    Guards,
    Schedule,
    check_choice,
)
from mirror.threads.user_frames import warn_user

Device = torch.device | str | int
_SCHEDULES = get_args(Schedule)
_GRADIENT_REDUCTIONS = get_args(GradientReduction)
_GIL = (
    'schedule="parallel": the replicas run at once, but this interpreter has a GIL, which they '
    "share: Python code runs in one of them at a time; use a free-threaded build (python3.14t, "
    'with PYTHON_GIL=0), or schedule="auto"'
)


@call_with_hints
class MirroredStrategy(Strategy):
    """Mirrors a model's variables on all devices of one process and keeps them equal.

    ::

        strategy = mirror.MirroredStrategy()
        with strategy.scope():
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters())
            for x, y in loader:
                loss = F.cross_entropy(model(x), y.to(strategy.devices[0]))
                optimizer.zero_grad(); loss.backward(); optimizer.step()

    Args:
        devices: devices or their names; a repeated entry makes several replicas on one device,
            ``["cpu"] * 4`` four simulated ones. ``None`` or empty: all visible CUDA devices,
            else one CPU. A list for each replica places a model's layers on several devices, see
            below.
        backend: ``"auto"``, the name of a communication backend, or a ``Communicator`` over the
            same devices.
        communication_options: see ``CommunicationOptions``.
        guards: what the strategy watches while it trains, see ``Guards``.
        gradient_reduction: what a backward pass inside ``run`` leaves in ``.grad``: ``"mean"``,
            weighted by the replicas' numbers of examples, or ``"sum"``, as in tf.distribute.
        schedule: how replicas take turns: ``"lockstep"``, one at a time, deterministic, or
            ``"staggered"``, the next one starts also when the current one blocks on its device.
            ``"auto"`` is ``"staggered"`` on CUDA; on simulated devices it gives the bits and the
            order of ``"lockstep"``, and measures in the first steps, and every 1000, what else it
            may do: have OpenMP's idle teams end, or backward passes outside ``run`` go on at once
            where there are CPUs to spare. Staggered simulated devices share the intra-op threads
            and, where that is measured to be faster, run at once: random numbers are then drawn
            in the order in which the replicas come, and sums divided otherwise. What has been
            chosen is logged, by "mirror". See [Note: Measured manners].

    **Layers on several devices.** Under ``devices=[["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]`` a
    model is written for the first replica: ``self.top.to("cuda:1")`` when it is made, and
    ``h.to("cuda:1")`` in ``forward``. Replica r has copies of what is on the first one's device k
    on its own device k, and where its code names that device in a function of tensors, its own is
    meant. ``get_replica_context().devices`` has them for what is none: streams, generators,
    ``torch.cuda.device``. Inputs go to the first device, results come from wherever they are. Each
    GPU is in one place. Layers are placed before the model is first used. Lists of CPUs simulate
    that: all their positions are the one CPU. See [Note: Places] in ``device/device_mesh.py``.

    Raises:
        DeviceError: a device does not exist, or CPU is mixed with CUDA; of lists, they are of
            unlike length or empty, are mixed with devices, or a GPU is there twice.
        BackendError: the backend is unknown or cannot serve the devices.
        ValueError: an unknown ``gradient_reduction`` or ``schedule``.
    """

    def __init__(
        self,
        devices: Sequence[Device | Sequence[Device]] | None = None,
        backend: str | Communicator = "auto",
        *,
        communication_options: CommunicationOptions | None = None,
        guards: Guards | None = None,
        gradient_reduction: GradientReduction = "mean",
        schedule: Schedule = "auto",
    ) -> None:
        check_choice("gradient_reduction", gradient_reduction, _GRADIENT_REDUCTIONS)
        check_choice("schedule", schedule, _SCHEDULES)
        options = or_default(communication_options, CommunicationOptions)
        places = DeviceMesh(self._rows(devices))
        resolved, manner = places.positions[0], str(schedule)
        simulated = is_simulated(resolved)
        if len(resolved) == 1 and simulated:
            manner = "lockstep"
        elif schedule == "auto" and not simulated:
            manner = "staggered" if is_gil_enabled() else "parallel"
        elif schedule == "staggered" and simulated:
            manner = "concurrent"
        if schedule == "parallel" and len(resolved) > 1 and is_gil_enabled():
            warn_user(_GIL)
        super().__init__(
            places,
            communicator_at(places, backend, options),
            options,
            or_default(guards, Guards),
            schedule=manner,
            weighted=gradient_reduction == "mean",
            workers=self._meet(resolved, backend, options),
            home=self._home(resolved),
        )

    @property
    def places(self) -> tuple[tuple[torch.device, ...], ...]:
        """Each replica's devices, in replica order: one, unless its layers are on several."""
        return self._group.replicas.places.replicas

    # Programs give them the keywords of DistributedDataParallel and of Keras's compile.
    mirror = signposted_keywords("MirroredStrategy.mirror")(Strategy.mirror)
    compile = signposted_keywords("MirroredStrategy.compile")(Strategy.compile)

    def _rows(self, devices: Any) -> Sequence[Sequence[torch.device]]:
        """Returns each replica's devices, of those that were asked for."""
        return resolve_places(devices)

    def _meet(
        self,
        devices: Sequence[torch.device],
        backend: str | Communicator,
        options: CommunicationOptions,
    ) -> LocalWorkerGroup | None:
        """Returns the processes whose replicas train together; ``None``: this one alone."""
        return None

    def _home(self, devices: Sequence[torch.device]) -> torch.device | None:
        """Returns where parameters are, if not with the replicas."""
        return None
