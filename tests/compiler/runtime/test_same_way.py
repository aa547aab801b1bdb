"""A compiled module takes the way of an uncompiled call where code asks if it is traced."""

import os
import sysconfig
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tests.compiler.runtime.test_compiled_module import Net, compare

SIZES = (6,) * 4
LIBRARY = os.path.join(sysconfig.get_paths()["purelib"], "asking.py")
SOURCE = """
import torch
import torch.fx.experimental.proxy_tensor as proxy
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


def is_compiling(h):
    return torch.compiler.is_compiling()


def is_jit_tracing(h):
    return torch.jit.is_tracing()


def is_fake(h):
    return isinstance(h, getattr(torch, "_subclasses").FakeTensor)


def is_imported_fake(h):
    return isinstance(h, FakeTensor)


def is_another_type(h):
    return type(h) is not torch.Tensor


def has_proxies(h):
    return proxy.get_proxy_mode() is not None


def has_mode(h):
    return _get_current_dispatch_mode() is not None


def scale(h, asks):
    return h * 3 if asks(h) else h * 2


FACTOR = 1.0


class Options:
    pass


def scale_by_global(h, options):
    return h * FACTOR


def scale_by_option(h, options):
    return h * getattr(options, "factor", 1.0)
"""
LIB = SimpleNamespace(__name__="asking")
exec(compile(SOURCE, LIBRARY, "exec"), vars(LIB))
# Questions that have the answer of an uncompiled call in a trace, and those that have not.
ANSWERED = ["is_compiling", "is_jit_tracing", "is_fake"]
NOTICED = ["is_imported_fake", "is_another_type", "has_proxies", "has_mode"]


def asking(name):
    class Asking(Net):
        def compute(self, h):
            return LIB.scale(h, getattr(LIB, name)).relu()

    return Asking


@pytest.mark.parametrize("name", [*ANSWERED, *NOTICED])
@pytest.mark.parametrize("n", [1, 2])
def test_code_that_asks_whether_it_is_traced_takes_the_way_of_a_call(name, n, caplog):
    traces = compare(asking(name), n, sizes=SIZES, fallback="eager")
    warnings = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    if name in ANSWERED:
        assert traces == 1
        assert not warnings
    else:
        (warning,) = warnings
        assert f"{LIBRARY}:" in warning
        assert "mul of float32" in warning


class Scaled(Net):
    factor = 1.0

    def prepare(self):
        self.names = {"a"}

    def compute(self, h):
        return h * self.factor * (3.0 if "b" in self.names else 1.0) + len(self.names)


def change_before_the_call(loop, x, y):
    loop.model.factor = 2.0 if loop.found else 1.0
    loop.step(x, y)


def change_before_the_trace(loop, x, y):
    loop.optimizer.zero_grad()
    loss = F.mse_loss(loop(x), y)
    loop.model.factor = 2.0
    loss.backward()
    loop.optimizer.step()
    loop.keep(loss)


