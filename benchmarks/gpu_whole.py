"""Checks whole programs on a GPU for gpu_check.py: streams, graphs, precision.

A check returns a line for the report, raises AssertionError with the fault, or raises Skipped. All
checks also run on simulated devices, which tests the checks.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial

import torch
from checking import LATE_CYCLES, Skipped, created, settle
from gpu_costs import feeds, first_use, hands_over, hides_reductions
from gpu_risks import beside_allocations, beside_computation, peers_are_what_they_say
from torch import nn

import mirror
from mirror import comm

Devices = tuple[torch.device, ...]
Check = Callable[[], str]

ROUNDS = 200  # on a GPU


def whole_checks(
    device: torch.device, elements: int, everything: Devices
) -> Iterator[tuple[str, Check]]:
    """Yields names and checks."""
    one = (device,)
    yield "naive in a fresh process", partial(starts_alone, device)
    yield "under a default device", partial(under_a_default_device, one * 2)
    for name in ("direct", "ring", "hierarchical"):
        if name == "direct" or device.type == "cuda":
            yield f"{name}, first use", partial(first_use, name, one * 2)
        yield f"{name}, two streams at once", partial(two_streams, name, one * 2)
        yield f"{name}, beside allocations", partial(beside_allocations, name, one * 2)
        yield f"{name}, beside computation", partial(beside_computation, name, one * 2, elements)
    yield "SyncBatchNorm beside buckets", partial(collectives_beside_buckets, one * 2)
    yield "the caller's own stream", partial(on_the_callers_stream, one * 2)
    yield "reductions hidden by backward", partial(hides_reductions, one * 2, elements)
    for schedule in ("staggered", "lockstep"):
        yield f"hand-over of 8 that block, {schedule}", partial(hands_over, one * 8, schedule)
    yield "input, pinned and in parts", partial(feeds, one * 2)
    yield "autocast and GradScaler", partial(scales, one * 2)
    yield "a graph captured after a run", partial(captures, device)
    yield "peers", partial(peers_are_what_they_say, everything)
    if len(everything) > 1:
        for name in ("nccl", "direct", "ring", "hierarchical"):
            yield (
                f"{name}, beside allocations, all GPUs",
                partial(beside_allocations, name, everything),
            )
            yield (
                f"{name}, beside computation, all GPUs",
                partial(beside_computation, name, everything, elements),
            )
        yield "two streams at once, all GPUs, nccl", partial(two_streams, "nccl", everything)
        yield (
            "SyncBatchNorm beside buckets, all GPUs",
            partial(collectives_beside_buckets, everything),
        )
        yield (
            "reductions hidden by backward, all GPUs",
            partial(hides_reductions, everything, elements),
        )
        yield "half types travel in two bytes", partial(rounds_once, everything)


def starts_alone(device: torch.device) -> str:
    """A process that has not touched the GPU makes a strategy and trains."""
    program = (
        "import torch, mirror\n"
        f"strategy = mirror.MirroredStrategy([{str(device)!r}] * 2, backend='naive')\n"
        "model = strategy.mirror(torch.nn.Linear(4, 2))\n"
        "model(torch.ones(6, 4)).sum().backward()\n"
        "assert model.weight.grad is not None\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr[-600:]
    return "trains"


def under_a_default_device(devices: Devices) -> str:
    """Every backend works under torch.set_default_device and in inference mode."""
    made = []
    for name in comm.available(devices):
        with torch.device(devices[0]), torch.inference_mode():
            with_backend = created(name, devices)
        tensors = [torch.ones(1000, device=device) for device in devices]
        with_backend.all_reduce(tensors)
        settle(devices)
        assert all(bool((tensor == len(devices)).all()) for tensor in tensors), name
        with_backend.close()
        made.append(name)
    return ", ".join(made)


def two_streams(name: str, devices: Devices) -> str:
    """Two collectives of one communicator, on two streams at once, are both right, each time."""
    with_backend = created(name, devices)
    gpus = [d for d in dict.fromkeys(devices) if d.type == "cuda"]
    sides = [torch.cuda.Stream(gpu) for gpu in gpus]
    expected = float(sum(range(1, len(devices) + 1)))
    try:
        rounds = ROUNDS if gpus else ROUNDS // 10
        for turn in range(rounds):
            first = [torch.full((30_011,), i + 1.0, device=d) for i, d in enumerate(devices)]
            second = [2 * tensor for tensor in first]
            settle(devices)
            for gpu in gpus:
                with torch.cuda.device(gpu):
                    torch.cuda._sleep(LATE_CYCLES // 1000)
            with_backend.all_reduce(first)
            with ExitStack() as stack:
                for side in sides:
                    stack.enter_context(torch.cuda.stream(side))
                with_backend.all_reduce(second)
            settle(devices)
            for tensors, wanted in ((first, expected), (second, 2 * expected)):
                for i, tensor in enumerate(tensors):
                    right = bool((tensor == wanted).all())
                    assert right, f"turn {turn}: replica {i} has a wrong sum"
    finally:
        with_backend.close()
    return f"{rounds} times"


def collectives_beside_buckets(devices: Devices) -> str:
    """SyncBatchNorm's collectives run in a backward pass while its buckets are reduced."""
    options = mirror.CommunicationOptions(bytes_per_pack=1 << 20, timeout_seconds=30)
    losses: dict[str, list[float]] = {}
    for backend in comm.available(devices):
        torch.manual_seed(5)
        with mirror.MirroredStrategy(
            devices, backend=backend, communication_options=options
        ) as strategy:
            layers: list[nn.Module] = []
            for _ in range(6):
                layers += [nn.Linear(600, 600), nn.BatchNorm1d(600), nn.ReLU()]
            net = mirror.nn.convert_sync_batchnorm(nn.Sequential(*layers))
            model = strategy.mirror(net.to(devices[0]))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            x = torch.randn(32, 600)

            def step(
                x: torch.Tensor = x,
                model: nn.Module = model,
                optimizer: torch.optim.Optimizer = optimizer,
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(x.to(mirror.get_replica_context().device)).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            losses[backend] = [
                float(strategy.reduce("mean", strategy.run(step))) for _ in range(8)
            ]
            strategy.check_replicas()
    first, *others = losses.values()
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-3, atol=1e-5)
    return f"8 steps each with {', '.join(losses)}"


