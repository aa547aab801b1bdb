"""Compiled steps whose optimizers step between programs: state is sharded, or on a device."""

import contextlib
import copy
import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirror
from tests.gpu.compiling import compiling_gpus
from tests.gpu.graphs import graphs_on
from tests.oracle import assert_same
from tests.pairs import each_once, quick_of

SIZES = (8, 7, 6, 8, 8)
STRATEGIES = {
    "sharded": functools.partial(mirror.MirroredStrategy, optimizer_state="sharded"),
    "central": mirror.CentralStorageStrategy,
}


class Parts:
    """A model, its optimizer, and a second one over another module, each of fixed values."""

    def __init__(self, make=torch.optim.AdamW, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.average = nn.Linear(4, 6)
        self.optimizer = make(self.model.parameters(), lr=0.05, **options)
        self.other = torch.optim.SGD(self.average.parameters(), lr=0.1, momentum=0.9)
        self.calls = []
        self.scaler = mirror.amp.GradScaler("cpu", init_scale=4.0)

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)

    def backward(self, x, y):
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        return loss


def clips(own, x, y):
    loss = own.backward(x, y)
    nn.utils.clip_grad_norm_(own.model.parameters(), 0.1)
    own.optimizer.step()
    return loss


def clears_at_the_end(own, x, y):
    loss = own.loss(x, y)
    loss.backward()
    own.optimizer.step()
    own.optimizer.zero_grad()
    return loss


def accumulates(own, x, y):
    loss = own.loss(x, y)
    loss.backward()
    own.optimizer.step()
    return loss


def changes_values_before(own, x, y):
    loss = own.backward(x, y)
    with torch.no_grad():
        own.model[0].weight.mul_(0.9)
    own.optimizer.step()
    return loss


def changes_values_after(own, x, y):
    loss = own.backward(x, y)
    own.optimizer.step()
    with torch.no_grad():
        for parameter in own.model.parameters():
            parameter.clamp_(-0.4, 0.4)
    return loss


def averages_values(own, x, y):
    loss = own.backward(x, y)
    own.optimizer.step()
    with torch.no_grad():
        for mean, parameter in zip(
            own.average.parameters(), own.model[0].parameters(), strict=True
        ):
            mean.lerp_(parameter, 0.1)
    return loss


def returns_the_change(own, x, y):
    before = own.model[2].bias.detach() * 1.0
    same = own.model[2].weight.detach().clone()
    loss = own.backward(x, y)
    own.optimizer.step()
    moved = (own.model[2].bias.detach() - before).sum() + (own.model[2].weight - same).sum()
    return loss + own.loss(x, y) + moved.detach()


def steps_two(own, x, y):
    loss = own.backward(x, y)
    own.other.zero_grad()
    own.optimizer.step()
    with torch.no_grad():
        hidden = own.model[0](x)
    (own.average(x) - hidden).square().mean().backward()
    own.other.step()
    return loss


def scales(own, x, y):
    own.optimizer.zero_grad()
    loss = own.loss(x, y)
    own.scaler.scale(loss).backward()
    own.scaler.step(own.optimizer)
    own.scaler.update()
    return loss.detach()


PROGRAMS = [clips, clears_at_the_end, accumulates, changes_values_before, changes_values_after]
PROGRAMS += [averages_values, returns_the_change, steps_two, scales]
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "nesterov": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True),
    "adafactor": torch.optim.Adafactor,
}


def batches(program=None):
    generator = torch.Generator().manual_seed(1)
    made = [(torch.randn(n, 4, generator=generator), torch.arange(n) % 3) for n in SIZES]
    if program is scales:  # skips the fourth step
        made[3][0][0, 0] = torch.inf
    return made


def left_by(own):
    parts = (own.model, own.average, own.optimizer, own.other)
    grads = [None if p.grad is None else p.grad.clone() for p in own.model.parameters()]
    return copy.deepcopy([part.state_dict() for part in parts]), grads, own.calls


def trained(make, program, strategy=None, mode=None, between=lambda own, i: None):
    own, losses = Parts(make), []

    def step(x, y):
        return program(own, x, y)

    compiled = step if strategy is None else strategy.compile(step, mode=mode)
    data = batches(program)
    if strategy is not None:
        data = list(strategy.distribute_dataset(data))
    for i, batch in enumerate(data):
        loss = compiled(*batch)
        losses.append((loss if strategy is None else strategy.reduce("mean", loss)).detach())
        between(own, i)
    if strategy is not None:
        assert compiled.num_traces >= 1
        strategy.check_replicas()
    return left_by(own), losses


def compared(kind, program, make, *, mode="trace", **options):
    expected = trained(make, program, **options)
    with STRATEGIES[kind](["cpu"] * 3) as strategy, strategy.scope():
        assert_same(trained(make, program, strategy, mode, **options), expected)


