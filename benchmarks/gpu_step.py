"""Measures training steps on one GPU, and how long each keeps the host busy.

For each model there are three tables, each with the plain loop. The first has DDP with one rank,
N plain models in turn, and N replicas in ways 1 and 3. The second has compiled steps by mode, and
the plain step captured by hand as one CUDA graph, which is the limit. The third has the loop of
way 1 with a compiled module, beside that graph. The global batch stays the same. All contestants
of a table are in one process and take turns, so read the ratios.

"ms" is the time of a step; "host ms" is the time until the calls of a step return, while the GPU
may still compute. Both are medians with quartiles.

The budget is shared out over the tables, and what one leaves goes to those after it. A compilation
that does not fit is a row "no time". With ``--devices cpu`` the models are tiny: that checks this
program.

    python benchmarks/gpu_step.py --json found.json
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from arguments import ROUNDS, at_least, new_file
from cases import CASES, Case
from checking import settle
from models import batch_of, build, loss_of
from pictures import machine
from timing import Elsewhere, Samples, interleaved
from torch import Tensor, nn
from train_worker import sgd

import mirror
from mirror.compiler.runtime.compiled_step import MODES
from mirror.devices import num_cuda_devices

BUDGET_SECONDS = 140
"""Under 145 s, with the start of this program."""
TURN_SECONDS = 0.1
FIRST_STEPS = 5
"""Before the clock runs; their last losses are compared."""
TABLES = {"uncompiled": 0.6, "compiled": 0.8, "modules": 0.8}
"""The part of a table's time in which contestants are made; the rest is for rounds."""
FEW_ROUNDS = 3
SAME_LOSS = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
WAYS = (1, 3)
PLAIN, CAPTURED = "plain", "plain, one CUDA graph"
Step = Callable[[], Any]


def nothing() -> None:
    """The check of a contestant without replicas."""


