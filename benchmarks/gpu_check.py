"""Checks every backend on a machine with a GPU, also with streams that are late.

Needs one GPU and uses all of them. With --device cpu, everything except NCCL runs on simulated
devices, which checks this program and not the GPU. Each check has a deadline; all checks together
have a budget.

    python benchmarks/gpu_check.py --json found.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from arguments import at_least
from checking import LATE_CYCLES, created, settle
from gpu_blocks import best_blocks
from gpu_graphs import graph_checks
from gpu_several import several_checks
from gpu_waits import wait_checks
from gpu_whole import whole_checks
from supervised import Check, add_options, run_checks
from timing import seconds_of

import mirror
from mirror import comm
from mirror.comm import self_test
from mirror.devices import num_cuda_devices, resolve
from mirror.errors import DeviceError
from mirror.tools.diagnosis import diagnose

REPLICAS = (1, 2, 4, 8)
KERNELS = ("direct", "ring", "hierarchical")
BUDGET_SECONDS = 460
"""Under 8 minutes, with the start of the processes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all checks and prints their outcomes; returns 1 if one failed, else 0."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="the one that replicas share")
    parser.add_argument(
        "--elements",
        type=at_least(1),
        default=16 * 2**20,
        metavar="N",
        help="of a large float32 message",
    )
    add_options(parser, BUDGET_SECONDS)
    arguments = parser.parse_args(argv)
    if arguments.device != "cpu" and num_cuda_devices() == 0:
        parser.error("there is no GPU; --device cpu checks this program on simulated devices")
    try:
        (device,) = resolve([arguments.device])
    except DeviceError as error:
        parser.error(str(error))
    command = [sys.executable, __file__, "--device", arguments.device]
    command += ["--elements", str(arguments.elements)]
    return run_checks(command, checks(device, arguments.elements), arguments)


def checks(device: torch.device, elements: int) -> Iterator[tuple[str, Check]]:
    """Yields names and checks, by value: those that find silent errors first, rates last.

    A check returns a line for the report.
    """
    one, everything = (device,), resolve()
    if len(everything) > 1:
        yield from several_checks(everything, ", all GPUs")
    yield from several_checks(one * 2, ", 2 on one")
    yield "doctor", partial(is_healthy, device)
    yield "nccl, one rank", partial(conforms, "nccl", one, elements)
    yield "nccl, one rank, late streams", partial(waits_for_streams, "nccl", one)
    yield "nccl, one rank, time-out", partial(times_out, one)
    for n in REPLICAS:
        for name in KERNELS:
            yield f"{name}, {n} on one device", partial(conforms, name, one * n, elements)
            yield f"{name}, {n} on one, late streams", partial(waits_for_streams, name, one * n)
    for n in REPLICAS:
        yield f"auto and training, {n} on one device", partial(trains, one * n)
        if device.type == "cuda":
            yield f"batches of the host, {n} on one", partial(waits_for_no_copy, one * n)
    if device.type == "cuda":
        yield from graph_checks(device, everything)
    yield from whole_checks(device, elements, everything)
    yield from wait_checks(device, everything)
    if len(everything) > 1:
        for name in ("nccl", *KERNELS):
            yield f"{name}, all GPUs", partial(conforms, name, everything, elements)
            yield f"{name}, all GPUs, late streams", partial(waits_for_streams, name, everything)
        yield "nccl, all GPUs, time-out", partial(times_out, everything)
        yield "auto and training, all GPUs", partial(trains, everything)
        yield "batches of the host, all GPUs", partial(waits_for_no_copy, everything)
        for name in KERNELS:
            yield (
                f"{name}, how many blocks, all GPUs",
                partial(best_blocks, name, everything, elements),
            )
    for name in KERNELS:
        yield f"{name}, how many blocks, 2 on one", partial(best_blocks, name, one * 2, elements)


def is_healthy(device: torch.device) -> str:
    """The doctor finds no fault; its output is printed."""
    diagnosis = diagnose([device], partial(print, flush=True))
    print(diagnosis.to_text(), "\n", flush=True)
    failures = [f"{backend.name}: {backend.failure}" for backend in diagnosis.backends]
    if not diagnosis.healthy:
        raise AssertionError("; ".join(text for text in failures if not text.endswith(": None")))
    return f"auto: {diagnosis.auto.name}, {diagnosis.auto.reason}"


def conforms(name: str, devices: tuple[torch.device, ...], elements: int) -> str:
    """Every collective and dtype is exact, and a large sum has the bits of copying and adding."""
    with_backend = created(name, devices)
    try:
        with_backend.prepare(self_test.EVERY)  # compiled one after the other, they take minutes
        count = self_test.examine(with_backend)
        generator = torch.Generator().manual_seed(1)
        # Integers, so that every order of summation is exact.
        values = [
            torch.randint(-99, 99, (elements,), generator=generator).float() for _ in devices
        ]
        tensors = [value.to(device) for value, device in zip(values, devices, strict=True)]
        total = torch.stack(values).sum(0) if len(values) > 1 else values[0]
        with_backend.all_reduce(tensors)
        settle(devices)
        for i, tensor in enumerate(tensors):
            if not torch.equal(tensor.cpu(), total):
                raise AssertionError(f"replica {i} has a wrong sum of {elements} elements")
        seconds = min(
            seconds_of(partial(reduce_once, with_backend, tensors, devices)) for _ in range(5)
        )
        small = [torch.ones(256, device=device) for device in devices]
        latency = min(
            seconds_of(partial(reduce_once, with_backend, small, devices)) for _ in range(50)
        )
    finally:
        with_backend.close()
    rate = tensors[0].nbytes / seconds / 1e9
    return (
        f"{count} collectives; {tensors[0].nbytes} bytes at {rate:.1f} GB/s (algbw), 1 KiB in "
        f"{latency * 1e6:.0f} us"
    )


