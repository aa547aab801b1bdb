"""Mistakes and habits around a mirrored model: copies, files, averages, hooks, surgery."""

import copy
import io
import threading

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import mirror
from mirror import StrategyError
from tests.mistakes.mistake import (
    X,
    Y,
    loss_of,
    mirrored,
    net,
    plain,
    refused,
    same,
    sgd,
    step,
    trains_as_plain,
)


def reloaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_saving_a_whole_model(strategy):
    model, optimizer, _ = mirrored(strategy)
    step(model, optimizer)
    loaded = reloaded(model)
    assert same(loaded, plain(steps=1))
    assert not mirror.is_mirrored(loaded)


def test_saving_in_the_scope(strategy):
    with strategy.scope():
        model = net()
        state = reloaded(model.state_dict())
    assert all(type(value) is torch.Tensor for value in state.values())
    assert list(state) == list(net().state_dict())


def test_loading_a_state_dict_of_a_wrapped_model(strategy):
    """What DataParallel and DDP have saved has another prefix, as on one device."""
    model, _, _ = mirrored(strategy)
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"module\.0\.weight"):
        model.load_state_dict(state)
    model.load_state_dict({name.removeprefix("module."): v for name, v in state.items()})


def test_loading_before_and_after_mirroring(strategy):
    state = plain().state_dict()
    model, _, _ = mirrored(strategy)
    model.load_state_dict(state)
    strategy.run(model, args=(X,))
    assert strategy.check_replicas() == 4
    assert same(model, plain())


def test_loading_an_optimizers_state_before_its_first_step(strategy):
    def trained(model, split):
        optimizer = torch.optim.Adam(model.parameters())
        step(model, optimizer)
        if split:
            state, optimizer = optimizer.state_dict(), torch.optim.Adam(model.parameters())
            optimizer.load_state_dict(reloaded(state))
        step(model, optimizer)
        return model

    assert same(trained(strategy.mirror(net()), split=True), trained(net(), split=False))


@refused(ValueError, "parameter group")
def test_loading_the_state_of_another_optimizer(strategy):
    model, optimizer, _ = mirrored(strategy)
    other = torch.optim.SGD(list(model.parameters())[:1], lr=0.1)
    optimizer.load_state_dict(other.state_dict())


def test_an_average_of_the_model(strategy):
    def train(model):
        optimizer = sgd(model)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for _ in range(3):
            step(model, optimizer)
            average.update_parameters(model)
        return average.module

    assert same(train(strategy.mirror(net())), train(net()))


def test_an_average_by_hand(strategy):
    def train(model):
        optimizer, average = sgd(model), copy.deepcopy(model)
        for _ in range(3):
            step(model, optimizer)
            with torch.no_grad():
                for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    ours.lerp_(theirs, 0.5)
        return average

    assert same(train(strategy.mirror(net())), train(net()))


def test_an_average_of_references(strategy):
    """``state_dict()`` without a copy follows the training, as on one device."""
    model, optimizer, _ = mirrored(strategy)
    best = model.state_dict()
    step(model, optimizer)
    assert torch.equal(best["0.weight"], model.state_dict()["0.weight"])


@pytest.mark.parametrize("when", ["before the optimizer", "after it"])
def test_freezing_the_first_layer(when, strategy):
    def train(model):
        if when == "before the optimizer":
            model[0].requires_grad_(False)
        optimizer = sgd(model)
        model[0].requires_grad_(False)
        for _ in range(2):
            step(model, optimizer)
        return model

    assert same(train(strategy.mirror(net())), train(net()))


def test_freezing_with_an_optimizer_over_what_is_left(strategy):
    def train(model):
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            step(model, optimizer)
        return model

    assert same(train(strategy.mirror(net())), train(net()))


@refused(ValueError, "empty parameter list")
def test_an_optimizer_over_parameters_that_are_used_up(strategy):
    model, _, _ = mirrored(strategy)
    parameters = model.parameters()
    list(parameters)
    torch.optim.SGD(parameters, lr=0.1)


