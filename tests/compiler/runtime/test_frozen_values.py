"""A compiled module freezes no value, code or mode that a loop changes between two calls.

Each program is a function that makes the class of a model, and what changes before a step. Its
losses and parameters are those of the same loop uncompiled. It is traced again, or runs uncompiled
with one warning.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import operator
import random
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import mirror
from tests.compiler.runtime.test_compiled_module import Net

STEPS, CHANGE, AGAIN = 6, 3, 5


def run(program, n, *, compiles):
    """Returns what a loop computes, the state of its program, and its warnings of mirror."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    made = program()
    make, change, around, state = (*made, None, None, None)[:4]
    strategy = mirror.MirroredStrategy(["cpu"] * n, verify="off")
    with strategy.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if compiles:
        strategy.compile(model, fallback="eager")
    found = []
    try:
        for i in range(STEPS):
            x, y = torch.randn(6, 6), torch.randn(6, 4)
            if change is not None:
                change(model, i)
            with contextlib.nullcontext() if around is None else around(i):
                optimizer.zero_grad(set_to_none=i % 2 == 0)  # forward may read a gradient
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            found.append(loss.detach())
    finally:
        if change is not None:
            change(model, None)
    found += [p.detach().clone() for p in model.parameters()]
    strategy.close()
    return found, None if state is None else state(model)


def compare(program, n):
    expected, kept = run(program, n, compiles=False)
    found, kept_too = run(program, n, compiles=True)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert kept == kept_too


def computes(function):
    """Returns the class of a model that computes this between its layers."""
    return type(function.__qualname__, (Net,), {"compute": function})


def setting(owner, name, then, later):
    """Returns a change that patches an attribute, and puts it back after the loop."""

    def change(model, i):
        setattr(owner, name, then if i is None or i < CHANGE else later)

    return change


def once(*changes):
    """Returns a change that makes each of these once."""

    def change(model, i):
        number = {CHANGE: 0, AGAIN: 1}.get(i, len(changes))
        if number < len(changes):
            changes[number]()

    return change


# Code that is replaced


def function_of_torch():
    return computes(lambda self, h: F.relu(h)), setting(F, "relu", F.relu, torch.tanh)


def function_of_a_layer():
    other = functools.partial(lambda linear, x, w, b=None: linear(x, w * 2, b), F.linear)
    return Net, setting(F, "linear", F.linear, other)


def method_of_tensors():
    return Net, setting(torch.Tensor, "relu", torch.Tensor.relu, torch.Tensor.tanh)


def method_of_a_layer():
    forward = nn.Linear.forward
    return Net, setting(nn.Linear, "forward", forward, lambda self, x: forward(self, x) * 2)


def method_of_the_class():
    class Model(Net): ...

    return Model, once(lambda: setattr(Model, "compute", lambda self, h: h.tanh()))


def method_of_the_object():
    def change(model, i):
        if i == CHANGE:
            model.forward = types.MethodType(lambda self, x: self.last(self.first(x)), model)
        elif i == AGAIN:
            model.first.forward = lambda x: x.repeat(1, 2)[:, :8] + 0 * model.first.weight.sum()

    return Net, change


def hook_of_all_modules():
    handles = []

    def double(module, args, output):
        return output * 2 if isinstance(module, nn.Linear) else None

    def change(model, i):
        if i == CHANGE:
            handles.append(nn.modules.module.register_module_forward_hook(double))
        elif i is None:
            handles.pop().remove()

    return Net, change


def backward_of_a_function():
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return h.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    triple = staticmethod(lambda ctx, grad: grad * 3)
    return computes(lambda self, h: Same.apply(h)), once(lambda: setattr(Same, "backward", triple))


def defaults():
    def scale(h, by=1.0):
        return h * by

    return computes(lambda self, h: scale(h)), once(lambda: setattr(scale, "__defaults__", (3.0,)))


def code():
    def same(h):
        return h * 1.0

    def triple(h):
        return h * 3.0

    change = once(lambda: setattr(same, "__code__", triple.__code__))
    return computes(lambda self, h: same(h)), change


def attribute_of_a_function():
    def scale(h):
        return h * scale.by

    scale.by = 1.0
    return computes(lambda self, h: scale(h)), once(lambda: setattr(scale, "by", 3.0))


def wrapper_that_counts():
    calls = []

    def counting(function):
        @functools.wraps(function)
        def wrapper(*args):
            calls.append(1)
            return function(*args) * len(calls)

        return wrapper

    return computes(counting(lambda self, h: h.relu())), None, None, lambda _: len(calls)


def overload():
    @functools.singledispatch
    def act(h):
        return h.relu()

    change = once(lambda: act.register(torch.Tensor, lambda h: h.tanh()))
    return computes(lambda self, h: act(h)), change


def source_of_an_expression():
    source = ["h.relu()"]
    return computes(lambda self, h: eval(source[0], {"h": h})), once(
        lambda: source.__setitem__(0, "h.tanh()")
    )


