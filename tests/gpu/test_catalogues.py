"""PyTorch's modules and optimizers, trained on GPUs, leave what one device leaves.

The GPUs are simulated, or real where torch sees any: ``benchmarks/one_gpu.sh``.
"""

import copy
import itertools
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db

import mirror
from mirror.values import map_structure
from tests.gpu.fake import FakeGpus
from tests.oracle import assert_same, train, train_loop
from tests.pairs import EXHAUSTIVE, each_once
from tests.replica.modules.test_module_db import (
    NOT_SPLIT,
    build,
    call,
    fresh,
    halves,
    matches,
    probe,
    replaced,
    samples,
    tensors,
    unpacked,
)
from tests.replica.optimizers.test_optim_db import hyperparameters, problem

# Some samples warn by the way, as do optimizers that are experimental.
pytestmark = pytest.mark.filterwarnings("ignore")

DEVICES = {"shared": ["cuda:0", "cuda:0"], "distinct": ["cuda:0", "cuda:1"]}
FACTORS = (1.0, 2.0)  # of the replicas' losses, so that their gradients differ
NUM_STEPS = 3
TOLERANCE = 1e-4  # of modules: steps amplify rounding

# Entries that cannot be faked, and why. One that trains fails its test.
NOT_FAKED = {
    "nn.CTCLoss": "torch copies its targets to the device that C++ sees, which is the CPU",
}


NUM_GPUS = torch.cuda.device_count()


@contextmanager
def strategy_on(devices, **options):
    if not NUM_GPUS:
        with FakeGpus(2), mirror.MirroredStrategy(devices, "naive", **options) as strategy:
            yield strategy
        return
    if len(set(devices)) > NUM_GPUS:
        pytest.skip(f"torch sees {NUM_GPUS} GPU")
    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    with exact, mirror.MirroredStrategy(devices, **options) as strategy:
        yield strategy


def on(where, **options):
    return strategy_on(DEVICES[where], **options)


def fails_if_not_faked(info):
    if NUM_GPUS or info.name not in NOT_FAKED:
        return nullcontext()
    return pytest.raises(RuntimeError, match="on the same device, but found cpu, cuda:0")


def sgd(module):
    parameters = list(module.parameters())
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9) if parameters else None


def update(optimizer, loss):
    """The rest of a training step; the loss is ``None`` where the output needs no gradient."""
    if loss is not None:
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


def train_step(module, optimizer, inputs, factor=1.0, device="cpu"):
    """Trains by inputs on the host; returns the loss, and the gradients of the inputs."""
    own = fresh(inputs)
    loss = probe(call(module, replaced(own, lambda t: t.to(device))))
    update(optimizer, None if loss is None else loss * factor)
    return replaced([loss], lambda t: t.detach() * factor), [t.grad for t in tensors(own)]


def train_in_run(strategy, plain, inputs):
    """Every replica has the whole input, and a loss of its own."""
    module, mean = strategy.mirror(copy.deepcopy(plain)), sum(FACTORS) / len(FACTORS)
    optimizer, of_plain = sgd(module), sgd(plain)

    def step(factor):
        device = mirror.get_replica_context().device
        return train_step(module, optimizer, inputs, factor, device)

    for i in range(NUM_STEPS):
        of_mean = list(train_step(plain, of_plain, inputs, mean))
        results = strategy.local_results(strategy.run(step, (mirror.PerReplica(FACTORS),)))
        for r, factor in enumerate(FACTORS):
            expected = replaced(of_mean, lambda t, share=factor / mean: t * share)
            assert_same(
                list(results[r]), expected, f"step {i}, replica {r}: loss, gradients", TOLERANCE
            )
        strategy.check_replicas()
    assert_same(module.state_dict(), plain.state_dict(), "state", TOLERANCE)


def train_transparently(strategy, plain, inputs):
    """Calls are split; the plain module is called on the parts where examples depend on others."""
    module = strategy.mirror(copy.deepcopy(plain))
    optimizer, of_plain = sgd(module), sgd(plain)
    for i in range(NUM_STEPS):
        own, of_one = fresh(inputs), fresh(inputs)
        actual = call(module, replaced(own, lambda t: t.to(strategy.devices[0])))
        is_whole = matches(actual, call(copy.deepcopy(plain), of_one))
        expected = call(plain, of_one) if is_whole else halves(plain, of_one)
        assert_same(unpacked(actual), unpacked(expected), f"step {i}: outputs", TOLERANCE)
        assert {t.device for t in tensors(actual)} <= set(strategy.devices)
        update(optimizer, probe(actual))
        update(of_plain, probe(expected))
        grads = [[t.grad for t in tensors(given)] for given in (own, of_one)]
        assert_same(*grads, f"step {i}: gradients of inputs", TOLERANCE)
        strategy.check_replicas()
    # Running statistics of the parts are averaged, where one device takes them one by one.
    entries = dict(plain.named_parameters()) if not is_whole else plain.state_dict()
    state = module.state_dict()
    assert_same({name: state[name] for name in entries}, entries, "state", TOLERANCE)


def can_be_split(plain, inputs):
    return halves(copy.deepcopy(plain), fresh(inputs)) is not None


