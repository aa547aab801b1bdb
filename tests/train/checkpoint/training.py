"""A small training with every part in a checkpoint, for tests that stop and resume it."""

import torch
from torch import nn

import mirror


class Training:
    """Dropout, running statistics, shuffled batches, momentum, a schedule, a moving average.

    Args:
        n: how many replicas; 0: plain PyTorch.
    """

    def __init__(self, n, seed=0, make_optimizer=None):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)
        )
        self.strategy = mirror.MirroredStrategy(["cpu"] * n) if n else None
        if self.strategy:
            self.strategy.mirror(self.model)
        make = make_optimizer or (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
        self.optimizer = make(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 6])
        given = torch.Generator().manual_seed(1)
        self.x, self.y = (
            torch.randn(56, 6, generator=given),
            torch.randint(3, (56,), generator=given),
        )
        self.progress = {"epoch": 0, "losses": []}
        self.batches = self._batches()
        self.checkpoint = mirror.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            batches=self.batches,
            progress=self.progress,
        )

    def _batches(self):
        data = mirror.data.from_arrays((self.x, self.y), 8, shuffle=True)
        strategy = self.strategy or mirror.MirroredStrategy(["cpu"])
        return strategy.distribute_dataset(data)

    def _step(self, batch):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, num_epochs=2, stop_at=None):
        """Trains from where it stands; returns whether it came to the end."""
        losses = self.progress["losses"]
        while self.progress["epoch"] < num_epochs:
            for batch in self.batches:
                if self.strategy:
                    loss = self.strategy.run(self._step, args=(batch,))
                    loss = self.strategy.reduce("mean", loss)
                else:
                    loss = self._step([part.values[0] for part in batch])
                losses.append(loss.item())
                self.schedule.step()
                if len(losses) == stop_at:
                    return False
            self.progress["epoch"] += 1
        return True

    def bits(self):
        """All that a run leaves, to compare."""
        state = [*self.model.state_dict().values(), torch.get_rng_state()]
        for entry in self.optimizer.state_dict()["state"].values():
            state += [torch.as_tensor(v) for v in entry.values() if v is not None]
        return [t.clone() for t in state], self.progress["losses"]

    def close(self):
        if self.strategy:
            self.strategy.close()


def same(a, b):
    tensors = zip(a[0], b[0], strict=True)
    return a[1] == b[1] and all(torch.equal(left, right) for left, right in tensors)
