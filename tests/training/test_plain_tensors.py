"""Plain tensors beside parameters: attributes, buffers, what no module holds."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import mirror
from tests.training.programs import Net, Place, sgd


def test_a_constant_tensor_kept_as_attribute(same):
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.mean = torch.arange(6.0)
            self.stats = [torch.full((6,), 2.0)]

        def forward(self, x):
            return super().forward((x - self.mean) / self.stats[0])

    def script(place):
        model = place.put(Scaled())
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        model.mean = torch.ones(6)
        model.stats[0].fill_(3.0)
        return losses, place.train(model, optimizer), model, optimizer

    same(script)


class Counts(Net):
    """Counts its calls, as schedules inside layers do, in a tensor that is no buffer."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.calls = torch.zeros(())

    def forward(self, x):
        if self.training:
            if self.in_place:
                self.calls += 1
            else:
                self.calls = self.calls + 1
        return super().forward(x) * (1 + 0.1 * self.calls)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_tensor_attribute_updated_in_forward_is_each_replicas_own(in_place, same):
    def script(place):
        model = place.put(Counts(in_place))
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        return losses, float(model.calls), model, optimizer

    same(script)


def test_a_buffer_updated_in_forward(same):
    class CountsInBuffer(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("scale", torch.ones(()), persistent=False)

        def forward(self, x):
            if self.training:
                self.calls += 1
                self.scale = self.scale * 1.1
            return super().forward(x) * self.scale + self.calls

    def script(place):
        model = place.put(CountsInBuffer())
        optimizer = sgd(model)
        losses = place.train(model, optimizer)
        with torch.no_grad():
            out = model.eval()(torch.ones(5, 6))
        return losses, out, model.scale, model, optimizer

    same(script)


def test_a_parameter_outside_any_module_learns_in_an_unchanged_loop(same_loop):
    def script(place):
        model = place.put(Net())
        temperature = nn.Parameter(torch.tensor(1.5))
        optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1, momentum=0.9)

        def loss(model, x, y):
            return F.cross_entropy(model(x) * temperature, y)

        return place.train(model, optimizer, loss), temperature, model

    same_loop(script)


def test_a_parameter_outside_any_module_is_refused_inside_run(make_strategy):
    """No replica has a copy of its own: stepping it would use a part of the gradient."""
    place = Place(make_strategy(2), True)
    model = place.put(Net())
    temperature = nn.Parameter(torch.tensor(1.5))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)

    def loss(model, x, y):
        return F.cross_entropy(model(x) * temperature, y)

    with pytest.raises(mirror.StrategyError, match="mirror"):
        place.train(model, optimizer, loss)


def test_reading_grad_of_buffers_and_parameters(same):
    """As gradient loggers and torch's own tracing do."""

    def script(place):
        model = place.put(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
        return [b.grad for b in model.buffers()], [b.requires_grad for b in model.buffers()]

    same(script)