@dataclass(frozen=True)
class Model:
    """A model of the tables.

    Attributes:
        case: the model and its global batch.
        simulated: what replaces them on simulated devices.
        dtype: bfloat16 for autocast, and then images are in the order channels_last.
        most_replicas: beyond it a step takes too long, or too much memory.
        in_turn: whether N plain models in turn are measured: where the host limits the step.
        shares: of the budget, of each table, relative to all others.
        compile_seconds: of torch's kernels, and of inductor, until one was timed. A compilation
            that may take longer than what is left is left out. [one H200, benchmarks/README.md]
        host_limits_ms: the accepted host time of a compiled step with one replica, and of each
            replica more; empty where the GPU limits the step.
        module_limit_ms: the accepted host time of a step with a compiled module, 8 replicas.
    """

    case: Case
    simulated: Case
    shares: tuple[float, float, float]
    compile_seconds: tuple[float, float]
    dtype: torch.dtype = torch.float32
    most_replicas: int = 8
    in_turn: bool = False
    host_limits_ms: tuple[float, ...] = ()
    module_limit_ms: float | None = None

    def batch(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(self._arranged(tensor.to(device)) for tensor in batch_of(self.case))

    def build(self, device: torch.device) -> nn.Module:
        model = build(self.case).to(device)
        return model.to(memory_format=self._format) if self._is_channels_last else model  # type: ignore[call-overload]

    def seconds_to_compile(self, mode: str) -> float:
        return self.compile_seconds[mode in ("auto", "inductor")]

    def _arranged(self, tensor: Tensor) -> Tensor:
        if self._is_channels_last and tensor.ndim == 4:
            return tensor.contiguous(memory_format=self._format)
        return tensor

    _format = torch.channels_last

    @property
    def _is_channels_last(self) -> bool:
        return self.dtype != torch.float32 and "size" in self.case.sizes


_RESNET = {"size": 32, "width": 64, "classes": 1000}
_TINY_RESNET = Case(
    "resnet50", "resnet50", 8, {"size": 32, "width": 4, "classes": 10}, batch_statistics=True
)
MODELS = {
    "mlp": Model(
        CASES["small-mlp"],
        Case("mlp", "mlp", 8, {"depth": 2, "width": 8}),
        shares=(1, 2, 1),
        compile_seconds=(1.5, 6),
        in_turn=True,
        host_limits_ms=(0.25, 0.1),
    ),
    "resnet50": Model(
        Case("resnet50", "resnet50", 16, _RESNET, batch_statistics=True),
        _TINY_RESNET,
        shares=(4, 4.5, 3.5),
        compile_seconds=(10, 70),
        in_turn=True,
        host_limits_ms=(1.2, 0.5),
        module_limit_ms=5.0,
    ),
    "resnet50-224-bf16": Model(
        Case("resnet50-224", "resnet50", 128, {**_RESNET, "size": 224}, batch_statistics=True),
        _TINY_RESNET,
        shares=(1.5, 2.5, 1),
        compile_seconds=(10, 70),
        dtype=torch.bfloat16,
        most_replicas=4,
    ),
    "gpt2-bf16": Model(
        Case(
            "gpt2",
            "gpt2",
            16,
            {"layers": 12, "width": 768, "heads": 12, "tokens": 512, "vocabulary": 50257},
        ),
        Case(
            "gpt2", "gpt2", 8, {"layers": 1, "width": 8, "heads": 2, "tokens": 4, "vocabulary": 9}
        ),
        shares=(1.5, 2.5, 1),
        compile_seconds=(10, 70),
        dtype=torch.bfloat16,
        most_replicas=4,
    ),
}


@dataclass(frozen=True)
class Made:
    """A contestant's step, and the check that its replicas are equal."""

    step: Step
    check: Callable[[], object] = nothing


class Trainer:
    """Makes the contestants of one table; what they hold ends with ``stack``."""

    def __init__(self, model: Model, devices: Sequence[torch.device], stack: ExitStack) -> None:
        self._model, self._devices, self._stack = model, devices, stack

    def plain(self) -> Made:
        device = self._devices[0]
        return Made(partial(self._loop(self._model.build(device)), *self._model.batch(device)))

    def in_turn(self, n: int) -> Made:
        """N models, each with a part of the batch: what one thread cannot launch faster."""
        places = self._places(n)
        steps = [self._loop(self._model.build(device)) for device in places]
        split = [tensor.tensor_split(n) for tensor in self._model.batch(places[0])]
        parts = [[tensors[i].to(device) for tensors in split] for i, device in enumerate(places)]
        return Made(lambda: [step(*part) for step, part in zip(steps, parts, strict=True)])

    def ddp(self) -> Made:
        device = self._devices[0]
        on_gpu = device.type == "cuda"
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        store = f"file://{folder}/store"
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        self._stack.callback(dist.destroy_process_group)
        ids = [device] if on_gpu else None
        model = nn.parallel.DistributedDataParallel(self._model.build(device), device_ids=ids)
        return Made(partial(self._loop(model), *self._model.batch(device)))

    def way_1(self, n: int) -> Made:
        strategy, step, batch = self._mirrored(n)
        return Made(partial(step, *batch), strategy.check_replicas)

    def way_3(self, n: int) -> Made:
        strategy, step, batch = self._mirrored(n)
        (parts,) = strategy.distribute_dataset([batch])
        return Made(partial(strategy.run, step, args=parts), strategy.check_replicas)

    def compiled(self, n: int, mode: str) -> Made:
        strategy, step, batch = self._mirrored(n)
        (parts,) = strategy.distribute_dataset([batch])
        compiled_step = strategy.compile(step, mode=mode)  # type: ignore[arg-type]
        return Made(partial(compiled_step, *parts), strategy.check_replicas)

    def module(self, n: int) -> Made:
        """The loop of way 1, with a compiled module."""
        strategy, step, batch = self._mirrored(n, compiles=True)
        return Made(partial(step, *batch), strategy.check_replicas)

    def captured(self) -> Made:
        """The plain step, replayed: nothing that launches the same kernels can be faster."""
        device, step = self._devices[0], self.plain().step
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(FIRST_STEPS - 1):
                step()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            loss = step()
        return Made(partial(_replay, graph, loss, step))

    def _mirrored(
        self, n: int, *, compiles: bool = False
    ) -> tuple[mirror.MirroredStrategy, Callable[..., Tensor], tuple[Tensor, ...]]:
        places = self._places(n)
        strategy = self._stack.enter_context(mirror.MirroredStrategy(places))
        model = strategy.mirror(self._model.build(places[0]))
        if compiles:
            strategy.compile(model, fallback="error")
        return strategy, self._loop(model), self._model.batch(places[0])

    def _loop(self, model: nn.Module) -> Callable[..., Tensor]:
        optimizer = sgd(model)
        dtype, kind = self._model.dtype, self._devices[0].type
        is_half = dtype != torch.float32

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(kind, dtype) if is_half else nullcontext():
                loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def _places(self, n: int) -> list[torch.device]:
        return [self._devices[i % len(self._devices)] for i in range(n)]


def _replay(graph: torch.cuda.CUDAGraph, loss: Tensor, captured: Step) -> Tensor:
    """Launches a graph; holds the captured step, in whose memory the graph works."""
    graph.replay()
    return loss


@dataclass(frozen=True)
class Contestant:
    """One row of a table before it is measured.

    Attributes:
        make: makes the model and its step.
        seconds: what the first calls may take.
        done: the steps that ``make`` has made.
        is_whole: whether it trains one model with the whole batch: its loss is compared.
    """

    name: str
    replicas: int
    make: Callable[[], Made]
    seconds: float = 0.0
    done: int = 0
    is_whole: bool = True


def uncompiled(model: Model, counts: Sequence[int], trainer: Trainer) -> Iterator[Contestant]:
    """Yields the contestants of the first table."""
    yield Contestant(PLAIN, 1, trainer.plain)
    yield Contestant("DDP, 1 rank", 1, trainer.ddp)
    for n in counts:
        if n > 1 and model.in_turn:
            yield Contestant(in_turn(n), n, partial(trainer.in_turn, n), is_whole=False)
        for way, make in zip(WAYS, (trainer.way_1, trainer.way_3), strict=True):
            yield Contestant(f"N = {n}, way {way}", n, partial(make, n))


def compiled(
    model: Model, counts: Sequence[int], modes: Sequence[str], trainer: Trainer
) -> Iterator[Contestant]:
    """Yields the contestants of the second table: torch's kernels first, then other modes."""
    yield Contestant(PLAIN, 1, trainer.plain)
    yield Contestant(CAPTURED, 1, trainer.captured, 0.0, FIRST_STEPS - 1)
    # "graphs" is first, and has more replicas where the host limits the step.
    by_value = sorted(modes, key=lambda mode: (model.seconds_to_compile(mode), mode != "graphs"))
    for mode in by_value:
        several = mode == by_value[0] and bool(model.host_limits_ms)
        for n in counts if several else counts[:1]:
            yield Contestant(
                compiled_name(n, mode),
                n,
                partial(trainer.compiled, n, mode),
                model.seconds_to_compile(mode),
            )


def modules(model: Model, counts: Sequence[int], trainer: Trainer) -> Iterator[Contestant]:
    """Yields the contestants of the third table."""
    yield Contestant(PLAIN, 1, trainer.plain)
    yield Contestant(CAPTURED, 1, trainer.captured, 0.0, FIRST_STEPS - 1)
    for n in counts:
        yield Contestant(
            module_name(n), n, partial(trainer.module, n), model.seconds_to_compile("graphs")
        )


def in_turn(n: int) -> str:
    return f"{n} plain models in turn"


def compiled_name(n: int, mode: str) -> str:
    return f"N = {n}, compiled, {mode}"


def module_name(n: int) -> str:
    return f"N = {n}, compiled module"


@dataclass
class Turn:
    """Times some steps of a contestant; keeps the host's part.

    Attributes:
        steps: the number of steps.
        host: seconds until the calls of a step returned, for each turn.
    """

    step: Step
    devices: Sequence[torch.device]
    steps: int = 1
    host: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        """Returns the seconds of a step."""
        self.step()  # caches are another contestant's
        settle(self.devices)
        start = perf_counter()
        for _ in range(self.steps):
            self.step()
        self.host.append((perf_counter() - start) / self.steps)
        settle(self.devices)
        return (perf_counter() - start) / self.steps


@dataclass(frozen=True)
class Row:
    """A measured contestant, or why it is none.

    Attributes:
        table: "uncompiled", "compiled" or "modules".
        seconds, host: of a step; ``None`` if it was not measured.
        over_plain: the ratios to the plain loop of its table.
        first_seconds: of making it and its first steps.
        state: "measured", "left out" or "failed".
        why: the reason if it was not measured.
    """

    model: str
    table: str
    name: str
    replicas: int
    seconds: Samples | None = None
    host: Samples | None = None
    over_plain: Samples | None = None
    first_seconds: float = 0.0
    state: str = "measured"
    why: str = ""

    def as_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "table": self.table,
            "name": self.name,
            "replicas": self.replicas,
            "ms": _numbers(self.seconds, 1e3),
            "host_ms": _numbers(self.host, 1e3),
            "over_plain": _numbers(self.over_plain, 1),
            "first_seconds": self.first_seconds,
            "state": self.state,
            "why": self.why,
        }

    def as_line(self) -> str:
        if self.state != "measured":
            return f"| {self.name:24} | {self.state}: {self.why} |"
        columns = (
            _text(self.seconds, 1e3, 3),
            _text(self.host, 1e3, 3),
            _text(self.over_plain, 1, 2),
            f"{self.first_seconds:.1f}",
        )
        return f"| {self.name:24} | {' | '.join(columns)} |"


