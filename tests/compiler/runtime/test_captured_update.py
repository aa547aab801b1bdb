"""After ``strategy.compile(module)``, updates run captured, with the bits of uncompiled ones."""

import copy
import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import mirror
from mirror.compiler.runtime import update_plan
from mirror.errors import CompileError
from tests.conftest import step_as_on_distinct_devices
from tests.gpu.compiling import compiling_gpus
from tests.gpu.graphs import graphs_on

PACKAGE = str(Path(mirror.__file__).parent)
STEPS = 7

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD of momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD by lists": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, maximize=True),
    "AdamW by lists": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "AdamW of a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.01)),
    "NAdam": lambda p: optim.NAdam(p),
    "NAdam by lists": lambda p: optim.NAdam(p, foreach=True),
    "RAdam": lambda p: optim.RAdam(p),
    "RAdam by lists": lambda p: optim.RAdam(p, foreach=True),
    "Adamax": lambda p: optim.Adamax(p),
    "Adamax by lists": lambda p: optim.Adamax(p, foreach=True),
    "ASGD": lambda p: optim.ASGD(p, t0=2),
    "ASGD by lists": lambda p: optim.ASGD(p, t0=2, foreach=True),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adadelta by lists": lambda p: optim.Adadelta(p, foreach=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr_decay=0.1),
    "Adagrad by lists": lambda p: optim.Adagrad(p, foreach=True),
    "RMSprop": lambda p: optim.RMSprop(p, centered=True, momentum=0.5),
    "RMSprop by lists": lambda p: optim.RMSprop(p, foreach=True),
    "Rprop": lambda p: optim.Rprop([q for q in p if q.dim()]),
    "Rprop by lists": lambda p: optim.Rprop([q for q in p if q.dim()], foreach=True),
}
CAPTURABLE = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: optim.Adam(p, lr=0.01, capturable=True),
    "Adam, one by one": lambda p: optim.Adam(p, lr=0.01, capturable=True, foreach=False),
    "AdamW of a tensor": lambda p: optim.AdamW(
        p, lr=torch.tensor(0.01, device="cuda:0"), capturable=True
    ),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, capturable=True),
}


class Net(nn.Module):
    """Layers, and a parameter without a dimension; one layer can be left out."""

    def __init__(self):
        super().__init__()
        self.first, self.other, self.last = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, both=True):
        h = self.first(x) + self.other(x) if both else self.first(x)
        return self.last(h.tanh()) * self.scale


class Loop:
    """A loop as programs write it."""

    def __init__(self, make, n, *, compiles, fallback="error", update="captured", **options):
        torch.manual_seed(0)
        devices, own_steps = options.pop("devices", ["cpu"] * n), options.pop("own_steps", False)
        self.strategy = mirror.MirroredStrategy(devices=devices, **options)
        if own_steps:
            step_as_on_distinct_devices(self.strategy)
        with self.strategy.scope():
            self.model = Net()
            self.optimizer = make(self.model.parameters())
        if compiles == "update":  # which saves the time of a trace
            calls = self.strategy._group.compiled_calls
            calls.capture_updates(self.model, update, fallback=fallback)
        elif compiles:
            self.strategy.compile(self.model, fallback=fallback, update=update)
        self.device, self.number, self.both = devices[0], 0, True
        self.scheduler, self.found = None, []

    @property
    def update(self):
        capturer = self.strategy._group.compiled_calls._capturer
        return None if capturer is None else capturer.update_of(self.optimizer)

    def backward(self):
        x, y = torch.randn(6, 4).to(self.device), torch.randn(6, 3).to(self.device)
        loss = F.mse_loss(self.model(x, self.both), y)
        loss.backward()
        return loss

    def step(self):
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def train(self, change=None, steps=STEPS):
        torch.manual_seed(1)
        for self.number in range(steps):
            if change is None or not change(self):
                self.step()
        state = self.optimizer.state_dict()["state"].values()
        tensors = [value for entry in state for value in entry.values()]
        self.found += [t.detach().cpu().clone() for t in (*self.model.parameters(), *tensors)]
        self.found += [p.grad.cpu() for p in self.model.parameters() if p.grad is not None]
        self.strategy.close()
        return self.found


