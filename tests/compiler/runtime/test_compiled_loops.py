"""Loops around a compiled module, as programs write them, leave the bits that they leave without.

Each program is a function of a machine: it builds what it needs, and keeps what it sees.
"""

import contextlib
import copy
import cProfile
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirror
from mirror.replica.modules.module_owner import interceptor_of
from tests.gpu.compiling import compiling_gpus
from tests.gpu.graphs import graphs_on


class Net(nn.Module):
    rate = 0.1

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.norm(self.first(x)).tanh()
        return self.last(F.dropout(h, self.rate, self.training) if self.rate else h)


class Machine:
    """Makes models, which are compiled or not, and keeps what a program sees."""

    def __init__(self, devices, compiles):
        self.strategy = mirror.MirroredStrategy(
            devices, "naive", schedule="lockstep", verify="off"
        )
        self.compiles, self.found, self.models = compiles, [], []
        self.device = self.strategy.devices[0]
        self.generator = torch.Generator().manual_seed(1)

    def compile(self, model):
        if self.compiles:
            self.strategy.compile(model, fallback="error")
            self.models.append(model)
        return model

    def model(self, make=Net):
        with self.strategy.scope():
            return self.compile(make())

    def sgd(self, model, **options):
        with self.strategy.scope():
            options = {"lr": 0.1, "momentum": 0.9, **options}
            return torch.optim.SGD(model.parameters(), **options)

    def batch(self, size=6):
        return torch.randn(size, 6, generator=self.generator).to(self.device)

    def batches(self, *sizes):
        return [self.batch(size) for size in sizes or (6,) * 4]

    def keep(self, *tensors):
        self.found += [t if t is None else t.detach().cpu().clone() for t in tensors]

    def step(self, model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        self.keep(loss, *model.parameters())


def keeping_outputs(m):
    model = m.model()
    optimizer = m.sgd(model)
    kept = []
    for x in m.batches():
        optimizer.zero_grad()
        output = model(x)
        output.square().mean().backward()
        optimizer.step()
        kept.append((output, output.detach().clone()))
    assert all(torch.equal(output, then) for output, then in kept)
    m.keep(*[output for output, _ in kept])


def keeping_outputs_without_gradients(m):
    model = m.model().eval()
    with torch.no_grad():
        kept = [(output, output.clone()) for output in map(model, m.batches())]
    assert all(torch.equal(output, then) for output, then in kept)
    m.keep(*[output for output, _ in kept])


def two_forwards_before_a_backward(m):
    model = m.model()
    optimizer = m.sgd(model)
    for x in m.batches():
        optimizer.zero_grad()
        (model(x).square().mean() + model(x + 1).abs().mean()).backward()
        optimizer.step()
        m.keep(*model.parameters())


def backward_in_another_order(m):
    model = m.model()
    for x in m.batches():
        model.zero_grad()
        losses = [model(x + i).square().mean() for i in range(3)]
        for i in (1, 2, 0):
            losses[i].backward()
            m.keep(*[p.grad for p in model.parameters()])


def outputs_without_backward(m):
    model = m.model()
    optimizer = m.sgd(model)
    for x in m.batches():
        kept = [model(x - 1), model(x - 2)]
        m.step(model, optimizer, x)
        m.keep(*kept)


class Raises(Net):
    def forward(self, x):
        if x.shape[1] != 6:
            raise ValueError("columns")
        return super().forward(x)


def exceptions_in_forward(m):
    model = m.model(Raises)
    optimizer = m.sgd(model)
    for x in m.batches():
        with pytest.raises(ValueError, match="columns"):
            model(x[:, :5])
        m.step(model, optimizer, x)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.inner(x))


def module_within_another(m):
    inner = m.model()
    outer = m.model(lambda: Outer(inner))
    optimizer = m.sgd(outer)
    for x in m.batches():
        m.step(outer, optimizer, x)
        m.step(inner, optimizer, x)


