"""A trace of a module runs the code that an uncompiled call has run, and no other.

What other code changes would happen once, in the trace, and never again; what it reads, such as a
clock, could not be compared.
"""

import gc
import time

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks_of_all

import mirror
from mirror.replica.modules.module_owner import interceptor_of


class Net(nn.Module):
    prints = False
    act = staticmethod(torch.relu)

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        if self.prints:
            print("called")
        return self.last(self.act(self.first(x)))


def print_and_relu(h):
    print("called")
    return h.relu()


def by_attribute(model, seen):
    model.prints = True


def by_function(model, seen):
    model.act = print_and_relu


def by_hook(model, seen):
    model.first.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))


def by_hook_that_prints(model, seen):
    model.last.register_forward_pre_hook(lambda module, args: print("called"))


def train(change, when, n, compiles, capsys):
    """Returns what a program has seen by the end of each of its steps."""
    torch.manual_seed(0)
    seen, found = [], []
    with mirror.MirroredStrategy(["cpu"] * n, verify="off") as strategy:
        model = strategy.mirror(Net())
        if compiles:
            strategy.compile(model)
        for i in range(6):
            if i == when:
                change(model, seen)
            model.zero_grad()
            model(torch.ones(6, 6)).sum().backward()
            found += [seen.copy(), capsys.readouterr().out, model.last.bias.grad.tolist()]
    return found


@pytest.mark.parametrize("when", [1, 4], ids=["before a trace", "after it"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("change", [by_attribute, by_function, by_hook, by_hook_that_prints])
def test_what_new_code_does_happens_in_each_call(change, n, when, capsys, caplog):
    expected, found = (train(change, when, n, c, capsys) for c in (False, True))
    assert found == expected
    (warning,) = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert __file__ in warning


def double(grads):
    return tuple(grad if grad is None else grad * 2 for grad in grads)


REGISTER = {
    "forward": lambda: hooks_of_all.register_module_forward_hook(lambda m, args, out: out * 2),
    "before": lambda: hooks_of_all.register_module_forward_pre_hook(lambda m, args: args[0] * 2),
    "backward": lambda: hooks_of_all.register_module_full_backward_hook(
        lambda m, grads, of_outputs: double(grads)
    ),
    "before backward": lambda: hooks_of_all.register_module_full_backward_pre_hook(
        lambda m, grads: double(grads)
    ),
}


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("n", [1, 2])
def test_hooks_of_all_modules_are_called_from_when_they_are_registered(kind, n):
    def train(compiles):
        torch.manual_seed(0)
        found = []
        with mirror.MirroredStrategy(["cpu"] * n) as strategy:
            model = strategy.mirror(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
            if compiles:
                strategy.compile(model, fallback="error")
            for i in range(6):
                if i == 2:
                    handle = REGISTER[kind]()
                if i == 4:
                    handle.remove()
                model.zero_grad()
                x = torch.ones(6, 6, requires_grad=True)
                model(x).square().sum().backward()
                found += [x.grad, *[p.grad for p in model.parameters()]]
            if compiles:
                assert interceptor_of(model).compiled.num_traces == 2
        return found

    assert all(map(torch.equal, train(False), train(True)))


@pytest.mark.parametrize("n", [1, 2])
def test_a_value_that_is_another_in_each_call_is_named_in_the_only_warning(n, caplog):
    with mirror.MirroredStrategy(["cpu"] * n) as strategy:
        model = strategy.compile(strategy.mirror(nn.Sequential(nn.Linear(6, 4), nn.ELU())))
        for i in range(8):
            model[1].alpha = 1.0 + i
            h = nn.functional.linear(torch.ones(6, 6), model[0].weight, model[0].bias)
            assert torch.allclose(model(torch.ones(6, 6)), nn.functional.elu(h, 1.0 + i))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "finds other values: one of training, alpha" in warning


@pytest.mark.parametrize("n", [1, 2])
def test_what_the_collector_calls_is_not_of_the_call(n):
    collections = []

    def count(phase, info):
        collections.append(time.perf_counter())

    thresholds = gc.get_threshold()
    gc.callbacks.append(count)
    with mirror.MirroredStrategy(["cpu"] * n, verify="off") as strategy:
        model = strategy.compile(strategy.mirror(Net()), fallback="error")
        try:
            for i in range(4):
                gc.set_threshold(1 if i == 0 else 0)  # in the call that is observed
                model(torch.ones(6, 6)).sum().backward()
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(count)
        assert interceptor_of(model).compiled.num_traces == 1
    assert collections
