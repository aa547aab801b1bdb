"""The private names of torch exist, and those that fail silently do what they are used for."""

import json
import re
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from mirror import cli
from mirror.base import dynamo, torch_private
from mirror.base.torch_private import private_names
from mirror.errors import StrategyError
from mirror.replica.gradients.grad_tracker import register_listener
from mirror.replica.params.torch_function import MirroredParameter
from mirror.threads import schedule

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", private_names().values(), ids=lambda name: name.path)
def test_this_torch_has_the_name_or_something_stands_in(name):
    assert not name.is_lacking or name.instead


def test_the_table_has_every_name_that_is_used():
    sources = Path(torch_private.__file__).read_text() + Path(dynamo.__file__).read_text()
    used = set(re.findall(r'_find\(\s*"(torch\.[^"]+)"', sources))
    assert len(used) > 10
    assert used <= set(private_names())
    scaler = (ROOT / "mirror" / "replica" / "optimizers" / "grad_scaler.py").read_text()
    sources += (ROOT / "mirror" / "compiler" / "torch_internals.py").read_text()
    for path in private_names():
        last = path.rpartition(".")[2]
        is_saved = last.startswith(("_saved_", "_raw_saved_")) or last == "unpack_hook"
        assert is_saved or re.search(rf"\b{last}\b", sources + scaler), path


def test_the_table_names_the_feature_that_is_lost():
    for name in private_names().values():
        assert name.gives
        assert name.lost
        assert name.path.startswith("torch.")


def test_what_is_lacking_raises_when_it_is_used_and_says_what_is_lost():
    name = torch_private._Lacking("torch.optim.Optimizer.profile_hook_step")
    rule = r"lacks torch\.optim\.Optimizer\.profile_hook_step, without .* inside run"
    with pytest.raises(StrategyError, match=rule):
        name()
    with pytest.raises(StrategyError, match=rule):
        _ = name.hooks


def test_what_stands_in_is_used_where_a_name_lacks():
    assert torch_private._find("torch._C._no_such_name", len) is len
    lacking = torch_private._find("torch._C._no_such_name")
    assert isinstance(lacking, torch_private._Lacking)


