"""Measures all-reduce of each usable backend, beside plain torch, gloo and a memory copy.

The columns are those of nccl-tests: algbw is bytes / time, and busbw is algbw * 2(n-1)/n, in GB/s.
"bytes" is the size of one replica's tensor. "moved" counts the memory traffic: n reads and n
writes of the tensor (one of each for a copy). All candidates of a size take turns in one run;
ratios are computed round by round.

    python benchmarks/all_reduce.py --replicas 2 4 8 --json FILE --plot FILE.png
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from functools import partial

import torch
from arguments import ROUNDS, at_least, new_file, new_picture
from gloo import Gloo, inputs, max_error
from pictures import KIB, bandwidths, caption_of
from timing import Elsewhere, Samples, interleaved, seconds_of
from torch import Tensor

from mirror import comm
from mirror.comm import host_backends
from mirror.devices import is_simulated, resolve, synchronize
from mirror.errors import DeviceError

MIB = 2**20
SIZES = (KIB, 16 * KIB, 256 * KIB, 4 * MIB, 64 * MIB)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
TOO_LONG_SECONDS = 1.0
Way = Callable[[list[Tensor]], None]
Candidate = Callable[[], object] | Elsewhere
COPIES = {"copy": False, "copy-nt": True}
"""A streaming copy by as many threads: with ordinary stores, and with non-temporal ones."""


@dataclass(frozen=True)
class Row:
    """One candidate at one size."""

    name: str
    n: int
    bytes: int
    samples: Samples
    max_error: float | None

    @property
    def microseconds(self) -> tuple[float, float, float]:
        low, high = self.samples.spread
        return self.samples.median * 1e6, low * 1e6, high * 1e6

    @property
    def algbw(self) -> float:
        return self.bytes / self.samples.median / 1e9

    @property
    def busbw(self) -> float | None:
        return None if self.name in COPIES else self.algbw * 2 * (self.n - 1) / self.n

    @property
    def moved_rate(self) -> float:
        return self.algbw * 2 * (1 if self.name in COPIES else self.n)


@dataclass(frozen=True)
class Target:
    """A number with a limit, from the rounds of one run."""

    what: str
    samples: Samples
    value: float
    at_most: bool = False

    @property
    def missed(self) -> bool:
        median = self.samples.median
        return median > self.value if self.at_most else median < self.value


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints tables; returns 1 when a target was missed, else 0."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        if arguments.device == "all":
            places = [resolve()]
        else:
            places = [resolve([arguments.device] * n) for n in arguments.replicas]
    except DeviceError as error:
        parser.error(str(error))
    names = {name for devices in places for name in comm.available(devices)}
    unknown = set(arguments.backends or ()) - names
    if unknown:
        parser.error(f"no backend {sorted(unknown)} can serve these devices; {sorted(names)} can")
    level = host_backends.require().level() if "host" in comm.available(["cpu"]) else "none"
    print(
        f"{date.today()}, {platform.machine()}, {places[0][0]}, {torch.get_num_threads()} "
        f"threads, loops for {level}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {arguments.dtype}, {arguments.rounds} rounds\n"
    )
    rows: list[Row] = []
    targets: list[Target] = []
    for devices in places:
        print(_HEAD.format(n=len(devices)))
        for measured in _measure(devices, arguments):
            rows += measured
            targets += _targets(measured, arguments.dtype)
            for row in measured:
                print(_line(row), flush=True)
        print()
    for target in targets:
        print(_target_line(target))
    if arguments.json:
        _write_json(arguments.json, rows, targets)
    if arguments.plot:
        caption = f"{caption_of(max(places, key=len))}; {arguments.dtype}"
        bandwidths(rows, caption).savefig(arguments.plot, dpi=150)
    return int(any(target.missed for target in targets))


def _measure(
    devices: tuple[torch.device, ...], arguments: argparse.Namespace
) -> Iterator[list[Row]]:
    """Yields the rows size by size; a candidate that gets too slow is left out from then on."""
    n = len(devices)
    dtype = getattr(torch, arguments.dtype)
    with ExitStack() as stack:
        ways: dict[str, Way] = {"torch": _plain}
        for name in comm.available(devices):
            if not arguments.backends or name in arguments.backends:
                communicator = comm.create(name, devices)
                stack.callback(communicator.close)
                ways[name] = communicator.all_reduce
        gloo = None
        if is_simulated(devices) and 1 < n <= arguments.gloo:
            gloo = stack.enter_context(Gloo(n))
        for size in sorted(arguments.sizes):
            count = size // dtype.itemsize
            values = inputs(n, count, dtype)
            tensors = [value.to(d, copy=True) for value, d in zip(values, devices, strict=True)]
            errors: dict[str, float | None] = {}
            candidates: dict[str, Candidate] = {}
            # Enough for the clock, and over before a busy machine takes the CPU away.
            repeats = max(1, min(20, MIB // max(size, 1)))
            for name, way in list(ways.items()):
                _fill(tensors, values)
                once = seconds_of(_repeated(way, tensors, 1))
                errors[name] = max(max_error(tensor, values) for tensor in tensors)
                if once > TOO_LONG_SECONDS:
                    print(f"(left out from {size} bytes on: {name}, which took {once:.1f} s)")
                    del ways[name]
                    continue
                candidates[name] = _repeated(way, tensors, repeats)
            if gloo is not None:
                errors["gloo"] = gloo.prepare(count, dtype)
                candidates["gloo"] = Elsewhere(partial(gloo.all_reduce, repeats))
            if is_simulated(devices) and "host" in ways and size % 16 == 0:
                candidates |= _copies(count, dtype, repeats)
            _fill(tensors, [torch.zeros(())] * n)  # sums of sums stay what they are
            del values
            taken = interleaved(candidates, rounds=arguments.rounds, warmup=2)
            yield [
                Row(name, n, size, samples.per(repeats), errors.get(name))
                for name, samples in taken.items()
            ]


def _repeated(way: Way, tensors: list[Tensor], repeats: int) -> Callable[[], None]:
    devices = {tensor.device for tensor in tensors}

    def run() -> None:
        for _ in range(repeats):
            way(tensors)
        for device in devices:
            synchronize(device)

    return run


def _plain(tensors: list[Tensor]) -> None:
    """A plain program: a sum in place on the first device, and a copy to each other device."""
    first, *others = tensors
    for other in others:
        first.add_(other.to(first.device))
    for other in others:
        other.copy_(first)


def _copies(count: int, dtype: torch.dtype, repeats: int) -> dict[str, Candidate]:
    library = host_backends.require()
    # Not zeros: memory that was never written to is one page of zeros, and stays in the cache.
    to, source = torch.ones(count, dtype=dtype), torch.ones(count, dtype=dtype)

    def copy(past_caches: bool) -> None:
        for _ in range(repeats):
            library.stream_copy(
                to.data_ptr(), source.data_ptr(), to.nbytes, past_caches=past_caches
            )

    return {name: partial(copy, past_caches) for name, past_caches in COPIES.items()}


def _fill(tensors: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _targets(rows: list[Row], dtype: str) -> Iterator[Target]:
    """Yields the host backend's ratios that have limits."""
    by_name = {row.name: row for row in rows}
    host = by_name.get("host")
    if host is None or dtype != "float32":
        return
    n, where = host.n, f"n = {host.n}, {_bytes(host.bytes)}"
    if n == 2 and host.bytes == KIB:
        microseconds = Samples(tuple(1e6 * s for s in host.samples.seconds))
        yield Target(f"host, us: {where}", microseconds, 15.0, at_most=True)
    if host.bytes < 64 * MIB:
        return
    copies = [by_name[name] for name in COPIES if name in by_name]
    if copies and n > 1:
        best = min(copies, key=lambda row: row.samples.median)
        moved = Samples(tuple(n * ratio for ratio in best.samples.over(host.samples).seconds))
        yield Target(f"host / {best.name}, bytes moved per second: {where}", moved, 1.0)
    if "gloo" in by_name:
        faster = by_name["gloo"].samples.over(host.samples)
        yield Target(f"host / gloo, speed: {where}", faster, 7.0)


