"""Checks of what replicas share on GPUs, and of what several GPUs do differently from one.

Simulated devices take turns in one thread, one after the other. GPUs have autograd threads of
their own, their replicas overlap, and cuDNN and CUDA keep state behind Python. A check returns a
line for the report, raises AssertionError with the fault, or raises Skipped. gpu_check.py runs
all of them; this program runs them on devices of your choice, each with a deadline.

    python benchmarks/gpu_several.py [--json FILE] [cuda:0 cuda:1 ... | cuda:0 cuda:0 | cpu cpu]
"""

from __future__ import annotations

import argparse
import copy
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from gpu_failures import a_device_that_fails, one_replica_fails
from gpu_trainings import (
    DTYPE,
    Devices,
    Parameters,
    Training,
    adam,
    named_devices,
    parts,
    rows,
    sgd,
)
from supervised import Check, add_options, run_checks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mirror

BUDGET_SECONDS = 240
ROUNDS = 5
"""Of checks whose fault depends on the order of threads."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all checks and prints their outcomes; returns 1 if one failed, else 0."""
    parser = argparse.ArgumentParser(prog="gpu_several", description=__doc__)
    parser.add_argument("devices", nargs="*", help="of the replicas; by default all GPUs")
    add_options(parser, BUDGET_SECONDS)
    arguments = parser.parse_args(argv)
    devices = named_devices(parser, arguments.devices, None)
    devices = devices * 2 if len(devices) == 1 else devices
    command = [sys.executable, __file__, *map(str, devices)]
    return run_checks(command, several_checks(devices, ""), arguments)


def several_checks(devices: Devices, where: str) -> Iterator[tuple[str, Check]]:
    """Yields names and checks: first those whose faults are silent, last those that take long.

    Args:
        where: the end of the names.
    """
    checks: tuple[Callable[[Devices], str], ...] = (
        synchronized_norms_outside_run,
        recurrent_layers,
        buckets_of_several_threads,
        two_losses_of_one_forward,
        own_steps,
        memory_that_steps_replace,
        streams_are_own,
        checkpoints_keep_the_generator,
        flags_of_the_process,
        conversions_in_a_scope,
        two_strategies_at_once,
        one_replica_fails,
        attention_compiled,
        a_device_that_fails,
    )
    for check in checks:
        yield check.__name__.replace("_", " ") + where, partial(check, devices)


# Autograd's threads: one per GPU


def synchronized_norms_outside_run(devices: Devices) -> str:
    """A backward pass outside run goes through collectives; each GPU's nodes have a thread."""

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()]
        return mirror.nn.convert_sync_batchnorm(nn.Sequential(*layers, nn.Linear(6, 4)).double())

    training = Training(make, rows(24, 6), rows(24, 4))
    for _ in range(ROUNDS):
        training.check(devices, "SyncBatchNorm", ways=(1, 2, 3))
    return f"{ROUNDS} times in ways 1, 2 and 3"


def buckets_of_several_threads(devices: Devices) -> str:
    """Hooks of several autograd threads launch many buckets."""
    options = mirror.CommunicationOptions(bytes_per_pack=4000)
    training = Training(_deep, rows(24, 32), rows(24, 32))
    for _ in range(ROUNDS):
        training.check(devices, "buckets", communication_options=options)
    return f"{ROUNDS} times in ways 1 and 3"


def two_losses_of_one_forward(devices: Devices) -> str:
    """A second backward pass adds to gradients that the first one has begun to reduce."""
    options = mirror.CommunicationOptions(bytes_per_pack=4000)
    training = Training(_deep, rows(24, 32), rows(24, 32), num_losses=2)
    for _ in range(ROUNDS):
        training.check(devices, "two losses", ways=(1, 2, 3), communication_options=options)
    return f"{ROUNDS} times in ways 1, 2 and 3"


def _deep() -> nn.Module:
    layers = (layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh()))
    return nn.Sequential(*layers).double()


