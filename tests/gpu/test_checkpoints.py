"""Checkpoints of simulated GPUs: copied through pinned memory, restored where they were."""

import pytest
import torch
from torch import nn

import mirror
from tests.gpu.fake import FakeGpus
from tests.gpu.programs import names


class Program:
    """A training on two simulated GPUs."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.strategy = mirror.MirroredStrategy(names(2), "naive")
        self.model = self.strategy.mirror(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.value = torch.full((3,), float(seed), device="cuda:1")
        self.checkpoint = mirror.Checkpoint(
            model=self.model, optimizer=self.optimizer, value=self.value
        )

    def losses(self):
        def step(x):
            loss = self.model(x).square().mean() + self.model[0].weight.sum()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        x = torch.arange(32.0).view(8, 4)
        parts = mirror.PerReplica((x[:4].to("cuda:0"), x[4:].to("cuda:1")))
        runs = [self.strategy.run(step, args=(parts,)) for _ in range(2)]
        return [self.strategy.reduce("mean", run).item() for run in runs]


@pytest.mark.parametrize("wait", [True, False])
def test_a_run_goes_on_with_the_same_losses_and_draws(tmp_path, wait):
    with FakeGpus(2):
        saved, other = Program(1), Program(2)
        with saved.strategy, other.strategy:
            saved.losses()
            saved.checkpoint.save(tmp_path / "c", wait=wait)
            saved.checkpoint.wait()
            generators = torch.cuda.default_generators
            draws = [torch.rand(2, generator=generator) for generator in generators]
            expected = saved.losses()
            assert other.checkpoint.restore(tmp_path / "c")["value"] is other.value
            assert (other.value.device, other.value.unique().item()) == (saved.value.device, 1)
            for generator, drawn in zip(generators, draws, strict=True):
                assert torch.equal(torch.rand(2, generator=generator), drawn)
            other.strategy.check_replicas()
            assert other.losses() == expected
