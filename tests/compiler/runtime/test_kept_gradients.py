"""Gradients after steps that run as CUDA graphs: right, whoever holds them, and copied when read.

On simulated GPUs with graphs that replay; the expected values are those of the same steps on the
CPU, where every step leaves new gradients.
"""

import pytest
import torch
from torch import nn

import mirror
from tests.gpu.compiling import Training, compiling_gpus, plain_step, usual_step
from tests.gpu.graphs import graphs_on

PLACES = [
    ["cuda:0"],
    ["cuda:0", "cuda:1"],
    pytest.param(["cuda:0"] * 2, marks=pytest.mark.slow),
    pytest.param(["cuda:0", "cuda:1", "cuda:0"], marks=pytest.mark.slow),
]


def move(training):
    """Moves the gradients to other parameters, as a program with master weights does."""
    others = [nn.Parameter(torch.zeros_like(p)) for p in training.model.parameters()]
    for other, parameter in zip(others, training.model.parameters(), strict=True):
        other.grad, parameter.grad = parameter.grad, None
    return others


def transpose(training):
    for parameter in training.model.parameters():
        if parameter.dim() == 2:
            parameter.grad.t_()


def change(training, seed):
    for parameter in training.model.parameters():
        parameter.grad = None if seed % 2 else torch.ones_like(parameter)


def grads(training):
    return [parameter.grad for parameter in training.model.parameters()]


def keep_and_clear(training):
    found = grads(training)
    training.optimizer.zero_grad()
    return found


HOLD = {  # what a program does after step number ``seed``; returns what it keeps
    "nothing": lambda training, seed: (),
    "objects": lambda training, seed: grads(training),
    "one": lambda training, seed: grads(training)[1:2],
    "every other": lambda training, seed: grads(training) if seed % 2 else (),
    "read": lambda training, seed: grads(training) and (),
    "views": lambda training, seed: [grad.view(-1) for grad in grads(training)],
    "parts": lambda training, seed: [grads(training)[0][:1]],
    "detached": lambda training, seed: [grad.detach() for grad in grads(training)],
    "data": lambda training, seed: [grad.data for grad in grads(training)],
    "moved": lambda training, seed: move(training) if seed > 1 else (),
    "cleared": lambda training, seed: training.optimizer.zero_grad(),
    "zeroed": lambda training, seed: training.optimizer.zero_grad(set_to_none=False),
    "kept and cleared": lambda training, seed: keep_and_clear(training),
    "written": lambda training, seed: [grad.mul_(2) for grad in grads(training)] and (),
    "written and kept": lambda training, seed: [grad.mul_(2) for grad in grads(training)],
    "transposed": lambda training, seed: transpose(training),
    "replaced": lambda training, seed: change(training, seed),
    "evaluated": lambda training, seed: training.strategy.run(lambda: None) and (),
}


def values_of(held):
    found = [value for one in held for value in (one, one.grad if one.is_leaf else None)]
    return [value.detach().cpu().clone() for value in found if value is not None]


def train(names, mode, make_step):
    """Returns what a program that holds gradients has after some steps, by the way it does."""
    training = Training(names, mode=mode, make_step=make_step)
    for seed in range(3):
        training.call(8, seed)
    found = {}
    for how in HOLD:
        held = []
        for seed in range(3):
            training.call(8, seed)
            held += HOLD[how](training, seed) or ()
        training.call(8)  # may write into what is held
        found[how] = values_of([*held, *training.model.parameters()])
    training.close()
    return found


@pytest.mark.parametrize("names", PLACES)
def test_gradients_are_those_of_steps_that_leave_new_ones(names):
    make_step = usual_step if len(set(names)) == 1 else plain_step  # clipped, or as reduced
    expected = train(["cpu"] * len(names), "trace", make_step)
    with compiling_gpus(2) as gpus, graphs_on(gpus) as graphs:
        found = train(names, "auto", make_step)
        assert sum(kind == "launch" for kind, *_ in graphs.events) >= 4 * len(HOLD)
    for how in HOLD:
        said = f"{how}: {{}}".format
        torch.testing.assert_close(found[how], expected[how], msg=said)