def waits_for_streams(name: str, devices: tuple[torch.device, ...]) -> str:
    """Late kernels on each stream write the inputs before a sum, and read the result after it."""
    with_backend = created(name, devices)
    expected = float(sum(range(1, len(devices) + 1)))
    try:
        for late in range(len(devices)):
            tensors = [torch.zeros(100_003, device=device) for device in devices]
            settle(devices)
            # One replica's values come late; a collective that does not wait takes the zeros.
            for i, (device, tensor) in enumerate(zip(devices, tensors, strict=True)):
                if i == late and device.type == "cuda":
                    with torch.cuda.device(device):
                        torch.cuda._sleep(LATE_CYCLES)
                tensor.fill_(i + 1)
            with_backend.all_reduce(tensors)
            doubled = [2 * tensor for tensor in tensors]
            settle(devices)
            for i, tensor in enumerate(doubled):
                if not bool((tensor == 2 * expected).all()):
                    raise AssertionError(f"replica {late} was late, and {i} read too early")
        if len(set(devices)) == len(devices) and devices[0].type == "cuda":
            side_streams(with_backend, devices, expected)
    finally:
        with_backend.close()
    return f"{len(devices)} late replicas in turn"


def side_streams(
    with_backend: comm.Communicator,
    devices: tuple[torch.device, ...],
    expected: float,
) -> None:
    """The same, on streams that are not the default ones."""
    tensors = [torch.zeros(100_003, device=device) for device in devices]
    settle(devices)
    for device in devices:
        torch.cuda.set_stream(torch.cuda.Stream(device))
    try:
        for i, (device, tensor) in enumerate(zip(devices, tensors, strict=True)):
            with torch.cuda.device(device):
                torch.cuda._sleep(LATE_CYCLES)
                tensor.fill_(i + 1)
        with_backend.all_reduce(tensors)
        settle(devices)
    finally:
        for device in devices:
            torch.cuda.set_stream(torch.cuda.default_stream(device))
        torch.cuda.set_device(devices[0])
    for i, tensor in enumerate(tensors):
        if not bool((tensor == expected).all()):
            raise AssertionError(f"on its own stream replica {i} was reduced too early")


def times_out(devices: tuple[torch.device, ...]) -> str:
    """A device that exceeds the timeout raises an error with its name; a new one works."""
    with_backend = created("nccl", devices)  # to make it, and to connect, takes seconds
    tensors = [torch.ones(1000, device=device) for device in devices]
    with_backend.all_reduce(tensors)
    settle(devices)
    with torch.cuda.device(devices[-1]):
        torch.cuda._sleep(20 * LATE_CYCLES)
    with with_backend.setting_timeout(0.5):
        with_backend.all_reduce(tensors)
    settle(devices)  # returns when the late kernel has ended, or NCCL's was aborted
    try:
        with_backend.all_reduce(tensors)
    except mirror.CollectiveTimeoutError as error:
        told = str(error)
    else:
        raise AssertionError("no error though a device was late by more than the time-out")
    finally:
        with_backend.close()
    conforms("nccl", devices, 1000)
    return told


def trains(devices: tuple[torch.device, ...]) -> str:
    """A strategy with backend="auto" leaves the parameters that one device gets."""
    torch.manual_seed(3)
    batches = [(torch.randn(14, 8), torch.randn(14, 3)) for _ in range(5)]
    plain = train(batches, devices[0])
    with mirror.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            mirrored = train(batches, devices[0])
        strategy.check_replicas()
        name = strategy.backend
    torch.testing.assert_close(mirrored, plain, rtol=1e-4, atol=1e-5)
    return f"chose {name}"


def waits_for_no_copy(devices: tuple[torch.device, ...]) -> str:
    """A split call of a host batch returns while the GPUs still do earlier work."""
    with mirror.MirroredStrategy(devices) as strategy:
        model = strategy.mirror(torch.nn.Linear(1024, 8))
        x = torch.randn(64 * len(devices), 1024)
        with torch.no_grad():
            for _ in range(3):  # the first ones make threads, memory and handles
                expected = model(x).cpu()
            settle(devices)
            busy = []
            for device in dict.fromkeys(devices):
                with torch.cuda.device(device):
                    torch.cuda._sleep(LATE_CYCLES)
                    busy.append(torch.cuda.current_stream().record_event())
            outputs: list[torch.Tensor] = []
            seconds = seconds_of(lambda: outputs.append(model(x)))
            is_ahead = not any(event.query() for event in busy)
            torch.testing.assert_close(outputs[0].cpu(), expected)
    if not is_ahead:
        raise AssertionError(f"the host waited for the devices: the call took {seconds:.3f} s")
    return f"returned after {1e3 * seconds:.1f} ms, while the devices were busy"


def train(
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> list[torch.Tensor]:
    torch.manual_seed(4)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for inputs, targets in batches:
        loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()  # blocks on the device
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def reduce_once(
    with_backend: comm.Communicator, tensors: list[torch.Tensor], devices: Sequence[torch.device]
) -> None:
    with_backend.all_reduce(tensors)
    settle(devices)


if __name__ == "__main__":
    sys.exit(main())
