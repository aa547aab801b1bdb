"""Names of devices, and the operations that differ between CPU and CUDA; no other file asks which.

A CPU device is a simulated one: ``["cpu"] * 4`` are four devices, distinguished by their position.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mirror.base.mutex import call_without_collection
from mirror.errors import DeviceError, short_repr
from mirror.values import is_int

_CPU = torch.device("cpu")
_NOTHING = nullcontext()
_NAME = re.compile(r"/?(?:device:)?(cpu|gpu|cuda)(?::([0-9]+))?", re.IGNORECASE)
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: its multiples modulo 2**63 are far apart
# Modules that seed the default generators, and save and restore their states.
RANDOM_MODULES = (torch, torch.random, torch.cuda, torch.cuda.random)
_SIMULATE = "pass devices=['cpu'] * 4 to simulate four devices"


def resolve(
    devices: Sequence[torch.device | str | int] | torch.device | str | None = None,
) -> tuple[torch.device, ...]:
    """Returns the named devices, one per replica, in order.

    Names may be, in upper or lower case, ``"cpu"``, ``"cuda"`` (the first GPU), ``"cuda:1"``,
    ``"cpu:1"`` (the CPU: it has no index), TensorFlow's ``"GPU:1"``, ``"/gpu:1"``,
    ``"/device:GPU:1"``, and in a sequence the number 1 for ``"cuda:1"``. A repeated entry makes
    several replicas on one device.

    Args:
        devices: a device or name, or a sequence of these; ``None`` or an empty sequence for all
            visible CUDA devices, or one CPU device if there is none.

    Raises:
        DeviceError: a device does not exist or is of an unknown type, CPU and CUDA are mixed, or
            a replica has several devices.
    """
    wanted: tuple[object, ...]
    if devices is None:
        wanted = ()
    elif isinstance(devices, torch.nn.Module):
        raise DeviceError(
            f"devices are the replicas' devices; got {short_repr(devices)}, a model; leave "
            "devices out for all GPUs, and pass the model to strategy.mirror(model)"
        )
    elif is_int(devices):
        is_all = str(devices).startswith("-")  # other libraries write -1 for all GPUs
        one = "" if is_all else f"[{devices}] for the GPU of that index, "
        raise DeviceError(
            f"devices have one entry per replica; got '{devices}', a number; leave devices out "
            f"for all GPUs, or pass {one}list(range(n)) for n GPUs, ['cpu'] * n to simulate n"
        )
    elif isinstance(devices, Iterable) and not isinstance(devices, str):
        wanted = tuple(devices)
    else:
        wanted = (devices,)
    num_cuda = num_cuda_devices()
    for device in wanted:
        if isinstance(device, Sequence) and not isinstance(device, str):
            raise DeviceError(
                f"devices have one entry per replica, each one device; got {[*wanted]!r}, with "
                "several for one replica; a model that one GPU cannot hold has its layers on the "
                "devices of mirror.MirroredStrategy([[...], [...]]), or is sharded with "
                "torch.distributed.fsdp.fully_shard, or its layers placed with "
                "torch.distributed.pipelining, in a process per GPU; if only the optimizer's "
                "state does not fit, use mirror.CentralStorageStrategy"
            )
    if not wanted:
        return tuple(torch.device("cuda", i) for i in range(num_cuda)) or (_CPU,)
    resolved = tuple(_resolve_one(device, num_cuda) for device in wanted)
    if len({device.type for device in resolved}) > 1:
        names = ", ".join(f"'{device}'" for device in wanted)
        raise DeviceError(
            f"the devices of one strategy must be all CPU or all CUDA; got {names}; visible are "
            f"{_visible(num_cuda)}; {_SIMULATE}"
        )
    return resolved


def resolve_places(devices: Any = None) -> tuple[tuple[torch.device, ...], ...]:
    """Returns each replica's devices; several if ``devices`` is a list of lists.

    Args:
        devices: an argument of ``resolve``, or a sequence with one sequence for each replica.

    Raises:
        DeviceError: as ``resolve``; or the lists differ in length, are empty, are mixed with
            devices, or have a GPU twice.
    """
    if not _is_list(devices) or not any(map(_is_list, devices)):
        return tuple((device,) for device in resolve(devices))
    rule = "devices have one entry per replica, all of them devices, or lists of equally many"
    if not all(map(_is_list, devices)):
        raise DeviceError(
            f"{rule}; got {[*devices]!r}, of both kinds; put the devices of each replica, also a "
            "lone one, in a list"
        )
    sizes = [len(row) for row in devices]
    if len(set(sizes)) > 1 or 0 in sizes:
        raise DeviceError(
            f"{rule}; got {[*devices]!r}, with {', '.join(map(str, sizes))}; give every replica a "
            "device for each position at which the model has layers"
        )
    flat = resolve([device for row in devices for device in row])
    for device in flat:
        if sizes[0] > 1 and device.type == "cuda" and flat.count(device) > 1:
            raise DeviceError(
                f"a GPU is at one position of one replica; got {[*devices]!r}, where '{device}' "
                "is twice; name each GPU once, or simulate by lists of 'cpu'"
            )
    return tuple(flat[i : i + sizes[0]] for i in range(0, len(flat), sizes[0]))


def num_cuda_devices() -> int:
    """Returns the number of CUDA devices that this process can see."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def count_cuda_devices() -> int:
    """Returns the number of CUDA devices without starting CUDA.

    The program can still set CUDA_VISIBLE_DEVICES after this call.
    """
    return torch.cuda.device_count()


