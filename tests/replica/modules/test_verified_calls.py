"""The first split call of each kind is compared with one device, and leaves no other trace."""

import array
import contextlib
import copy
import logging
import random
import secrets
import sys
import time
import types
import uuid
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import mirror
from mirror.replica.modules import trial_state

DIFFERS = "does not return what one device does"


class Computing(nn.Module):
    """A layer, and a function of it and of the arguments."""

    def __init__(self, compute, *shape):
        super().__init__()
        self.layer = nn.Linear(*(shape or (4, 3)))
        self.compute = compute

    def forward(self, *args, **kwargs):
        return self.compute(self.layer, *args, **kwargs)


@contextlib.contextmanager
def told(what=None):
    """Expects one warning of a difference, or none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(one.message) for one in caught]
    found = [text for text in texts if DIFFERS in text]
    assert (len(found), what is None or what in found[0]) == (int(what is not None), True), texts


def labels(z):
    return [["B", "I", "O"][k] for k in z.argmax(1)]


def x(n=6):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(n))


TARGETS = torch.tensor([1, 2, 0, 1, 0, 0])
TELLS = {
    "labels of even parts": (lambda f, x, y: labels(f(x)), "output has 3 entries, and on one"),
    "a sum over an equal number of each part": (
        lambda f, x, y: F.cross_entropy(f(x), y, reduction="sum") / (y == 1).sum().item(),
        "output is",
    ),
    "a loss of a branch": (
        lambda f, x, y: (
            F.cross_entropy(f(x)[y > 1], y[y > 1]) if (y > 1).any() else f(x).sum() * 0
        ),
        "output is",
    ),
    "a mean of the inputs": (lambda f, x, y: f(x - x.mean(0)), "differs from one device's by"),
    "the first example": (lambda f, x, y: f(x - x[0]), "differs from one device's by"),
    "ranks": (lambda f, x, y: f(x.argsort(0).float()), "differs from one device's by"),
    "a sum below a layer": (lambda f, x, y: F.relu(f(x.sum(0))).sum(), "output is"),
    "pairs": (lambda f, x, y: f(torch.cdist(x, x)[:, [0, 1] * 2]).sum(), "output is"),
    "a dict with an entry": (lambda f, x, y: {"z": f(x), "n": f(x - x[0])}, "output['n'] differs"),
    "a number of the part": (lambda f, x, y: (f(x), len(x) / 2 + 0.0), None),
    "sizes": (lambda f, x, y: (f(x), f"{len(x)} examples"), "is '3 examples'"),
    "predictions": (lambda f, x, y: (f(x), x.argsort(0)[:, 0]), "output[1] differs"),
    "an array": (lambda f, x, y: f(x).detach().numpy() - x.mean(0).sum().item(), "differs from"),
}


@pytest.mark.parametrize("name", TELLS)
def test_a_difference_is_told_once(name):
    compute, what = TELLS[name]
    with mirror.MirroredStrategy(["cpu"] * 2, verify="first") as strategy:
        net = strategy.mirror(Computing(compute))
        with told(what):
            net(x(), TARGETS)
        with told(None):
            net(x(), TARGETS)


def gathered(x):
    context = mirror.get_replica_context()
    return x if context is None else context.all_gather(x)


def forces(f, x):
    x = x.requires_grad_()
    return torch.autograd.grad(f(x).square().sum(), x, create_graph=True)[0]


def hooked(value):
    value.grad_fn.register_hook(lambda *_: None)  # there is none under no_grad
    return value


def summed(value):
    context = mirror.get_replica_context()
    if context is None:
        return value.sum(0)
    return context.all_reduce("mean", value.sum(0)) * context.num_replicas_in_sync


KEEPS = {
    "a layer": lambda f, x: f(x),
    "a mean": lambda f, x: f(x).square().mean(),
    "a sum": lambda f, x: f(x).square().sum(),
    "structures": lambda f, x: {"z": f(x), "more": [f(x), (f(x).mean(), None, "name", 3)]},
    "layers": lambda f, x: [f(x), f(x) * 2, f(x) * 3],
    "dropout": lambda f, x: F.dropout(f(x), 0.5),
    "forces": forces,
    "checkpoints": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "what all give": lambda f, x: f(x) - gathered(x).mean(0).sum(),
    "a mean over replicas": lambda f, x: f(x) - summed(f(x)),
    "a hook on a node": lambda f, x: hooked(f(x)),
}


@pytest.mark.parametrize("size", [6, 5, 2])
@pytest.mark.parametrize("name", KEEPS)
def test_what_joins_is_not_told_and_is_that_of_one_device(name, size):
    torch.manual_seed(0)
    plain = Computing(KEEPS[name])
    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        net = strategy.mirror(copy.deepcopy(plain))
        actual, expected = net(x(size)), plain(x(size))
    if name != "dropout":
        assert_equal(actual, expected)


def assert_equal(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(actual, expected)
    elif isinstance(expected, (list, tuple, dict)):
        assert len(actual) == len(expected)
        for key in range(len(expected)) if not isinstance(expected, dict) else expected:
            assert_equal(actual[key], expected[key])
    else:
        assert actual == pytest.approx(expected) if type(expected) is float else actual == expected


def test_lists_of_uneven_parts_have_an_entry_for_each_example():
    plain = Computing(lambda f, x: (labels(f(x)), [{"boxes": row[None]} for row in f(x)]))
    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        net = strategy.mirror(copy.deepcopy(plain))
        assert_equal(net(x(5)), plain(x(5)))


class Counting(nn.Module):
    """Keeps a count of its calls in everything that a module can change."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("fresh", torch.zeros(()))
        self.number, self.entries, self.table = 0, [], {"calls": 0}
        self.plain = torch.zeros(())
        self.random = np.random.default_rng(0)
        self.drawn = None

    def forward(self, x, seen):
        self.calls += 1
        self.fresh = self.fresh + 1
        self.number += 1
        self.entries.append(len(x))
        self.table["calls"] += 1
        self.plain = self.plain + 1
        self.drawn = self.random.random()
        if not hasattr(self, "late"):
            self.late = nn.Identity()
            self.layer.register_forward_hook(lambda *_: None)
        seen.append(self.number)
        random.random(), np.random.rand()
        x.mul_(1)
        wide = self.layer(x)[:, :, None].expand(-1, -1, 2) * torch.ones(2).cumsum(0)
        return self.norm(wide) + torch.rand(()) * 0