def train_until_an_error(names, mode):
    """Returns the gradients after a step that fails, as the step before has left them."""
    guards = mirror.Guards(finite_gradients=True)
    strategy = mirror.MirroredStrategy(names, "naive", guards=guards)
    training = Training(names, strategy=strategy, mode=mode, make_step=plain_step)
    for seed in range(5):
        training.call(8, seed)
    x, y = training.parts(8, 5)
    x = mirror.PerReplica([part * float("nan") for part in x.values])
    with pytest.raises(mirror.GradientError):
        training.compiled(x, y)
    found = values_of(grads(training))
    strategy.close()
    return found


@pytest.mark.parametrize("names", PLACES)
def test_an_error_leaves_the_gradients_of_the_step_before(names):
    expected = train_until_an_error(["cpu"] * len(names), "trace")
    with compiling_gpus(2) as gpus, graphs_on(gpus) as graphs:
        torch.testing.assert_close(train_until_an_error(names, "auto"), expected)
        assert "launch" in {kind for kind, *_ in graphs.events}


@pytest.mark.parametrize("names", PLACES[:2])
def test_two_steps_leave_the_gradients_of_their_own_parameters(names):
    def train(names, mode):
        strategy = mirror.MirroredStrategy(names, "naive")
        pairs = [Training(names, strategy=strategy, mode=mode) for _ in range(2)]
        found = []
        for seed in range(8):
            pairs[seed % 2].call(8, seed)
            if seed in (5, 7):
                found += [grad.cpu().clone() for pair in pairs for grad in grads(pair)]
        strategy.close()
        return found

    expected = train(["cpu"] * len(names), "trace")
    with compiling_gpus(2) as gpus, graphs_on(gpus):
        torch.testing.assert_close(train(names, "auto"), expected)


def move_in_run(training):
    def step():
        for parameter in training.model.parameters():
            parameter.data = parameter.data * 0.5

    training.strategy.run(step)


def move_buffers_in_run(training):
    def step():
        training.model[1].running_mean.data = training.model[1].running_mean.data * 0.5

    training.strategy.run(step)


def replace_buffers_in_run(training):
    def step():
        training.model[1].running_mean = training.model[1].running_mean * 0.5

    training.strategy.run(step)


def move_outside(training):
    for parameter in training.model.parameters():
        parameter.data = parameter.data * 0.5


def move_buffers_outside(training):
    training.model[1].running_mean.data = training.model[1].running_mean.data * 0.5


def move_state(training):
    for state in training.optimizer.state.values():
        state["momentum_buffer"].data = state["momentum_buffer"].data * 0.5


def load_state(training):
    training.optimizer.load_state_dict(training.optimizer.state_dict())


def run_uncompiled(training):
    training.strategy.run(training.step, training.parts(8, 1))


MOVES = [
    move_in_run,
    move_buffers_in_run,
    replace_buffers_in_run,
    move_outside,
    move_buffers_outside,
    move_state,
    load_state,
    run_uncompiled,
]


def train_moving(names, mode):
    training = Training(names, mode=mode)
    for seed in range(4):
        training.call(8, seed)
    found = []
    for move in MOVES:
        move(training)
        for seed in range(3):
            training.call(8, seed)
        state = [*training.model.state_dict().values()]
        found.append((move.__name__, [tensor.detach().cpu().clone() for tensor in state]))
    training.strategy.check_replicas()
    training.close()
    return found


@pytest.mark.parametrize("names", [pytest.param(PLACES[0], marks=pytest.mark.slow), *PLACES[1:]])
def test_memory_that_moves_between_steps_is_followed(names):
    expected = train_moving(["cpu"] * len(names), "trace")
    with compiling_gpus(2) as gpus, graphs_on(gpus):
        found = train_moving(names, "auto")
    for (move, state), (_, values) in zip(found, expected, strict=True):
        torch.testing.assert_close(state, values, msg=f"{move}: {{}}".format)
