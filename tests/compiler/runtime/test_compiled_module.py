"""``strategy.compile(module)``: the unchanged loop has the bits that it has uncompiled."""

import array
import collections
import contextvars
import copy
import ctypes
import dataclasses
import datetime
import functools
import gc
import itertools
import logging
import os
import pathlib
import pickle
import queue
import random
import secrets
import subprocess
import sys
import threading
import time
import types
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mirror
from mirror.errors import CompileError, StrategyError
from mirror.replica.modules.module_owner import interceptor_of
from tests.pairs import quick_of
from tests.profiled import profiled

SIZES = (6, 6, 6, 4, 6, 4)


class Net(nn.Module):
    """Two layers; a program is what ``compute`` does between them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.prepare()

    def prepare(self): ...

    def forward(self, x):
        return self.last(self.compute(self.first(x)))

    def compute(self, h):
        return h.relu()


class Norms(Net):
    def prepare(self):
        self.norm, self.scale = nn.BatchNorm1d(8), nn.LayerNorm(8)
        self.register_buffer("count", torch.zeros(()))

    def compute(self, h):
        self.count += 1
        return self.scale(self.norm(h)) * self.count.sqrt()


class Draws(Net):
    def compute(self, h):
        torch.rand(3)  # not used: the generator moves all the same
        h = F.dropout(h, 0.5, self.training) + torch.randn_like(h)
        return h.masked_fill(torch.rand_like(h) > 0.7, 0.0)


class Attention(Net):
    def compute(self, h):
        q, k, v = h[:, None, None].expand(-1, 2, 3, -1).mul(2).unbind(2)
        return F.scaled_dot_product_attention(q, k, v).mean(1)


class Checkpointed(Net):
    def compute(self, h):
        return checkpoint(lambda h: torch.tanh(h) * h, h, use_reentrant=False)


class Twice(Net):
    def compute(self, h):
        return h.relu() + (h @ self.first.weight @ self.first.weight.t()).tanh()


class InPlace(Net):
    def compute(self, h):
        h = h.mul(2)
        h[:, 0] = 1.0
        return h.add_(1).relu_()


class Several(Net):
    """Several outputs, of which a loss may use some."""

    def forward(self, x):
        left, right = self.first(x).chunk(2, 1)
        return {"y": self.last(torch.cat([left.tanh(), right], 1)), "left": left, "name": "x"}


CATALOGUE = [Net, Norms, Draws, Attention, Checkpointed, Twice, InPlace, Several]


class Loop:
    """A loop as programs write it."""

    def __init__(self, make, n, *, compiles, fallback="error", outside=False, **options):
        torch.manual_seed(0)
        self.strategy = mirror.MirroredStrategy(devices=["cpu"] * n, **options)
        with self.strategy.scope():
            self.model = make() if not outside else None
        if outside:
            self.model = self.strategy.mirror(make())
        with self.strategy.scope():
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if compiles:
            assert self.strategy.compile(self.model, fallback=fallback) is self.model
            self.strategy.compile(self.model, fallback=fallback)
        self.found, self.traces = [], None

    @property
    def compiled(self):
        return interceptor_of(self.model).compiled

    def __call__(self, x):
        found = self.model(x)
        return found["y"] if isinstance(found, dict) else found

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self(x), y)
        loss.backward()
        self.optimizer.step()
        self.keep(loss)

    def step_in_run(self, x, y):
        n = self.strategy.num_replicas_in_sync

        def parts(tensor):
            return self.strategy.distribute_values_from_function(
                lambda context: tensor[context.replica_id_in_sync_group :: n].clone()
            )

        def step(x, y):
            self.optimizer.zero_grad()
            loss = F.mse_loss(self(x), y) + F.mse_loss(self(x + 1), y)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        losses = self.strategy.run(step, args=(parts(x), parts(y)))
        self.keep(*self.strategy.local_results(losses))

    def evaluate(self, x):
        self.model.eval()
        with torch.no_grad():
            self.keep(self(x))
        self.model.train()

    def keep(self, *tensors):
        self.found += [tensor.detach().clone() for tensor in tensors]

    def train(self, step=None, sizes=SIZES):
        torch.manual_seed(1)
        step = Loop.step if step is None else step
        for size in sizes:
            x, y = torch.randn(size, 6), torch.randn(size, 4)
            step(self, x, y)
        self.keep(*self.model.state_dict().values())
        if interceptor_of(self.model) is not None and self.compiled is not None:
            self.traces = self.compiled.num_traces
        self.strategy.close()
        return self.found


def compare(make, n, step=None, *, sizes=SIZES, **options):
    """Trains uncompiled and compiled, which must have equal bits; returns the number of traces."""
    uncompiled = Loop(make, n, compiles=False, **options).train(step, sizes)
    loop = Loop(make, n, compiles=True, **options)
    found = loop.train(step, sizes)
    assert len(found) == len(uncompiled)
    assert all(map(torch.equal, found, uncompiled))
    return loop.traces


def evaluated(loop, x, y):
    loop.step(x, y)
    loop.evaluate(x)


@pytest.mark.parametrize("make", CATALOGUE)
@pytest.mark.parametrize("n", [1, 2])
def test_a_loop_with_evaluations_has_the_bits_of_an_uncompiled_one(make, n):
    assert compare(make, n, evaluated) >= 4  # two sizes each of training and of evaluation


@pytest.mark.parametrize("n", [1, 3])
def test_calls_in_run_have_the_bits_of_uncompiled_ones(n):
    assert compare(Norms, n, Loop.step_in_run, sizes=(6,) * 4) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "parallel"},
        {"optimizer_state": "sharded"},
        {"outside": True},
    ],
    ids=str,
)
def test_other_strategies_and_modules_made_outside_the_scope(options):
    assert compare(Norms, 3, sizes=(6,) * 4, **options) == 1


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, x):
        return self.table(x)


@pytest.mark.parametrize("n", [1, 2])
def test_an_error_in_a_replay_names_the_replica_and_the_next_call_is_right(n):
    with mirror.MirroredStrategy(["cpu"] * n) as strategy:
        model = strategy.compile(strategy.mirror(Lookup()), fallback="error")
        good, bad = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 7])
        expected = model(good)
        for _ in range(2):
            model(good)
        with pytest.raises(IndexError) as raised:
            model(bad)
        if n > 1:
            assert any("replica 1" in note for note in raised.value.__notes__)
        assert torch.equal(model(good), expected)
        assert interceptor_of(model).compiled.num_traces == 1


def test_a_replay_runs_in_the_callers_thread_and_compares_guards_once():
    threads, guarded = set(), []

    def profile(frame, event, _):
        if event == "call" and "mirror" in frame.f_code.co_filename:
            threads.add(threading.get_ident())
            guarded.extend([frame] * (frame.f_code.co_name == "hold"))

    with profiled(profile, threads=True), mirror.MirroredStrategy(["cpu"] * 3) as strategy:
        model = strategy.compile(strategy.mirror(Net()), fallback="error")
        for _ in range(4):
            threads.clear()
            guarded.clear()
            model(torch.ones(6, 6)).sum().backward()
        assert threads == {threading.get_ident()}
        assert len(guarded) == 1


def test_parts_of_unequal_sizes_have_a_program_each():
    assert compare(Net, 3, sizes=(7,) * 4) == 2


def clipping(loop, x, y):
    loop.optimizer.zero_grad()
    F.mse_loss(loop(x), y).backward()
    loop.keep(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1))
    loop.optimizer.step()


def accumulating(loop, x, y):
    F.mse_loss(loop(x), y).backward()
    loop.keep(*[p.grad for p in loop.model.parameters()])
    if len(loop.found) % 8 == 0:
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def without_sync(loop, x, y):
    with loop.strategy.no_sync():
        F.mse_loss(loop(x), y).backward()
    clipping(loop, x, y)


def hooking(loop, x, y):
    if not loop.found:
        loop.model.first.weight.register_hook(lambda grad: grad * 2)
    loop.step(x, y)


def two_calls(loop, x, y):
    loop.optimizer.zero_grad()
    loop(x)
    (F.mse_loss(loop(x), y) + F.mse_loss(loop(2 * x), y)).backward()
    loop.optimizer.step()


def under_autocast(loop, x, y):
    loop.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(loop(x).float(), y)
    loss.backward()
    loop.optimizer.step()


def of_inputs(loop, x, y):
    x.requires_grad_()
    loop.step(x, y)
    loop.keep(x.grad)


def twice_backward(loop, x, y):
    loop.optimizer.zero_grad()
    loss = F.mse_loss(loop(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loop.optimizer.step()


def writing_the_output(loop, x, y):
    loop.optimizer.zero_grad()
    F.mse_loss(loop(x).mul_(2), y).backward()
    loop.optimizer.step()


def checkpointing(loop, x, y):
    x.requires_grad_()
    for use_reentrant in (True, False):
        F.mse_loss(checkpoint(loop, x, use_reentrant=use_reentrant), y).backward()
    loop.optimizer.step()


def copying(loop, x, y):
    loop.step(x, y)
    for other in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        loop.keep(other.eval()(x))
    loop.model.load_state_dict(loop.model.state_dict())
    with torch.inference_mode():
        loop.keep(loop(x))


def scaling(loop, x, y):
    scaler = mirror.amp.GradScaler("cpu", init_scale=8.0)
    loop.optimizer.zero_grad()
    scaler.scale(F.mse_loss(loop(x), y)).backward()
    scaler.step(loop.optimizer)
    scaler.update()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "step",
    [
        *(clipping, accumulating, without_sync, hooking, two_calls, under_autocast, of_inputs),
        *(twice_backward, writing_the_output, checkpointing, copying, scaling),
    ],
)
def test_what_surrounds_a_call_is_as_it_is_uncompiled(step, n):
    compare(Norms, n, step, sizes=(6,) * 4)


def of_other_outputs(loop, x, y):
    loop.optimizer.zero_grad()
    found = loop.model(x)
    names = ("y", "left") if len(loop.found) in (0, 3) else ("y",)
    loss = sum(found[name].square().mean() for name in names)
    loss.backward()
    loop.keep(loss)
    loop.optimizer.step()


@pytest.mark.parametrize("n", [1, 2])
def test_other_outputs_may_get_gradients_than_those_of_the_trace(n):
    assert compare(Several, n, of_other_outputs, sizes=(6,) * 6) > 1


def penalizing(loop, x, y):
    x.requires_grad_()
    loop.optimizer.zero_grad()
    output = loop(x)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    loss = F.mse_loss(output, y) + grad.square().sum()
    loss.backward()
    loop.keep(loss)
    loop.optimizer.step()


@pytest.mark.parametrize("n", [1, 2])
def test_gradients_of_gradients_run_uncompiled_with_one_warning(n, caplog):
    assert compare(Norms, n, penalizing, fallback="eager") == 0
    assert [record.getMessage().count("create_graph") for record in caplog.records] == [1]


def change_attribute(model):
    model.norm.eps *= 2


def change_private_attribute(model):
    model._is_scaled = not model._is_scaled


def change_layer(model):
    model.last = nn.Sequential(model.last, nn.Tanh())


def add_hook(model):
    model.first.register_forward_hook(lambda module, args, output: output * 2)


def freeze(model):
    model.first.weight.requires_grad_(not model.first.weight.requires_grad)


def change_global(model):
    SCALE[0] += 1


def replace_data(model):
    model.first.weight.data = model.first.weight.data * 2


SCALE = [1.0]


class Scaled(Norms):
    _is_scaled = False

    def prepare(self):
        super().prepare()
        self._is_scaled = True

    def compute(self, h):
        return super().compute(h) * (SCALE[0] if self._is_scaled else 3.0)


@pytest.mark.parametrize(
    ("change", "retraces"),
    [
        (change_attribute, True),
        (change_private_attribute, True),
        (change_layer, True),
        (add_hook, True),
        (freeze, True),
        (change_global, True),
        (replace_data, False),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_what_a_trace_takes_for_granted_is_compared_before_each_call(change, retraces, n):
    def step(loop, x, y):
        loop.found.append(torch.zeros(()))
        if len(loop.found) in (4, 7):
            change(loop.model)
        loop.optimizer.zero_grad()
        F.mse_loss(loop(x), y).backward()
        loop.optimizer.step()

    def make():
        SCALE[0] = 1.0
        return Scaled()

    assert (compare(make, n, step, sizes=(6,) * 8) > 1) == retraces


@pytest.mark.parametrize("n", [1, 2])
def test_a_value_that_alternates_has_a_program_each(n):
    def step(loop, x, y):
        loop.model.norm.momentum = 0.1 if len(loop.found) % 2 else 0.2
        loop.step(x, y)

    assert compare(Norms, n, step, sizes=(6,) * 8) == 2


@pytest.mark.parametrize("n", [1, 2])
def test_each_autocast_mode_has_a_program(n, caplog):
    def step(loop, x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled=len(loop.found) % 4 < 2):
            loop.step(x, y)

    assert compare(Norms, n, step, sizes=(6,) * 12) == 2
    assert not caplog.records


class Comprehends(Net):
    def compute(self, h):
        return torch.cat([part * h.shape[1] for part in h.chunk(2, 1)], 1)


@pytest.mark.parametrize("n", [1, 2])
def test_a_comprehension_may_read_variables_around_it(n):
    assert compare(Comprehends, n) > 0


@pytest.mark.parametrize("replicas", quick_of(["1", "2"], ["2"]))
def test_mirror_run_compiles_the_models_of_a_script(replicas, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "torch.manual_seed(0)\n"
        "model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))\n"
        "optimizer, criterion = torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss()\n"
        "for _ in range(4):\n"
        "    optimizer.zero_grad()\n"
        "    loss = criterion(model(torch.randn(4, 4)), torch.zeros(4, 2))\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    print(loss.item())\n"
        "from mirror.replica.modules.module_owner import interceptor_of as route\n"
        "compiled = getattr(route(model), 'compiled', None)\n"
        "print('traces', compiled and compiled.num_traces)\n"
    )
    printed = []
    for options in ([], ["--compile"]):
        command = [sys.executable, "-m", "mirror", "run", "--replicas", replicas, *options]
        done = subprocess.run([*command, str(script)], capture_output=True, text=True, check=True)
        printed.append(done.stdout.splitlines())
    assert printed[0][:-1] == printed[1][:-1]
    assert [lines[-1] for lines in printed] == ["traces None", "traces 1"]


# What a program would do once and never again


class Counter(Net):
    def prepare(self):
        self.n = 0

    def compute(self, h):
        self.n += 1
        return h * self.n


class Inside(Net):
    def prepare(self):
        self.inner = Counter()

    def forward(self, x):
        return self.inner(x)


class OfClass(Net):
    n = 0

    def compute(self, h):
        type(self).n += 1
        return h * type(self).n


class Appends(Net):
    def prepare(self):
        self.seen = []

    def compute(self, h):
        self.seen.append(1)
        return h


class Private(Net):
    def prepare(self):
        self._seen = []

    def compute(self, h):
        self._seen.append(1)
        return h * len(self._seen)


class Entry(Net):
    def prepare(self):
        self.state = {"n": 0}

    def compute(self, h):
        self.state["n"] += 1
        return h * self.state["n"]


class Fields(Net):
    def prepare(self):
        self.state = type("State", (), {})()
        self.state.n = 0

    def compute(self, h):
        self.state.n += 1
        return h * self.state.n


class Slots(Net):
    def prepare(self):
        self.state = type("State", (), {"__slots__": ("n",)})()
        self.state.n = 0

    def compute(self, h):
        self.state.n += 1
        return h * self.state.n


def make_tick():
    n = 0

    def tick():
        nonlocal n
        n += 1
        return n

    return tick


class Closure(Net):
    def prepare(self):
        self.tick = make_tick()

    def compute(self, h):
        return h * self.tick()


CALLS = 0


class Global(Net):
    def compute(self, h):
        global CALLS
        CALLS += 1
        return h * CALLS


class Default(Net):
    def prepare(self):
        Default.compute.__defaults__[0][0] = 0

    def compute(self, h, state=[0]):  # noqa: B006
        state[0] += 1
        return h * state[0]


class Iterator(Net):
    def prepare(self):
        self.numbers = itertools.count(1)

    def compute(self, h):
        return h * next(self.numbers)


class Generated(Net):
    def prepare(self):
        self.numbers = (i for i in range(1, 100))

    def compute(self, h):
        return h * next(self.numbers)


class Rotates(Net):
    def prepare(self):
        self.numbers = collections.deque([1, 2, 3])

    def compute(self, h):
        self.numbers.rotate(1)
        return h * self.numbers[0]


class Set(Net):
    def prepare(self):
        self.numbers = set()

    def compute(self, h):
        self.numbers.add(len(self.numbers))
        return h * len(self.numbers)


class Array(Net):
    def prepare(self):
        self.numbers = np.zeros(1)

    def compute(self, h):
        self.numbers[0] += 1
        return h * float(self.numbers[0])


class Depth(Net):
    def compute(self, h):
        for _ in range(random.randint(1, 3)):
            h = h.tanh()
        return h


class NumpysDepth(Net):
    def compute(self, h):
        return h.tanh() if np.random.rand() > 0.5 else h


class OwnRandom(Net):
    def prepare(self):
        self.random = random.Random(0)

    def compute(self, h):
        return h * self.random.random()


class NumpysRandom(Net):
    def prepare(self):
        self.random = np.random.default_rng(0)

    def compute(self, h):
        return h * self.random.random()


class Environment(Net):
    def compute(self, h):
        return h * float(os.environ.get("TEST_OF_COMPILED_MODULE", "1"))


class Value(Net):
    def compute(self, h):
        return h / h.abs().max().item()


class Branch(Net):
    def compute(self, h):
        return h if h.sum() > 0 else -h


class Converts(Net):
    def compute(self, h):
        return h * float(h.detach().numpy().mean())


class Stores(Net):
    def compute(self, h):
        self.hidden = h
        return h


class Moves(Net):
    """Draws in a checkpointed layer, whose random state is restored in backward."""

    def compute(self, h):
        return checkpoint(F.dropout, h, use_reentrant=False)


class Reentrant(Net):
    def compute(self, h):
        return checkpoint(torch.tanh, h, use_reentrant=True)


class Itself(Net):
    def forward(self, x):
        return super().forward(x), x


class Rate(Net):
    def prepare(self):
        self.schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(self.parameters(), 0.1), 1)

    def compute(self, h):
        return h * self.schedule.get_last_lr()[0]


class Sorted(Net):
    def compute(self, h):
        return h[:, h.sum(0) > 0].sum(1, keepdim=True) * torch.ones(8)


class Collects(Net):
    """Replicas set the list first, and change it in place from then on."""

    seen = None

    def compute(self, h):
        if self.seen is None:
            self.seen = []
        self.seen.append(1)
        return h * len(self.seen)


class Held(Net):
    """Reads a number from an object whose state no guard sees."""

    make, read = None, None

    def prepare(self):
        self.kept = type(self).make()

    def compute(self, h):
        return h * (1 + float(type(self).read(self.kept)) % 7)


def holding(name, make, read):
    members = {"make": staticmethod(make), "read": staticmethod(read)}
    return type(name, (Held,), members)


def called(function, value):
    function()
    return value


def appended(values):
    values.append(1)
    return len(values)


def counted(state):
    state.n = 1 + getattr(state, "n", 0)
    return state.n


def queued(queue):
    queue.put(1)
    return queue.qsize()


def bound_append():
    values = []
    return types.SimpleNamespace(append=values.append, size=values.__len__)


HELD = [
    holding("BitGenerator", lambda: np.random.PCG64(0), lambda kept: kept.random_raw()),
    holding("ArrayOfNumbers", lambda: array.array("i"), appended),
    holding("Bytes", bytearray, appended),
    holding("UsersList", collections.UserList, appended),
    holding("Ordered", collections.OrderedDict, lambda d: len(d) + (d.update({len(d): 1}) or 0)),
    holding("Counted", collections.Counter, lambda c: c.update("a") or c["a"]),
    holding("Defaults", lambda: collections.defaultdict(list), lambda d: appended(d["a"])),
    holding("Queue", queue.SimpleQueue, queued),
    holding("OldQueue", queue.Queue, queued),
    holding("Name", types.SimpleNamespace, lambda s: counted(s)),
    holding("Bound", bound_append, lambda s: called(lambda: s.append(1), s.size())),
    holding("Nested", lambda: {"a": [{"b": [0]}]}, lambda d: appended(d["a"][0]["b"])),
    holding("InTuple", lambda: ([],), lambda t: appended(t[0])),
    holding("OfThread", threading.local, lambda s: counted(s)),
    holding(
        "Variable",
        lambda: contextvars.ContextVar("n", default=0),
        lambda v: called(lambda: v.set(v.get() + 1), v.get()),
    ),
    holding("Partial", lambda: functools.partial(appended, []), lambda f: f()),
    holding("Chain", lambda: collections.ChainMap({}), lambda d: d.update({len(d): 1}) or len(d)),
    holding(
        "Ctypes",
        lambda: ctypes.c_int(0),
        lambda c: called(lambda: setattr(c, "value", c.value + 1), c.value),
    ),
    holding("Cycle", lambda: itertools.cycle([1, 2, 3]), next),
    holding("Secret", lambda: None, lambda _: secrets.randbelow(10**6)),
    holding("Unique", lambda: None, lambda _: uuid.uuid4().int % 10**6),
    holding("Url", lambda: None, lambda _: os.urandom(1)[0]),
    holding("Today", lambda: None, lambda _: datetime.datetime.now().microsecond),
    holding("FileRead", lambda: None, lambda _: len(pathlib.Path(__file__).read_text())),
    holding("FileTime", lambda: None, lambda _: os.stat(__file__).st_mtime % 7),
    holding("Exists", lambda: None, lambda _: os.path.exists(__file__)),
    holding("Garbage", lambda: None, lambda _: gc.get_count()[0]),
    holding("Seeded", lambda: None, lambda _: torch.initial_seed() % 7),
    holding("Number", lambda: None, lambda _: torch.rand(()).item()),
    holding("Perm", lambda: None, lambda _: torch.randperm(5).tolist()[0]),
]


@pytest.mark.parametrize("kind", HELD, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("n", [1, 2])
def test_state_behind_an_object_is_compared_or_refused(kind, n, caplog):
    loop = Loop(functools.partial(remake, kind), n, compiles=True, fallback="eager", verify="off")
    loop.train(of_any, (6,) * 4)
    assert loop.traces == 0
    (warning,) = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert kind.__name__ in warning


def leaving_autocast(loop, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loop.step(x, y)


class LeavesAutocast(Net):
    def compute(self, h):
        with torch.autocast("cpu", enabled=False):
            return h.float() @ self.first.weight @ self.first.weight.t()


def with_other_parameters(loop, x, y):
    given = {k: (p.detach() * 2).requires_grad_() for k, p in loop.model.named_parameters()}
    loss = F.mse_loss(torch.func.functional_call(loop.model, given, (x,)), y)
    loop.keep(*torch.autograd.grad(loss, list(given.values())))


def in_channels_last(loop, x, y):
    if len(loop.found) == 3:
        loop.model.first.weight.data = loop.model.first.weight.data.t().contiguous().t()
    loop.step(x, y)


class Reads(Net):
    def compute(self, h):
        return h * self.first.weight.view(-1).sum() if self.first.weight.is_contiguous() else h


@pytest.mark.parametrize(
    ("make", "step"),
    [(LeavesAutocast, leaving_autocast), (Net, with_other_parameters), (Reads, in_channels_last)],
)
@pytest.mark.parametrize("n", [1, 2])
def test_modes_and_memory_of_parameters_are_those_of_the_call(make, step, n):
    sizes = (6,) * 6
    assert compare(make, n, step, sizes=sizes, fallback="eager") == (
        0 if step is with_other_parameters else 1 + (step is in_channels_last)
    )


def checkpointing_layers(loop, x, y):
    loop.optimizer.zero_grad()
    layers = [loop.model.first, loop.model.last]
    h = checkpoint(layers[0], x, use_reentrant=False)
    F.mse_loss(layers[1](layers[1](h.relu()).repeat(1, 2)), y).backward()
    loop.optimizer.step()


@pytest.mark.parametrize("n", [1, 2])
def test_a_trace_waits_while_a_checkpoint_is_recomputed(n):
    found = []
    for compiles in (False, True):
        loop = Loop(Net, n, compiles=False)
        for layer in (loop.model.first, loop.model.last) if compiles else ():
            loop.strategy.compile(layer)
        found.append(loop.train(checkpointing_layers, (6,) * 4))
    assert all(map(torch.equal, *found))


class Bounded(nn.Parameter):
    bound = 2.0


class OfKind(Net):
    def prepare(self):
        self.first.weight = Bounded(self.first.weight.detach())

    def compute(self, h):
        return h * self.first.weight.bound


class Attributed(Net):
    def prepare(self):
        self.first.weight.bound = 2.0

    def compute(self, h):
        return h * getattr(self.first.weight, "bound", 1.0)


@pytest.mark.parametrize("kind", [OfKind, Attributed])
@pytest.mark.parametrize("n", [1, 2])
def test_parameters_are_read_as_what_they_are(kind, n, caplog):
    assert compare(kind, n, sizes=(6,) * 4, fallback="eager") == 0
    assert len(caplog.records) == 1


REFUSED = [
    Collects,
    *(Counter, Inside, OfClass, Appends, Private, Entry, Fields, Slots, Closure, Global, Default),
    *(Iterator, Generated, Rotates, Set, Array, Depth, NumpysDepth, OwnRandom, NumpysRandom),
    *(
        Environment,
        Value,
        Branch,
        Converts,
        Stores,
        Moves,
        Reentrant,
        Itself,
        Rate,
        Sorted,
    ),
]


def remake(kind):
    global CALLS
    CALLS = OfClass.n = 0
    random.seed(0)
    np.random.seed(0)
    return kind()


def of_any(loop, x, y):
    loop.optimizer.zero_grad()
    found = loop.model(x)
    F.mse_loss(found[0] if isinstance(found, tuple) else found, y).backward()
    loop.optimizer.step()


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("n", [1, 2])
def test_what_a_program_would_freeze_runs_uncompiled_with_one_warning(kind, n, caplog):
    make = functools.partial(remake, kind)
    assert compare(make, n, of_any, sizes=(6,) * 4, fallback="eager", verify="off") == 0
    (warning,) = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert kind.__name__ in warning
    assert __file__ in warning or kind in (Itself, Moves, Reentrant)


FACTOR = 1.0
PASSES: list[Any] = []


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, grad):
        return -FACTOR * grad


class ByFunction(Net):
    def compute(self, h):
        return Reversed.apply(h)


class ByHook(Net):
    def compute(self, h):
        if h.requires_grad:
            h.register_hook(self.scale)
        return h * sum(len(str(scale)) * FACTOR for scale in [h.dim()])

    def scale(self, grad):
        return grad * FACTOR


class ByModuleHook(Net):
    def prepare(self):
        self.first.register_full_backward_hook(lambda _, grads, of: self.scale(grads))
        self.first.register_full_backward_pre_hook(lambda _, grads: self.scale(grads))

    def scale(self, grads):
        return tuple(grad if grad is None else grad * FACTOR for grad in grads)


class Notes(ByHook):
    def scale(self, grad):
        PASSES.append(1)
        return grad * 2


def of_a_factor(loop, x, y):
    global FACTOR
    FACTOR = 1.0 + len(loop.found) // 2
    Loop.step(loop, x.requires_grad_(), y)


@pytest.mark.parametrize("kind", [ByFunction, ByHook, ByModuleHook])
def test_code_of_the_backward_pass_reads_the_values_of_now(kind):
    assert compare(kind, 1, of_a_factor, sizes=(6,) * 6) >= 2


def test_a_hook_that_notes_its_calls_runs_uncompiled_with_one_warning(caplog):
    PASSES.clear()
    assert compare(Notes, 1, sizes=(6,) * 5, fallback="eager") == 0
    (warning,) = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert "PASSES" in warning
    assert len(PASSES) == 2 * 5


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    scale: float = 2.0


Named = collections.namedtuple("Named", "x scale")


class OfStructures(Net):
    def forward(self, given):
        values = given if isinstance(given, collections.UserDict) else None
        x = values["x"] if values is not None else given.x
        return super().forward(x) * (values["scale"] if values is not None else given.scale)


@pytest.mark.parametrize(
    "wrap", [Pair, lambda x: Named(x, 2.0), lambda x: collections.UserDict(x=x, scale=2.0)]
)
@pytest.mark.parametrize("n", [1, 2])
def test_arguments_may_be_structures_of_tensors_and_plain_values(wrap, n):
    def step(loop, x, y):
        loop.step(wrap(x), y)

    assert compare(OfStructures, n, step, sizes=(6,) * 4, verify="off") == 1


class Opaque:
    def __init__(self, x):
        self.x, self.scale = x, 2.0


@pytest.mark.parametrize("n", [1, 2])
def test_an_argument_that_no_trace_follows_is_told_once(n, caplog):
    class OfOpaque(Net):
        def forward(self, x, kind):
            return super().forward(x) * kind.scale

    def step(loop, x, y):
        loop.optimizer.zero_grad()
        F.mse_loss(loop.model(x, kind=Opaque(None)), y).backward()
        loop.optimizer.step()

    assert compare(OfOpaque, n, step, sizes=(6,) * 4, fallback="eager", verify="off") == 0
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "argument 'kind' is a Opaque" in warning
    assert "fallback" not in warning
    with pytest.raises(CompileError, match="argument 'kind' is a Opaque"):
        Loop(OfOpaque, n, compiles=True, verify="off").train(step)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("within", [False, True])
def test_what_torch_has_compiled_runs_as_it_does(within, n, caplog):
    def step(loop, x, y):
        if loop.found:
            loop.step(x, y)
            return
        with loop.strategy.scope():
            compiled = torch.compile(loop.model, backend="eager")
            outer = nn.Sequential(compiled) if within else compiled
        loop.strategy.compile(outer)
        for _ in range(3):
            loop.optimizer.zero_grad()
            F.mse_loss(outer(x), y).backward()
            loop.optimizer.step()
        loop.keep(x)

    uncompiled, compiled = [Loop(Net, n, compiles=False).train(step, (6,) * 2) for _ in range(2)]
    assert all(map(torch.equal, compiled, uncompiled))
    warnings = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert all("compiled it already" in one or "Sequential" in one for one in warnings)
    assert warnings


class OfSparse(Net):
    def forward(self, x, links):
        return super().forward(torch.sparse.mm(links, x))


def test_a_sparse_argument_is_told(caplog):
    def step(loop, x, y):
        F.mse_loss(loop.model(x, torch.eye(6).to_sparse()), y).backward()

    compare(OfSparse, 1, step, sizes=(6,) * 3, fallback="eager")
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "argument 1 is a tensor with the layout sparse_coo" in warning


LOGGER = logging.getLogger("tests.of_forward")


class Logs(Net):
    def compute(self, h):
        LOGGER.debug("%s", h.shape)
        return h


@pytest.mark.parametrize("n", [1, 2])
def test_forward_may_have_a_logger_that_is_silent(n):
    assert compare(Logs, n, sizes=(6,) * 4) == 1


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_forward_that_logs_runs_uncompiled_with_one_warning(level, caplog):
    with caplog.at_level(level, "tests.of_forward"):
        traces = compare(Logs, 1, sizes=(6,) * 4, fallback="eager")
    warnings = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert (traces == 0) == (level == logging.DEBUG) == (len(warnings) == 1)


OPERATIONS = torch.library.Library("mirror_test_module", "DEF")
OPERATIONS.define("double(Tensor x) -> Tensor")
OPERATIONS.impl("double", lambda x: x * 2, "CPU")  # none for the placeholders of a trace


class OfOwnKernel(Net):
    def compute(self, h):
        return h + torch.ops.mirror_test_module.double(h.detach())


def test_a_failing_trace_names_the_users_line(caplog):
    compare(OfOwnKernel, 1, sizes=(6,) * 4, fallback="eager")
    (warning,) = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert __file__ in warning
    assert "torch.ops.mirror_test_module.double(h.detach())" in warning
    assert "\n" not in warning


class OfModes(Net):
    def compute(self, h):
        if self.training:
            return h * h.sum().item()
        return h * h.max().item()


def test_warnings_speak_of_forward_and_not_of_a_step(caplog):
    compare(OfModes, 1, sizes=(6,) * 4, fallback="eager")
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "step" not in warning.replace(__file__, "")
    assert "fallback" not in warning


def test_each_reason_is_told_with_its_mode(caplog):
    compare(OfModes, 1, evaluated, sizes=(6,) * 4, fallback="eager")
    first, second = [r.getMessage().partition(" cannot")[0] for r in caplog.records]
    assert (first, second) == ("calls of OfModes", "calls of OfModes in evaluation")


@pytest.mark.parametrize("n", [1, 2])
def test_a_clock_is_refused_with_its_line(n):
    class Clock(Net):
        def compute(self, h):
            return h * (time.perf_counter() % 2)

    with pytest.raises(CompileError, match=r"perf_counter\(\) % 2.*: it calls perf_counter"):
        Loop(Clock, n, compiles=True, verify="off").train()


FLAGS = {
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "cuDNN": lambda: torch.backends.cudnn.flags(enabled=False, allow_tf32=True),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_that_choose_kernels_are_compared(flag):
    """A graph, or a trace, has the kernels of its flags."""
    with mirror.MirroredStrategy(["cpu"]) as strategy:
        with strategy.scope():
            model = strategy.compile(nn.Linear(6, 4), fallback="error")
        compiled = interceptor_of(model).compiled
        x = torch.ones(3, 6)
        traces = []
        for changes in (False, False, True, True, False, True):
            if changes:
                with FLAGS[flag]():
                    model(x).mean().backward()
            else:
                model(x).mean().backward()
            traces.append(compiled.num_traces)
    # The third call has run uncompiled, with the changed flag; the fourth one is traced.
    assert traces == [0, 1, 1, 2, 2, 2]


def test_more_than_four_shapes_run_uncompiled_with_one_warning(caplog):
    sizes = [size for size in range(6, 18, 2) for _ in range(2)]
    assert compare(Net, 2, sizes=sizes, fallback="eager") == 4
    assert [r.getMessage().count("more than 4 shapes") for r in caplog.records] == [1]


def test_a_value_that_always_changes_ends_in_uncompiled_calls(caplog):
    def step(loop, x, y):
        change_attribute(loop.model)
        loop.step(x, y)

    compare(Norms, 1, step, sizes=(6,) * 16, fallback="eager")
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "'eps'" in warning or "eps" in warning


def test_the_code_of_forward_does_not_run_in_a_replay():
    calls = []

    class Seen(Net):
        def compute(self, h):
            calls.append(torch.compiler.is_compiling())
            return h

    with pytest.raises(CompileError, match="changes variable 'calls'"):
        Loop(Seen, 2, compiles=True, verify="off").train()


def test_a_module_of_another_strategy_is_refused():
    with mirror.MirroredStrategy(devices=["cpu"] * 2) as strategy:
        with pytest.raises(StrategyError, match="does not mirror"):
            strategy.compile(Net())
        with pytest.raises(ValueError, match="fallback"):
            strategy.compile(Net(), fallback="never")


def test_a_loop_over_simulated_gpus_replays_graphs():
    from tests.gpu.compiling import compiling_gpus
    from tests.gpu.graphs import graphs_on

    def train(compiles):
        with compiling_gpus(2) as gpus, graphs_on(gpus) as graphs:
            torch.manual_seed(0)
            strategy = mirror.MirroredStrategy(devices=["cuda:0", "cuda:1"], backend="naive")
            with strategy.scope():
                model = Norms()
                optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            if compiles:
                strategy.compile(model, fallback="error")
            found = []
            for i in range(6):
                x, y = torch.randn(8, 6).to("cuda:0"), torch.randn(8, 4).to("cuda:0")
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                if i == 4:  # while the graphs' memory is in use
                    loss = loss + F.mse_loss(model(2 * x), y)
                loss.backward()
                optimizer.step()
                found.append(loss.detach().cpu())
            found += [tensor.cpu() for tensor in model.state_dict().values()]
            strategy.close()
            events = [event[0] for event in graphs.events]
            assert not gpus.violations
        return found, events.count("capture"), events.count("launch")

    (uncompiled, *none), (compiled, *counts) = train(False), train(True)
    assert none == [0, 0]
    assert all(map(torch.equal, uncompiled, compiled))
    # Of two replicas: forward and backward, captured at the second replay, and the update.
    assert counts == [6, 22]