def state_of(net):
    return {
        "buffers": {name: b.detach().clone() for name, b in net.named_buffers()},
        "numbers": (net.number, net.table["calls"], float(net.plain), str(net.drawn)),
        "entries": list(net.entries),
        "modules": [name for name, _ in net.named_modules()],
        "hooks": len(net.layer._forward_hooks),
        "random": (torch.rand(()).item(), random.random(), np.random.rand()),
    }


def test_a_trial_leaves_no_trace():
    found = []
    for verify in ("off", "first"):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        with mirror.MirroredStrategy(["cpu"] * 2, verify=verify) as strategy:
            net, seen = strategy.mirror(Counting()), []
            data = x()
            out = net(data, seen)
            found.append((out.detach(), seen, data, vars(data), state_of(net)))
            strategy.check_replicas()
    assert_equal(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]
    assert_equal(found[1][2], found[0][2])
    assert found[1][3] == found[0][3]
    assert_equal(found[1][4], found[0][4])


def calls_of(net):
    calls, compute = [], net.compute

    def counted(layer, x, *rest, **more):
        calls.append(len(x))
        return compute(layer, x, *rest, **more)

    net.compute = counted
    return calls


def test_a_trial_calls_no_hook_of_the_program_unless_it_matters():
    lengths = []
    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        net = strategy.mirror(Computing(lambda f, x: f(x)))
        net.layer.register_forward_hook(lambda module, args, out: lengths.append(len(out)))
        net(x())
        assert lengths == [3, 3]
        net.layer.register_forward_hook(lambda module, args, out: out * 2)
        lengths.clear()
        net(x(5))
        assert lengths == [3, 2, 5]