def on_the_callers_stream(devices: Devices) -> str:
    """Replicas wait for work that the caller has enqueued on a stream of its own."""
    device = devices[0]
    with mirror.MirroredStrategy(devices) as strategy:
        model = strategy.mirror(nn.Linear(64, 64, bias=False).to(device))
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for _ in range(20):
            x = torch.zeros(128, 64, device=device)
            settle(devices)
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                if stream is not None:
                    torch.cuda._sleep(LATE_CYCLES // 100)
                x.fill_(1.0)
                y = model(x) + 0
                total = y.sum().item()
            expected = 128 * float(model.weight.detach().sum())
            assert abs(total - expected) < 1e-2 * max(1.0, abs(expected)), (total, expected)
    return "20 late inputs"


def scales(devices: Devices) -> str:
    """Training under autocast with a scaler gives nearly the parameters of one device."""
    kind = devices[0].type
    dtype = torch.float16 if kind == "cuda" else torch.bfloat16
    results = []
    for n in (1, len(devices)):
        torch.manual_seed(6)
        with mirror.MirroredStrategy(devices[:n]) as strategy:
            net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
            model = strategy.mirror(net.to(devices[0]))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = mirror.amp.GradScaler(kind, enabled=kind == "cuda")
            x = torch.randn(32, 16, device=devices[0])
            for _ in range(10):
                optimizer.zero_grad()
                with torch.autocast(kind, dtype=dtype):
                    loss = model(x).float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            results.append([p.detach().float().cpu().clone() for p in model.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-3)
    return f"10 steps in {dtype}"


def captures(device: torch.device) -> str:
    """A CUDA graph can be captured right after a collective, while its event is watched."""
    if device.type != "cuda":
        raise Skipped("graphs are of CUDA")
    with_backend = created("nccl", (device,))
    try:
        tensor = torch.ones(100, device=device)
        for _ in range(5):
            with_backend.all_reduce([tensor])
            graph = torch.cuda.CUDAGraph()
            static = torch.ones(100, device=device)
            with torch.cuda.graph(graph):
                out = static * 2
            static.fill_(3.0)
            graph.replay()
            settle((device,))
            assert bool((out == 6).all())
    finally:
        with_backend.close()
    return "5 captures within 50 ms of a collective"


def rounds_once(devices: Devices) -> str:
    """bfloat16 sums over NCCL are those of float32, rounded once."""
    with_backend = created("nccl", devices)
    generator = torch.Generator().manual_seed(2)
    try:
        values = [torch.randn(100_003, generator=generator).bfloat16() for _ in devices]
        total = torch.stack([value.float() for value in values]).sum(0).bfloat16()
        tensors = [value.to(device) for value, device in zip(values, devices, strict=True)]
        with_backend.all_reduce(tensors)
        settle(devices)
        for i, tensor in enumerate(tensors):
            wrong = int((tensor.cpu() != total).sum())
            # Sums of more than two may round otherwise in the last bit of float32 before.
            assert wrong <= len(total) // 500, f"replica {i}: {wrong} of {len(total)} differ"
    finally:
        with_backend.close()
    return f"{len(total)} sums"