# Memory that code below Python, or a step, replaces


class Flattening(nn.LSTM):
    """An LSTM that gives its weights one buffer in each forward pass, as many models do."""

    def forward(self, *args: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        self.flatten_parameters()
        result: tuple[Tensor, tuple[Tensor, Tensor]] = super().forward(*args)
        return result


def recurrent_layers(devices: Devices) -> str:
    """Optimizers step the weights that cuDNN reads: it gives weights one buffer, behind Python."""
    kinds: tuple[Callable[..., nn.Module], ...] = (nn.LSTM, nn.GRU, nn.RNN, Flattening)
    for kind in kinds:
        for optimizer, state in ((sgd, "replicated"), (adam, "sharded")):
            Training(
                partial(kind, 2, 4, batch_first=True, dtype=DTYPE),
                rows(24, 3, 2),
                rows(24, 3, 4),
                optimizer,
            ).check(devices, f"{kind.__name__}, {state}", optimizer_state=state)
    return "LSTM, GRU, RNN, and flattening in forward; SGD, and Adam sharded; ways 1 and 3"


def _shrink(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
    """Gives every parameter other memory."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data = parameter.data * 0.99


class Shrinking(torch.optim.SGD):
    def step(self, closure: None = None) -> None:
        super().step(closure)
        _shrink(self)


def memory_that_steps_replace(devices: Devices) -> str:
    """Steps and hooks that set ``p.data`` change what the next forward pass reads."""

    def subclass(parameters: Parameters) -> torch.optim.Optimizer:
        return Shrinking(parameters, 0.05)

    def hooked(parameters: Parameters) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        optimizer.register_step_post_hook(_shrink)
        return optimizer

    for optimizer in (subclass, hooked):
        Training(_small, rows(24, 6), rows(24, 4), optimizer).check(devices, optimizer.__name__)
    return "a subclass of SGD, a hook; ways 1 and 3"


def own_steps(devices: Devices) -> str:
    """Each GPU steps its own copies: rates that are tensors, one update for all, tied memory."""

    def adam_with_rate_there(parameters: Parameters) -> torch.optim.Optimizer:
        mine = list(parameters)
        device = mine[0].device
        if device.type != "cuda":  # the training on one device
            return torch.optim.Adam(mine, 0.01)
        rate = torch.tensor(0.01, dtype=DTYPE, device=device)
        return torch.optim.Adam(mine, rate, capturable=True)

    kinds = {
        "rate": lambda parameters: torch.optim.Adam(parameters, torch.tensor(0.01, dtype=DTYPE)),
        "fused": lambda parameters: torch.optim.Adam(parameters, 0.01, fused=True),
        "foreach": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=True),
        "rate on a GPU": adam_with_rate_there,
    }
    for name, kind in kinds.items():
        # A step count on a GPU is a float32.
        rtol = 1e-4 if name == "rate on a GPU" else 1e-7
        Training(_small, rows(24, 6), rows(24, 4), kind).check(devices, name, rtol=rtol)

    def tie(model: nn.Module) -> None:  # on its device: a move would give each its own memory
        first, second = model.get_submodule("0"), model.get_submodule("2")
        second.weight.data = first.weight.data

    def one_by_one(parameters: Parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.01, foreach=False)

    Training(_small, rows(24, 6), rows(24, 4), one_by_one, tie).check(devices, "tied memory")
    return ", ".join((*kinds, "tied memory"))


def _small() -> nn.Module:
    layers = nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)
    return nn.Sequential(*layers).double()


# What all replicas of a process share


def streams_are_own(devices: Devices) -> str:
    """A replica's draws, on its device and on the CPU, do not depend on those of other ones."""
    found = []
    for first in (1, 4):  # the number of draws of replica 0
        torch.manual_seed(3)
        with mirror.MirroredStrategy(devices) as strategy:

            def draw(first: int = first) -> Tensor:
                context = mirror.get_replica_context()
                count = first if context.replica_id_in_sync_group == 0 else 1
                on_device = [torch.rand((), device=context.device).item() for _ in range(count)]
                on_cpu = [torch.rand(()).item() for _ in range(count)]
                time.sleep(0.002 * count)  # so that another replica may draw meanwhile
                return torch.tensor([on_device[0], on_cpu[0]])

            found.append(strategy.local_results(strategy.run(draw)))
    for replica_id, (few, many) in list(enumerate(zip(*found, strict=True)))[1:]:
        assert torch.equal(few, many), (
            f"replica {replica_id} drew {few.tolist()}, and {many.tolist()} as replica 0 drew more"
        )
    assert len({tuple(drawn.tolist()) for drawn in found[0]}) == len(devices), "equal draws"
    return f"of {len(devices)} replicas"


class Scaled(nn.Module):
    """A layer that draws from the CPU's generator, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        scale = 1 + torch.rand(()).item()
        time.sleep(0.001 * scale)  # so that another replica may draw meanwhile
        return torch.tanh(self.layer(inputs)) * scale


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = checkpoint(block, inputs, use_reentrant=False)
        return inputs.square().mean(1)


def checkpoints_keep_the_generator(devices: Devices) -> str:
    """Recomputation saves and sets the CPU's generator, which all replicas share."""
    for way in (1, 3):
        right = _generator_states(devices[:1], way)
        for _ in range(ROUNDS):
            found = _generator_states(devices, way)
            assert found == right, f"way {way}: after the steps {found}, of one device {right}"
    return f"{ROUNDS} times in ways 1 and 3"


def _generator_states(devices: Devices, way: int) -> list[int]:
    """Returns a checksum of the CPU's generator after each step."""
    torch.manual_seed(1)
    inputs, states = torch.randn(8, 8), []
    with mirror.MirroredStrategy(devices) as strategy:
        model = strategy.mirror(Checkpointed().to(devices[0]))
        torch.manual_seed(5)
        for _ in range(3):
            if way == 1:
                model(inputs.to(devices[0])).mean().backward()
            else:
                split = parts(inputs, devices)
                strategy.run(lambda inputs: model(inputs).mean().backward(), args=(split,))
            states.append(zlib.crc32(torch.get_rng_state().numpy().tobytes()))
    return states


def flags_of_the_process(devices: Devices) -> str:
    """Contexts that set flags of the process, and modes of modules, are each replica's own."""
    with mirror.MirroredStrategy(devices) as strategy:
        model = strategy.mirror(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(devices[0]))

        def step() -> Tensor:
            replica_id, wrong = mirror.get_replica_context().replica_id_in_sync_group, 0
            for _ in range(3):
                with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
                    time.sleep(0.004 * (1 + replica_id))
                    wrong += torch.backends.cuda.flash_sdp_enabled()
                with torch.backends.cudnn.flags(enabled=False):
                    time.sleep(0.004 * (3 - replica_id % 3))
                    wrong += torch.backends.cudnn.enabled
                model.eval()
                time.sleep(0.003 * (1 + replica_id))
                wrong += model[1].training
                model.train()
                time.sleep(0.005)
                wrong += not model[1].training
            return torch.tensor(wrong)

        for _ in range(2):
            counts = [int(count) for count in strategy.local_results(strategy.run(step))]
            assert not any(counts), f"of 12 settings {counts} were another replica's"
    assert torch.backends.cuda.flash_sdp_enabled(), "sdpa_kernel's flags are left changed"
    assert torch.backends.cudnn.enabled, "cudnn.flags are left changed"
    return "sdpa_kernel, cudnn.flags, eval and train"


def conversions_in_a_scope(devices: Devices) -> str:
    """A module made in a scope may be converted before its first use, also the second one."""
    conversions: dict[str, Callable[[nn.Module], nn.Module]] = {
        "double()": lambda module: module.double(),
        "half().float()": lambda module: module.half().float(),
        "to(bfloat16)": lambda module: module.to(torch.bfloat16),
        "to(the last device)": lambda module: module.to(devices[-1]),
        "cpu()": lambda module: module.cpu(),
        "double().to(device)": lambda module: module.double().to(devices[0]),
        "to(channels_last)": lambda module: module.to(memory_format=torch.channels_last),
        "share_memory()": lambda module: module.share_memory(),
    }
    with mirror.MirroredStrategy(devices) as strategy:
        strategy.mirror(nn.Linear(2, 2).to(devices[0]))  # from now on conversions are watched
        for name, convert in conversions.items():
            with strategy.scope():
                module = convert(nn.Conv2d(2, 2, 1))
                dtype = module.weight.dtype
                images = torch.ones(4, 2, 3, 3, dtype=dtype, device=devices[0])
                outputs = module(images)
            assert mirror.is_mirrored(module.weight), f"{name}: not mirrored"
            assert outputs.dtype == dtype, f"{name}: {outputs.dtype} in place of {dtype}"
            assert outputs.device == devices[0], f"{name}: on {outputs.device}"
    return ", ".join(conversions)


def two_strategies_at_once(devices: Devices) -> str:
    """Two threads, each with a strategy over the same devices, launch collectives at once."""
    model = _deep()  # made once: two threads would draw its values from one generator
    training = Training(partial(copy.deepcopy, model), rows(24, 32), rows(24, 32))
    options = mirror.CommunicationOptions(bytes_per_pack=4000, timeout_seconds=30)
    errors: list[BaseException] = []

    def train() -> None:
        try:
            for _ in range(ROUNDS):
                training.check(devices, "two at once", communication_options=options)
        except BaseException as error:  # raised in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return f"{ROUNDS} times in ways 1 and 3"


# Compiled steps


class Attention(nn.Module):
    """A layer whose kernel of attention torch chooses by the dtype, and by the device."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.project, self.join = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        projected = self.project(inputs).view(len(inputs), -1, 3, 4, 16)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=True
        )
        return self.join(attended.transpose(1, 2).flatten(2))


def attention_compiled(devices: Devices) -> str:
    """No kernel of attention counts as one that draws if its dropout is 0; dropout compiles."""
    told = []
    for dtype, dropout in ((torch.float32, 0.0), (torch.bfloat16, 0.0), (torch.float32, 0.1)):
        name = f"{str(dtype).removeprefix('torch.')}, dropout {dropout}"
        losses = {
            is_compiled: _attend(devices, dtype, dropout, is_compiled)
            for is_compiled in (False, True)
        }
        assert all(map(torch.isfinite, losses[True])), f"{name}: {losses[True]}"
        if dropout == 0:
            torch.testing.assert_close(losses[True], losses[False], rtol=2e-2, atol=1e-4)
        told.append(name)
    return "; ".join(told)


def _attend(
    devices: Devices, dtype: torch.dtype, dropout: float, is_compiled: bool
) -> list[Tensor]:
    """Returns the losses of three steps, on the CPU."""
    torch.manual_seed(2)
    model, inputs = Attention(dropout).to(devices[0]), torch.randn(8, 16, 64)
    with mirror.MirroredStrategy(devices) as strategy:
        strategy.mirror(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(inputs: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast(devices[0].type, dtype, enabled=dtype != torch.float32):
                loss = model(inputs).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        # By torch's own kernels: what may be traced does not depend on inductor.
        call = strategy.compile(step, mode="trace") if is_compiled else None
        split, losses = parts(inputs, devices), []
        for _ in range(3):
            loss = strategy.run(step, args=(split,)) if call is None else call(split)
            losses.append(strategy.reduce("mean", loss).cpu())
        strategy.check_replicas()
    return losses


if __name__ == "__main__":
    sys.exit(main())
