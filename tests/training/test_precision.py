"""Autocast, and models of other dtypes and memory formats."""

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.training.programs import SIZES, Net, adam, features, sgd

BF16 = 3e-2


@pytest.mark.parametrize("where", ["around", "inside", "around, step outside"])
def test_autocast(where, same):
    def script(place):
        model = place.put(Net())
        optimizer = sgd(model, lr=0.05)
        dtypes = []

        def forward(x, y):
            out = model(x)
            return F.cross_entropy(out, y), out.dtype

        def step(x, y):
            optimizer.zero_grad()
            if where == "inside":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss, dtype = forward(x, y)
            else:
                loss, dtype = forward(x, y)
            dtypes.append(str(dtype))
            loss.backward()
            if where != "around, step outside":
                optimizer.step()
            return loss.detach()

        losses = []
        for batch in features():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where != "inside"):
                losses.append(place.step(step, *batch))
            if where == "around, step outside":
                optimizer.step()
        assert set(dtypes) == {"torch.bfloat16"}
        return losses, model, optimizer

    same(script, tolerance=BF16)


def test_autocast_can_be_left_inside(same):
    """A layer that must be exact leaves autocast; gradients stay in the parameters' dtype."""

    class Partly(Net):
        def forward(self, x):
            hidden = torch.tanh(self.first(x))
            with torch.autocast("cpu", enabled=False):
                return self.head(hidden.float())

    def script(place):
        model = place.put(Partly())
        optimizer = sgd(model, lr=0.05)

        def loss(model, x, y):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
                assert out.dtype == torch.float32
                return F.cross_entropy(out, y)

        losses = place.train(model, optimizer, loss)
        return losses, model, optimizer, [str(p.grad.dtype) for p in model.parameters()]

    same(script, tolerance=BF16)


def test_autocast_sees_new_weights_after_each_step(same):
    """Its cache of cast weights does not outlive the step."""

    def script(place):
        model = place.put(Net())
        optimizer = sgd(model)
        x, y = torch.randn(6, 6), torch.randint(3, (6,))
        outputs = []
        for _ in range(4):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs.append(place.step(lambda x: model(x).float().mean(), x))
            place.train(model, optimizer, data=lambda sizes: [(x, y)])
        return outputs

    same(script, tolerance=BF16)


@pytest.mark.parametrize("convert", ["double", "to", "bfloat16"])
def test_the_dtype_is_converted_after_mirroring(convert, same):
    dtype = torch.bfloat16 if convert == "bfloat16" else torch.float64

    def script(place):
        model = place.put(Net())
        place.train(model, sgd(model, lr=0.01))
        model.to(dtype=dtype) if convert == "to" else getattr(model, convert)()
        optimizer = sgd(model, lr=0.01)
        data = [(x.to(dtype), y) for x, y in features()]
        losses = place.train(model, optimizer, data=lambda sizes: data)
        grads = [str(p.grad.dtype) for p in model.parameters()]
        model.float()
        return losses, grads, place.train(model, sgd(model, lr=0.01)), model, optimizer

    same(script, tolerance=BF16 if dtype == torch.bfloat16 else 1e-5)


def test_a_double_model_is_exact_to_its_own_precision(same):
    def script(place):
        model = place.put(Net())
        optimizer = adam(model)
        model.double()
        data = [(x.double(), y) for x, y in features()]
        return place.train(model, optimizer, data=lambda sizes: data), model, optimizer

    same(script, tolerance=1e-10)


def test_channels_last_after_mirroring(same):
    def script(place):
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
        place.put(model).to(memory_format=torch.channels_last)
        optimizer = sgd(model, lr=0.05)
        data = [(torch.randn(n, 2, 4, 4), torch.randint(3, (n,))) for n in SIZES]
        losses = place.train(model, optimizer, data=lambda sizes: data)
        stays = model[0].weight.is_contiguous(memory_format=torch.channels_last)
        return losses, stays, model, optimizer

    same(script)
