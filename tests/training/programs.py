"""Where a training script runs, and the small models and batches of the scripts."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from tests.oracle import assert_same

# For three replicas: 3 + 3 + 2, 3 + 2 + 2, 2 + 2 + 1, two with one example, one with one.
SIZES = (8, 7, 5, 2, 1)


class Place:
    """Where a script runs: on one device, or on replicas, which the script need not know.

    Attributes:
        strategy: ``None`` on one device.
        in_run: whether ``step`` runs its function once per replica.
    """

    def __init__(self, strategy=None, in_run=False):
        self.strategy = strategy
        self.in_run = in_run

    def put(self, module):
        return module if self.strategy is None else self.strategy.mirror(module)

    def step(self, fn, *batch):
        """One step on a batch; returns the mean of what ``fn`` returns."""
        if self.in_run:
            (parts,) = self.strategy.distribute_dataset([batch])
            result = self.strategy.run(fn, args=parts)
            result = None if result is None else self.strategy.reduce("mean", result)
        else:
            result = fn(*batch)
        if self.strategy is not None and not torch.is_inference_mode_enabled():
            self.strategy.check_replicas()
        return result

    def steps(self, fn, batches=None):
        """One step on each batch, of ``features()`` if none are given; returns their results."""
        return [self.step(fn, *batch) for batch in (features() if batches is None else batches)]

    def train(self, model, optimizer, loss_fn=None, *, sizes=SIZES, data=None, after=None):
        """Plain steps over fresh batches; returns the losses."""
        loss_fn = loss_fn or cross_entropy

        def step(*batch):
            optimizer.zero_grad()
            loss = loss_fn(model, *batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        losses = []
        for batch in (data or features)(sizes):
            losses.append(self.step(step, *batch))
            if after is not None:
                after()
        return losses


def compare(script, place, tolerance):
    torch.manual_seed(7)
    expected = _copy_state(script(Place()))
    torch.manual_seed(7)
    actual = _copy_state(script(place))
    assert_same(actual, expected, "script", tolerance)


def _copy_state(value):
    """What a script returns, with modules and optimizers as copies of their state."""
    if isinstance(value, nn.Module | torch.optim.Optimizer | lr_scheduler.LRScheduler):
        return _copy_state(value.state_dict())
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy_state(item) for item in value]
    return value


class Net(nn.Module):
    """Two layers with names to change them by."""

    def __init__(self, hidden=8, classes=3):
        super().__init__()
        self.first = nn.Linear(6, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(torch.tanh(self.first(x)))


def features(sizes=SIZES):
    return [(torch.randn(size, 6), torch.randint(3, (size,))) for size in sizes]


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def sgd(model, lr=0.2):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adam(model, lr=0.02):
    return torch.optim.AdamW(model.parameters(), lr=lr)
