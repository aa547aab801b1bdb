"""mirror.plan: from a step measured here to 1,024 devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mirror.errors import short_repr
from mirror.tools.planning.all_reduce_cost import (
    ALGORITHMS,
    Cluster,
    link_between_devices,
    link_between_machines,
)
from mirror.tools.planning.plan_result import Plan, advice
from mirror.tools.planning.prediction import SCALINGS, Predictor
from mirror.tools.planning.workload import (
    OPTIMIZER_STATES,
    PlanError,
    check_number,
    check_plan_choice,
    check_plan_count,
    make_workload,
    measure,
    optimizer_state_of,
    sizes_of_model,
    sizes_of_numbers,
)

if TYPE_CHECKING:
    from mirror.strategy.strategy_base import Strategy

BUCKET_BYTES = 25 * 2**20
_WIRE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def plan(
    measured: Strategy | Callable[[], object] | None = None,
    *,
    model: nn.Module | None = None,
    parameters: float | Sequence[float] | None = None,
    tensors: int | None = None,
    step_seconds: float | None = None,
    batch_size: int = 1,
    host_seconds: float | None = None,
    forward_share: float | None = None,
    update_seconds: float | None = None,
    link: str | Sequence[float] = "nvlink4",
    network: str | Sequence[float] = "8x400g",
    devices_per_machine: int = 8,
    max_devices: int = 1024,
    scaling: str = "weak",
    algorithm: str = "auto",
    bucket_bytes: float = BUCKET_BYTES,
    wire_dtype: torch.dtype | None = None,
    optimizer_state: str | None = None,
) -> Plan:
    """Predicts a step's time, throughput and efficiency on 1 to ``max_devices`` devices.

    ::

        print(mirror.plan(strategy, model=model, batch_size=64))  # from the steps it has taken
        print(mirror.plan(step_seconds=0.35, parameters=25.6e6, tensors=161, batch_size=128))

    docs/planning.md describes the model, its limits, and its errors against published figures. It
    has no stragglers and no slow input, so the predicted throughput is an upper bound.

    Args:
        measured: the source of the step: a strategy that has taken steps, or a function that runs
            one on one device and is called up to 33 times. Without it, ``step_seconds``.
        model: the model with the gradients to reduce. Without it, ``parameters``.
        parameters: the number of elements of each tensor, in order of registration, or of all.
        tensors: the number of tensors, if ``parameters`` is a sum; 100 by default.
        step_seconds: the step of one device alone, on its whole batch.
        batch_size: the examples of that step.
        host_seconds: the time in which the host launches it. Unless given, or measured on a GPU,
            it is 60 us for each tensor, at most the whole step.
        forward_share: the share of the forward pass in forward and backward; by default the
            measured one, or 1/3.
        update_seconds: the part of the step that the optimizer takes; by default the measured one,
            or 0.
        link: the link between the devices of a machine: "nvlink1" to "nvlink5", "pcie3" to
            "pcie5", or (gigabytes per second, microseconds per hop).
        network: the network between machines: adapters x Gbit/s as in "8x400g", or two numbers as
            for ``link``.
        devices_per_machine: the number of devices that one process can drive.
        max_devices: the largest number of devices.
        scaling: "weak": every device has ``batch_size`` examples; "strong": the devices share
            them, and forward and backward shrink in proportion.
        algorithm: "ring", "tree", "hierarchical", or "auto", the faster one of ring and tree.
        bucket_bytes: the capacity of a bucket, which is reduced at once.
        wire_dtype: the dtype of gradients on the wire; by default that of the parameters.
        optimizer_state: "replicated", or "sharded" over all devices, see
            ``MirroredStrategy``; by default that of the measured strategy.

    Raises:
        PlanError: a ``ValueError`` that names the argument and its value.
    """
    if model is not None and (parameters is not None or tensors is not None):
        raise PlanError("model has its parameters: leave out parameters= and tensors=")
    if wire_dtype is not None and not isinstance(wire_dtype, torch.dtype):
        raise PlanError(f"wire_dtype must be a torch.dtype, got {short_repr(wire_dtype)}")
    if model is not None:
        sizes = sizes_of_model(model, wire_dtype)
    elif parameters is not None:
        sizes = sizes_of_numbers(parameters, tensors, wire_dtype)
    else:
        raise PlanError("pass model=, or parameters=: the number of elements to reduce")
    cluster = Cluster(
        link=link_between_devices(link),
        network=link_between_machines(network),
        devices_per_machine=check_plan_count("devices_per_machine", devices_per_machine),
        algorithm=check_plan_choice("algorithm", algorithm, ALGORITHMS),
    )
    check_plan_choice("scaling", scaling, SCALINGS)
    if optimizer_state is None:
        optimizer_state = optimizer_state_of(measured)
    check_plan_choice("optimizer_state", optimizer_state, OPTIMIZER_STATES)
    bucket = check_number("bucket_bytes", bucket_bytes)
    most = check_plan_count("max_devices", max_devices)
    seen = measure(measured, model, step_seconds)
    workload = make_workload(
        step_seconds=seen.step_seconds,
        batch_size=batch_size,
        sizes_bytes=sizes,
        forward_share=seen.forward_share if forward_share is None else forward_share,
        update_seconds=seen.update_seconds if update_seconds is None else update_seconds,
        host_seconds=seen.host_seconds if host_seconds is None else host_seconds,
    )
    if scaling == "strong" and workload.batch_size == 1 and most > 1:
        raise PlanError("scaling='strong' shares one batch between the devices: pass batch_size=")
    shards = optimizer_state == "sharded"
    rows = tuple(Predictor(workload, cluster, scaling, bucket, shards).rows(most))
    sentences = advice(rows, cluster.devices_per_machine)
    return Plan(rows, workload, cluster, scaling, sentences, optimizer_state)


def make_plan(given: Mapping[str, Any], case: Mapping[str, Any]) -> Plan:
    """Returns the plan for a command line.

    Args:
        given: the arguments of ``plan`` by name, ``wire_dtype`` as a string; ``None``: not given.
        case: the arguments of a published step, for those that are not given.

    Raises:
        PlanError: ``plan`` raises it.
    """
    arguments = {**case, **{name: value for name, value in given.items() if value is not None}}
    if "wire_dtype" in arguments:
        arguments["wire_dtype"] = _WIRE_DTYPES[arguments["wire_dtype"]]
    for option, name in (("--host-ms", "host_seconds"), ("--update-ms", "update_seconds")):
        part, whole = arguments.get(name, 0.0), arguments.get("step_seconds", math.inf)
        if part > whole or (
            part == whole and name == "update_seconds"
        ):  # the error of plan would be in seconds
            raise PlanError(
                f"{option} is a part of the step of {1e3 * whole:g} ms (--step-ms, or that of "
                f"--case); got {1e3 * part:g}"
            )
    return plan(**arguments)
