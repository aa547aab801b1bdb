"""The strategies of one process: MirroredStrategy has a copy of all state on every device.

``Strategy`` in ``strategy_base.py`` has its public members. ``OneDeviceStrategy`` is the case of
one replica, and the default strategy of ``get_strategy`` is one, too. The functions below the
classes ask for the current strategy and replica, and whether a variable is mirrored.

``CentralStorageStrategy`` has parameters and optimizer state once, on a parameter device:
``replica/params/central_param.py`` says how values and gradients travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.base.migration_hints import call_with_hints, keywords_with_hints
from mirror.comm.communicator import Communicator
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.data.input_options import resolve_options
from mirror.device.device_mesh import DeviceMesh
from mirror.devices import are_distinct, is_simulated, resolve, resolve_places
from mirror.errors import DeviceError, StrategyError, short_repr
from mirror.execution.parallel_runs import is_gil_enabled
from mirror.execution.run import current
from mirror.replica.modules.module_owner import ReplicaDict
from mirror.replica.params.mirrored_buffer import AGGREGATIONS, MirroredBuffer
from mirror.strategy.group import all_groups
from mirror.strategy.replica_context import ReplicaContext
from mirror.strategy.strategy_base import Strategy
from mirror.strategy.strategy_options import (
    CommunicationOptions,
    GradientReduction,
    Guards,
    OptimizerState,
    Schedule,
    Verify,
    check_choice,
    make_mesh_communicator,
)
from mirror.threads.user_frames import warn_user

Device = torch.device | str | int
_SCHEDULES = get_args(Schedule)
_GRADIENT_REDUCTIONS = get_args(GradientReduction)
_OPTIMIZER_STATES = get_args(OptimizerState)
_VERIFY = get_args(Verify)

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
        devices: devices or their names. A repeated entry makes several replicas on one device;
            ``["cpu"] * 4`` makes four simulated devices. ``None`` or an empty list stands for all
            visible CUDA devices, else one CPU. A list for each replica places a model's layers on
            several devices, see below.
        backend: ``"auto"``, the name of a communication backend, or a ``Communicator`` over the
            same devices.
        communication_options: see ``CommunicationOptions``.
        guards: the checks during training, see ``Guards``.
        gradient_reduction: the value of ``.grad`` after a backward pass inside ``run``:
            ``"mean"``, weighted by the replicas' numbers of examples, or ``"sum"``, as in
            tf.distribute.
        schedule: the order in which replicas run. ``"lockstep"`` runs one at a time, and is
            deterministic. ``"staggered"`` also starts the replica of the next GPU when the current
            one begins its backward pass, and any replica when the current one blocks for some
            milliseconds. ``"auto"`` is ``"staggered"`` on distinct GPUs, where replicas
            take turns once a step uses what the process has once (``execution/parallel_runs.py``),
            and ``"lockstep"`` on GPUs that replicas share. On simulated devices it keeps the bits
            and the order of ``"lockstep"``, and runs long backward passes outside ``run`` at once
            if there are CPUs for them. Staggered simulated devices share the intra-op threads,
            and run at once if each is busy for more than 2 ms: the order of random draws and the
            division of sums then vary. See ``threads/schedule.py``.
        optimizer_state: ``"replicated"``: every replica has the whole state of the optimizers.
            ``"sharded"``: each of the N replicas has and updates 1/N of it, and gets the new
            values of the rest from the others. State dicts and checkpoints are those of one
            device. See [Note: Sharded state] in ``replica/optimizers/sharded_states.py``.
        verify: ``"first"``: the first split call of each kind is also made on the whole batch, on
            the first replica and without gradients, and its outputs are compared; a difference is
            a warning. ``"error"``: it raises ``StrategyError``. ``"off"``: no comparison, nor with
            several workers. See [Note: Trials] in ``replica/modules/verified_calls.py``.

    **Layers on several devices.** With ``devices=[["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]`` a
    model is written for the first replica: ``self.top.to("cuda:1")`` at its creation, and
    ``h.to("cuda:1")`` in ``forward``. Replica r has copies of the variables on the first replica's
    device k on its own device k. A tensor function that names the first replica's device uses its
    own. For streams, generators and ``torch.cuda.device`` use ``get_replica_context().devices``.
    Inputs go to the first device; results stay on their devices. Each GPU may appear once. Place
    layers before the first use of the model. Lists of CPUs simulate several devices on one CPU.
    See [Note: Places] in ``device/device_mesh.py``.

    Raises:
        DeviceError: a device does not exist, or CPU is mixed with CUDA; or lists differ in
            length, are empty, are mixed with devices, or have a GPU twice.
        BackendError: the backend is unknown or cannot serve the devices.
        ValueError: ``gradient_reduction``, ``schedule``, ``optimizer_state`` or ``verify`` is
            unknown.
        StrategyError: the state is to be sharded, and replicas have several devices each.
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
        optimizer_state: OptimizerState = "replicated",
        verify: Verify = "first",
    ) -> None:
        check_choice("gradient_reduction", gradient_reduction, _GRADIENT_REDUCTIONS)
        check_choice("schedule", schedule, _SCHEDULES)
        check_choice("optimizer_state", optimizer_state, _OPTIMIZER_STATES)
        check_choice("verify", verify, _VERIFY)
        options = resolve_options(communication_options, CommunicationOptions)
        mesh = DeviceMesh(self._resolve_devices(devices))
        if optimizer_state == "sharded" and mesh.is_model_parallel:
            raise StrategyError(
                'optimizer_state="sharded" needs replicas with one device each, and these have '
                "several; leave it out, or pass one device for each replica"
            )
        resolved, schedule_name = mesh.positions[0], str(schedule)
        simulated = is_simulated(resolved)
        if len(resolved) == 1 and simulated:
            schedule_name = "lockstep"
        elif schedule == "auto" and not (simulated or are_distinct(resolved)):
            schedule_name = "lockstep"  # replicas of one GPU draw from its one generator
        elif schedule == "auto" and not simulated:
            schedule_name = "staggered" if is_gil_enabled() else "parallel"
        elif schedule == "staggered" and simulated:
            schedule_name = "concurrent"
        if schedule == "parallel" and len(resolved) > 1 and is_gil_enabled():
            warn_user(_GIL)
        super().__init__(
            mesh,
            make_mesh_communicator(mesh, backend, options),
            options,
            resolve_options(guards, Guards),
            schedule=schedule_name,
            weighted=gradient_reduction == "mean",
            workers=self._join_workers(resolved, backend, options),
            parameter_device=self._choose_parameter_device(resolved),
            shards_state=optimizer_state == "sharded",
            verify=verify,
        )

    @property
    def places(self) -> tuple[tuple[torch.device, ...], ...]:
        """Each replica's devices, in replica order; several if layers are on several devices."""
        return self._group.replicas.mesh.replicas

    # Programs pass keywords of DistributedDataParallel and of Keras's compile to these methods.
    mirror = keywords_with_hints("MirroredStrategy.mirror")(Strategy.mirror)
    compile = keywords_with_hints("MirroredStrategy.compile")(Strategy.compile)

    def _resolve_devices(self, devices: Any) -> Sequence[Sequence[torch.device]]:
        """Returns each replica's devices."""
        return resolve_places(devices)

    def _join_workers(
        self,
        devices: Sequence[torch.device],
        backend: str | Communicator,
        options: CommunicationOptions,
    ) -> LocalWorkerGroup | None:
        """Returns the processes that train together; ``None`` for this process only."""
        return None

    def _choose_parameter_device(self, devices: Sequence[torch.device]) -> torch.device | None:
        """Returns the parameter device; ``None`` if parameters are on the replicas' devices."""
        return None


