"""Models on simulated GPUs that are converted: in a scope and outside, before and after use.

A module that is made in a scope is on the CPU until its first use.
"""

import copy
import inspect
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import StrategyError
from tests.gpu.fake import FakeGpus
from tests.oracle import assert_same
from tests.pairs import each_once
from tests.toy_models import ConvertedNet

GPUS = [torch.device("cuda", i) for i in range(3)]
# What is done, what that is on the CPU, and the device that it moves to.
CONVERSIONS = {
    **{
        name: (convert, convert, None)
        for name, convert in {
            "double": lambda model: model.double(),
            "float": lambda model: model.float(),
            "half": lambda model: model.half(),
            "bfloat16": lambda model: model.bfloat16(),
            "type": lambda model: model.type(torch.double),
            "to dtype": lambda model: model.to(torch.double),
            "channels_last": lambda model: model.to(memory_format=torch.channels_last),
            "share_memory": lambda model: model.share_memory(),
            "apply": lambda model: model.apply(lambda module: module.double()),
            "half and back": lambda model: model.half().float(),
        }.items()
    },
    "cpu": (lambda model: model.cpu(), lambda model: model, torch.device("cpu")),
    "cuda": (lambda model: model.cuda(), lambda model: model, GPUS[0]),
    "to cuda:1": (lambda model: model.to("cuda:1"), lambda model: model, GPUS[1]),
    "to cuda:2": (lambda model: model.to("cuda:2"), lambda model: model, GPUS[2]),
    "both": (lambda m: m.to("cuda:0", torch.double), lambda m: m.double(), GPUS[0]),
    "one by one": (lambda m: m.double().to("cuda:0"), lambda m: m.double(), GPUS[0]),
    "to_empty": (lambda m: filled(m.to_empty(device="cuda:0")), lambda m: filled(m), GPUS[0]),
}
DEVICES = {"one": GPUS[:1], "shared": GPUS[:1], "distinct": GPUS[:2], "central": GPUS[:2]}
STRATEGIES = {
    "one": lambda: mirror.OneDeviceStrategy("cuda:0"),
    "shared": lambda: mirror.MirroredStrategy(["cuda:0"] * 2, "naive"),
    "distinct": lambda: mirror.MirroredStrategy(["cuda:0", "cuda:1"], "naive"),
    "central": lambda: mirror.CentralStorageStrategy(["cuda:0", "cuda:1"], "cpu"),
}


def filled(model):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.25)
    return model


def made():
    torch.manual_seed(0)
    return ConvertedNet().eval()


def trained(model, between=None, device=None):
    """Returns the losses of two steps, and the state and gradients after them.

    Args:
        between: is done to the model between the steps.
    """
    losses = []
    for convert in (lambda _: None, between or (lambda _: None)):
        convert(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.arange(32.0, device=device).view(4, 2, 2, 2).to(model.last.weight.dtype) / 32
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict(), [p.grad for p in model.parameters()]


@each_once(
    name=CONVERSIONS,
    kind=STRATEGIES,
    when=["in the scope", "before", "between", "in run"],
    model=["first", "second"],
)
def test_a_converted_model_is_that_of_one_device(name, kind, when, model, monkeypatch):
    convert, on_cpu, device = CONVERSIONS[name]
    is_early = when in ("in the scope", "before")
    if not is_early and device not in (None, *DEVICES[kind]):
        convert, on_cpu = partial(be_refused, kind, convert), lambda model: model
    plain = made()
    if is_early:
        on_cpu(plain)
    expected = trained(plain, None if is_early else on_cpu)
    with FakeGpus(3), STRATEGIES[kind]() as strategy:
        if model == "first":  # of the process: conversions are still torch's
            monkeypatch.setattr(nn.Module, "_apply", inspect.unwrap(nn.Module._apply))
        else:
            strategy.mirror(nn.Linear(1, 1))
        with strategy.scope() if when == "in the scope" else nullcontext():
            model = made()
            if is_early:
                convert(model)
        strategy.mirror(model)
        in_run = (lambda model: strategy.run(convert, (model,))) if when == "in run" else convert
        found = trained(model, None if is_early else in_run, GPUS[0])
        strategy.check_replicas()
        low = {p.dtype for p in plain.parameters()} & {torch.half, torch.bfloat16}
        assert_same(found, expected, tolerance=1e-2 if low else 1e-5)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert p.stride() == q.stride()


def be_refused(kind, convert, model):
    """Checks that a mirrored model stays where it is; one replica has an ordinary model."""
    if kind == "one":
        convert(model).to("cuda:0")
        return
    with pytest.raises(StrategyError, match=r"copy\.deepcopy\(model\)"):
        convert(model)


@pytest.mark.parametrize("kind", ["shared", "distinct", "central"])
@pytest.mark.parametrize("convert", [lambda m: m.to("meta"), lambda m: m.to_empty(device="meta")])
def test_a_mirrored_model_cannot_move_to_meta(kind, convert):
    with FakeGpus(2), STRATEGIES[kind]() as strategy:
        model = strategy.mirror(made())
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(StrategyError, match=r"moved to meta.*copy\.deepcopy\(model\)"):
            convert(model)
        assert_same(model.state_dict(), before)
        model(torch.ones(4, 2, 2, 2, device="cuda:0"))