# Values behind names


def cached_function():
    calls = []

    @functools.cache
    def scale(size):
        calls.append(size)
        return 1.0 + len(calls)

    change = once(scale.cache_clear, scale.cache_clear)
    return computes(lambda self, h: h * scale(h.shape[1])), change, None, lambda _: len(calls)


def descriptor_that_counts():
    class Tick:
        n = 0

        def __get__(self, owner, kind=None):
            self.n += 1
            return self.n

    tick = Tick()
    model = computes(lambda self, h: h * self.tick)
    model.tick = tick
    return model, None, None, lambda _: tick.n


def attribute_of_a_subclass():
    class Base:
        by = 1.0

    class Config(Base): ...

    config = Config()
    return computes(lambda self, h: h * config.by), once(
        lambda: setattr(Base, "by", 3.0), lambda: setattr(Config, "by", 5.0)
    )


def attribute_that_hides_one_of_the_class():
    class Config:
        by = 1.0

    config = Config()
    return computes(lambda self, h: h * config.by), once(lambda: setattr(config, "by", 3.0))


def class_of_an_object():
    class First:
        by = 1.0

    class Second:
        by = 3.0

    config = First()
    change = once(lambda: setattr(config, "__class__", Second))
    return computes(lambda self, h: h * config.by), change


def singleton():
    class Config:
        instance = None

        def __new__(cls):
            if cls.instance is None:
                cls.instance = super().__new__(cls)
                cls.instance.by = 1.0
            return cls.instance

    return computes(lambda self, h: h * Config().by), once(
        lambda: setattr(Config(), "by", 3.0), lambda: setattr(Config, "instance", None)
    )


def dict_of_a_library():
    class Config(collections.UserDict): ...

    config = Config(by=1.0)
    return computes(lambda self, h: h * config["by"]), once(lambda: config.update(by=3.0))


def order_of_a_dict():
    layers = {"relu": torch.relu, "tanh": torch.tanh}

    def compute(self, h):
        for layer in layers.values():
            h = layer(h - 0.1)
        return h

    return computes(compute), once(lambda: layers.update(relu=layers.pop("relu")))


def other_layers():
    class Model(Net):
        def prepare(self):
            self.middle = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def compute(self, h):
            for layer in self.middle:
                h = layer(h).tanh()
            return h

    def change(model, i):
        if i == CHANGE:
            model.middle._modules = dict(zip("012", [*model.middle][::-1], strict=True))

    return Model, change


def imported_module():
    settings = sys.modules["settings_of_this_test"] = types.ModuleType("settings")
    settings.by = 1.0

    def compute(self, h):
        from settings_of_this_test import by  # type: ignore[import-not-found]

        return h * by

    return computes(compute), once(lambda: setattr(settings, "by", 3.0))


def module_found_by_its_name():
    settings = sys.modules["settings_of_this_test"] = types.ModuleType("settings")
    settings.by = 1.0
    find = importlib.import_module
    change = once(lambda: setattr(settings, "by", 3.0))
    return computes(lambda self, h: h * find("settings_of_this_test").by), change


BY = 1.0


def looked_up_global():
    globals()["BY"] = 1.0
    change = once(lambda: globals().update(BY=3.0))
    return computes(lambda self, h: h * globals()["BY"]), change


def getters():
    config = argparse.Namespace(inner=argparse.Namespace(by=1.0))
    get = operator.attrgetter("inner.by")
    change = once(lambda: setattr(config.inner, "by", 3.0))
    return computes(lambda self, h: h * get(config)), change


def string_of_a_tensor():
    return (computes(lambda self, h: h * (len(str(h.detach())) / 1000)),)


def warning():
    def compute(self, h):
        warnings.warn("deprecated", stacklevel=1)
        return h

    class Recorded(list):
        def __enter__(self):
            self.catching = warnings.catch_warnings(record=True)
            self.append(self.catching.__enter__())
            warnings.simplefilter("always")

        def __exit__(self, *exception):
            self.catching.__exit__(*exception)

    seen = Recorded()
    return computes(compute), None, lambda i: seen, lambda _: [*map(len, seen)]


def tensor_that_a_layer_keeps():
    class Model(Net):
        def prepare(self):
            self.first = nn.utils.weight_norm(self.first)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(nn.Linear(1, 1))
    return Model, None, None, lambda model: model.first.weight.tolist()


def replaced_buffer():
    class Model(Net):
        def prepare(self):
            self.register_buffer("mask", torch.ones(8), persistent=False)

        def compute(self, h):
            return h * self.mask

    def change(model, i):
        if i in (CHANGE, AGAIN):
            model.mask = torch.arange(8.0) + i

    return Model, change


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.config = torch.relu, argparse.Namespace(by=1.0)

    def forward(self, h):
        return self.act(h) * self.config.by


