"""Every optimizer and every module of torch's own catalogues, in compiled steps."""

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

import mirror
from tests.compiler.training import Beside, batches

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

# What plain loops refuse, too: closures, dense gradients, differentiable steps.
OTHERS = {"LBFGS", "SparseAdam"}
# They ask for values, which a refusal names with its line.
REFUSED = {"Adafactor", "nn.CTCLoss", "nn.GaussianNLLLoss"}
# They draw random numbers: others than an uncompiled step's.
DRAW = ("Dropout", "RReLU", "FractionalMaxPool")
# Torch's samples train tensors that no module has.
TRAINS_OTHERS = {"nn.LSTMCell"}


def options_of(info):
    found = [dict(given.kwargs) for given in info.optim_inputs_func(device=torch.device("cpu"))]
    return [given for given in found if not given.get("differentiable")]


def name_of(info):
    return info.optim_cls.__name__


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(info.optim_cls, options, id=f"{name_of(info)}-{i}")
        for info in optim_db
        if name_of(info) not in OTHERS
        for i, options in enumerate(options_of(info))
    ],
)
def test_optimizers_equal_the_plain_loop(kind, options):
    def model():  # of matrices, which Muon wants
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))

    beside = Beside(2, make_model=model, make_optimizer=lambda p: kind(p, **options))
    if kind.__name__ not in REFUSED:
        beside.train(batches([8] * 4), rtol=1e-3, atol=1e-4)
        return
    with pytest.raises(mirror.CompileError, match=r"training.py:\d+ `optimizer.step\(\)`"):
        beside.train(batches([8] * 4))


def floats_in(value):
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    return [t for one in value for t in floats_in(one)] if isinstance(value, tuple) else []


def unlike(value):
    """Returns what the two replicas get for an argument."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    other = value * 0.9 if value.is_floating_point() else value.clone()
    return mirror.PerReplica([value.clone(), other])


def train(info, sample, *, is_compiled):
    """Trains a module by a sample of its inputs; returns losses, parameters and buffers."""
    torch.manual_seed(0)
    given = sample.constructor_input
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        with strategy.scope():
            module, head = info.module_cls(*given.args, **given.kwargs), nn.Linear(1, 1)
            optimizer = torch.optim.SGD([*module.parameters(), *head.parameters()], 0.01)

        def step(*args, **kwargs):
            optimizer.zero_grad()
            outputs = floats_in(module(*args, **kwargs))
            loss = sum(head(o.float().mean().reshape(1, 1)).sum() for o in outputs)
            loss.backward()
            optimizer.step()
            return loss

        args = [unlike(value) for value in sample.forward_input.args]
        kwargs = {name: unlike(value) for name, value in sample.forward_input.kwargs.items()}
        compiled = strategy.compile(step, mode="trace")
        losses = []
        for _ in range(3):
            made = compiled(*args, **kwargs) if is_compiled else strategy.run(step, args, kwargs)
            losses += [float(loss) for loss in strategy.local_results(made)]
        held = (*module.parameters(), *head.parameters(), *module.buffers())
        return [torch.tensor(losses), *[tensor.detach().clone() for tensor in held]]


@pytest.mark.filterwarnings("ignore")  # what torch says of its own samples
@pytest.mark.parametrize(
    "info", [i for i in module_db if i.name not in TRAINS_OTHERS], ids=lambda info: info.name
)
def test_modules_do_what_they_do_in_run(info):
    device = torch.device("cpu")
    sample = info.module_inputs_func(info, device, torch.float32, True, True)[0]
    if not any(isinstance(value, torch.Tensor) for value in sample.forward_input.args):
        pytest.skip("its samples have no tensors")
    if any(kind in info.name for kind in DRAW):
        pytest.skip("it draws")
    if info.name in REFUSED:
        with pytest.raises(mirror.CompileError, match=r"test_catalogues.py:\d+ `outputs ="):
            train(info, sample, is_compiled=True)
        return
    for got, expected in zip(
        train(info, sample, is_compiled=True), train(info, sample, is_compiled=False), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
