"""Parameter servers: variables on two of them, steps on three workers, a coordinator here.

The model, the optimizer and the step are ordinary. ``coordinator.schedule`` sends a step to the
next free worker, where the model is pulled when it is read, and ``optimizer.step()`` sends the
gradients to the servers. Two ways: each gradient is applied when it arrives; or an update is the
mean of the first two of three gradients, and the slowest worker's is dropped.

With TF_CONFIG the servers and workers are those of the cluster there (``mirror serve``).
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirror

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    needs = "this example needs scikit-learn: pip install 'mirror-strategy[examples]'"
    raise SystemExit(f"{error}; {needs}") from None

NUM_EPOCHS = 8
BATCH_SIZE = 50
NUM_TRAINED = 1500


def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)


def batches(context: mirror.InputContext) -> Iterator[tuple[Tensor, Tensor]]:
    """Every worker calls this, and draws batches of its own."""
    x, y = digits()
    while True:
        chosen = torch.randint(NUM_TRAINED, (BATCH_SIZE,))
        yield x[chosen], y[chosen]


def train(name: str, strategy: mirror.ParameterServerStrategy) -> None:
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def step(batch: tuple[Tensor, Tensor]) -> float:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    coordinator = mirror.ClusterCoordinator(strategy)
    data = coordinator.create_per_worker_dataset(batches)
    for _ in range(NUM_EPOCHS):
        steps = NUM_TRAINED // BATCH_SIZE
        losses = [coordinator.schedule(step, args=(data,)) for _ in range(steps)]
        coordinator.join()
        mean = sum(coordinator.fetch(losses)) / steps
    x, y = digits()
    right = (model(x[NUM_TRAINED:]).argmax(1) == y[NUM_TRAINED:]).float().mean()
    print(f"{name}: loss {mean:.3f}, {right:.1%} of the test digits right")
    print(strategy.report(), end="\n\n")


def make_strategy(**options: Any) -> mirror.ParameterServerStrategy:
    if "TF_CONFIG" in os.environ:
        cluster = mirror.cluster.TFConfigResolver()
        return mirror.ParameterServerStrategy(cluster=cluster, **options)
    return mirror.ParameterServerStrategy(num_servers=2, num_workers=3, **options)


def main() -> None:
    with make_strategy() as strategy:
        train("asynchronous", strategy)
    with make_strategy(sync=True, replicas_to_aggregate=2) as strategy:
        train("synchronous, one worker to spare", strategy)


if __name__ == "__main__":
    main()
