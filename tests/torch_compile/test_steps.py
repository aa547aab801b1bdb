"""Compiled steps, losses and optimizers, with and without a strategy: as not compiled."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.oracle import assert_same, assert_same_training
from tests.pairs import each_once
from tests.torch_compile.compiled import Backend, Net, adam, batches, make_loss, trained_plainly

# The compiler reads .grad of everything that enters a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def test_what_the_cross_replica_context_changes_reaches_compiled_code(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(Net())
    call = torch.compile(model, backend="eager")
    x = torch.randn(6, 6)
    call(x)
    with torch.no_grad():
        model.first.weight.mul_(2)
        model.last.bias.data.fill_(3)
    model.scale.fill_(0.5)
    assert_same(call(x), copy.deepcopy(model)(x))
    model.last = nn.Linear(8, 4)
    assert_same(call(x), copy.deepcopy(model)(x))


def test_a_compiled_loss_joins_a_split_model(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(Net())
    x, y = batches()[0]

    def penalized(out, y):
        return F.cross_entropy(out, y) + sum(p.square().sum() for p in model.parameters())

    compiled = torch.compile(penalized, backend="aot_eager")
    compiled(model(x), y).backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    penalized(model(x), y).backward()
    assert_same(got, [p.grad for p in model.parameters()])


def test_collectives_in_a_compiled_step(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(Net())

    @torch.compile(backend="eager")
    def step(x):
        context = mirror.get_replica_context()
        total = context.all_reduce("sum", model(x).sum())
        parts = context.all_gather(torch.full((1,), context.replica_id_in_sync_group))
        context.weight = context.replica_id_in_sync_group + 1.0
        count = context.merge_call(lambda strategy, value: len(value.values), (1,))
        return total * 2, parts, count

    x = torch.randn(4, 6)
    (batch,) = strategy.distribute_dataset([x])
    for _ in range(2):
        total, parts, count = strategy.run(step, args=(batch,))
        expected = model(x).sum() * 2
        assert_same(total.values, (expected, expected))
        assert_same(parts.values, (torch.tensor([0, 1]),) * 2)
        assert count.values == (2, 2)


@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_optimizer_step(inside, make_strategy):
    model = Net()
    plain, plain_optimizer, _ = trained_plainly(copy.deepcopy(model), batches())
    strategy = make_strategy(2)
    strategy.mirror(model)
    optimizer = adam(model)
    update = torch.compile(lambda: optimizer.step(), backend="eager")
    loss = make_loss(model)

    def step(batch):
        optimizer.zero_grad()
        loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update()

    for batch in strategy.distribute_dataset(batches()) if inside else batches():
        strategy.run(step, args=(batch,)) if inside else step(batch)
        strategy.check_replicas()
    assert_same_training(model, optimizer, plain, plain_optimizer)


@each_once(
    inside=[True, False],
    where=["model", "before the optimizer", "in the optimizer"],
)
def test_a_compiled_step_that_raises_leaves_all_usable(inside, where, make_strategy):
    class Fragile(Net):
        breaks = False

        def forward(self, x):
            if self.breaks and where == "model":
                raise ArithmeticError("asked for")
            return super().forward(x)

    class FragileSGD(torch.optim.SGD):
        def step(self, closure=None):
            if model.breaks and where == "in the optimizer":
                raise ArithmeticError("asked for")
            return super().step(closure)

    model = Fragile()
    start = copy.deepcopy(model)
    strategy = make_strategy(2)
    strategy.mirror(model)
    optimizer = FragileSGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if model.breaks and where == "before the optimizer":
            raise ArithmeticError("asked for")
        optimizer.step()

    def call(batch):
        if not inside:
            return step(batch)
        (batch,) = strategy.distribute_dataset([batch])
        return strategy.run(step, args=(batch,))

    model.breaks = True
    with pytest.raises(ArithmeticError, match="asked for"):
        call(batches()[0])
    optimizer.zero_grad()
    model.breaks = False
    assert_same(model.state_dict(), start.state_dict())
    call(batches()[0])
    strategy.check_replicas()
    plain_optimizer = torch.optim.SGD(start.parameters(), lr=0.1)
    x, y = batches()[0]
    F.cross_entropy(start(x), y).backward()
    plain_optimizer.step()
    assert_same(model.state_dict(), start.state_dict())


def test_the_compiler_is_reset_between_steps(make_strategy):
    strategy, backend = make_strategy(2), Backend()
    model = strategy.mirror(Net())
    call = torch.compile(model, backend=backend)
    x = torch.randn(4, 6)
    for step in range(1, 4):
        assert_same(call(x), model(x))
        assert len(backend.replicas) == 2 * step
        torch.compiler.reset()


def test_models_compiled_in_a_scope_and_copies_of_them(make_strategy):
    strategy, backend = make_strategy(2), Backend()
    with strategy.scope():
        model = torch.compile(Net(), backend=backend, fullgraph=True)
    x = torch.randn(4, 6)
    out = model(x)
    assert len(backend.replicas) == 2
    assert mirror.is_mirrored(model)
    copied = copy.deepcopy(model)
    assert not mirror.is_mirrored(copied)
    assert_same(copied(x), out)
    assert list(copied.state_dict()) == list(model.state_dict())


def test_models_that_are_not_mirrored_compile_as_without_mirror(make_strategy):
    make_strategy(2).mirror(Net())
    backend, model = Backend(), Net()
    model.compile(backend=backend, fullgraph=True)
    other = torch.compile(Net(), backend=backend, fullgraph=True)
    for network in (model, other):
        torch.compiler.reset()
        network(torch.ones(2, 6))
    assert backend.replicas == [None] * 2


def test_methods_of_torch_are_wrapped_at_first_use_and_once(script_pool, make_strategy):
    imported = script_pool.run("import torch, mirror; print(torch.nn.Module.compile.__module__)")
    assert imported.stdout.strip() == "torch.nn.modules.module"
    for _ in range(2):
        make_strategy(2).mirror(Net())
    for method in (nn.Module.compile, nn.Module.__setattr__):
        assert not hasattr(method.__wrapped__, "__wrapped__")
        assert method.__doc__ == method.__wrapped__.__doc__


def test_two_strategies_compile_the_same_class(make_strategy):
    for strategy in (make_strategy(2), make_strategy(3)):
        model = strategy.mirror(Net())
        call = torch.compile(model, backend="eager", fullgraph=True)
        for x, _ in batches():
            assert_same(call(x), copy.deepcopy(model)(x))


def test_one_replica_compiles_as_without_mirror():
    with mirror.MirroredStrategy(["cpu"]) as strategy:
        backend = Backend()
        model = strategy.mirror(Net())
        model.compile(backend=backend, fullgraph=True)
        (out,) = strategy.run(model, args=(torch.ones(2, 6),)).values
        assert_same(model(torch.ones(2, 6)), out)
        assert len(backend.replicas) == 1


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # torch's own
def test_the_step_of_an_optimizer_without_mirrored_parameters_compiles(make_strategy):
    strategy = make_strategy(2)
    strategy.mirror(nn.Linear(1, 1))  # else the scope of the parameter would seem forgotten
    strategy.run(lambda: None)
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    torch.compile(lambda: optimizer.step(), backend="eager")()
    assert parameter.tolist() == [0.5] * 3