def test_an_optimizer_over_a_state_dict_trains_nothing(strategy):
    """Detached tensors have no gradients, as on one device."""
    model, _, _ = mirrored(strategy)
    optimizer = torch.optim.SGD(model.state_dict().values(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    assert same(model, net())


def test_weights_shared_before_mirroring(strategy):
    def build():
        model = net()
        model.append(nn.Linear(2, 2, bias=False)).append(nn.Linear(2, 2, bias=False))
        nn.init.eye_(model[3].weight)
        model[4].weight = model[3].weight
        return model

    expected, model = build(), strategy.mirror(build())
    step(expected, sgd(expected))
    step(model, sgd(model))
    assert same(model, expected)
    assert model[3].weight is model[4].weight


def test_weights_shared_after_mirroring(strategy):
    def train(model):
        model.append(nn.Linear(2, 2, bias=False)).append(nn.Linear(2, 2, bias=False))
        nn.init.eye_(model[3].weight)
        model[4].weight = model[3].weight
        step(model, sgd(model))
        return model

    assert same(train(strategy.mirror(net())), train(net()))


def test_a_layer_replaced_after_mirroring(strategy):
    def train(model):
        model[2] = nn.Linear(4, 2)
        nn.init.constant_(model[2].weight, 0.1)
        nn.init.zeros_(model[2].bias)
        optimizer = sgd(model)
        for _ in range(2):
            step(model, optimizer)
        return model

    assert same(train(strategy.mirror(net())), train(net()))
    strategy.check_replicas()


def test_parameters_initialised_after_mirroring(strategy):
    def train(model):
        model.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)
        for _ in range(2):
            step(model, sgd(model))
        return model

    assert same(train(strategy.mirror(net())), train(net()))
    strategy.check_replicas()


def test_a_forward_hook_sees_every_part(strategy):
    seen = []
    model = strategy.mirror(net())
    model[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    model(X)
    assert seen == [4, 4]


def test_a_gradient_hook_sees_the_whole_gradient(strategy):
    seen = []
    model, expected = strategy.mirror(net()), net()
    model[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
    loss_of(model).backward()
    loss_of(expected).backward()
    assert len(seen) == 1
    assert torch.allclose(seen[0], expected[0].weight.grad, atol=1e-6)


def test_an_output_read_as_a_scalar_in_a_condition(strategy):
    model, optimizer, _ = mirrored(strategy)
    if loss_of(model).item() > 0:
        step(model, optimizer)
    assert same(model, plain(steps=1))


def test_checkpointing_in_run(strategy):
    def program(model, optimizer, x=X, y=Y):
        optimizer.zero_grad()
        output = checkpoint(model, x, use_reentrant=False)
        nn.functional.cross_entropy(output, y).backward()
        optimizer.step()

    trains_as_plain(strategy, program)


def test_functional_call_in_run(strategy):
    def program(model, optimizer, x=X, y=Y):
        optimizer.zero_grad()
        output = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
        nn.functional.cross_entropy(output, y).backward()
        optimizer.step()

    trains_as_plain(strategy, program)


def test_autocast_in_run(strategy):
    model, optimizer, batch = mirrored(strategy)

    def program(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()

    strategy.run(program, args=batch)
    strategy.check_replicas()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@refused(StrategyError, "ScriptModule")
def test_a_script_module(strategy):
    strategy.mirror(torch.jit.trace(net(), X))


# Threads and processes


@refused(StrategyError, "another thread")
def test_run_from_a_thread_while_a_run_goes_on(strategy):
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


def test_a_thread_of_the_users_reads_the_model(strategy):
    model, _, _ = mirrored(strategy)
    outputs = []
    thread = threading.Thread(target=lambda: outputs.append(model(X)))
    thread.start()
    thread.join()
    assert torch.allclose(outputs[0], net()(X), atol=1e-6)
