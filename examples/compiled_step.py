"""A whole step compiled: one trace of it for all replicas, for any number of them.

The first call runs as ``strategy.run`` would; the second traces and compiles, which takes a while,
and once for all batch sizes: the last batch of an epoch is a smaller one here. A number that is to
be printed is returned by the step as a tensor, and asked for after it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mirror

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    needs = "this example needs scikit-learn: pip install 'mirror-strategy[examples]'"
    raise SystemExit(f"{error}; {needs}") from None

NUM_EPOCHS = 5


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=64, shuffle=True)

    # All GPUs; without one, two simulated devices.
    devices = None if torch.cuda.is_available() else ["cpu"] * 2
    with mirror.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=NUM_EPOCHS * len(loader)
            )

        def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
            x, y = batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            return loss.detach()

        compiled_step = strategy.compile(train_step)
        for epoch in range(NUM_EPOCHS):
            for batch in strategy.distribute_dataset(loader):
                losses = compiled_step(batch)
                scheduler.step()  # the learning rate is an input: no second trace
            loss = strategy.reduce("mean", losses).item()
            print(f"epoch {epoch + 1}: last loss {loss:.3f}")
        print(f"traced {compiled_step.num_traces} times")
        print(strategy.report())

        model.eval()
        with torch.no_grad():
            right = model(x[1500:]).argmax(1).cpu() == y[1500:]
        print(f"test accuracy: {right.float().mean().item():.1%}")


if __name__ == "__main__":
    main()
