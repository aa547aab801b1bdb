"""Programs: those of one strategy, the copies on its devices, and a run of one of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from mirror.integrations.tpu.program_keys import tpu_program_key
from mirror.integrations.tpu.torchax_library import Library
from mirror.integrations.tpu.tpu_arguments import TpuArguments
from mirror.integrations.tpu.tpu_copies import TpuCopies
from mirror.integrations.tpu.tpu_optimizers import rule_of, state_on_host
from mirror.integrations.tpu.tpu_program import TpuProgram
from mirror.integrations.tpu.tpu_refusals import WHOLE_STEPS
from mirror.integrations.tpu.tpu_results import results_of
from mirror.server.recorded_model import Model

_MOST = 64  # programs that are kept: one per step and kind of batch


class TpuPrograms:
    """Makes programs where there is none yet, and runs them.

    Args:
        devices: jax's.
        strategy: what is current inside of steps.

    Attributes:
        copies: what the devices have.
        kept: the programs, by what they take for granted.
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
        """Runs a step; returns its results regrouped, and whether an optimizer has stepped."""
        with self._computing():
            return self._run(fn, arguments, model, optimizers)

    def clear(self) -> None:
        """Forgets all programs and copies."""
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
        values = [self.copies.copy_of(id(t), t) for t in model.tensors]
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
            self.copies.copy_of(
                (id(model.tensors[i]), id(optimizers[n]), name),
                state_on_host(optimizers[n], model.tensors[i], name),
            )
            for n, i, name in program.state_keys
        ]
        numbers = [
            np.array([program.host_numbers(n, i, g) for i, g in program.groups[n]])
            for n in program.stepped
        ]
        # Of the generator that checkpoints save; every replica makes a key of its own of it.
        seed = np.uint32(torch.randint(2**31, ()).item())
        each = [np.array(arguments.which, "int32"), np.array(arguments.counts), arguments.parts]
        outputs, parameters, after, buffers = program.compiled(
            values,
            states,
            *jax.device_put((numbers, seed, arguments.shared), self._one),
            *jax.device_put(each, self._each),
        )
        self._give_back(model, optimizers, program, parameters, after, buffers)
        # Then a backward pass from the results, outside, would find no graph.
        is_wanted = any(t.requires_grad for t in model.tensors[: model.num_parameters])
        ends_here = is_wanted and torch.is_grad_enabled() and not program.has_backward
        refusal = WHOLE_STEPS if ends_here else None
        results = results_of(program.outputs, outputs, arguments, refusal)
        return results, bool(program.stepped)

    def _give_back(
        self,
        model: Model,
        optimizers: Sequence[Optimizer],
        program: TpuProgram,
        parameters: Sequence[Any],
        after: Sequence[Any],
        buffers: Sequence[Any],
    ) -> None:
        """Writes what a run has changed into the user's tensors."""
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
            vars(optimizers[n])["_opt_called"] = True  # or a scheduler would warn
            for i, _ in program.groups[n]:
                rule_of(optimizers[n]).count(optimizers[n].state[model.tensors[i]])

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Has jax compute as torch does: 64-bit types, float32 products in float32."""
        jax = self._library.jax
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            yield
