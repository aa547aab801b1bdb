"""TPUStrategy: whole steps on TPUs, through torchax and jax. Experimental."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mirror.base.migration_hints import attribute_error, init_with_hints
from mirror.base.process_bound import NoCopy
from mirror.base.torch_private import wrap_once
from mirror.comm.reduce_ops import Op
from mirror.data.distributed_dataset import DistributedDataset
from mirror.data.input_options import InputContext, InputOptions
from mirror.errors import ReplicaMismatchError, StrategyError, short_repr
from mirror.execution.lifecycle import step_ends
from mirror.execution.run import current, enclosing_replica
from mirror.server.recorded_model import Model, RecordedModules
from mirror.strategy.distributed_values import check_call, find_active
from mirror.strategy.mirrored import MirroredStrategy
from mirror.strategy.scope import PlacingScope
from mirror.threads.user_frames import warn_user
from mirror_tpu.arguments import make_arguments
from mirror_tpu.programs import TpuPrograms
from mirror_tpu.refusals import WHOLE_STEPS, check_model
from mirror_tpu.torchax_library import (
    load,
    load_jax,
    resolve_jax_devices,
    to_torch_device,
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)
T = TypeVar("T")

# Members of other strategies that this one lacks, and alternatives.
_REMEDIES = {
    "compile": "run compiles: strategy.run(step, args=(batch,))",
    "no_sync": "give whole batches: a step for TPUs has one backward pass",
    "trace": "use jax.profiler.trace(path)",
    "report": "use jax.profiler.trace(path)",
}


@init_with_hints
class TPUStrategy(NoCopy):
    """Runs whole steps on all TPU devices of this process, as one program. Experimental.

    It has never run on a TPU: it was only tested on simulated devices, which are CPU devices of
    jax. docs/tpu.md describes its behaviour, and the steps that it rejects.

    ::

        strategy = mirror.TPUStrategy()                  # or TPUStrategy(["cpu"] * 4)
        with strategy.scope():
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters())

        def step(batch):
            x, y = batch
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for batch in strategy.distribute_dataset(loader):
            losses = strategy.run(step, args=(batch,))

    The model and the optimizer's state stay ordinary tensors on the host:
    ``mirror.Checkpoint`` and ``state_dict`` work as in any program.

    Args:
        devices: ``"tpu:0"``, ``"tpu:1"``, ... or jax's own devices; ``"cpu"`` once for each
            simulated device; ``None`` for all TPU devices of this process.

    Raises:
        ModuleNotFoundError: the extra ``[tpu]`` is not installed.
        BackendError: the extra is installed in other versions.
        DeviceError: a device does not exist.
    """

    _instead = "make a strategy in each process; copy.deepcopy(model) gives an ordinary model"

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        # The number of jax's CPU devices can be chosen until jax is used.
        self._jax_devices = resolve_jax_devices(load_jax(), devices)
        library = load()
        number = len(self._jax_devices)
        warn_user(
            "TPUStrategy is experimental: it was never run on a TPU, only on simulated devices; "
            "compare its first losses with those of one device"
        )
        # Distributes batches and combines results, on the host.
        self._host = MirroredStrategy(["cpu"] * number)
        self._programs = TpuPrograms(library, self._jax_devices, self)
        self._recorded = RecordedModules()
        self._optimizers = OptimizerTracker()
        self._is_closed = False
        own = weakref.ref(self)
        hook = register_optimizer_step_pre_hook(lambda o, *_: _refuse_outside(own, o))
        weakref.finalize(self, hook.remove)

    # Properties

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas, one for each device."""
        return len(self._jax_devices)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Torch's names for the devices: ``xla:0`` is a TPU, ``cpu`` a simulated one."""
        return tuple(map(to_torch_device, self._jax_devices))

    @property
    def backend(self) -> str:
        """The name of the communication backend."""
        return "xla"

    def __repr__(self) -> str:
        return f"TPUStrategy({list(map(str, self._jax_devices))})"

    # Variables

    def scope(self) -> PlacingScope:
        """Makes this strategy current; it records the modules that are created inside.

        Raises:
            StrategyError: it is entered inside another strategy's scope or ``run``, or after
                ``close``.
        """
        return PlacingScope(self, self._recorded, self._check_usable)

    def mirror(self, module: ModuleT) -> ModuleT:
        """Records an existing module (a pretrained one), and returns it.

        Raises:
            TypeError: the argument is not a module.
        """
        self._check_usable("mirror")
        if not isinstance(module, nn.Module):
            raise TypeError(f"mirror takes a torch.nn.Module, got {short_repr(module)}")
        for inner in module.modules():
            self._recorded.add(inner)
        return module

    # Running

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs a step on all replicas, as one program, and returns the results regrouped.

        The first call with a kind of batch traces and compiles ``fn``; later calls do not run its
        Python. Numbers, strings and flags in its closure, globals and arguments, and in attributes
        of modules, are compared in every run, and a new value leads to a new program. All other
        values that are not tensors stay as they were in the trace.

        Returns:
            The structure that ``fn`` returns, with PerReplica tensors on the host.

        Raises:
            StrategyError: the step does something that no program can do, see docs/tpu.md.
            StructureError: results differ in structure, or a PerReplica has a wrong number of
                parts.
        """
        self._check_usable("run")
        check_call(fn, args, kwargs)
        trees = (tuple(args), dict(kwargs or {}))
        number = self.num_replicas_in_sync
        active, weights = find_active(number, *trees)
        arguments = make_arguments(trees, active, weights, number)
        model = Model(self._recorded.roots())
        optimizers = self._optimizers.find_optimizers(model)
        check_model(model)
        results, has_stepped = self._programs.run(fn, arguments, model, optimizers)
        if has_stepped:
            step_ends.notify(None)
        return results

    # Values and data

    def reduce(self, op: Op, value: Any, axis: int | None = None) -> Any:
        """Combines the parts of PerReplica values; as ``MirroredStrategy.reduce``."""
        self._check_usable("reduce")
        return self._host.reduce(op, value, axis)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenates the parts in replica order; as ``MirroredStrategy.gather``."""
        self._check_usable("gather")
        return self._host.gather(value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns one entry per replica that has a part, in replica order."""
        return self._host.local_results(value)

    def distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes global batches; as ``MirroredStrategy.distribute_dataset``.

        The parts are in memory of the host; ``run`` brings them to the devices.
        """
        self._check_usable("distribute_dataset")
        return self._host.distribute_dataset(dataset, options)

    def distribute_dataset_from_function(
        self, fn: Callable[[InputContext], Iterable[Any]], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes the per-replica batches of ``fn(InputContext)``."""
        self._check_usable("distribute_dataset_from_function")
        return self._host.distribute_dataset_from_function(fn, options)

    def distribute_values_from_function(self, fn: Callable[[Any], T]) -> Any:
        """Returns ``fn(context)`` of every replica as PerReplica, keeping structures."""
        self._check_usable("distribute_values_from_function")
        return self._host.distribute_values_from_function(fn)

    # Keeping

    def check_replicas(self) -> int:
        """Compares the copies on the devices; returns the number of compared tensors.

        Raises:
            ReplicaMismatchError: the bits of a tensor differ between two devices.
        """
        arrays = self._programs.copies.arrays()
        for array in arrays.values():
            first, *others = (
                np.asarray(shard.data).tobytes() for shard in array.addressable_shards
            )
            for r, other in enumerate(others, 1):
                if other != first:
                    raise ReplicaMismatchError(
                        f"a tensor of shape {tuple(array.shape)} has other bits on replica {r} "
                        "than on replica 0; all devices must have the same"
                    )
        return len(arrays)

    def close(self) -> None:
        """Drops the copies on the devices, and the programs. Idempotent."""
        self._is_closed = True
        self._programs.clear()
        self._host.close()

    def _check_usable(self, what: str) -> None:
        if self._is_closed:
            raise StrategyError("this strategy is closed; create a new one")
        if current.replica is not None or enclosing_replica() is not None:
            raise StrategyError(
                f"{what} of {self!r} was called inside run; call it outside, between steps"
            )

    def __enter__(self) -> TPUStrategy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> NoReturn:
        if name in _REMEDIES:
            raise StrategyError(f"a TPUStrategy has no {name}; {_REMEDIES[name]}")
        raise attribute_error(self, name)


def _refuse_outside(own: weakref.ref[TPUStrategy], optimizer: Optimizer) -> None:
    """Raises StrategyError for an optimizer step outside ``run``, which would run on the host."""
    strategy = own()
    if strategy is None or strategy._is_closed or current.replica is not None:
        return
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for root in strategy._recorded.roots():
        if any(id(p) in ids for p in root.parameters()):
            raise StrategyError(f"{type(optimizer).__name__}.step() outside of run: {WHOLE_STEPS}")


_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class OptimizerTracker:
    """Finds the optimizers that were created after the first TPUStrategy, with weak references."""

    def __init__(self) -> None:
        wrap_once(Optimizer, "__init__", _wrap_init)

    def find_optimizers(self, model: Model) -> list[Optimizer]:
        """Returns the optimizers that hold a parameter of a model, in one order for all runs."""
        ids = {id(tensor) for tensor in model.tensors}
        found = [
            optimizer
            for optimizer in _optimizers
            if any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
        ]
        return sorted(found, key=id)


def _wrap_init(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _optimizers.add(self)

    return __init__
