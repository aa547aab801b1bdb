"""An ordinary training loop on all GPUs (or four simulated devices): two lines are new.

The call ``model(x)`` splits the batch over the replicas and joins their outputs; the loss, its
backward pass and the optimizer's step are those of the whole batch.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mirror

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    needs = "this example needs scikit-learn: pip install 'mirror-strategy[examples]'"
    raise SystemExit(f"{error}; {needs}") from None


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:1500], labels[:1500])
    loader = DataLoader(train, batch_size=64, shuffle=True)

    # All GPUs; without one, four simulated devices.
    devices = None if torch.cuda.is_available() else ["cpu"] * 4
    strategy = mirror.MirroredStrategy(devices)  # new
    with strategy.scope():  # new
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for epoch in range(10):
        model.train()
        total = 0.0
        for x, y in loader:
            # The outputs are where one device's would be: on the first.
            loss = F.cross_entropy(model(x), y.to(strategy.devices[0]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        print(f"epoch {epoch + 1}: loss {total / len(train):.3f}")

    model.eval()
    with torch.no_grad():
        right = model(images[1500:]).argmax(1).cpu() == labels[1500:]
    print(f"test accuracy: {right.float().mean().item():.1%}")
    strategy.close()


if __name__ == "__main__":
    main()