@call_with_hints
class OneDeviceStrategy(MirroredStrategy):
    """Runs on one named device.

    It is ``MirroredStrategy`` with one device. A program for several devices runs on it without
    threads, for instance in a test or under a debugger.

    Args:
        device: the device or its name; the number 1 for ``"cuda:1"``.
        guards: the checks during training, see ``Guards``.

    Raises:
        DeviceError: the device does not exist, or not exactly one is given.
    """

    def __init__(self, device: torch.device | str | int, *, guards: Guards | None = None) -> None:
        check_single_device("device", device, "mirror.MirroredStrategy(devices)")
        super().__init__([device], guards=guards)


def check_single_device(name: str, device: object, several: str) -> None:
    """Raises DeviceError if a value is not one device; ``several`` names the alternative."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    if not (isinstance(device, (torch.device, str)) or is_number):
        raise DeviceError(
            f"{name} is one device, such as 'cpu' or 'cuda:0'; got {short_repr(device)}; several "
            f"devices go to {several}"
        )


def get_strategy() -> MirroredStrategy:
    """Returns the strategy of the current scope or replica, else a default of one replica."""
    strategy: MirroredStrategy | None = current.strategy
    return _default_strategy() if strategy is None else strategy


def has_strategy() -> bool:
    """Returns whether a strategy other than the default is current."""
    return current.strategy is not None


def in_cross_replica_context() -> bool:
    """Returns whether a strategy is current, but none of its replicas."""
    return current.strategy is not None and current.replica is None


def get_replica_context() -> ReplicaContext | None:
    """Returns the current replica's context; ``None`` in a cross-replica context.

    Without a strategy it is the context of a default strategy of one replica.
    """
    if current.strategy is None:
        return _default_strategy().context_of(None)
    replica = current.replica
    if replica is None:
        return None
    if replica.context is None:
        strategy: MirroredStrategy = replica.replicas.strategy
        replica.context = strategy.context_of(replica)
    context: ReplicaContext = replica.context
    return context


@cache
def _default_strategy() -> MirroredStrategy:
    return MirroredStrategy(resolve(None)[:1])


def is_mirrored(obj: object) -> bool:
    """Returns whether a module, parameter, buffer or optimizer is mirrored by a strategy.

    A module is mirrored if one of its own or its submodules' variables is; an optimizer if one of
    its parameters is.
    """
    if isinstance(obj, nn.Module):
        return any(map(is_mirrored, (*obj.parameters(), *obj.buffers())))
    if isinstance(obj, Optimizer):
        return any(is_mirrored(p) for options in obj.param_groups for p in options["params"])
    if not isinstance(obj, Tensor):
        return False
    for group in all_groups():
        group.modules.mirror_recorded()
        if group.registry.owns(obj):
            return True
    return False


def set_aggregation(module: nn.Module, buffer_name: str, how: str) -> None:
    """Sets how a mirrored buffer's copies combine when read in the cross-replica context.

    It has no effect with one replica.

    Args:
        how: ``"mean"``; ``"sum"``, where writing ``x`` in the cross-replica context sets the first
            replica's copy to ``x`` and the rest to zero; ``"first"``; ``"none"``, where reading
            raises StrategyError.

    Raises:
        ValueError: ``how`` is unknown.
        AttributeError: the module has no such buffer.
        StrategyError: the buffer is not mirrored.
    """
    if not isinstance(how, str) or how not in AGGREGATIONS:
        names = ", ".join(AGGREGATIONS)
        raise ValueError(f"aggregation must be one of {names}, got {short_repr(how)}")
    buffers: dict[str, Any] = module._buffers
    if buffer_name in module._parameters:
        raise AttributeError(
            f"{buffer_name!r} is a parameter of {type(module).__name__}, and parameters are equal "
            "on all replicas; set_aggregation is for buffers, which replicas write"
        )
    if buffers.get(buffer_name) is None:
        raise AttributeError(f"{type(module).__name__} has no buffer {buffer_name!r}")
    if not is_mirrored(dict.__getitem__(buffers, buffer_name)):
        raise StrategyError(
            f"buffer {buffer_name!r} is not mirrored; create the module in strategy.scope() or "
            "pass it to strategy.mirror first"
        )
    buffer = dict.__getitem__(buffers, buffer_name)
    if isinstance(buffer, MirroredBuffer) and isinstance(buffers, ReplicaDict):
        buffer._mirrored.aggregation = buffers.aggregations[buffer_name] = how


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
    ``mirror/replica/params/central_param.py``.

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

    def _resolve_devices(self, devices: Any) -> Sequence[Sequence[torch.device]]:
        return [(device,) for device in resolve(devices)]

    def _choose_parameter_device(self, devices: Sequence[torch.device]) -> torch.device | None:
        is_one = tuple(devices) == (self._parameter_device,) and not is_simulated(devices)
        return None if is_one else self._parameter_device