def test_forward_runs_once_more_for_each_kind_of_call():
    with mirror.MirroredStrategy(["cpu"] * 2, verify="first") as strategy:
        net = strategy.mirror(Computing(lambda f, x, *rest, **more: f(x)))
        calls = calls_of(net)
        kinds = {
            "the first": lambda: net(x()),
            "uneven parts": lambda: net(x(5)),
            "parts of one": lambda: net(x(2)),
            "another structure": lambda: net(x(), None),
            "a dict": lambda: net(x(), {"y": 1}),
            "other keys": lambda: net(x(), {"y": 1, "z": 2}),
            "a name": lambda: net(x(), n=1),
            "a dtype": lambda: net(x(), x().long()),
            "an evaluation": lambda: net.eval()(x()),
            "without a graph": lambda: torch.no_grad()(net)(x()),
        }
        for kind, call in kinds.items():
            for times in (3, 2):
                calls.clear()
                call()
                assert len(calls) == times, kind
        assert calls == [3, 3]


def test_first_is_the_default_and_several_workers_or_one_replica_have_nothing_to_compare():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        calls = calls_of(net := strategy.mirror(Computing(lambda f, x: f(x))))
        net(x())
    assert calls == [6, 3, 3]
    with mirror.MirroredStrategy(["cpu"]) as strategy:
        calls = calls_of(net := strategy.mirror(Computing(lambda f, x: f(x))))
        net(x())
    assert calls == [6]


def test_off_and_error():
    compute = TELLS["the first example"][0]
    with mirror.MirroredStrategy(["cpu"] * 2, verify="off") as strategy, told(None):
        net = strategy.mirror(Computing(compute))
        calls = calls_of(net)
        net(x(), TARGETS)
        assert len(calls) == 2
    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        net = strategy.mirror(Computing(compute))
        with pytest.raises(mirror.StrategyError, match="output differs from one device's by"):
            net(x(), TARGETS)
    with pytest.raises(ValueError, match="verify must be one of first, error, off, got 'always'"):
        mirror.MirroredStrategy(["cpu"] * 2, verify="always")


def test_an_error_of_the_whole_batch_alone_is_told():
    def few(f, x):
        if len(x) > 4:
            raise ValueError("at most 4 examples")
        return f(x)

    with mirror.MirroredStrategy(["cpu"] * 2, verify="first") as strategy:
        net = strategy.mirror(Computing(few))
        with told("on one device ValueError is raised: at most 4 examples"):
            assert net(x()).shape == (6, 3)


def backward_inside(f, x):
    loss = f(x).sum()
    loss.backward()
    return loss.detach()


def memory(f, x):
    if len(x) > 3:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return f(x)