def compare(make, n, change=None, compiles=True, **options):
    """Trains uncompiled and compiled, which must have equal bits; returns the captured update."""
    uncompiled = Loop(make, n, compiles=False, **options).train(change)
    loop = Loop(make, n, compiles=compiles, **options)
    found = loop.train(change)
    assert len(found) == len(uncompiled)
    assert all(map(torch.equal, found, uncompiled))
    return loop.update


def scheduling(loop):
    if loop.scheduler is None:
        loop.scheduler = optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
    loop.step()
    loop.scheduler.step()
    return True


def editing_groups(loop):
    group = loop.optimizer.param_groups[0]
    if loop.number == 3:
        group["weight_decay"] = 0.2
        if group.get("momentum"):
            group["momentum"] = 0.4
    elif loop.number == 5:
        group["lr"] = group["lr"] * 0.5
        if "betas" in group:
            group["betas"] = (0.5, 0.6)


def loading(loop):
    if loop.number == 2:
        loop.saved = copy.deepcopy(loop.optimizer.state_dict())
    elif loop.number == 5:
        loop.optimizer.load_state_dict(loop.saved)


def skipping(loop):
    loop.both = loop.number in (0, 4, 5)  # the counts of steps of one layer stay behind


@pytest.mark.parametrize("change", [scheduling, editing_groups, loading, skipping])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_each_optimizer_has_the_bits_of_an_uncompiled_one(make, change):
    assert compare(make, 2, change, "update").num_runs


def adding_a_group(loop):
    if loop.number == 3:
        with loop.strategy.scope():
            loop.layer = loop.strategy.mirror(nn.Linear(4, 3))
        loop.optimizer.add_param_group({"params": loop.layer.parameters(), "lr": 0.5})
    if loop.number >= 3:
        loop.optimizer.zero_grad()
        loop.layer(torch.ones(6, 4)).square().mean().backward()
        loop.backward()
        loop.optimizer.step()
        return True


def keeping_zeros(loop):
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    loop.optimizer.step()
    return True


def scaling(loop):
    if loop.scheduler is None:
        loop.scheduler = mirror.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    loop.optimizer.zero_grad()
    loop.scheduler.scale(loop.backward()).detach()
    loop.scheduler.step(loop.optimizer)
    loop.scheduler.update()
    return True


def changing_state(loop):
    state = loop.optimizer.state[loop.model.first.weight]
    if loop.number == 3:
        state["exp_avg"].zero_()
        state["step"].fill_(1)
    elif loop.number == 5:
        state["exp_avg_sq"] = torch.ones_like(state["exp_avg_sq"])
        for p in loop.model.parameters():
            loop.optimizer.state[p]["step"].data.fill_(4)


def replacing_values(loop):
    if loop.number == 3:
        loop.model.first.weight.data = torch.ones(5, 4)
        loop.model.scale.requires_grad_(False)
    elif loop.number == 5:
        loop.model.load_state_dict({k: v * 0.5 for k, v in loop.model.state_dict().items()})
        loop.model.scale.requires_grad_(True)


def in_run(loop):
    def step():
        loop.optimizer.zero_grad()
        loop.model(torch.full((6, 4), loop.number / 9)).square().mean().backward()
        loop.optimizer.step()
        if loop.number == 4:
            loop.optimizer.step()

    loop.strategy.run(step)
    return True