# With several replicas, the trace is made before the second call.
@pytest.mark.parametrize(
    ("step", "traces"), [(change_before_the_call, (1, 2)), (change_before_the_trace, (1, 1))]
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_value_that_changes_between_a_call_and_its_trace_refuses_nothing(step, traces, n):
    assert compare(Scaled, n, step, sizes=SIZES) == traces[n - 1]


class Decides(Net):
    def prepare(self):
        self.options = OwnOptions()
        self.options.kind = None

    def compute(self, h):
        if self.options.kind is None:
            self.options.kind = "double" if h.dtype is torch.float32 else "single"
        return h * 2 if self.options.kind == "double" else h


def test_a_first_call_that_decides_something_refuses_nothing():
    assert compare(Decides, 1, sizes=SIZES) == 1


@pytest.mark.parametrize("n", [1, 2])
def test_sets_are_compared_by_their_entries(n):
    def step(loop, x, y):
        calls = len(loop.found)
        if calls == 3:
            loop.model.names.add("b")
        elif calls == 5:
            loop.model.names.remove("b")
            loop.model.names.add("c")
        loop.step(x, y)

    assert compare(Scaled, n, step, sizes=(6,) * 8) == 3


class OwnOptions:
    pass


@pytest.mark.parametrize("function", ["scale_by_global", "scale_by_option"])
@pytest.mark.parametrize("kind", ["library", "own"])
@pytest.mark.parametrize("n", [1, 2])
def test_what_functions_of_libraries_read_is_compared(function, kind, n):
    class Reads(Net):
        def prepare(self):
            LIB.FACTOR = 1.0
            self.options = LIB.Options() if kind == "library" else OwnOptions()

        def compute(self, h):
            return getattr(LIB, function)(h, self.options)

    def step(loop, x, y):
        if len(loop.found) == 3:
            place = LIB if function == "scale_by_global" else loop.model.options
            setattr(place, "FACTOR" if place is LIB else "factor", 2.0)
        loop.step(x, y)

    assert compare(Reads, n, step, sizes=(6,) * 5) == 2


class Whole(Net):
    def prepare(self):
        self.factor, self.held = 2, {"factor": 2}

    def compute(self, h):
        whole = h.mul(4).long()
        return h + whole * self.factor // 3 + whole * self.held["factor"] // 3


def make_float(model):
    model.factor = 2.0


def make_entry_float(model):
    model.held["factor"] = 2.0


def make_negative_zero(model):
    model.factor = -0.0 if model.factor == 0 else 0.0


@pytest.mark.parametrize("change", [make_float, make_entry_float, make_negative_zero])
@pytest.mark.parametrize("n", [1, 2])
def test_an_equal_number_of_another_kind_is_another_value(change, n):
    def step(loop, x, y):
        if len(loop.found) in (3, 5):
            change(loop.model)
        loop.step(x, y)

    traces = compare(Whole, n, step, sizes=(6,) * 8)
    assert traces == (3 if change is make_negative_zero else 2)


class Positions(Net):
    def compute(self, h):
        positions = torch.arange(h.shape[1])
        if (positions.diff() == 1).all():
            h = h * positions
        return h


class ChangedPositions(Net):
    def compute(self, h):
        positions = torch.arange(h.shape[1])
        positions[0] = 1
        return h if (positions.diff() == 1).all() else h * 2


@pytest.mark.parametrize(("kind", "traces"), [(Positions, 1), (ChangedPositions, 0)])
def test_a_value_that_no_input_leads_to_may_be_asked(kind, traces, caplog):
    assert compare(kind, 2, sizes=SIZES, fallback="eager") == traces
    assert sum("asked of a tensor" in r.getMessage() for r in caplog.records) == 1 - traces


class Layer:
    def __init__(self, keys):
        self.keys, self.is_filled = keys, True


class Cache:
    def __init__(self):
        self.layers, self.device, self.kind = [], None, Layer


class Caches(Net):
    def forward(self, x):
        cache = Cache()
        h = self.first(x)
        cache.layers.append(Layer(h.tanh()))
        cache.device = h.device
        return {"y": self.last(cache.layers[0].keys), "cache": cache, "again": cache}


class Keeps(Net):
    def prepare(self):
        self.cache = Cache()

    def forward(self, x):
        return {"y": self.last(self.first(x)), "cache": self.cache}


def with_a_cache(loop, x, y):
    loop.optimizer.zero_grad()
    found = loop.model(x)
    cache = found["cache"]
    F.mse_loss(found["y"], y).backward()
    loop.optimizer.step()
    loop.keep(*[layer.keys for layer in cache.layers])
    loop.keep(
        torch.tensor([cache is found.get("again"), cache is getattr(loop.model, "cache", 0)])
    )
    loop.caches = [*getattr(loop, "caches", []), cache]
    assert len({*map(id, loop.caches)}) == (
        1 if hasattr(loop.model, "cache") else len(loop.caches)
    )


@pytest.mark.parametrize(("kind", "traces"), [(Caches, 1), (Keeps, 0)])
@pytest.mark.parametrize("n", [1, 2])
def test_objects_in_outputs_are_new_in_each_call(kind, traces, n):
    assert compare(kind, n, with_a_cache, sizes=SIZES, fallback="eager") == traces


class Losses(Net):
    """A loss and the values that it is made of, by a buffer that each call changes."""

    def prepare(self):
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = self.last(self.first(x).relu()) * self.calls
        return {"loss": y.square().mean(1), "y": y}


@pytest.mark.parametrize(("uses_both", "traces"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("n", [1, 2])
def test_a_loss_and_the_values_it_is_made_of_get_the_gradients_of_a_call(uses_both, traces, n):
    def step(loop, x, y):
        loop.optimizer.zero_grad()
        found = loop.model(x)
        loss = found["loss"].mean()
        if uses_both:
            loss = loss + F.mse_loss(found["y"], y)
        loss.backward()
        loop.optimizer.step()
        loop.keep(loss)

    assert compare(Losses, n, step, sizes=SIZES) == traces


@pytest.mark.parametrize("way", ["hook", "retain"])
def test_a_gradient_that_passes_through_an_output_is_told(way, caplog):
    def step(loop, x, y):
        loop.optimizer.zero_grad()
        found = loop.model(x)
        if way == "hook":
            found["y"].register_hook(loop.keep)
        else:
            found["y"].retain_grad()
        found["loss"].mean().backward()
        loop.optimizer.step()
        if way == "retain":
            loop.keep(found["y"].grad)

    assert compare(Losses, 1, step, sizes=SIZES, fallback="eager") == 0
    assert sum("retains its gradient" in r.getMessage() for r in caplog.records) == 1
