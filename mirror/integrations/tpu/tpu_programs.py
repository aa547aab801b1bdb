"""The programs of one strategy: kept by key, created when needed, and run on copies of tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from mirror.integrations.tpu.torchax_library import Library
from mirror.integrations.tpu.tpu_arguments import TpuArguments, is_static
from mirror.integrations.tpu.tpu_copies import TpuCopies
from mirror.integrations.tpu.tpu_optimizers import flags_of, rule_of, state_on_host
from mirror.integrations.tpu.tpu_program import TpuProgram
from mirror.integrations.tpu.tpu_refusals import WHOLE_STEPS
from mirror.integrations.tpu.tpu_results import regroup_outputs
from mirror.server.recorded_model import Model

_MOST = 64  # the number of programs that are kept: one per step and kind of batch


class TpuPrograms:
    """Runs steps as programs, and creates these when there is none yet.

    Args:
        devices: jax's devices.
        strategy: the strategy that is current in steps.

    Attributes:
        copies: the tensors' copies on the devices.
        kept: the programs, by the key of the facts that they depend on.
    """

    def __init__(self, library: Library, devices: Sequence[Any], strategy: Any) -> None:
        self._library, self._strategy = library, strategy
        sharding = library.jax.sharding
        self._mesh = sharding.Mesh(np.array(devices), ("replica",))
        self._one = sharding.NamedSharding(self._mesh, sharding.PartitionSpec())
        self._each = sharding.NamedSharding(self._mesh, sharding.PartitionSpec("replica"))
        self.copies = TpuCopies(library.jax, self._one)
        self.kept: OrderedDict[Any, TpuProgram] = OrderedDict()

    def run(
        self,
        fn: Callable[..., Any],
        arguments: TpuArguments,
        model: Model,
        optimizers: Sequence[Optimizer],
    ) -> tuple[Any, bool]:
        """Runs a step; returns its regrouped results, and whether an optimizer has stepped."""
        with self._torch_precision():
            return self._run(fn, arguments, model, optimizers)

    def clear(self) -> None:
        """Drops all programs and copies."""
        self.kept.clear()
        self.copies.clear()

    def _run(
        self,
        fn: Callable[..., Any],
        arguments: TpuArguments,
        model: Model,
        optimizers: Sequence[Optimizer],
    ) -> tuple[Any, bool]:
        jax = self._library.jax
        values = [self.copies.device_copy(id(t), t) for t in model.tensors]
        key = tpu_program_key(fn, arguments, model, optimizers)
        program = self.kept.get(key)
        if program is None:
            mesh, strategy = self._mesh, self._strategy
            program = self.kept[key] = TpuProgram(
                self._library, mesh, strategy, model, optimizers, fn, arguments, values
            )
            while len(self.kept) > _MOST:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        states = [
            self.copies.device_copy(
                (id(model.tensors[i]), id(optimizers[n]), name),
                state_on_host(optimizers[n], model.tensors[i], name),
            )
            for n, i, name in program.state_keys
        ]
        numbers = [
            np.array([program.host_numbers(n, i, g) for i, g in program.groups[n]])
            for n in program.stepped
        ]
        # From the generator that checkpoints save; every replica derives its own key.
        seed = np.uint32(torch.randint(2**31, ()).item())
        each = [np.array(arguments.which, "int32"), np.array(arguments.counts), arguments.parts]
        outputs, parameters, after, buffers = program.compiled(
            values,
            states,
            *jax.device_put((numbers, seed, arguments.shared), self._one),
            *jax.device_put(each, self._each),
        )
        self._write_back(model, optimizers, program, parameters, after, buffers)
        # A backward pass from such results, outside run, would find no graph.
        is_wanted = any(t.requires_grad for t in model.tensors[: model.num_parameters])
        ends_here = is_wanted and torch.is_grad_enabled() and not program.has_backward
        refusal = WHOLE_STEPS if ends_here else None
        results = regroup_outputs(program.outputs, outputs, arguments, refusal)
        return results, bool(program.stepped)

    def _write_back(
        self,
        model: Model,
        optimizers: Sequence[Optimizer],
        program: TpuProgram,
        parameters: Sequence[Any],
        after: Sequence[Any],
        buffers: Sequence[Any],
    ) -> None:
        """Writes the values that a run has changed into the user's tensors."""
        changed = zip((*program.updated, *program.buffers), (*parameters, *buffers), strict=True)
        for i, array in changed:
            self.copies.put(id(model.tensors[i]), array, model.tensors[i])
        for (n, i, name), array in zip(program.state_keys, after, strict=True):
            tensor, optimizer = model.tensors[i], optimizers[n]
            state = optimizer.state[tensor]
            if state.get(name) is None:
                state[name] = torch.zeros_like(tensor.detach())
            self.copies.put((id(tensor), id(optimizer), name), array, state[name])
        for n in program.stepped:
            vars(optimizers[n])["_opt_called"] = True  # otherwise a scheduler would warn
            for i, _ in program.groups[n]:
                rule_of(optimizers[n]).count(optimizers[n].state[model.tensors[i]])

    @contextmanager
    def _torch_precision(self) -> Iterator[None]:
        """Makes jax compute like torch: 64-bit types, float32 products in float32."""
        jax = self._library.jax
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            yield


def tpu_program_key(
    fn: Callable[..., Any], arguments: TpuArguments, model: Model, optimizers: Sequence[Optimizer]
) -> Any:
    """Returns the key of a step's program; a step with a new key is traced again.

    Of the step's closure and globals, and of modules' attributes, it has the numbers, strings and
    flags, and lists and tuples of them.
    """
    of_modules = [
        [(k, v) for k, v in vars(module).items() if is_static(v) and not k.startswith("_")]
        for module in model.modules
    ]
    return (
        fn,
        arguments.key,
        repr(_read_free_values(fn)),
        repr(of_modules),
        tuple(model.identity()),
        tuple(model.flags()),
        tuple((id(o), flags_of(o), _members(o)) for o in optimizers),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    )


def _read_free_values(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Returns the plain values of a function's globals and closure, by name."""
    inner: Any = getattr(fn, "__func__", fn)
    code = getattr(inner, "__code__", None)
    if code is None:
        return []
    seen = {name: inner.__globals__[name] for name in code.co_names if name in inner.__globals__}
    for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=True):
        try:
            seen[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return sorted((name, value) for name, value in seen.items() if is_static(value))


def _members(optimizer: Optimizer) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups)