LEFT_OUT = {
    "backward": (backward_inside, "forward calls backward"),
    "memory": (memory, "does not fit"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_trial_that_cannot_be_made_is_left_out(name, caplog):
    compute, why = LEFT_OUT[name]
    found = []
    for verify in ("off", "first"):
        torch.manual_seed(0)
        with mirror.MirroredStrategy(["cpu"] * 2, verify=verify) as strategy:
            net = strategy.mirror(Computing(compute))
            with caplog.at_level(logging.INFO, "mirror"):
                net(x())
            found.append(net.layer.weight.grad)
    assert why in caplog.text
    if name == "backward":
        assert torch.equal(*found)


def test_what_a_lightning_module_logs_is_logged_once(monkeypatch):
    logged = []

    class LightningModule(Computing):
        def log(self, name, value):
            logged.append((name, value))

        def forward(self, x):
            self.log("mean", x.mean())
            return self.layer(x)

    library = types.ModuleType("lightning.pytorch")
    library.LightningModule = LightningModule
    monkeypatch.setitem(sys.modules, "lightning.pytorch", library)
    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        strategy.mirror(LightningModule(None))(x())
    assert logged == [("mean", pytest.approx(x().mean().item()))]


@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_rounding_of_inputs_is_no_difference(mean):
    """The first layer subtracts a mean that has most of their digits."""
    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        net = strategy.mirror(nn.Sequential(mirror.nn.SyncBatchNorm(4), nn.Linear(4, 3)))
        net(x(64) + mean)


def test_rounding_of_inputs_excuses_no_difference_of_whole_numbers():
    """Numbers of the part that are cut to integers, which an error of rounding changes."""
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        net = strategy.mirror(Computing(lambda f, x, n: f(x)[:, :1] + n.floor().sum()))
        with told("differs"):
            net(x(), torch.arange(1.0, 7.0))


def test_rounding_is_no_difference():
    """A value of which all digits cancel, but for those of rounding."""

    def cancelling(f, x):
        z = f(x * 1e3)
        return (z.sum(0, keepdim=True) + 1e6 - 1e6).expand_as(z) * 0 + z + (z + 1e7 - 1e7)

    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        strategy.mirror(Computing(cancelling, 4, 64))(x(64))


def test_casts_and_parametrizations_of_a_trial_are_not_kept():
    class Scaled(nn.Module):
        def forward(self, weight):
            return weight * 2

    with mirror.MirroredStrategy(["cpu"] * 2, verify="first") as strategy:
        net = Computing(lambda f, x: f(x))
        parametrize.register_parametrization(net.layer, "weight", Scaled())
        strategy.mirror(net)
        with torch.autocast("cpu", torch.bfloat16), parametrize.cached():
            net(x()).float().sum().backward()
        assert net.layer.parametrizations.weight.original.grad is not None
        assert net.layer.bias.grad is not None


def test_batch_norm_has_a_message_of_its_own():
    with mirror.MirroredStrategy(["cpu"] * 2, verify="first") as strategy:
        net = strategy.mirror(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        with told(None):
            net(x())


def test_numbers_of_the_part_are_never_constants():
    def right(f, x, y):
        return f(x), int((f(x).argmax(1) == y).sum()), 3

    with mirror.MirroredStrategy(["cpu"] * 2, verify="first") as strategy:
        net = strategy.mirror(Computing(right))
        y = net.layer(x()).argmax(1)
        for targets in (y, y.roll(1), y):
            with told(None):
                _, count, constant = net(x(), targets)
            assert isinstance(count, mirror.PerReplica)
            assert constant == 3
            expected = int((net.layer(x()).argmax(1) == targets).sum())
            assert sum(strategy.local_results(count)) == expected


def test_a_parameter_that_forward_writes_for_its_part_is_told():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.full((6, 2), 3.0))

        def forward(self, ids):
            return F.embedding(ids, self.table, max_norm=1.0)

    with mirror.MirroredStrategy(["cpu"] * 2, verify="first") as strategy:
        net = strategy.mirror(Table())
        with told("parameter 'table' is written by forward"):
            net(torch.arange(6))


class Centred(nn.Module):
    def forward(self, x):
        return x - x.detach().mean(0)


@pytest.mark.parametrize(
    ("mixing", "name"),
    [
        (Centred(), "'1.0' (Centred)"),
        (nn.Flatten(), None),
    ],
)
def test_the_first_module_with_another_output_is_named(mixing, name):
    layers = nn.Linear(4, 4), nn.Sequential(mixing, nn.Tanh()), nn.Linear(4, 2)
    with mirror.MirroredStrategy(["cpu"] * 3, verify="first") as strategy:
        net = strategy.mirror(nn.Sequential(*layers))
        with told(name and f"; the first module with another output is {name}. If forward"):
            net(x())


def test_no_module_is_named_where_a_collective_needs_all_replicas():
    def compute(f, x):
        mirror.get_replica_context().all_reduce("sum", x.mean())
        return f(x - x[0])

    with mirror.MirroredStrategy(["cpu"] * 2, verify="first") as strategy:
        net = strategy.mirror(Computing(compute))
        with told("of its largest value. If forward computes over the examples"):
            net(x())


def test_a_compiled_model_is_not_compared():
    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        net = strategy.mirror(Computing(lambda f, x: f(x - x[0])))
        net.compile(backend="eager")
        calls = calls_of(net)
        net(x())
        assert len(calls) == 2


# What a trial must not change: values of classes in C, and those that .data gives.


def stepping(net, value):
    with torch.no_grad():
        for mine, other in zip(net.average.parameters(), net.layer.parameters(), strict=True):
            value(mine, other)


def with_data(mine, other):
    mine.data = mine.data * 0.5 + other.data * 0.5


CHANGES = {
    "numpy's old generator": (np.random.RandomState, lambda kept, _: kept.rand()),
    "a bit generator": (np.random.PCG64, lambda kept, _: kept.random_raw()),
    "a bytearray": (bytearray, lambda kept, _: kept.append(1) or len(kept)),
    "an array": (lambda: array.array("i"), lambda kept, _: kept.append(1) or len(kept)),
    "data set": (list, lambda _, net: stepping(net, with_data)),
    "data written": (list, lambda _, net: stepping(net, lambda a, b: a.data.lerp_(b.data, 0.5))),
    "a view": (list, lambda _, net: stepping(net, lambda a, b: a.detach().lerp_(b, 0.5))),
}


class Keeping(nn.Module):
    def __init__(self, kept, change):
        super().__init__()
        self.layer, self.average, self.change = nn.Linear(4, 3), nn.Linear(4, 3), change
        self.average.requires_grad_(False)
        self.kept = kept() if kept is not np.random.RandomState else kept(0)
        if kept is np.random.PCG64:
            self.kept = kept(0)

    def forward(self, x):
        found = self.change(self.kept, self)
        return self.layer(x) * (1 + float(found or 0) % 7) + self.average(x)


@pytest.mark.parametrize("name", CHANGES)
def test_a_trial_changes_no_state_behind_classes_in_c_and_data(name):
    found = []
    for verify in ("off", "first"):
        torch.manual_seed(0)
        with mirror.MirroredStrategy(["cpu"] * 2, verify=verify) as strategy:
            net = strategy.mirror(Keeping(*CHANGES[name]))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on counts of calls, one for each replica
                out = [net(x()).detach() for _ in range(2)]
            strategy.check_replicas()
            found.append([*out, *(p.detach().clone() for p in net.parameters())])
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("kind", [list, tuple, set, dict.fromkeys])
def test_a_table_of_numbers_is_copied_as_a_whole(kind, monkeypatch):
    sizes = []
    contents_of = trial_state.contents_of
    monkeypatch.setattr(
        trial_state,
        "contents_of",
        lambda v: sizes.append(len(found := contents_of(v))) or found,
    )
    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        net = strategy.mirror(Computing(lambda f, x: f(x)))
        net.table = kind(range(1000))
        net(x())
    assert 1000 not in sizes


class Uncopyable(dict):
    def __copy__(self):
        raise RuntimeError("not to be copied")


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("held", [Uncopyable(), nested(5000)], ids=["refuses", "deep"])
def test_a_state_that_cannot_be_copied_is_no_error_of_forward(held, caplog):
    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        net = strategy.mirror(Computing(lambda f, x: f(x)))
        net.held = held
        with caplog.at_level(logging.INFO, "mirror"):
            net(x())
    assert "its state cannot be copied" in caplog.text


VARYING = {
    "a clock": lambda f, x: (f(x), torch.tensor(time.perf_counter())),
    "names": lambda f, x: [uuid.uuid4().hex for _ in f(x)],
    "secrets": lambda f, x: f(x) + secrets.randbelow(10**6),
    "an own generator": lambda f, x: f(x) + np.random.default_rng().random(),
}


@pytest.mark.parametrize("name", VARYING)
def test_what_no_two_calls_return_is_not_compared(name):
    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        strategy.mirror(Computing(VARYING[name]))(x(5))


def test_a_forward_that_takes_another_path_with_hooks_is_compared_without_them():
    """As ``nn.TransformerEncoder`` does: rows of padding are 0 on its fast path, else nan."""

    def padded(f, x):
        return f(x) * (float("nan") if f._forward_hooks else 1.0)

    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        strategy.mirror(Computing(padded))(x())


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_a_traced_submodule_is_called_in_a_trial():
    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        net = Computing(lambda f, x: net.traced(f(x)))
        net.traced = torch.jit.trace(nn.ReLU(), torch.zeros(2, 3))
        strategy.mirror(net)(x())


class Scheduled(nn.Module):
    """Its outputs depend on how often it was called, which replicas share: the second has 2."""

    def __init__(self, counts):
        super().__init__()
        self.layer, self.counts = nn.Linear(4, 3), counts

    def forward(self, x):
        self.counts.append(len(x))
        return self.layer(x) * len(self.counts)


def test_a_state_that_the_call_has_changed_excuses_no_difference():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        net = strategy.mirror(Scheduled([]))
        with told("output differs"):
            net(x())


class Calling(nn.Linear):
    def __call__(self, x):
        return {"out": super().__call__(x)}


def test_a_call_of_the_class_itself_is_made_once():
    plain = Calling(4, 3)
    with mirror.MirroredStrategy(["cpu"] * 2, verify="error") as strategy:
        net = strategy.mirror(copy.deepcopy(plain))
        assert_equal(net(x()), plain(x()))