def module_of_two_models(m):
    inner = m.model()
    pair = [m.model(lambda: Outer(inner)) for _ in range(2)]
    optimizers = [m.sgd(model) for model in pair]
    for x in m.batches():
        for model, optimizer in zip(pair, optimizers, strict=True):
            m.step(model, optimizer, x)


def second_pass_of_a_graph(m):
    model = m.model()
    for x in m.batches():
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        m.keep(*[p.grad for p in model.parameters()])
        loss.backward()
        m.keep(*[p.grad for p in model.parameters()])


def two_optimizers(m):
    model = m.model()
    with m.strategy.scope():
        pair = [
            torch.optim.Adam([*model.first.parameters(), *model.norm.parameters()], lr=0.01),
            torch.optim.SGD(model.last.parameters(), lr=0.1),
        ]
    for i, x in enumerate(m.batches()):
        model.zero_grad()
        model(x).square().mean().backward()
        pair[0].step()
        if i % 2:
            pair[1].step()
        m.keep(*model.parameters())


def optimizer_before_compile(m):
    with m.strategy.scope():
        model = Net()
    optimizer = m.sgd(model)
    for i, x in enumerate(m.batches()):
        if i == 1:
            m.compile(model)
        m.step(model, optimizer, x)


def loading_states(m):
    model = m.model()
    optimizer = m.sgd(model)
    for i, x in enumerate(m.batches(*(6,) * 6)):
        if i == 2:
            states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if i == 4:
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        m.step(model, optimizer, x)


def accumulating(m):
    model = m.model()
    optimizer = m.sgd(model)
    for i, x in enumerate(m.batches(8, 8, 6, 8, 8, 6)):
        with m.strategy.no_sync() if i % 3 < 2 else contextlib.nullcontext():
            (model(x).square().sum() / 22).backward()
        if i % 3 == 2:
            m.keep(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            m.keep(*model.parameters())


def averaging_copies(m):
    model = m.model()
    optimizer = m.sgd(model)
    for i, x in enumerate(m.batches()):
        m.step(model, optimizer, x)
        if i == 1:
            ema = copy.deepcopy(model)
        if i >= 1:
            with torch.no_grad():
                for mean, p in zip(ema.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)
            m.keep(ema.eval()(x))


def saving_whole_models(m):
    model = m.model()
    optimizer = m.sgd(model)
    for x in m.batches():
        m.step(model, optimizer, x)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        m.keep(torch.load(file, weights_only=False).eval()(x))


def freezing(m):
    model = m.model()
    optimizer = m.sgd(model)
    for i, x in enumerate(m.batches(*(6,) * 6)):
        model.first.requires_grad_(i < 2 or i > 4)
        m.step(model, optimizer, x)


def scheduling(m):
    model = m.model()
    optimizer = m.sgd(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for x in m.batches():
        m.step(model, optimizer, x)
        scheduler.step()


def keeping_zero_gradients(m):
    model = m.model()
    optimizer = m.sgd(model, weight_decay=0.1)
    for x in m.batches():
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()
        m.keep(*model.parameters(), *[p.grad for p in model.parameters()])


def changing_gradients(m):
    model = m.model()
    optimizer = m.sgd(model)
    for i, x in enumerate(m.batches()):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        m.keep(*[p.grad for p in model.parameters()])
        model.last.weight.grad.mul_(1 + i)
        model.last.bias.grad = torch.full_like(model.last.bias.grad, 0.5 + i)
        optimizer.step()
        m.keep(*model.parameters())


def changing_groups(m):
    model = m.model()
    with m.strategy.scope():
        optimizer = torch.optim.Adam(model.first.parameters(), lr=0.01)
    for i, x in enumerate(m.batches()):
        if i == 2:
            optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.1})
        optimizer.param_groups[0]["betas"] = (0.9 - i / 10, 0.99)
        m.step(model, optimizer, x)


