"""A training on simulated GPUs, with every way in which programs choose streams."""

from contextlib import ExitStack, contextmanager

import torch
from torch import nn

import mirror
from tests.toy_models import replica_id

# Small enough that a model of some hundred parameters has several buckets.
SMALL_PACKS = mirror.CommunicationOptions(bytes_per_pack=600)
WAYS = ("plain", "callers", "replicas", "changing", "transparent", "host", "dataset")
NUM_STEPS = 4


def names(num_devices):
    return [f"cuda:{i}" for i in range(num_devices)]


def train(devices, way, **options):
    """Returns the losses of some steps.

    Args:
        way: "plain": all on the streams that are current anyway; "callers": the caller is on
            streams of its own; "replicas": the function of each replica is, for the whole step;
            "changing": but for the optimizer; "transparent": model(x), loss.backward()
            without run; "host": the same with a batch on the host; "dataset": batches come
            from a distributed dataset.
    """
    torch.manual_seed(0)
    options = {"backend": "naive", "communication_options": SMALL_PACKS, **options}
    with mirror.MirroredStrategy(devices, **options) as strategy:
        model = strategy.mirror(
            nn.Sequential(
                nn.Linear(8, 16),
                nn.BatchNorm1d(16),
                nn.ReLU(),
                nn.Linear(16, 16),
                nn.ReLU(),
                nn.Linear(16, 4),
            )
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        data = [(torch.randn(16, 8), torch.randn(16, 4)) for _ in range(NUM_STEPS)]
        is_changing = way == "changing"
        own = [torch.cuda.Stream(d) for d in devices] if way in _NEEDS_STREAMS else []

        def step(batch):
            x, y = batch[0], batch[1].to(batch[0].device if way != "host" else devices[0])
            optimizer.zero_grad()
            with on(own[replica_id()]) if is_changing else ExitStack():
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
            optimizer.step()
            return loss.detach()

        def step_on_own_stream(batch):
            with on(own[replica_id()]):
                return step(batch)

        if way == "dataset":
            batches = strategy.distribute_dataset(data)
        elif way == "host":
            batches = data
        else:
            batches = ([t.to(devices[0], non_blocking=True) for t in batch] for batch in data)
        losses = []
        for batch in batches:
            with ExitStack() as stack:
                if way == "callers":
                    for stream in own:
                        stack.enter_context(on(stream))
                # Made here and now: on the caller's streams.
                batch = batch if way == "dataset" else [t + 0 for t in batch]
                if way in ("transparent", "host"):
                    loss = step(batch)
                else:
                    parts = batch if way == "dataset" else split(strategy, batch, devices)
                    fn = step_on_own_stream if way == "replicas" else step
                    loss = strategy.reduce("mean", strategy.run(fn, args=(parts,)))
                losses.append(loss * 1)
        return [loss.item() for loss in losses]


_NEEDS_STREAMS = ("callers", "replicas", "changing")


def split(strategy, batch, devices):
    """Returns each replica's part of a batch, on its device."""
    chunks = [t.tensor_split(len(devices)) for t in batch]
    return tuple(
        mirror.PerReplica([part.to(d) for part, d in zip(parts, devices, strict=True)])
        for parts in chunks
    )


@contextmanager
def on(stream):
    """Goes on on a stream after what is enqueued; and after it where it was, as torch demands."""
    before = torch.cuda.current_stream(stream.device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)


# A model with layers on two devices, and the devices of its replicas

A, B, C, D = (torch.device("cuda", i) for i in range(4))
ROWS = [[A, B], [C, D]]


class Net(nn.Module):
    """Written for one replica, on two devices."""

    def __init__(self, bottom=A, top=B):
        super().__init__()
        self.of_top = top
        self.bottom = nn.Linear(4, 8).to(bottom)
        self.top = nn.Linear(8, 2).to(top)

    def forward(self, x):
        return self.top(self.bottom(x).relu().to(self.of_top))


def on_cpu(module):
    """Returns the same model on one device."""
    plain = Net("cpu", "cpu")
    plain.load_state_dict({k: v.cpu() for k, v in module.state_dict().items()})
    return plain
