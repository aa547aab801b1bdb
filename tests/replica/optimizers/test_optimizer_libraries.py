"""Every optimizer class of public libraries, with its defaults, mirrored and plain.

A library that is not installed is skipped, and so are classes that want more than parameters.
"""

import copy
import importlib
import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.oracle import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")

LIBRARIES = [
    *"adan_pytorch came_pytorch dadaptation lion_pytorch prodigyopt pytorch_optimizer".split(),
    *"schedulefree timm.optim torch_optimizer".split(),
]
SIZES = [7, 5, 2, 8]
TOLERANCE = 1e-5


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batches(is_reversed=False):
    generator = torch.Generator().manual_seed(1)
    made = []
    for size in SIZES:
        x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(4, (size,), generator=generator)
        made.append((x.flip(0), y.flip(0)) if is_reversed else (x, y))
    return made


def classes_of(library):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(library)
    except ImportError:
        return []
    return [
        kind
        for name, kind in sorted(vars(module).items())
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind.__module__.startswith(library.split(".")[0])
        and not name.startswith("_")
    ]


CLASSES = [(library, kind) for library in LIBRARIES for kind in classes_of(library)]


def make(kind, model):
    has_rate = "lr" in inspect.signature(kind.__init__).parameters
    optimizer = kind(model.parameters(), **({"lr": 1e-2} if has_rate else {}))
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    return optimizer


def train(kind, way=0, strategy=None, is_reversed=False):
    """Returns the parameters after training; way 0 is one device."""
    model = net() if strategy is None else strategy.mirror(net())
    optimizer = make(kind, model)
    torch.manual_seed(7)

    def loss_of(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def step(batch, loss_of=loss_of):
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()

    data = batches(is_reversed)
    for batch in data if way < 2 else strategy.distribute_dataset(data):
        if way < 2:
            step(batch)
        elif way == 2:
            step(batch, lambda part: strategy.reduce("mean", strategy.run(loss_of, (part,))))
        else:
            strategy.run(step, args=(batch,))
        if strategy is not None:
            strategy.check_replicas()
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize(
    ("library", "kind"), CLASSES, ids=[f"{lib}.{kind.__name__}" for lib, kind in CLASSES]
)
def test_an_optimizer_of_a_library_is_that_of_one_device(make_strategy, library, kind, way):
    try:
        expected, again = train(kind), train(kind, is_reversed=True)
    except Exception as error:
        pytest.skip(f"plain PyTorch cannot step it so: {error}")
    refused = ""
    try:
        actual = train(kind, way, make_strategy(3))
    except mirror.StrategyError as error:
        refused = str(error)
    if refused:
        assert way == 3
        assert "random numbers" in refused
    elif all(torch.allclose(expected[key], again[key], TOLERANCE, TOLERANCE) for key in expected):
        assert_same(actual, expected, tolerance=10 * TOLERANCE)
    # Else it makes of the order of summation another result by itself.


def test_the_libraries_have_classes():
    if not CLASSES:
        pytest.skip(f"none of {', '.join(LIBRARIES)} is installed")
    assert len(CLASSES) > 1
