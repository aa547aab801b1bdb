"""Trains a small net in the three ways on 3 simulated devices and compares: make smoke."""

import copy
import platform

import torch
import torch.nn.functional as F
from torch import nn

import mirror

BATCHES = [(torch.randn(n, 6), torch.randint(3, (n,))) for n in (7, 5, 8, 2)]
NET = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3))


def trained(model, call, way=1, strategy=None):
    """Returns the losses of uneven batches and the states after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(batch):
        return F.cross_entropy(call(batch[0]), batch[1])

    def step(batch, loss_of=loss_of):
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    def on_replicas(fn, batch):
        return strategy.reduce("mean", strategy.run(fn, args=(batch,)))

    one_step = [
        step,
        lambda b: step(b, lambda b: on_replicas(loss_of, b)),
        lambda b: on_replicas(step, b),
    ]
    batches = BATCHES if way == 1 else strategy.distribute_dataset(BATCHES)
    losses = [one_step[way - 1](batch) for batch in batches]
    return losses, copy.deepcopy(model).state_dict(), optimizer.state_dict()["state"]


def main():
    plain = copy.deepcopy(NET)
    expected = trained(plain, plain)
    for way, is_compiled in [(way, which) for way in (1, 2, 3) for which in (False, True)]:
        with mirror.MirroredStrategy(["cpu"] * 3) as strategy:
            model = mirror.nn.convert_sync_batchnorm(strategy.mirror(copy.deepcopy(NET)))
            call = torch.compile(model, backend="eager") if is_compiled else model
            actual = trained(model, call, way, strategy)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            strategy.check_replicas()
        torch.compiler.reset()
    print(f"seen: torch {torch.__version__}, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