def test_the_doctor_reports_what_this_torch_lacks(monkeypatch, capsys):
    assert cli.main(["doctor", "--devices", "cpu"]) == 0
    lacking = [name.path for name in private_names().values() if name.is_lacking]
    text = capsys.readouterr().out
    assert (f"has all {len(private_names())} private names" in text) is not bool(lacking)
    assert all(f"lacks {path}" in text for path in lacking)
    monkeypatch.delattr(torch.autograd, "_engine_run_backward")
    assert cli.main(["doctor", "--devices", "cpu"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "lacks torch.autograd._engine_run_backward: lost is parallel" in text
    assert cli.main(["doctor", "--json", "--devices", "cpu"]) == 0
    lacks = json.loads(capsys.readouterr().out)["torch_lacks"]
    assert {*lacking, "torch.autograd._engine_run_backward"} == {name["path"] for name in lacks}


tells_hooks = pytest.mark.skipif(
    private_names()["torch._C._autograd.SavedTensor.unpack_hook"].is_lacking,
    reason="this torch does not tell by what it unpacks",
)
WITHOUT_THEM = """
import sys, torch
from mirror.base.torch_private import _resolve_in_torch, private_names

# torch._dynamo is not imported with mirror.
paths = [path for path in private_names() if not path.startswith("torch._dynamo.")]
owners = {path: _resolve_in_torch(path.rpartition(".")[0]) for path in paths}
deleted = []
for path, owner in owners.items():
    name = path.rpartition(".")[2]
    for home in getattr(owner, "__mro__", (owner,)):
        if name in getattr(home, "__dict__", ()):
            try:
                delattr(home, name)
            except TypeError:  # what is built in cannot be deleted
                continue
            deleted.append(path)
for name in [name for name in sys.modules if name.partition(".")[0] == "mirror"]:
    del sys.modules[name]
import mirror, mirror.amp, mirror.cli, mirror.nn
print(len(deleted), *deleted)
"""


def test_mirror_can_be_imported_without_all_that_can_be_taken_away(script_pool):
    done = script_pool.run(WITHOUT_THEM)
    assert done.returncode == 0, done.stderr
    number, *deleted = done.stdout.split()
    assert int(number) >= 30
    broke = {"try_get", "_current_graph_task_id", "profile_hook_step"}
    assert broke <= {path.rpartition(".")[2] for path in deleted}


# What the names that would fail silently do


def test_split_calls_split(make_strategy):
    class Seen(nn.Linear):
        def forward(self, x):
            sizes.append(len(x))
            return super().forward(x)

    sizes = []
    make_strategy(2, verify="off").mirror(Seen(3, 1))(torch.ones(4, 3))
    assert sizes == [2, 2]


def test_a_module_that_cannot_be_split_is_no_longer_mirrored(make_strategy, monkeypatch):
    monkeypatch.delattr(nn.Module, "_compiled_call_impl")
    with pytest.raises(StrategyError, match="calls of mirrored modules outside run"):
        make_strategy(2).mirror(nn.Linear(3, 1))


def test_the_kinds_of_nodes_are_found_in_graphs():
    parameter = nn.Parameter(torch.ones(2))
    node = get_gradient_edge(parameter).node
    assert type(node).__name__ == torch_private.ACCUMULATES
    assert node.variable is parameter
    base = parameter * 2
    base[0] = 3.0
    assert type(base.grad_fn).__name__ in torch_private.HIDES_ANOTHER


@tells_hooks
def test_hooks_that_unpack_what_is_saved_are_found():
    p = torch.ones(2, requires_grad=True)
    assert (p * p).grad_fn._raw_saved_other.unpack_hook is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert (p * p).grad_fn._raw_saved_other.unpack_hook is not None


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name, notes):
        ctx.name, ctx.notes = name, notes
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.notes.append((ctx.name, torch_private.current_graph_task_id()))
        return grad, None, None


@pytest.mark.parametrize("is_moved", [False, True])
def test_the_sequence_number_moves_the_order_of_a_backward_pass(is_moved):
    notes = []
    x = torch.ones((), requires_grad=True)
    first, second = (Noting.apply(x, name, notes) for name in ("first", "second"))
    assert torch_private.sequence_number(first.grad_fn) < torch_private.sequence_number(
        second.grad_fn
    )
    if is_moved:
        number = torch_private.sequence_number(second.grad_fn)
        torch_private.set_sequence_number(first.grad_fn, number + 1)
    (first + second).backward()
    names, tasks = zip(*notes, strict=True)
    assert names == (("first", "second") if is_moved else ("second", "first"))
    # And which backward pass it is.
    assert len(set(tasks)) == 1
    assert tasks[0] >= 0
    assert torch_private.current_graph_task_id() == -1


def test_hooks_that_cannot_be_taken_over_are_seen():
    parameter = nn.Parameter(torch.ones(2))
    assert not torch_private.has_post_accumulate_hooks(parameter)
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert torch_private.has_post_accumulate_hooks(parameter)
    assert not torch_private.hooks_of(parameter)
    parameter.register_hook(lambda grad: None)
    assert len(torch_private.hooks_of(parameter)) == 1
    torch_private.forget_hooks(parameter)
    assert not torch_private.hooks_of(parameter)


class Watched(nn.Module):
    """Notes the threads that gradients come in."""

    def __init__(self):
        super().__init__()
        self.threads = []

    def forward(self, x):
        x.register_hook(lambda grad: self.threads.append(threading.get_ident()))
        return x * 1


@tells_hooks
def test_backward_passes_are_noticed(make_strategy, monkeypatch):
    """They come apart, are in reports, and tell which of them reach a copy."""
    monkeypatch.setattr(schedule, "LONG_TURN_SECONDS", -1.0)
    monkeypatch.setattr(schedule, "NUM_TURNS", 1)
    strategy = make_strategy(2, schedule="staggered")
    strategy.run(lambda: None)  # the first turn is looked at
    model = strategy.mirror(nn.Sequential(nn.Linear(3, 3), Watched(), nn.Linear(3, 1)))
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    threads = set(model[1].threads)
    assert len(threads) > 1
    assert strategy.report().backward > 0
    assert register_listener(model)


def test_a_parameter_made_of_another_is_noticed(make_strategy):
    model = make_strategy(2).mirror(nn.Linear(3, 1))
    made = nn.Parameter(model.weight)
    assert isinstance(made, MirroredParameter)
    assert made._mirrored is not model.weight._mirrored


def test_other_holders_of_a_gradient_are_counted():
    alone, shared = torch.ones(2), torch.ones(2)
    view = shared.view(1, 2)
    for _ in range(2):
        assert torch_private.num_sharers([alone, shared, view]) == [0, 1, 1]
    other = shared.view(2, 1)
    assert torch_private.num_sharers([alone, view, other]) == [0, 2, 2]


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_what_follows_a_thread_is_seen():
    def record_tracing(x):
        seen.append(
            (
                torch_private.is_jit_tracing(),
                torch_private.functions_interpreter() is not None,
                torch_private.num_dispatch_modes(),
            )
        )
        return x * 1

    seen = []
    x = torch.ones(2)
    record_tracing(x)
    torch.jit.trace(record_tracing, (x,), check_trace=False)
    torch.func.vmap(record_tracing)(x)
    with FlopCounterMode(display=False):
        record_tracing(x)
    assert seen == [
        (False, False, 0),
        (True, False, 0),
        (False, True, 0),
        (False, False, 1),
    ]
    with torch.device("cpu"):
        assert torch_private.num_function_modes() == 1
    assert torch_private.num_function_modes() == 0