def _numbers(samples: Samples | None, unit: float) -> list[float] | None:
    """Returns the median and the quartiles."""
    return samples and [unit * value for value in (samples.median, *samples.spread)]  # type: ignore[return-value]


def _text(samples: Samples | None, unit: float, digits: int) -> str:
    if samples is None:
        return ""
    median, low, high = (f"{unit * s:.{digits}f}" for s in (samples.median, *samples.spread))
    return f"{median} ({low}-{high})"


def measure(
    name: str,
    table: str,
    contestants: Iterator[Contestant],
    model: Model,
    devices: Sequence[torch.device],
    end: float,
    rounds: int,
) -> list[Row]:
    """Makes the contestants of a table and gives them turns, until the clock is at ``end``."""
    begin = perf_counter()
    last = begin + TABLES[table] * (end - begin)
    turns: dict[str, Turn] = {}
    rows: list[Row] = []
    timed: dict[float, float] = {}
    expected: float | None = None
    for one in contestants:
        row = Row(name, table, one.name, one.replicas)
        start = perf_counter()
        left, seconds = last - start, one.seconds and timed.get(one.seconds, one.seconds)
        if one.name == CAPTURED and devices[0].type != "cuda":
            rows.append(replace(row, state="left out", why="it needs a GPU"))
            continue
        if turns and seconds > left:
            why = f"no time: it takes {seconds:.0f} s, and {max(0, left):.0f} s are left"
            rows.append(replace(row, state="left out", why=why))
            continue
        try:
            made = one.make()
            turn = Turn(made.step, devices)
            losses = [_mean(turn.step()) for _ in range(FIRST_STEPS - one.done)]
            made.check()
            if one.is_whole and not model.case.batch_statistics and expected is not None:
                _check_loss(one.name, losses[-1], expected, SAME_LOSS[model.dtype])
            if one.name == PLAIN:
                expected = losses[-1]
            taken = perf_counter() - start
            turn.steps = max(1, min(50, int(TURN_SECONDS / turn())))
        except Exception as error:  # the others are measured
            rows.append(replace(row, state="failed", why=_text_of(error)))
            continue
        timed[one.seconds] = taken
        rows.append(replace(row, first_seconds=taken))
        turns[one.name] = turn
    one_round = sum(_seconds(turn) for turn in turns.values())
    fitting = int((end - perf_counter()) / max(one_round, 1e-9))
    rounds = max(min(rounds, fitting), min(rounds, FEW_ROUNDS))
    for turn in turns.values():
        turn.host.clear()
    samples = interleaved(
        {key: Elsewhere(turn) for key, turn in turns.items()}, rounds=rounds, warmup=0
    )
    plain = samples.get(PLAIN)
    return [
        replace(
            row,
            seconds=samples[row.name],
            host=Samples(tuple(turns[row.name].host)),
            over_plain=plain and samples[row.name].over(plain),
        )
        if row.state == "measured"
        else row
        for row in rows
    ]


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _seconds(turn: Turn) -> float:
    start = perf_counter()
    turn()
    return perf_counter() - start