def module_beside_the_model():
    teacher = Teacher()
    change = once(
        lambda: setattr(teacher.config, "by", 3.0), lambda: setattr(teacher, "act", torch.tanh)
    )
    return computes(lambda self, h: h + teacher(h)), change


def bases_of_a_class():
    class First:
        by = 1.0

    class Second:
        by = 3.0

    class Config(First): ...

    config = Config()
    change = once(lambda: setattr(Config, "__bases__", (Second,)))
    return computes(lambda self, h: h * config.by), change


def buffer_that_was_none():
    class Model(Net):
        def prepare(self):
            self.register_buffer("mask", None)

        def compute(self, h):
            return h if self.mask is None else h * self.mask

    def change(model, i):
        if i == CHANGE:
            model.mask = torch.arange(8.0)

    return Model, change


def gradient_of_the_last_step():
    def compute(self, h):
        grad = self.last.bias.grad
        return h if grad is None else h + grad.sum()

    return (computes(compute),)


# Modes of torch


def threads_of_torch():
    before = torch.get_num_threads()

    def change(model, i):
        torch.set_num_threads(before + (i is not None and i >= CHANGE))

    return computes(lambda self, h: h * torch.get_num_threads()), change


def flag_of_a_backend():
    model = computes(lambda self, h: h * (2.0 if torch.backends.cudnn.benchmark else 1.0))
    return model, setting(torch.backends.cudnn, "benchmark", False, True)


def kernel_of_attention():
    def compute(self, h):
        q, k, v = h[:, None, None].expand(-1, 2, 3, -1).mul(2).unbind(2)
        q, k, v = (one[:, None] for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1)

    kernels = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    return computes(compute), None, lambda i: sdpa_kernel(kernels[i >= CHANGE])


class Doubles(TorchFunctionMode):
    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is torch.Tensor.relu else found


def mode_of_functions():
    return Net, None, lambda i: Doubles() if i >= CHANGE else contextlib.nullcontext()


def mode_of_operations():
    counts = []

    @contextlib.contextmanager
    def around(i):
        with FlopCounterMode(display=False) as counter:
            yield
        counts.append(counter.get_total_flops())

    return Net, None, around, lambda _: counts


def cached_casts():
    """A parameter that is used twice under autocast has one cast, which adds its gradients up."""

    def compute(self, h):
        return (h @ self.first.weight @ self.first.weight.t()).float()

    return computes(compute), None, lambda i: torch.autocast("cpu", torch.bfloat16)


# What the backward pass reads


def module_hook_that_counts():
    passes = []

    class Model(Net):
        def prepare(self):
            self.last.register_full_backward_hook(self.note)

        def note(self, module, grads, of_outputs):
            passes.append(1)
            return tuple(grad * len(passes) for grad in grads)

    return Model, None, None, lambda _: len(passes)


def changed_after_the_forward_pass():
    """The forward pass reads the value of then, and the hook reads that of now."""
    by = [1.0]

    class Model(Net):
        def compute(self, h):
            if h.requires_grad:
                h.register_hook(lambda grad: grad * by[0])
            return h * by[0]

    class Loss(Model):
        def __call__(self, x):
            found = super().__call__(x)
            by[0] += 1.0
            return found

    return Loss, lambda model, i: by.__setitem__(0, 1.0)


PROGRAMS = [
    *(function_of_torch, function_of_a_layer, method_of_tensors, method_of_a_layer),
    *(method_of_the_class, method_of_the_object, hook_of_all_modules, backward_of_a_function),
    *(defaults, code, attribute_of_a_function, wrapper_that_counts, overload),
    *(source_of_an_expression, cached_function, descriptor_that_counts),
    *(attribute_of_a_subclass, attribute_that_hides_one_of_the_class, class_of_an_object),
    *(singleton, dict_of_a_library, order_of_a_dict, other_layers, imported_module),
    *(module_found_by_its_name, looked_up_global, getters, string_of_a_tensor, warning),
    *(module_beside_the_model, bases_of_a_class, buffer_that_was_none, gradient_of_the_last_step),
    *(tensor_that_a_layer_keeps, threads_of_torch, flag_of_a_backend, kernel_of_attention),
    *(mode_of_functions, mode_of_operations, cached_casts, module_hook_that_counts),
    changed_after_the_forward_pass,
]


@pytest.fixture(autouse=True)
def settable_flags(monkeypatch):
    """Flags may be set, although torch's own test utilities were imported before."""
    held = torch.backends.flags_frozen.__globals__  # torch.backends is a proxy of its module
    monkeypatch.setitem(held, "__allow_nonbracketed_mutation_flag", True)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_loop_of_one_replica_freezes_nothing(program):
    compare(program, 1)


@pytest.mark.parametrize(
    "program",
    [replaced_buffer, mode_of_functions, changed_after_the_forward_pass, cached_casts],
    ids=lambda program: program.__name__,
)
def test_a_loop_of_two_replicas_freezes_nothing(program):
    compare(program, 2)
