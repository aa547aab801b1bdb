"""Compiled steps on simulated GPUs: torch without CUDA can trace no GPU's tensors, but the CPU's.

So the fakes of a trace are the CPU's, and what a trace finds of devices is the CPU: a piece is
placed on every GPU, the first one too.
"""

from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import mirror
from mirror.compiler.capture import call_record, observed_call
from mirror.compiler.runtime import build_module, build_program
from mirror.compiler.step_errors import is_users
from mirror.replica.gradients import packed_grads
from tests.gpu.fake import FakeGpus

HERE = str(Path(__file__).parent)


@contextmanager
def compiling_gpus(num_devices):
    """Gives simulated GPUs on which steps can be compiled, by torch's own kernels."""
    with FakeGpus(num_devices) as gpus:

        def real(function):
            def call(*args, **kwargs):
                with gpus.really():
                    return function(*args, **kwargs)

            return call

        with (
            mock.patch.object(build_program, "trace_step", real(build_program.trace_step)),
            mock.patch.object(
                build_program, "plan_step", real(build_program.plan_step)
            ),  # traces it again
            mock.patch.object(build_program, "_has_compiler", return_value=False),
            mock.patch.object(build_module, "trace_module", real(build_module.trace_module)),
            mock.patch.object(build_module, "functional", real(build_module.functional)),
            mock.patch.object(observed_call, "is_users", _is_users),
            mock.patch.object(packed_grads.node_hooks, "may_exist", False),  # of other tests
            mock.patch.object(call_record, "_add", _but_devices(call_record._add)),
        ):
            yield gpus


def _is_users(path):
    """Whether a file is the user's: the simulation of GPUs is not."""
    return is_users(path) and not path.startswith(HERE)


def _but_devices(describe):
    """Returns what describes a value for a trace's comparison: its devices are the CPU."""

    def call(value, found):
        describe("a device" if isinstance(value, torch.device) else value, found)

    return call


def model(dropout=0.0):
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4)
    )


def usual_step(module, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def plain_step(module, optimizer):
    """A step that leaves gradients as they have been reduced."""

    def step(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


class Training:
    """A compiled training on some devices, a batch after the other.

    Args:
        names: of the devices, one per replica.
        strategy: one that several trainings share.
        options: of ``compile``.
    """

    def __init__(
        self, names, make_model=model, make_optimizer=sgd, make_step=usual_step, backend="naive",
        strategy=None, **options,
    ):  # fmt: skip
        torch.manual_seed(0)
        self.names = names
        self.strategy = strategy or mirror.MirroredStrategy(names, backend)
        self.model = self.strategy.mirror(make_model())
        self.optimizer = make_optimizer(self.model.parameters())
        self.step = make_step(self.model, self.optimizer)
        self.compiled = self.strategy.compile(self.step, **options)

    def parts(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        whole = (
            torch.randn(size, 8, generator=generator),
            torch.randn(size, 4, generator=generator),
        )
        return tuple(
            mirror.PerReplica(
                [
                    part.to(device)
                    for part, device in zip(
                        tensor.tensor_split(len(self.names)), self.names, strict=True
                    )
                ]
            )
            for tensor in whole
        )

    def call(self, size=16, seed=0):
        """Makes a step; returns its mean loss, where it is."""
        return self.strategy.reduce("mean", self.compiled(*self.parts(size, seed)))

    def train(self, sizes):
        """Returns the losses after the first, and the parameters at the end, on the CPU.

        The first step is not compiled, and draws by generators of devices: its rate is 0.
        """
        losses = []
        (group,) = self.optimizer.param_groups
        for seed, size in enumerate(sizes):
            group["lr"] = 0.0 if seed == 0 else 0.1
            torch.manual_seed(seed)
            losses.append(self.call(size, seed))
        self.strategy.check_replicas()
        state = [value.detach().cpu() for value in self.model.state_dict().values()]
        return [loss.item() for loss in losses[1:]], state

    def close(self):
        self.strategy.close()