def _mean(loss: object) -> float:
    """Returns the mean over the parts of a step's result; waits for the devices."""
    if isinstance(loss, Tensor):
        return float(loss)
    parts = loss.values if isinstance(loss, mirror.PerReplica) else loss
    values = [float(part) for part in parts]  # type: ignore[attr-defined]
    return sum(values) / len(values)


def _check_loss(name: str, loss: float, expected: float, tolerance: float) -> None:
    """Raises RuntimeError if a contestant's loss differs from that of the plain loop."""
    if not math.isfinite(loss) or abs(loss - expected) > tolerance * abs(expected):
        raise RuntimeError(
            f"{name} has a loss of {loss:g} after {FIRST_STEPS} steps, the plain loop "
            f"{expected:g}: they do not do the same work"
        )


@dataclass(frozen=True)
class Limit:
    """A limit, and what was found."""

    what: str
    value: float
    most: float

    @property
    def missed(self) -> bool:
        return self.value > self.most

    def __str__(self) -> str:
        state = "MISSED" if self.missed else "met"
        return f"{self.what}: {self.value:.3f}, limit {self.most}: {state}"


def limits(models: Mapping[str, Model], rows: Sequence[Row]) -> Iterator[Limit]:
    """Yields the limits that the measured rows can be held to."""
    found = {(row.model, row.table, row.name): row for row in rows if row.seconds is not None}

    def ratio(key: str, table: str, one: str, other: str, most: float) -> Iterator[Limit]:
        pair = [found.get((key, table, name)) for name in (one, other)]
        first, second = (row.seconds if row else None for row in pair)
        if first is not None and second is not None:
            yield Limit(f"{key}: {one} / {other}", first.over(second).median, most)

    for key, model in models.items():
        for way in WAYS:
            yield from ratio(key, "uncompiled", f"N = 1, way {way}", PLAIN, 1.02)
            yield from ratio(key, "uncompiled", f"N = 8, way {way}", in_turn(8), 1.1)
        yield from ratio(key, "compiled", compiled_name(1, "graphs"), CAPTURED, 1.03)
        yield from ratio(key, "modules", module_name(1), CAPTURED, 1.03)
        eight = found.get((key, "modules", module_name(8)))
        if eight is not None and eight.host is not None and model.module_limit_ms is not None:
            host = 1e3 * eight.host.median
            yield Limit(f"{key}: host ms, {module_name(8)}", host, model.module_limit_ms)
        if not model.host_limits_ms:
            continue
        of_replicas = {
            row.replicas: 1e3 * row.host.median
            for row in rows
            if row.model == key and row.name == compiled_name(row.replicas, "graphs") and row.host
        }
        one, each = model.host_limits_ms
        if 1 in of_replicas:
            yield Limit(f"{key}: host ms, {compiled_name(1, 'graphs')}", of_replicas[1], one)
            for n, host in of_replicas.items():
                if n > 1:
                    more = (host - of_replicas[1]) / (n - 1)
                    yield Limit(f"{key}: host ms of a replica more, N = {n}", more, each)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints the tables; returns 1 if a row failed or a limit was missed, else 0."""
    begin = perf_counter()
    arguments = _arguments(argv)
    devices = [torch.device(name) for name in arguments.devices]
    on_gpus = devices[0].type == "cuda"
    if on_gpus:
        torch.cuda.set_device(devices[0])
    models = {
        name: MODELS[name]
        if on_gpus
        else replace(MODELS[name], case=MODELS[name].simulated, compile_seconds=(0, 0))
        for name in arguments.models
    }
    environment = {
        "machine": machine(),
        "devices": ", ".join(map(str, devices)),
        "gpu": torch.cuda.get_device_name(devices[0]) if on_gpus else "",
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
    }
    print("\n".join(f"{key}: {value}" for key, value in environment.items()))
    rows: list[Row] = []
    planned = [
        (name, table, share)
        for name, model in models.items()
        for table, share in zip(TABLES, model.shares, strict=True)
    ]
    for i, (name, table, share) in enumerate(planned):
        model = models[name]
        now = perf_counter()
        left = begin + arguments.budget - now
        end = now + left * share / sum(share for *_, share in planned[i:])
        counts = [n for n in arguments.replicas if n <= model.most_replicas]
        try:
            with ExitStack() as stack:
                trainer = Trainer(model, devices, stack)
                contestants = {
                    "uncompiled": uncompiled(model, counts, trainer),
                    "compiled": compiled(model, counts, arguments.modes, trainer),
                    "modules": modules(model, counts, trainer),
                }[table]
                found = measure(name, table, contestants, model, devices, end, arguments.rounds)
        except Exception as error:  # the other tables are measured
            found = [Row(name, table, "all", 0, state="failed", why=_text_of(error))]
        rows += found
        _make_room()
        print(f"\n{name}, {table}\n")
        print(f"| {'':24} | ms | host ms | / plain | first s |\n|---|---|---|---|---|")
        print("\n".join(row.as_line() for row in found), flush=True)
        judged = list(limits(models, rows)) if on_gpus else []
        if arguments.json:  # after each table: a run that is killed leaves what it has
            told = {
                "environment": environment,
                "seconds": perf_counter() - begin,
                "rows": [row.as_json() for row in rows],
                "limits": [vars(limit) | {"missed": limit.missed} for limit in judged],
            }
            Path(arguments.json).write_text(json.dumps(told, indent=1) + "\n")
    print()
    for limit in judged:
        print(limit)
    print(f"{perf_counter() - begin:.0f} s of {arguments.budget} s")
    failed = any(row.state == "failed" for row in rows)
    return int(failed or any(limit.missed for limit in judged))


def _make_room() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_step", description=__doc__)
    parser.add_argument(
        "--devices",
        nargs="+",
        default=["cuda:0"],
        metavar="NAME",
        help="dealt in turn to the replicas: cuda:0, cuda:0 cuda:1 ..., cpu; all: every GPU",
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--replicas", type=at_least(1), nargs="+", default=[1, 2, 4, 8], metavar="N"
    )
    parser.add_argument(
        "--modes",
        nargs="*",
        choices=MODES,
        default=[mode for mode in MODES if mode != "auto"],
        help="of compiled steps",
    )
    parser.add_argument("--rounds", type=ROUNDS, default=15, help="at most; less if time is short")
    parser.add_argument(
        "--budget", type=at_least(1), default=BUDGET_SECONDS, metavar="SECONDS", help="of all"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="for the numbers")
    arguments = parser.parse_args(argv)
    visible = [f"cuda:{i}" for i in range(num_cuda_devices())]
    if arguments.devices == ["all"]:
        arguments.devices = visible
    known = ["cpu"] if arguments.devices[:1] == ["cpu"] else visible
    if not arguments.devices or any(name not in known for name in arguments.devices):
        parser.error(
            f"--devices takes cpu, or some of the GPUs {visible}; got {arguments.devices}; cpu "
            "checks this program on simulated devices"
        )
    arguments.replicas.sort()
    return arguments


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main())