def profiling(m):
    """A profiler in C has the place of what observes calls: those beside it are not traced."""
    model = m.model()
    optimizer = m.sgd(model)
    for i, x in enumerate(m.batches(*(6,) * 6)):
        with cProfile.Profile() if i in (0, 2) else contextlib.nullcontext():
            m.step(model, optimizer, x)


class Heads(Net):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(8, 1)

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(h), self.other(h)


def one_head_at_a_time(m):
    model = m.model(Heads)
    optimizer = m.sgd(model)
    for i, x in enumerate(m.batches(*(6,) * 6)):
        optimizer.zero_grad()
        model(x)[i > 3].square().mean().backward()
        m.keep(*[p.grad for p in model.parameters()])
        optimizer.step()


def passes_that_reach_one_of_two_models(m):
    inner, outer = m.model(), m.model(lambda: Outer(nn.Linear(4, 4)))
    outer.forward = lambda x, h: (outer.head(h), outer.inner(x[:, :4]))
    for i, x in enumerate(m.batches()):
        inner.zero_grad()
        outer(x, inner(x))[i % 2].square().mean().backward()
        m.keep(*[p.grad for p in inner.parameters()])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.layer(self.layer(x).tanh())


def autocast_of_dropout_and_of_parameters_used_twice(m):
    """A parameter is cast once, so the gradients of its uses are added in half precision."""
    model = m.model(lambda: nn.Sequential(Tied(), nn.Linear(6, 8), nn.Dropout(0.1)))
    for x in m.batches(6, 6, 6):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        output.float().square().mean().backward()
        m.keep(output, *[p.grad for p in model.parameters()])


PROGRAMS = [
    *(keeping_outputs, keeping_outputs_without_gradients, two_forwards_before_a_backward),
    *(backward_in_another_order, outputs_without_backward, exceptions_in_forward),
    *(module_within_another, module_of_two_models, second_pass_of_a_graph, two_optimizers),
    *(optimizer_before_compile, loading_states, accumulating, averaging_copies),
    *(saving_whole_models, freezing, scheduling, keeping_zero_gradients, changing_gradients),
    *(changing_groups, profiling, one_head_at_a_time, passes_that_reach_one_of_two_models),
    autocast_of_dropout_and_of_parameters_used_twice,
]


def run(program, devices, compiles):
    torch.manual_seed(0)
    machine = Machine(devices, compiles)
    with machine.strategy:
        program(machine)
        called = [interceptor_of(model).compiled for model in machine.models]
        assert sum(one.num_traces for one in called) >= bool(called)
    return machine.found


def check(program, devices):
    expected, found = (run(program, devices, compiles) for compiles in (False, True))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one is other if one is None else torch.equal(one, other)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("n", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_loop_leaves_the_bits_that_it_leaves_uncompiled(program, n):
    check(program, ["cpu"] * n)


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_not_called_in_passes_through_other_outputs(method, caplog):
    """With one replica they are autograd's, which calls them also where no gradient arrives."""
    machine, called = Machine(["cpu"], compiles=False), []
    with machine.strategy:
        model = machine.model(Heads)
        machine.strategy.compile(model)
        for i, x in enumerate(machine.batches(*(6,) * 5)):
            if i == 3:
                getattr(model.other.bias, method)(lambda _, i=i: called.append(i))
            model(x)[i % 2].square().mean().backward()
    assert called == [3]
    assert "parameter 'other.bias' has a hook, and only some outputs" in caplog.text


ON_GPUS = [
    keeping_outputs,
    two_forwards_before_a_backward,
    backward_in_another_order,
    accumulating,
    one_head_at_a_time,
]


@pytest.mark.parametrize("program", ON_GPUS, ids=lambda program: program.__name__)
def test_a_loop_on_gpus_leaves_the_bits_that_it_leaves_uncompiled(program):
    with compiling_gpus(2) as gpus, graphs_on(gpus) as graphs:
        check(program, gpus.devices)
        assert not gpus.violations
        assert "launch" in [event[0] for event in graphs.events]