def cuda_devices_in_use() -> tuple[torch.device, ...]:
    """Returns all CUDA devices if this process has used one, else none."""
    num_cuda = num_cuda_devices() if torch.cuda.is_initialized() else 0
    return tuple(torch.device("cuda", i) for i in range(num_cuda))


def is_simulated(devices: Sequence[torch.device]) -> bool:
    """Returns whether all devices are CPU devices."""
    return all(device.type == "cpu" for device in devices)


def are_distinct(devices: Sequence[torch.device]) -> bool:
    """Returns whether no two replicas share a device; replicas on the CPU always share it."""
    return len(set(devices)) == len(devices)


def model_name(device: torch.device) -> str:
    """Returns the model name of a GPU, or ``"cpu"``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def using(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the calling thread's current device; no effect for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING


def synchronize(device: torch.device) -> None:
    """Waits until a device has done all enqueued work; the CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def backward_in_calling_thread(devices: Sequence[torch.device]) -> AbstractContextManager[object]:
    """Makes backward passes run in the calling thread, instead of autograd's threads.

    A replica's backward pass may contain a merge point, where it waits for the other replicas.
    Autograd has one thread per GPU, so replicas that share a GPU would deadlock in that thread. A
    backward pass on the CPU always runs in the calling thread.
    """
    return _NOTHING if is_simulated(devices) else torch.autograd.set_multithreading_enabled(False)


def random_state(device: torch.device) -> torch.Tensor:
    """Returns the state of the device's default random generator."""
    return generator_state(_generator(device))


def generator_state(generator: torch.Generator) -> torch.Tensor:
    """Returns the state of a generator; several threads may call this at once.

    torch creates the tensor while it holds the generator's mutex. A garbage collection at that
    point may release the GIL, and a thread that takes it and waits for the mutex causes a
    deadlock. So collection is disabled.
    """
    return call_without_collection(generator.get_state)


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Sets the state of the device's default random generator."""
    _generator(device).set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()  # creates the generators; counting devices does not
    return torch.cuda.default_generators[device.index]


def separate_streams(generators: Sequence[torch.Generator]) -> None:
    """Reseeds generators with equal seeds, so that their random sequences differ.

    ``torch.manual_seed(s)`` gives every GPU the seed ``s``, and all replicas would draw the same
    dropout masks. The first generator keeps its seed; the other generators get seeds that are
    derived from it, so one seed still makes a run reproducible. Generators with other seeds are
    unchanged, also those restored by ``torch.cuda.set_rng_state_all``: a state has its seed.
    """
    first = generators[0].initial_seed()
    for k, generator in enumerate(generators[1:], 1):
        if generator.initial_seed() == first:
            generator.manual_seed(stream_seed(first, k))


def seed_functions() -> list[tuple[Any, str]]:
    """Returns torch's functions that set the generators of GPUs, as modules and names.

    ``torch.manual_seed`` calls ``manual_seed_all``, and ``fork_rng`` calls ``set_rng_state``.
    """
    names = ("manual_seed_all", "seed_all", "set_rng_state")
    return [(module, name) for module in (torch.cuda, torch.cuda.random) for name in names]


def stream_seed(seed: int, k: int) -> int:
    """Returns the seed of the ``k``-th random sequence that is derived from one seed."""
    return (seed + k * _GOLDEN) % 2**63


def generators_of(devices: Sequence[torch.device]) -> list[torch.Generator]:
    """Returns the default generators of the distinct GPUs; replicas share the CPU's generator."""
    return [_generator(device) for device in dict.fromkeys(devices) if device.type == "cuda"]


def parse(devices: Iterable[object]) -> tuple[torch.device, ...]:
    """Returns the named devices, without a check that they exist.

    Raises:
        DeviceError: an entry is not the name of a device.
    """
    return tuple(_parse_one(device, num_cuda_devices())[1] for device in devices)


def _resolve_one(device: object, num_cuda: int) -> torch.device:
    name, parsed = _parse_one(device, num_cuda)
    if parsed.type == "cuda" and parsed.index >= num_cuda:
        raise DeviceError(
            f"{name!r} does not exist; visible are {_visible(num_cuda)}; {_SIMULATE}"
        )
    return parsed


def _parse_one(device: object, num_cuda: int) -> tuple[str, torch.device]:
    name = str(device) if isinstance(device, (torch.device, str)) else ""
    if is_int(device):
        name = f"cuda:{device}"
    match = _NAME.fullmatch(name)
    if match is None:
        got = short_repr(device if name == "" and device is not None else str(device))
        raise DeviceError(
            f"a device is 'cpu' or one like 'cuda:0'; got {got}; visible are "
            f"{_visible(num_cuda)}; leave devices out for all GPUs, or {_SIMULATE}"
        )
    is_cpu = match[1].lower() == "cpu"
    return name, _CPU if is_cpu else torch.device("cuda", int(match[2] or 0))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _visible(num_cuda: int) -> str:
    return ", ".join(["'cpu'", *(f"'cuda:{i}'" for i in range(num_cuda))])