@each_once(
    program=PROGRAMS,
    make=[pytest.param(m, id=n) for n, m in OPTIMIZERS.items()],
    kind=STRATEGIES,
)
def test_a_step_is_that_of_one_device(kind, program, make):
    compared(kind, program, make)


@pytest.mark.slow
@each_once(program=PROGRAMS, kind=STRATEGIES)
def test_inductors_step_is_that_of_one_device(kind, program):
    compared(kind, program, torch.optim.AdamW, mode="inductor")


@each_once(
    program=quick_of(PROGRAMS, [clips, steps_two]),
    kind=STRATEGIES,
)
def test_a_step_in_cuda_graphs_is_that_of_one_device(kind, program):
    expected = trained(torch.optim.AdamW, program)
    with compiling_gpus(2) as gpus, graphs_on(gpus) as graphs:
        with STRATEGIES[kind](["cuda:0", "cuda:1"], backend="naive") as strategy, strategy.scope():
            found = trained(torch.optim.AdamW, program, strategy, "graphs")
            assert_same(found, expected)
        assert "launch" in {event[0] for event in graphs.events}


def hook_and_schedule(own, i):
    if i == 0:
        own.optimizer.register_step_post_hook(lambda *_: own.calls.append(i))
    if i == 2:
        own.optimizer.param_groups[0].update(lr=0.01, weight_decay=0.3)


def edit_state(own, i):
    for entry in own.optimizer.state.values():
        entry["exp_avg"].mul_(0.5)


def load(own, i):
    if i == 2:
        own.optimizer.load_state_dict(copy.deepcopy(own.optimizer.state_dict()))
        own.model.load_state_dict({k: v + 0.1 for k, v in own.model.state_dict().items()})


def regroup(own, i):
    if i == 2:
        (group,) = own.optimizer.param_groups
        moved = group["params"][2:]
        del group["params"][2:]
        own.optimizer.add_param_group({"params": moved, "lr": 0.01})


@each_once(between=[hook_and_schedule, edit_state, load, regroup], kind=STRATEGIES)
def test_what_changes_between_steps_counts(kind, between):
    compared(kind, clips, torch.optim.AdamW, between=between)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_compiled_steps_and_others_may_alternate(kind):
    def train(step, other, own):
        for i, batch in enumerate(batches() if other is None else other.batches):
            (step if other is None or i % 2 == 0 else other.step)(*batch)
        return left_by(own)

    own = Parts()
    expected = train(lambda x, y: accumulates(own, x, y), None, own)
    with STRATEGIES[kind](["cpu"] * 2) as strategy, strategy.scope():
        mine = Parts()
        compiled = strategy.compile(lambda x, y: accumulates(mine, x, y), mode="trace")
        other = types.SimpleNamespace(
            step=lambda *batch: strategy.run(lambda x, y: accumulates(mine, x, y), batch),
            batches=list(strategy.distribute_dataset(batches())),
        )
        assert_same(train(compiled, other, mine), expected)
        assert compiled.num_traces == 1


def with_a_closure(own, x, y):
    return own.optimizer.step(lambda: own.backward(x, y))


def twice(own, x, y):
    own.backward(x, y)
    own.optimizer.step()
    own.optimizer.step()


def own_gradient(own, x, y):
    own.backward(x, y)
    own.model[2].bias.grad = torch.zeros(3) + x.mean()
    own.optimizer.step()


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            with_a_closure,
            "optimizer.step with a closure cannot be followed",
        ),
        (twice, "a second step of one optimizer"),
        (
            own_gradient,
            "gives the optimizer a parameter or a gradient with a value that differs between",
        ),
    ],
)
def test_what_a_step_between_programs_cannot_do_is_refused(kind, program, words):
    with STRATEGIES[kind](["cpu"] * 2) as strategy, strategy.scope():
        own = Parts()
        compiled = strategy.compile(lambda x, y: program(own, x, y), mode="trace")
        first, second, *_ = strategy.distribute_dataset(
            [(torch.ones(4, 4), torch.ones(4).long())] * 2
        )
        with pytest.raises((mirror.CompileError, mirror.StrategyError)) as refused:
            compiled(*first)
            compiled(*second)
    assert words in str(refused.value)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_an_error_of_the_optimizer_leaves_equal_replicas(kind):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            if fails:
                raise ValueError("no")

    fails = False
    with STRATEGIES[kind](["cpu"] * 2) as strategy, strategy.scope():
        own = Parts(Failing)
        compiled = strategy.compile(lambda x, y: clips(own, x, y), mode="trace")
        for i, batch in enumerate(strategy.distribute_dataset(batches())):
            fails = i == 3
            with pytest.raises(ValueError, match="no") if fails else contextlib.nullcontext():
                compiled(*batch)
            strategy.check_replicas()
        assert compiled.num_traces == 1