def first_that_can_be_split(info, inputs):
    for sample in inputs:
        if can_be_split(build(info, sample, "training"), sample.forward_input):
            return sample
    raise AssertionError("no sample of this entry can be split: NOT_SPLIT lacks it")


def infos(found, step=1, first=0):
    """Returns params; those between each so many, from the first on, are exhaustive."""
    return [
        pytest.param(info, id=info.name, marks=() if i % step == first else EXHAUSTIVE)
        for i, info in enumerate(found)
    ]


# Of two neighbours one is called in run, the other outside; both are in test_module_db.py.
@each_once(info=infos(module_db, 2), where=DEVICES)
def test_modules_in_run(info, where):
    (sample, *_) = samples(info, "training")
    plain = build(info, sample, "training")
    with on(where) as strategy, fails_if_not_faked(info):
        train_in_run(strategy, plain, sample.forward_input)


TO_SPLIT = [info for info in module_db if info.name not in NOT_SPLIT]


@each_once(info=infos(TO_SPLIT, 2, 1), where=DEVICES)
def test_modules_in_transparent_calls(info, where):
    sample = first_that_can_be_split(info, samples(info, "training"))
    plain = build(info, sample, "training")
    with on(where) as strategy, fails_if_not_faked(info):
        train_transparently(strategy, plain, sample.forward_input)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("info", infos(i for i in module_db if i.name not in NOT_FAKED))
def test_modules_with_other_inputs(info, where):
    with on(where) as strategy:
        for sample in samples(info, "training")[1:]:
            given = sample.forward_input
            train_in_run(strategy, build(info, sample, "training"), given)
            plain = build(info, sample, "training")
            if info.name not in NOT_SPLIT and can_be_split(plain, given):
                train_transparently(strategy, plain, given)


def lazy_model(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.LazyLinear(3), torch.nn.LazyConv1d(2, 1)
    ).to(device)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])  # where the program has put the model
@pytest.mark.parametrize("way", [1, 3])
@pytest.mark.parametrize("devices", [["cuda:0"], *DEVICES.values()], ids=["one", *DEVICES])
def test_lazy_modules_get_their_parameters_where_the_replicas_are(devices, way, device):
    x, plain = torch.ones(4, 3, 2), lazy_model("cpu")
    plain(x)
    with strategy_on(devices) as strategy:
        model = strategy.mirror(lazy_model(device))
        if way == 1:
            model(x.to("cuda:0")).square().mean().backward()
        else:
            (batch,) = strategy.distribute_dataset([x])
            strategy.run(lambda x: model(x).square().mean().backward(), (batch,))
        assert {str(p.device) for p in model.parameters()} == {"cuda:0"}
        # On a GPU torch draws their first values from the GPU's generator.
        plain.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
        grads = [p.grad for p in model.parameters()]
        plain(x).square().mean().backward()
        assert_same(grads, [p.grad for p in plain.parameters()], "gradients", TOLERANCE)


# Flags that say how to compute, and not what.
HOW = ("capturable", "foreach", "fused")


def placed(batches, strategy):
    return [map_structure(lambda t: t.to(strategy.devices[0]), batch) for batch in batches]


def assert_trains(strategy, way, info, kwargs):
    plain, batches, loss = problem(info)
    tolerance = None
    if info.step_requires_closure:  # LBFGS divides rounding by small steps
        plain, batches = plain.double(), [(x.double(), y) for x, y in batches[1:2] * NUM_STEPS]
        kwargs, tolerance = {**kwargs, "max_iter": 4}, 1e-5
    options = {key: value for key, value in kwargs.items() if key not in HOW}
    of_plain = info.optim_cls(plain.parameters(), **copy.deepcopy(options))
    model = strategy.mirror(copy.deepcopy(plain))
    if way == 1:
        given = placed(batches, strategy)
    else:
        given = batches
    optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(kwargs))
    expected = train_loop(plain, of_plain, batches[:NUM_STEPS], loss)
    actual = train(way, strategy, model, optimizer, given[:NUM_STEPS], loss)
    assert_same(actual, expected, f"{kwargs}: losses", tolerance)
    assert_same(model.state_dict(), plain.state_dict(), f"{kwargs}: state", tolerance)


@each_once(info=infos(optim_db, 4), **{"where,way": [*itertools.product(DEVICES, (1, 3))]})
def test_optimizers(info, where, way):
    with on(where) as strategy:
        for kwargs in hyperparameters(info, "cuda"):
            assert_trains(strategy, 1 if info.step_requires_closure else way, info, kwargs)


@pytest.mark.parametrize("info", infos(optim_db, 3))
def test_optimizers_made_in_a_scope(info):
    """Before its first use, the model there is on the CPU, and so is what a constructor makes."""
    for where, state in itertools.product(DEVICES, ("replicated", "sharded")):
        plain, batches, loss = problem(info)
        of_plain = info.optim_cls(plain.parameters())
        with on(where, optimizer_state=state) as strategy, strategy.scope():
            model, _, _ = problem(info)
            optimizer = info.optim_cls(model.parameters())
            actual = train_loop(model, optimizer, placed(batches[:2], strategy), loss)
            strategy.check_replicas()
        expected = train_loop(plain, of_plain, batches[:2], loss)
        assert_same(actual, expected, f"{where}, {state}")