def holding_gradients(loop):
    loop.step()
    loop.found += [p.grad for p in loop.model.parameters()]
    versions = [p._version for p in loop.model.parameters()]
    loop.optimizer.step()
    assert all(p._version > v for p, v in zip(loop.model.parameters(), versions, strict=True))
    return True


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        None,
        adding_a_group,
        keeping_zeros,
        scaling,
        changing_state,
        replacing_values,
        in_run,
        holding_gradients,
    ],
)
def test_what_surrounds_an_update_is_as_it_is_uncompiled(change, n):
    assert compare(OPTIMIZERS["AdamW"], n, change).num_runs >= 2


@pytest.mark.parametrize("change", [in_run, skipping])
@pytest.mark.parametrize("schedule", ["lockstep", "parallel"])
def test_replicas_that_step_by_themselves_share_the_recorded_operations(schedule, change):
    update = compare(OPTIMIZERS["AdamW"], 3, change, schedule=schedule, own_steps=True)
    assert all(update._plans)
    if schedule == "lockstep":
        assert update.num_runs <= 2 * STEPS


@pytest.mark.parametrize("name", ["Adam", "Rprop", "NAdam"])
def test_large_parameters_are_updated_some_at_a_time(name, monkeypatch):
    monkeypatch.setattr(update_plan, "CHUNK_BYTES", 100)
    compare(OPTIMIZERS[name], 2, skipping)


def test_groups_of_several_kinds():
    def make(params):
        scale, *others = params
        slow = {"params": [scale, others[0]], "lr": 0.5, "weight_decay": 0.0}
        return optim.AdamW([slow, {"params": others[1:], "amsgrad": True}], lr=0.01)

    compare(make, 2, editing_groups)


def with_hooks(loop):
    if loop.number == 3:
        loop.handle = loop.optimizer.register_step_post_hook(
            lambda *args: loop.found.append(torch.ones(1))
        )
    elif loop.number == 5:
        loop.handle.remove()


def with_closures(loop):
    if loop.number in (3, 4):
        loop.optimizer.zero_grad()
        loop.optimizer.step(loop.backward)
        return True


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("change", "why"), [(with_hooks, "it has hooks of steps"), (with_closures, "a closure")]
)
def test_steps_with_hooks_or_closures_run_uncompiled_with_one_warning(change, why, n, caplog):
    assert compare(OPTIMIZERS["SGD"], n, change, fallback="eager").num_runs == 1
    assert [record.getMessage().count(why) for record in caplog.records] == [1]


class Own(optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (optim.Adafactor, "update each element by itself"),
        (Own, "update each element by itself"),
        (lambda p: optim.Rprop(p), "it reads the value of a tensor"),
    ],
    ids=["Adafactor", "own", "Rprop of a number"],
)
def test_other_optimizers_run_uncompiled_with_one_warning(make, why, caplog):
    compare(make, 2, fallback="eager")
    assert [record.getMessage().count(why) for record in caplog.records] == [1]
    with pytest.raises(CompileError, match=why):
        Loop(make, 2, compiles=True).train()


def test_sharded_state_is_updated_as_it_is_uncompiled():
    assert compare(OPTIMIZERS["AdamW"], 2, scheduling, optimizer_state="sharded").num_runs == 0


def test_parameters_in_one_memory_are_refused():
    def make(params):
        params = list(params)
        params[2].data = params[1].data.view(5, 4)[:, 0]
        return optim.SGD(params, lr=0.1)

    with pytest.raises(CompileError, match="lie in the same memory"):
        Loop(make, 1, compiles=True).train()


def test_an_update_can_be_left_out_and_taken_back():
    loop = Loop(OPTIMIZERS["SGD"], 2, compiles=True, update="eager")
    loop.step()
    assert loop.update is None
    loop.strategy.compile(loop.model)
    loop.step()
    assert loop.update.num_runs == 1
    loop.strategy.compile(loop.model, update="eager")
    loop.step()
    assert loop.update is None
    with pytest.raises(ValueError, match="update"):
        loop.strategy.compile(loop.model, update="never")
    loop.strategy.close()


