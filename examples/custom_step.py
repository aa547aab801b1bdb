"""The whole step per replica, with what real loops have: clipping, a schedule, a metric.

``train_step`` is called once per replica, with its part of the batch. What it does is what one
would write for one device: the gradients that it sees after ``backward`` are already those of the
whole batch.
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

NUM_EPOCHS = 8


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=50, shuffle=True)

    # All GPUs; without one, four simulated devices.
    devices = None if torch.cuda.is_available() else ["cpu"] * 4
    with mirror.MirroredStrategy(devices) as strategy:
        with strategy.scope():
            model = nn.Sequential(
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(256, 10),
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=NUM_EPOCHS * len(loader)
            )

        def train_step(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            x, y = batch
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            right = (outputs.argmax(1) == y).sum()
            return {"loss": loss.detach(), "norm": norm, "right": right}

        batches = strategy.distribute_dataset(loader)
        for epoch in range(NUM_EPOCHS):
            num_right = 0
            for batch in batches:
                results = strategy.run(train_step, args=(batch,))
                scheduler.step()
                num_right += int(strategy.reduce("sum", results["right"]))
            # The mean weights the replicas by their numbers of examples. The norm is that of the
            # common gradient: one replica's will do.
            loss = strategy.reduce("mean", results["loss"])
            norm = strategy.local_results(results["norm"])[0]
            print(
                f"epoch {epoch + 1}: {num_right / 1500:.1%} right, last batch: loss {loss:.3f}, "
                f"gradient norm {norm:.2f}, learning rate now {scheduler.get_last_lr()[0]:.4f}"
            )

        model.eval()
        with torch.no_grad():
            right = model(x[1500:]).argmax(1).cpu() == y[1500:]
        print(f"test accuracy: {right.float().mean().item():.1%}")


if __name__ == "__main__":
    main()
