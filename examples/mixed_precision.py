"""Mixed precision with gradient accumulation: autocast, GradScaler, ``strategy.no_sync()``.

A batch that does not fit into memory comes as micro-batches. Under ``no_sync`` their gradients
stay where they are; the first backward pass outside it reduces the sum of all, once per step.
Weights and gradients are float32; activations are bfloat16 or float16. Gradients of
float16 are scaled so that they do not vanish. If any replica has an inf, all skip the step.

    python examples/mixed_precision.py
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
NUM_TRAIN = 1536  # whole steps: 24 of 2 micro-batches of 32
MICRO_BATCH_SIZE = 32
NUM_MICRO_BATCHES = 2


def train(strategy: mirror.MirroredStrategy, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    dataset = TensorDataset(x[:NUM_TRAIN], y[:NUM_TRAIN])
    loader = DataLoader(dataset, batch_size=MICRO_BATCH_SIZE, shuffle=True)

    device_type = strategy.devices[0].type
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    # Not enabled, it changes nothing: bfloat16 has the range of float32.
    scaler = mirror.amp.GradScaler(device_type, init_scale=2.0**20, enabled=dtype == torch.float16)

    def backward(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        with torch.autocast(device_type, dtype=dtype):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss / NUM_MICRO_BATCHES).backward()
        return loss.detach()

    def backward_and_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = backward(batch)
        scaler.unscale_(optimizer)
        # It sees the gradient of all micro-batches on all replicas.
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    batches = strategy.distribute_dataset(loader)
    for epoch in range(1, NUM_EPOCHS + 1):
        total = 0.0
        for i, batch in enumerate(batches, 1):
            if i % NUM_MICRO_BATCHES:
                with strategy.no_sync():
                    losses = strategy.run(backward, args=(batch,))
            else:
                losses = strategy.run(backward_and_step, args=(batch,))
            total += strategy.reduce("mean", losses).item()
        scale = f", scale {scaler.get_scale():g}" if scaler.is_enabled() else ""
        print(f"epoch {epoch}: loss {total / len(batches):.3f}{scale}")

    # Autocast around a split call, or around run, holds on every replica too.
    with torch.no_grad(), torch.autocast(device_type, dtype=dtype):
        outputs = model(x[NUM_TRAIN:])
    right = outputs.argmax(1).cpu() == y[NUM_TRAIN:]
    print(f"test accuracy {right.float().mean().item():.1%}, outputs are {outputs.dtype}")


def main() -> None:
    # All GPUs; without one, four simulated devices.
    devices = None if torch.cuda.is_available() else ["cpu"] * 4
    with mirror.MirroredStrategy(devices) as strategy:
        for dtype in (torch.bfloat16, torch.float16):
            print(f"activations in {dtype}")
            train(strategy, dtype)


if __name__ == "__main__":
    main()