_HEAD = """\
| n = {n}        |     bytes | us (median) |            (quartiles) |  algbw |  busbw |  moved | max error |
|---|---|---|---|---|---|---|---|"""  # noqa: E501


def _line(row: Row) -> str:
    median, low, high = row.microseconds
    busbw = "" if row.busbw is None else f"{row.busbw:.2f}"
    error = "" if row.max_error is None else f"{row.max_error:.1e}"
    return (
        f"| {row.name:12} | {row.bytes:9} | {median:11.1f} | {low:9.1f} to {high:9.1f} "
        f"| {row.algbw:6.2f} | {busbw:>6} | {row.moved_rate:6.2f} | {error:>9} |"
    )


def _target_line(target: Target) -> str:
    low, high = target.samples.spread
    return (
        f"{target.what}: {target.samples.median:.2f} ({low:.2f} to {high:.2f}), target "
        f"{'<=' if target.at_most else '>='} {target.value:g}{' MISSED' if target.missed else ''}"
    )


def _write_json(path: str, rows: list[Row], targets: list[Target]) -> None:
    found = {
        "rows": [
            {
                "name": row.name,
                "n": row.n,
                "bytes": row.bytes,
                "us": row.microseconds,
                "algbw": row.algbw,
                "busbw": row.busbw,
                "moved": row.moved_rate,
                "max_error": row.max_error,
            }
            for row in rows
        ],
        "targets": [
            {
                "what": target.what,
                "median": target.samples.median,
                "quartiles": target.samples.spread,
                "target": target.value,
                "missed": target.missed,
            }
            for target in targets
        ],
    }
    with open(path, "w") as file:
        json.dump(found, file, indent=1)


def _bytes(count: int) -> str:
    for unit, size in (("MiB", MIB), ("KiB", KIB)):
        if count % size == 0:
            return f"{count // size} {unit}"
    return f"{count} B"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mirror bench all-reduce",
        description="All-reduce by every backend: nccl-tests' columns.",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0, ...; all: every GPU once")
    parser.add_argument("--replicas", type=at_least(1), nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument(
        "--sizes",
        type=at_least(1),
        nargs="+",
        default=SIZES,
        metavar="BYTES",
        help="of one replica",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="default: all available")
    parser.add_argument("--rounds", type=ROUNDS, default=15)
    parser.add_argument(
        "--gloo",
        type=at_least(0),
        default=4,
        metavar="N",
        help="up to so many processes; 0 for none",
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="for the numbers")
    parser.add_argument(
        "--plot", type=new_picture, metavar="FILE", help="for a picture of the bus bandwidths"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
