"""A communicator of your own: one that counts what travels and leaves the work to another.

A communicator does the collectives of a strategy. To plug one in, derive from
``mirror.comm.Communicator``, implement four collectives, and give it a name with
``mirror.comm.register``. This one holds a communicator that exists and passes every call on, so
it works wherever that one does. What it shows: ``bytes_per_pack`` changes into how many messages
the gradients are packed, not how many bytes they are, and not the result.

    python examples/custom_communicator.py
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirror

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    needs = "this example needs scikit-learn: pip install 'mirror-strategy[examples]'"
    raise SystemExit(f"{error}; {needs}") from None

NUM_STEPS = 30


@mirror.comm.register("counting")
class CountingCommunicator(mirror.comm.Communicator):
    """Counts the calls, and the bytes that each replica puts into them."""

    def __init__(self, devices: Sequence[torch.device | str], inner: str | None = None) -> None:
        super().__init__(devices)
        others = [name for name in mirror.comm.available(devices) if name != self.name]
        self.inner = mirror.comm.create(inner or others[0], devices)
        self.num_calls = 0
        self.num_bytes = 0

    # Communicator.all_reduce_lists packs the gradients of a step and calls this.
    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum", scale: float = 1.0) -> None:
        self._count(tensors)
        self.inner.all_reduce(tensors, op, scale)

    def broadcast(self, tensors: Sequence[Tensor], root: int = 0) -> None:
        self._count(tensors)
        self.inner.broadcast(tensors, root)

    def reduce_scatter(self, tensors: Sequence[Tensor], op: str = "sum") -> None:
        self._count(tensors)
        self.inner.reduce_scatter(tensors, op)

    def all_gather(self, tensors: Sequence[Tensor]) -> None:
        self._count(tensors)
        self.inner.all_gather(tensors)

    def close(self) -> None:
        self.inner.close()
        super().close()

    def _count(self, tensors: Sequence[Tensor]) -> None:
        self.num_calls += 1
        self.num_bytes += tensors[0].nbytes


def train(strategy: mirror.MirroredStrategy, x: Tensor, y: Tensor) -> tuple[nn.Module, float]:
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for batch in strategy.distribute_dataset([(x, y)] * NUM_STEPS):
        losses = strategy.run(train_step, args=(batch,))
    return model, strategy.reduce("mean", losses).item()


def main() -> None:
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)

    # All GPUs; without one, four simulated devices.
    devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"] * 4
    for bytes_per_pack in (0, 25 * 2**20):
        # backend="counting" would make one as well; this one we want to ask afterwards.
        communicator = CountingCommunicator(devices)
        options = mirror.CommunicationOptions(bytes_per_pack=bytes_per_pack)
        with mirror.MirroredStrategy(
            devices, backend=communicator, communication_options=options
        ) as strategy:
            model, loss = train(strategy, x, y)
            num_bytes = sum(parameter.nbytes for parameter in model.parameters())
            print(
                f"backend {strategy.backend!r} over {communicator.inner.name!r}, packs of "
                f"{bytes_per_pack:,} bytes: loss {loss:.6f} after {NUM_STEPS} steps\n"
                f"  the gradients of a replica are {num_bytes:,} bytes; per step it sent "
                f"{communicator.num_bytes / NUM_STEPS:,.0f} in "
                f"{communicator.num_calls / NUM_STEPS:g} calls"
            )


if __name__ == "__main__":
    main()