def test_the_code_of_an_optimizer_runs_once_where_its_numbers_stay():
    loop = Loop(OPTIMIZERS["SGD"], 2, compiles=True)
    loop.train()
    assert loop.update.num_runs == 1


def test_a_copy_of_an_optimizer_has_an_update_of_its_own():
    loop = Loop(OPTIMIZERS["Adam"], 1, compiles=True)
    loop.step()
    loop.step()
    model, optimizer = copy.deepcopy((loop.model, loop.optimizer))
    before = [p.detach().clone() for p in loop.model.parameters()]
    model(torch.ones(6, 4)).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, loop.model.parameters(), before))
    assert not all(map(torch.equal, model.parameters(), before))
    loop.strategy.close()


def calls_of_a_step(make, num_layers, n):
    """Returns the calls of a captured step: of Python, and by mirror of C.

    The least of several: what is freed meanwhile, of other tests, does not count.
    """
    strategy = mirror.MirroredStrategy(devices=["cpu"] * n)
    with strategy.scope():
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(num_layers)])
        optimizer = make(model.parameters())
    strategy._group.compiled_calls.capture_updates(model, "captured", fallback="error")
    count = [0, 0]

    def note(frame, event, arg):
        name = frame.f_code.co_filename
        count[0] += event == "call"
        count[1] += event == "c_call" and name.startswith(PACKAGE)

    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(4, 4)).sum().backward()
            count[:] = 0, 0
            sys.setprofile(note)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
            found.append(tuple(count))
    finally:
        gc.enable()
    strategy.close()
    return min(found[3:])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("name", "most"), [("SGD", 160), ("AdamW", 360), ("AdamW by lists", 430), ("AdamW fused", 265)]
)
def test_calls_of_python_do_not_grow_with_the_parameters(name, most, n):
    few, many = (calls_of_a_step(OPTIMIZERS[name], num, n) for num in (2, 20))
    assert few == many
    assert few[0] <= most


@pytest.mark.parametrize("make", CAPTURABLE.values(), ids=CAPTURABLE)
@pytest.mark.parametrize("n", [1, 2])
def test_on_gpus_an_update_is_a_graph_while_its_numbers_stay(make, n):
    def change(loop):
        if loop.number == 5:
            rate = loop.optimizer.param_groups[0]["lr"]
            if isinstance(rate, torch.Tensor):
                rate.mul_(0.5)
            else:
                loop.optimizer.param_groups[0]["lr"] = rate * 0.5
        loop.step()
        plans = [] if loop.update is None else [p[0] for p in loop.update._plans if p]
        have_graphs.append([plan._graph is not None for plan in plans])
        return True

    found = []
    for compiles in (False, True):
        have_graphs: list[list[bool]] = []
        with compiling_gpus(n) as gpus, graphs_on(gpus) as graphs:
            devices = [f"cuda:{i}" for i in range(n)]
            loop = Loop(make, n, compiles=compiles, devices=devices, schedule="lockstep")
            found.append(loop.train(change, 9))
            launches = graphs.events.count(("launch", torch.device("cuda:0")))
    assert all(map(torch.equal, *found))
    assert have_graphs[4] == have_graphs[-1] == [True] * n
    assert launches


@pytest.mark.parametrize(
    "make", [optim.Adam, lambda p: optim.SGD(p, lr=0.1, foreach=False)], ids=["Adam", "SGD"]
)
def test_on_gpus_other_updates_are_launched_by_the_kernel(make):
    found = []
    for compiles in (False, True):
        with compiling_gpus(2) as gpus, graphs_on(gpus):
            devices = ["cuda:0", "cuda:1"]
            loop = Loop(make, 2, compiles=compiles, devices=devices, schedule="lockstep")
            found.append(loop.train(scheduling))
    assert all(map(torch.equal, *found))
    assert loop.update.num_runs <= STEPS + 1  # of both replicas
