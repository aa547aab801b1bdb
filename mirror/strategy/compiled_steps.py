"""Creates a strategy's compiled steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mirror.compiler.runtime.compiled_step import FALLBACKS, MODES, CompiledStep
from mirror.compiler.runtime.param_sync import ParamSync
from mirror.compiler.runtime.worker_consensus import WorkerConsensus
from mirror.errors import CompileError
from mirror.strategy.group import Group
from mirror.strategy.run_arguments import check_call, find_active
from mirror.strategy.strategy_options import check_choice


def make_compiled_step(
    group: Group, run: Callable[..., Any], step: Callable[..., Any], *, fallback: str, mode: str
) -> CompiledStep:
    """Returns a step of this group's replicas that is compiled when it is called.

    Raises:
        CompileError: a replica has several devices, or the strategy has a parameter device or
            sharded optimizer state, and ``fallback`` is "error".
        TypeError: ``run`` could not call ``step``.
        ValueError: ``fallback`` or ``mode`` is unknown.
    """
    check_choice("fallback", fallback, FALLBACKS)
    check_choice("mode", mode, MODES)
    check_call(step, (), {})
    replicas = group.replicas
    has_places = replicas.places.is_model_parallel
    is_eager = has_places or replicas.has_parameter_device or replicas.shards_state
    if has_places and fallback == "error":
        raise CompileError(
            "compiled steps are programs of one device each, and a replica of this strategy has "
            "several; call strategy.run(step, ...), or pass fallback='eager' to do so"
        )
    if group.replicas.has_parameter_device and fallback == "error":
        raise CompileError(
            "compiled steps run the optimizer on the replicas' devices, and this strategy keeps "
            "parameters and optimizer state on the parameter device; call strategy.run(step, "
            "...), where torch.compile may compile the model, or pass fallback='eager' to do so; "
            "or use mirror.MirroredStrategy"
        )
    if replicas.shards_state and fallback == "error":
        raise CompileError(
            "a compiled step updates all parameters on every device, and with "
            'optimizer_state="sharded" each device has the state of some only; call '
            "strategy.run(step, ...), where torch.compile may compile the model, or pass "
            "fallback='eager' to do so; or leave optimizer_state out"
        )
    coherence = ParamSync(
        group.replicas, group.runner, group.variables, group.access, group.beside_copies
    )

    def make() -> Any:
        from mirror.compiler.runtime.build_program import (
            ProgramBuilder,  # torch's compiler, which takes a second
        )

        return ProgramBuilder(
            group.replicas, group.registry, group.reducer, coherence, group.finite, mode
        )

    return CompiledStep(
        step,
        run,
        find_active,
        coherence,
        WorkerConsensus(group.replicas.workers),
        make,
        fallback=fallback,
        is_eager=is_eager,
    )
