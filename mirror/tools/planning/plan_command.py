"""What ``mirror plan`` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from mirror.tools.planning.bandwidths import LINKS, NETWORKS, link_between_machines
from mirror.tools.planning.plan import plan
from mirror.tools.planning.plan_error import PlanError, one_of
from mirror.tools.planning.plan_result import Plan
from mirror.tools.planning.published_figures import CASES

_WIRE_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def make_plan(given: Mapping[str, Any], case: str | None) -> Plan:
    """Returns the plan of a command line.

    Args:
        given: arguments of ``plan`` by name, ``wire_dtype`` as a string; ``None``: not given.
        case: one of the published steps, which has what is not given.

    Raises:
        PlanError: there is no such case, or ``plan`` says so.
    """
    arguments = {} if case is None else _of_case(one_of("case", case, tuple(CASES)))
    arguments |= {name: value for name, value in given.items() if value is not None}
    if "wire_dtype" in arguments:
        arguments["wire_dtype"] = _WIRE_DTYPES[arguments["wire_dtype"]]
    for option, name in (("--host-ms", "host_seconds"), ("--update-ms", "update_seconds")):
        part, whole = arguments.get(name, 0.0), arguments.get("step_seconds", math.inf)
        if part > whole or (part == whole and name == "update_seconds"):  # plan speaks of seconds
            raise PlanError(
                f"{option} is a part of the step of {1e3 * whole:g} ms (--step-ms, or that of "
                f"--case); got {1e3 * part:g}"
            )
    return plan(**arguments)


def table_of_links() -> str:
    """Returns the links that have names, with where their numbers are from."""
    rows = [("link", "GB/s", "us a hop", "source")]
    for link in (*LINKS.values(), *map(link_between_machines, NETWORKS)):
        speed = f"{link.bytes_per_second / 1e9:g}"
        rows.append((link.name, speed, f"{1e6 * link.hop_seconds:g}", link.source))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:3]
    lines = [
        f"{name:{widths[0]}}  {speed:>{widths[1]}}  {hop:>{widths[2]}}  {source}"
        for name, speed, hop, source in rows
    ]
    return "\n".join([*lines, "", *(f"{name:{widths[0]}}  {NETWORKS[name]}" for name in NETWORKS)])


def _of_case(name: str) -> dict[str, Any]:
    case = CASES[name]
    return {
        "step_seconds": case.batch_size / case.alone,
        "batch_size": case.batch_size,
        "parameters": [size / 4 for size in case.sizes_bytes],
        "link": case.link,
        "network": case.network,
        "devices_per_machine": case.devices_per_machine,
        "algorithm": case.algorithm,
        "bucket_bytes": min(case.bucket_bytes, sum(case.sizes_bytes)),
    }
