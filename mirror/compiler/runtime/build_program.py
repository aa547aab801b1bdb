"""ProgramBuilder: traces a step, and creates its programs and guards."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from typing import Any

import torch

from mirror.compiler.lowering.partitioner import plan_step
from mirror.compiler.lowering.program_cache import Ready, load_program, program_key, store_program
from mirror.compiler.lowering.programs import (
    CallableProgram,
    compile_piece,
    interpret_piece,
    scatters_into_images,
)
from mirror.compiler.lowering.step_plan import ProgramPiece, StepPlan, is_mostly_convolutions
from mirror.compiler.lowering.step_trace import StepTrace, trace_step
from mirror.compiler.lowering.write_order import order_writes
from mirror.compiler.runtime.bindings import Bindings
from mirror.compiler.runtime.cuda_graphs import CapturedPieces
from mirror.compiler.runtime.parallel_launch import ParallelLaunch
from mirror.compiler.runtime.param_sync import ParamSync
from mirror.compiler.runtime.step_arguments import StepArguments
from mirror.compiler.runtime.step_program import StepProgram
from mirror.compiler.runtime.step_reductions import StepReductions
from mirror.compiler.runtime.trace_guards import TraceGuards, guard_step
from mirror.compiler.step_inputs import InputKind, state_tensors
from mirror.compiler.torch_internals import Sizes, sizes_of
from mirror.compiler.varying_inputs import VaryingInputs
from mirror.device.cuda_graph import CudaGraph, has_graphs
from mirror.errors import CompileError, first_line
from mirror.execution.replicas import Replicas
from mirror.replica.gradients.non_finite import NonFiniteCheck
from mirror.replica.gradients.ready_grads import Reducer
from mirror.replica.modules.module_owner import suspend_recording
from mirror.replica.params.replicated_params import MirroredTensors

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 2000


class ProgramBuilder:
    """Builds the programs of one strategy's steps.

    Args:
        mode: ``"inductor"``: compiled; ``"graphs"``: torch's own kernels in CUDA graphs, and on
            the CPU as in ``"trace"``; ``"trace"``: torch's own kernels, launched one by one;
            ``"auto"``: ``"graphs"`` on GPUs, which needs no compiler and rounds as an uncompiled
            step, and on the CPU ``"inductor"`` where there is a compiler, except for large
            convolutions.
    """

    def __init__(
        self,
        replicas: Replicas,
        registry: MirroredTensors,
        reducer: Reducer,
        param_sync: ParamSync,
        finite: NonFiniteCheck | None,
        mode: str,
    ) -> None:
        self._replicas, self._registry = replicas, registry
        self._reductions = StepReductions(replicas, reducer, finite)
        self._looks_at_gradients = finite is not None
        self._param_sync = param_sync
        self._mode = mode
        self._devices = tuple(dict.fromkeys(replicas.devices))

    def build(
        self, step: Callable[..., Any], arguments: StepArguments, varying: VaryingInputs
    ) -> tuple[TraceGuards, StepProgram]:
        """Traces a step, called with these arguments, and builds its programs.

        An open scope does not record the modules that the tracer and the compiler create.
        """
        with suspend_recording():
            return self._build(step, arguments, varying)

    def _build(
        self, step: Callable[..., Any], arguments: StepArguments, varying: VaryingInputs
    ) -> tuple[TraceGuards, StepProgram]:
        places = state_tensors(self._registry)
        leaves = arguments.leaves(arguments.signatures[0])
        traced = trace_step(
            step,
            arguments.caller(step),
            leaves,
            arguments.own,
            self._replicas,
            places,
            self._param_sync.gradients(places),
            varying,
            reduces_alone=self._looks_at_gradients,
        )
        try:
            plan, levels, sizes = self._finish(traced)
        except CompileError:
            raise
        except Exception as error:
            raise CompileError(
                f"the step cannot be compiled: the compiler failed ({type(error).__name__}: "
                f"{str(error)[:_MAX_MESSAGE]}); pass mode='trace', or fallback='eager'"
            ) from error
        for collective, packing in zip(traced.collectives, plan.packings, strict=True):
            collective.packing = packing
        used = [one.of for one in traced.inputs if one.kind is InputKind.PARAMETER]
        assumptions = guard_step(
            step,
            traced.modules,
            used,
            traced.swaps,
            traced.stepped_apart,
            traced.rates_read,
            traced.numbers,
            traced.scalers,
        )
        program = StepProgram(
            self._replicas,
            traced,
            plan,
            levels,
            sizes,
            [leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
            arguments.structure,
            Bindings(self._replicas, traced, plan),
            self._reductions,
            self._param_sync,
            self._launcher(traced),
        )
        return assumptions, program

    def _finish(self, trace_step: StepTrace) -> tuple[StepPlan, list[Ready], Sizes]:
        """Returns the programs of a step, from the disk if they are there."""
        num_replicas = self._replicas.workers.num_replicas
        step = (
            trace_step.graph,
            trace_step.inputs,
            trace_step.mode,
            trace_step.collectives,
            num_replicas,
        )
        key = None
        is_interpreted = self._is_interpreted(trace_step)
        if not is_interpreted and self._devices == (torch.device("cpu"),):
            key = program_key(*step, trace_step.device)
        kept = None if key is None else load_program(key)
        if kept is not None:
            logger.info("the programs of a compiled step come from the disk: %s", key)
            return kept
        plan = plan_step(*step, for_inductor=not is_interpreted)
        make = self._interpret if is_interpreted else self._compile
        levels = [
            (make(level.shared, trace_step), make(level.own, trace_step)) for level in plan.levels
        ]
        sizes = sizes_of(trace_step.mode, trace_step.fakes)
        if key is not None:
            store_program(key, plan, levels, sizes)
        return plan, levels, sizes

    def _is_interpreted(self, trace_step: StepTrace) -> bool:
        """Whether torch's own kernels run the step, without a compiler."""
        if self._mode != "auto":
            return self._mode != "inductor"
        device = self._replicas.devices[0]
        if has_graphs(device) or not _has_compiler():
            return True
        return device.type == "cpu" and is_mostly_convolutions(trace_step.graph.graph.nodes)

    def _interpret(
        self, piece: ProgramPiece | None, trace_step: StepTrace
    ) -> CallableProgram | None:
        if piece is None:
            return None
        return interpret_piece(piece, trace_step.device, self._devices)

    def _compile(
        self, piece: ProgramPiece | None, trace_step: StepTrace
    ) -> CallableProgram | None:
        if piece is None or scatters_into_images(piece):
            return self._interpret(piece, trace_step)
        assert piece.graph is not None
        if not order_writes(piece.graph.graph):
            return self._interpret(piece, trace_step)
        # TraceGuards compares the strides of parameters once; own programs run on every replica.
        inputs = enumerate(trace_step.inputs if piece.is_own else ())
        guarded = {i for i, one in inputs if one.kind is InputKind.PARAMETER}
        try:
            return compile_piece(piece, trace_step.mode, trace_step.device, self._devices, guarded)
        except Exception as error:
            if self._mode == "inductor":
                raise
            logger.warning(
                "a compiled step runs by torch's own kernels, because inductor failed: %s: %s",
                type(error).__name__,
                first_line(error),
            )
            return self._interpret(piece, trace_step)

    def _launcher(self, trace_step: StepTrace) -> ParallelLaunch | CapturedPieces:
        """Returns the launcher of the programs: CUDA graphs where the device has them."""
        devices = self._replicas.devices
        if self._mode == "trace" or not has_graphs(devices[0]):
            return ParallelLaunch(self._replicas)
        stay = [i for i, one in enumerate(trace_step.inputs) if one.stays]
        return CapturedPieces(devices, stay, CudaGraph)


def _has_compiler() -> bool:
    return shutil.which("g++") is not None or torch.accelerator.is_available()
