"""Models and loops of workers, and each worker compared with one device."""

import os
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

import mirror


def strategy_of(num_local=1, **options):
    """Returns the strategy of a worker with so many simulated devices."""
    return mirror.MultiWorkerMirroredStrategy(["cpu"] * num_local, **options)


def rank():
    """Returns this worker's."""
    return torch.distributed.get_rank()


class Net(nn.Module):
    """Two layers with a BatchNorm between."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def values_of(model):
    """Returns the state of a model, as lists."""
    return {name: value.tolist() for name, value in model.state_dict().items()}


# Each worker beside one device


SIZES = (8, 8, 7, 5, 2, 1, 8)  # of global batches: some workers have no examples
SEVERAL_BUCKETS = mirror.CommunicationOptions(bytes_per_pack=200)


class OneDevice:
    """Where a program trains: here, in a plain loop."""

    options = None

    def __init__(self, sizes=SIZES):
        draws = torch.Generator().manual_seed(5)
        self.batches = [
            (torch.randn(n, 4, generator=draws), torch.randint(0, 3, (n,), generator=draws))
            for n in sizes
        ]
        self.kept = []
        torch.manual_seed(0)

    def scope(self):
        return nullcontext()

    def no_sync(self):
        return nullcontext()

    def backward(self, loss_of, *batch):
        """Has the gradients of a loss, the mean over a global batch, arrive."""
        loss = loss_of(*batch)
        loss.backward()
        return loss

    def keep(self, *modules, grads=True):
        """Notes gradients, or values, for the comparison."""
        for p in (p for module in modules for p in module.parameters()):
            value = p.grad if grads else p
            self.kept.append(None if value is None else value.detach().clone())


class Worker(OneDevice):
    """Where it trains: on this worker's replicas, of ``counts`` on all."""

    def __init__(self, counts, way, sizes=SIZES, **options):
        super().__init__(sizes)
        self.counts, self.way, self.rank = counts, way, int(os.environ["RANK"])
        options = {"communication_options": SEVERAL_BUCKETS, **options}
        self.strategy = mirror.MultiWorkerMirroredStrategy(["cpu"] * counts[self.rank], **options)

    def scope(self):
        return self.strategy.scope()

    def no_sync(self):
        return self.strategy.no_sync()

    def backward(self, loss_of, *batch):
        parts = self.own_parts(batch)
        if self.way == 1:
            loss = loss_of(*(torch.cat(leaf) for leaf in zip(*parts, strict=True)))
            loss.backward()
            return loss
        values = [
            mirror.PerReplica(leaf, weights=[len(part[0]) for part in parts])
            for leaf in zip(*parts, strict=True)
        ]
        if self.way == 2:
            loss = self.strategy.reduce("mean", self.strategy.run(loss_of, args=tuple(values)))
            loss.backward()
            return loss
        return self.strategy.run(lambda *leaves: loss_of(*leaves).backward(), args=tuple(values))

    def own_parts(self, batch):
        """Returns this worker's parts of a global batch, one per replica."""
        parts = zip(*(torch.tensor_split(leaf, sum(self.counts)) for leaf in batch), strict=True)
        first = sum(self.counts[: self.rank])
        return list(parts)[first : first + self.counts[self.rank]]


def as_worker(program, counts, way, **options):
    """Runs a program on a worker; returns what it keeps."""
    worker = Worker(counts, way, **options)
    try:
        program(worker)
    finally:
        worker.strategy.close()
    return worker.kept


def on_one_device(program, sizes=SIZES):
    """Runs it here."""
    torch.manual_seed(0)
    place = OneDevice(sizes)
    program(place)
    return place.kept


def assert_as_one_device(
    worker_pool, program, counts=(1, 1), way=1, sizes=SIZES, tolerance=1e-6, **how
):
    """Runs a program of a test file on workers; each must keep what one device keeps."""
    wanted = on_one_device(program, sizes)
    assert wanted
    for found in worker_pool(len(counts)).run(as_worker, program, counts, way, sizes=sizes, **how):
        assert len(found) == len(wanted)
        for i, (mine, whole) in enumerate(zip(found, wanted, strict=True)):
            assert (mine is None) == (whole is None), i
            if mine is not None:
                assert mine.is_sparse == whole.is_sparse
                if mine.is_sparse:
                    mine, whole = mine.to_dense(), whole.to_dense()
                torch.testing.assert_close(mine, whole, rtol=tolerance * 10, atol=tolerance)


def net(width=6):
    """Returns a classifier of the batches."""
    inner = [nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*inner, nn.Linear(width, 3))


def cross_entropy(model):
    """Returns the loss of a classifier."""
    return lambda x, y: F.cross_entropy(model(x), y)
