"""Recurrent layers of GPUs in compiled steps: cuDNN wants their weights in one buffer."""

import pytest
import torch
from torch import nn

from tests.compiler.training import Beside, batches
from tests.pairs import each_once


@pytest.fixture
def flattened(monkeypatch):
    """Has ``flatten_parameters`` do on the CPU what it does on GPUs; returns the layers."""
    layers = []

    def flatten_parameters(layer):
        weights = layer._flat_weights
        if len({weight.data_ptr() for weight in weights}) == len(layer._flat_weights_names):
            layers.append(layer)

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten_parameters)
    return layers


class Network(nn.Module):
    def __init__(self, kind, *, flattens, flat_weights=False, **options):
        super().__init__()
        self.layer = kind(2, 5, batch_first=True, **options)
        self.head = nn.Linear(5 * (1 + self.layer.bidirectional), 3)
        self.flattens = flattens
        if flat_weights:  # as cuDNN leaves them
            sizes = [weight.numel() for weight in self.layer.parameters()]
            buffer = torch.zeros(sum(sizes))
            for weight, part in zip(self.layer.parameters(), buffer.split(sizes), strict=True):
                weight.data = part.view_as(weight).copy_(weight.data)

    def forward(self, x):
        if self.flattens:
            self.layer.flatten_parameters()
        return self.head(self.layer(x.reshape(-1, 3, 2))[0][:, -1])


@each_once(
    kind=[nn.LSTM, nn.GRU, nn.RNN],
    num_replicas=[1, 2, 3],
    flattens=[True, False],
    flat_weights=[True, False],
    bidirectional=[True, False],
)
def test_a_layer_of_a_gpu_trains_as_one_device(
    kind, num_replicas, flattened, flattens, flat_weights, bidirectional
):
    def make_model():
        return Network(
            kind, flattens=flattens, flat_weights=flat_weights, bidirectional=bidirectional
        )

    beside = Beside(num_replicas, make_model)
    beside.train(batches([8, 8, 7, 8]), rtol=1e-4, atol=1e-5)
    assert beside.compiled.num_traces == 1


def test_the_weights_stay_parameters_and_later_runs_flatten_them(flattened):
    beside = Beside(2, lambda: Network(nn.GRU, flattens=True))
    layer = beside.model.layer
    data = list(beside.strategy.distribute_dataset(batches([8, 8, 8, 8])))
    for parts in data[:3]:
        beside.compiled(*parts)
    assert beside.compiled.num_traces == 1
    assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))
    flattened.clear()
    beside.strategy.run(beside.step, data[3])
    assert flattened == [layer] * 2  # once for each replica, as forward asks for
