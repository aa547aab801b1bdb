"""Mistakes and habits around a mirrored model: copies, files, averages, hooks, wrappers."""

import io
import threading

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mirror import StrategyError
from tests.mistakes.mistake import (
    X,
    check_refusal,
    each,
    loader,
    loss_of,
    mirrored,
    net,
    refused,
    same,
    sgd,
    step,
)


def reloaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def seeded(make):
    """Calls ``make`` with the seed of net()."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make()


def train(model, steps=2):
    optimizer = sgd(model)
    for _ in range(steps):
        step(model, optimizer)
    return model


# Programs around a model, which know nothing of replicas; each returns the model to compare.


def frozen_and_left_out(model):
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        step(model, optimizer)
    return model


def over_its_state_dict(model):
    """Detached tensors have no gradients, so the optimizer changes nothing."""
    optimizer = torch.optim.SGD(model.state_dict().values(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    return model


PROGRAMS = [frozen_and_left_out, over_its_state_dict]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_trains_a_mirrored_model_as_on_one_device(program, strategy):
    assert same(program(strategy.mirror(net())), program(net()))
    strategy.check_replicas()


def shared():
    model = net()
    model.append(nn.Linear(2, 2, bias=False)).append(nn.Linear(2, 2, bias=False))
    model[4].weight = model[3].weight
    return model


class Late(nn.Module):
    """Makes a submodule in its first forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.head = None

    def forward(self, x):
        if self.head is None:
            self.head = seeded(lambda: nn.Linear(2, 2))
        return self.head(self.body(x))


def with_batch_norm(convert=lambda model: model):
    return convert(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))


@pytest.mark.parametrize("in_run", [False, True])
@pytest.mark.parametrize(
    "make", [shared, Late, lambda: with_batch_norm(nn.SyncBatchNorm.convert_sync_batchnorm)]
)
def test_an_unusual_model_trains_as_on_one_device(make, in_run, strategy):
    expected = seeded(with_batch_norm if make not in (shared, Late) else make)
    model = strategy.mirror(seeded(make))
    kinds = [type(module) for module in model.modules()]
    expected(X)
    model(X)
    optimizers = sgd(expected), sgd(model)
    for _ in range(2):
        step(expected, optimizers[0])
        if not in_run:
            step(model, optimizers[1])
        for batch in strategy.distribute_dataset(loader() if in_run else []):
            strategy.run(step, args=(model, optimizers[1], *batch))
    assert same(model, expected)
    strategy.check_replicas()
    assert [type(module) for module in model.modules()][: len(kinds)] == kinds
    assert torch.allclose(model.eval()(X), expected.eval()(X), atol=1e-6)


def test_sync_batch_norm_can_be_converted_after_mirroring(strategy):
    model, expected = strategy.mirror(seeded(with_batch_norm)), seeded(with_batch_norm)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert same(train(model), train(expected))


def test_a_state_saved_in_the_scope_holds_plain_tensors(strategy):
    with strategy.scope():
        model = net()
        state = reloaded(model.state_dict())
    assert all(type(value) is torch.Tensor for value in state.values())
    assert list(state) == list(net().state_dict())


def test_a_state_of_a_wrapped_model_is_refused_as_on_one_device(strategy):
    """What DataParallel and DDP have saved has another prefix."""
    model, _, _ = mirrored(strategy)
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"module\.0\.weight"):
        model.load_state_dict(state)
    model.load_state_dict({name.removeprefix("module."): v for name, v in state.items()})


def test_a_state_dict_follows_the_training(strategy):
    """Without a copy, as on one device."""
    model, optimizer, _ = mirrored(strategy)
    best = model.state_dict()
    step(model, optimizer)
    assert torch.equal(best["0.weight"], model.state_dict()["0.weight"])


@refused(ValueError, "parameter group")
def test_the_state_of_another_optimizer_is_refused(strategy):
    model, optimizer, _ = mirrored(strategy)
    other = torch.optim.SGD(list(model.parameters())[:1], lr=0.1)
    optimizer.load_state_dict(other.state_dict())


@refused(ValueError, "empty parameter list")
def test_an_optimizer_over_an_exhausted_iterator_is_refused(strategy):
    model, _, _ = mirrored(strategy)
    parameters = model.parameters()
    list(parameters)
    torch.optim.SGD(parameters, lr=0.1)


def test_a_forward_hook_sees_every_part_and_a_gradient_hook_the_whole_gradient(strategy):
    lengths, gradients = [], []
    model, expected = strategy.mirror(net()), net()
    model[0].register_forward_hook(lambda module, args, output: lengths.append(len(output)))
    model[0].weight.register_hook(lambda grad: gradients.append(grad.clone()))
    loss_of(model).backward()
    loss_of(expected).backward()
    assert lengths == [4, 4]
    assert len(gradients) == 1
    assert torch.allclose(gradients[0], expected[0].weight.grad, atol=1e-6)


# Wrappers


def wrapped_by_the_trainer(model):
    """As transformers' Trainer does."""
    names = {"__name__": "transformers.trainer", "wrap": DataParallel}
    exec("def wrap_model(model): return wrap(model)", names)
    return names["wrap_model"](model)


WRAPPERS = {
    "DataParallel": (lambda s, m: DataParallel(m), "DataParallel", "leave it out"),
    "DataParallel around it": (
        *(lambda s, m: DataParallel(nn.Sequential(m)), "DataParallel", "leave it out"),
    ),
    "Trainer": (
        lambda s, m: wrapped_by_the_trainer(m),
        *("leave it out: transformers' Trainer", "arguments._n_gpu = 1"),
    ),
    "DDP": (lambda s, m: DistributedDataParallel(m), "DistributedDataParallel", "leave it out"),
    "DDP in run": (
        lambda s, m: s.run(lambda: DistributedDataParallel(m)),
        *("DistributedDataParallel", "leave it out"),
    ),
    "mirrored": (lambda s, m: s.mirror(DataParallel(net())), "DataParallel", "model.module"),
    "inside": (
        lambda s, m: s.mirror(nn.Sequential(nn.Linear(3, 3), DataParallel(net()))),
        *("1 is a DataParallel", "model.module"),
    ),
}


@each(WRAPPERS)
def test_wrappers_for_several_devices_are_refused(case, strategy):
    program, *words = case
    model, _, _ = mirrored(strategy)
    check_refusal((program, StrategyError, *words), strategy, model)


@refused(StrategyError, "DataParallel", "leave it out")
def test_data_parallel_made_in_the_scope_is_refused(strategy):
    with strategy.scope():
        DataParallel(net())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@refused(StrategyError, "ScriptModule")
def test_a_script_module_is_refused(strategy):
    strategy.mirror(torch.jit.trace(net(), X))


# Threads


@refused(StrategyError, "another thread")
def test_a_run_in_another_thread_during_a_run_is_refused(strategy):
    errors = []

    def other():
        try:
            strategy.run(lambda: 1)
        except StrategyError as error:
            errors.append(error)

    def program():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    strategy.run(program)
    raise errors[0]


def test_a_thread_of_the_program_can_call_the_model(strategy):
    model, _, _ = mirrored(strategy)
    outputs = []
    thread = threading.Thread(target=lambda: outputs.append(model(X)))
    thread.start()
    thread.join()
    assert torch.allclose(outputs[0], net()(X), atol=1e-6)
