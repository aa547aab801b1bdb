"""A program over parameter servers that counts its updates, and a hook that counts its calls."""

import torch
from torch import nn

import mirror
from mirror.train import Hook, Training


class Counting:
    """A program over servers; its weight is the number of updates."""

    def __init__(self, directory=None, **options):
        self.strategy = mirror.ParameterServerStrategy(**options)
        with self.strategy.scope():
            model = self.model = nn.Linear(1, 1)  # a bias: a second server has a variable, too
            optimizer = self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            model.weight.zero_()
        self.manager = directory and mirror.CheckpointManager(
            mirror.Checkpoint(model=model, optimizer=optimizer), directory, max_to_keep=None
        )

        def step(k):
            optimizer.zero_grad()
            model(-torch.ones(1, 1)).sum().backward()
            optimizer.step()
            return k

        self.step = step

    @property
    def weight(self):
        return self.model.weight.item()

    def train(self, hooks=(), step=None, batches=None):
        """Trains on the numbers from 0 on; logs what its steps return."""
        with Training(self.strategy, checkpoint=self.manager, hooks=hooks) as training:
            coordinator = mirror.ClusterCoordinator(self.strategy)
            for k in training.batches(range(100) if batches is None else batches):
                training.log(k=coordinator.schedule(step or self.step, args=(k,)))
        assert training.strategy.coordinator._session.queue.listeners == []
        return training

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.strategy.close()


def weights_saved(directory):
    """Returns the weight in each checkpoint, by its step."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpoint = mirror.Checkpoint(model=model, optimizer=optimizer)
    found = {}
    for step in mirror.CheckpointManager(checkpoint, directory).steps:
        checkpoint.restore(step)
        found[int(step)] = model.weight.item()
    return found


class Seen(Hook):
    """Notes what it is called for; may do something after a step."""

    def __init__(self, at=0, do=lambda training: None):
        self.at, self.do = at, do
        self.after, self.values, self.saves, self.errors = [], [], [], []

    def after_step(self, training):
        self.after.append(training.step)
        if "k" in training.logged_now:
            self.values.append(training.value("k"))
        if training.step == self.at:
            self.do(training)

    def saved(self, training):
        self.saves.append(training.step)

    def end(self, training, error):
        self.errors.append(type(error))
