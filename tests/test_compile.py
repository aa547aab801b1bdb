"""torch.compile of mirrored models and steps: results as eager, one compilation per replica.

Most tests use the backend "eager", or "aot_eager" where gradients take another path: what mirror
must get right is what the compiler is shown, not the code that a backend generates.
"""

import copy
import logging
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.execution.current import current
from tests.oracle import assert_same, assert_same_training

# The compiler looks at .grad of whatever comes into a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # costs seconds
    # A frame that hits the limit silently runs uncompiled; here it fails.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


class Backend:
    """The backend "eager" that notes for which replica it was called, None outside run."""

    def __init__(self):
        self.replicas = []

    def __call__(self, graph, examples):
        replica = current.replica
        self.replicas.append(None if replica is None else replica.replica_id)
        return graph.forward


class Net(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.inner = nn.Sequential(*inner)
        self.last = nn.Linear(8, 3)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x):
        return self.last(torch.tanh(self.inner(self.first(x)))) * self.scale


def batches(sizes=(8, 5, 8), classes=3):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 6, generator=generator), torch.randint(classes, (n,), generator=generator))
        for n in sizes
    ]


def make_loss(call):
    def loss(batch):
        x, y = batch
        return F.cross_entropy(call(x), y)

    return loss


def make_step(model, optimizer, loss):
    def step(batch):
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return value.detach()

    return step


def train(way, strategy, model, optimizer, loss, step, data):
    """One of the three ways; the replicas are compared after every step."""
    losses = []
    for batch in data if way == 1 else strategy.distribute_dataset(data):
        if way == 1:
            value = step(batch)
        elif way == 2:
            optimizer.zero_grad()
            value = strategy.reduce("mean", strategy.run(loss, args=(batch,)))
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            value = strategy.reduce("mean", strategy.run(step, args=(batch,)))
        strategy.check_replicas()
        losses.append(value.detach())
    return losses


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained_plainly(model, data):
    optimizer = adam(model)
    step = make_step(model, optimizer, make_loss(model))
    return model, optimizer, [step(batch) for batch in data]


def plain_sequence():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("make", [Net, pytest.param(plain_sequence, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mirrored", ["first", "last"])
@pytest.mark.parametrize("compiled", ["model", "method", "function"])
@pytest.mark.parametrize("way", [1, 2, 3])
def test_compiled_training_is_that_of_one_device(way, compiled, mirrored, make, make_strategy):
    model = make()
    plain, plain_optimizer, expected = trained_plainly(copy.deepcopy(model), batches())
    strategy, backend = make_strategy(2), Backend()
    if mirrored == "first":
        strategy.mirror(model)
    call = model
    if compiled == "model":
        call = torch.compile(model, backend=backend)
    elif compiled == "method":
        model.compile(backend=backend)
    if mirrored == "last":
        strategy.mirror(model)
    optimizer = adam(model)
    loss = make_loss(call)
    step = make_step(model, optimizer, loss)
    if compiled == "function":
        loss, step = (torch.compile(f, backend=backend) for f in (loss, step))
    losses = train(way, strategy, model, optimizer, loss, step, batches())
    assert_same(losses, expected)
    assert_same_training(model, optimizer, plain, plain_optimizer)
    # torch compiles nothing of a Sequential's method: it begins with no code of its own.
    if compiled != "method" or make is Net:
        assert set(backend.replicas) - {None} == {0, 1}


@pytest.mark.parametrize("compiled", ["model", "method"])
@pytest.mark.parametrize("way", [1, 2, 3])
def test_a_model_in_one_graph_compiles_once_per_replica(way, compiled, make_strategy):
    """fullgraph=True refuses graph breaks; 8 replicas are as many as the limit of one device."""
    model = Net()
    plain, plain_optimizer, expected = trained_plainly(copy.deepcopy(model), batches((16, 16)))
    strategy, backend = make_strategy(8), Backend()
    strategy.mirror(model)
    call = model
    if compiled == "model":
        call = torch.compile(model, backend=backend, fullgraph=True)
    else:
        model.compile(backend=backend, fullgraph=True)
    optimizer = adam(model)
    loss = make_loss(call)
    step = make_step(model, optimizer, loss)
    losses = train(way, strategy, model, optimizer, loss, step, batches((16, 16)))
    assert_same(losses, expected)
    assert_same_training(model, optimizer, plain, plain_optimizer)
    assert sorted(backend.replicas) == list(range(8))


def test_the_recompile_limit_counts_for_every_replica(make_strategy):
    """Four shapes on three replicas are 12 compilations, where one device may have 8."""
    strategy, backend = make_strategy(3), Backend()
    model = strategy.mirror(Net())
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    for size in range(3, 15, 3):
        x = torch.ones(size, 6)
        assert_same(call(x), model(x))
    assert len(backend.replicas) == 12


def test_functions_in_run_compile_in_one_graph(make_strategy):
    strategy, backend = make_strategy(2), Backend()
    model = strategy.mirror(Net())
    loss = torch.compile(make_loss(model), backend=backend, fullgraph=True)
    ((x, y),) = batches((8,))
    (batch,) = strategy.distribute_dataset([(x, y)])
    for _ in range(3):
        value = strategy.reduce("mean", strategy.run(loss, args=(batch,)))
        assert_same(value, F.cross_entropy(model(x), y))
    assert len(backend.replicas) == 2


def test_a_fullgraph_function_outside_run_is_refused_with_the_reason(make_strategy):
    model = make_strategy(2).mirror(Net())
    loss = torch.compile(make_loss(model), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="take turns in threads of their own"):
        loss(batches()[0])
    assert_same(loss.__wrapped__(batches()[0]), make_loss(copy.deepcopy(model))(batches()[0]))


MODELS = {
    "batch norm": lambda: Net(nn.BatchNorm1d(8)),
    "sync batch norm": lambda: Net(mirror.nn.SyncBatchNorm(8)),
    "dropout": lambda: Net(nn.Dropout(0.5)),
    "attention": lambda: Net(
        nn.Unflatten(1, (2, 4)),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        nn.Flatten(),
    ),
}


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
@pytest.mark.parametrize("way", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "attention")) for k in MODELS]
)
def test_layers_compiled_are_as_mirrored_and_not_compiled(kind, way, backend, make_strategy):
    """Normalization and dropout see a replica's part: the oracle is mirrored training itself."""
    outcomes = []
    start = MODELS[kind]()
    for compiled in (False, True):
        torch.manual_seed(3)
        strategy = make_strategy(2)
        model = strategy.mirror(copy.deepcopy(start))
        call = torch.compile(model, backend=backend) if compiled else model
        optimizer = adam(model)
        loss = make_loss(call)
        losses = train(
            way, strategy, model, optimizer, loss, make_step(model, optimizer, loss), batches()
        )
        model.eval()
        with torch.no_grad():
            out = call(torch.ones(5, 6))
        outcomes.append((losses, out, model.state_dict(), optimizer.state_dict()))
    assert_same(outcomes[1], outcomes[0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        out, _ = self.lstm(x.unflatten(1, (2, 3)))
        return self.head(out[:, -1])


class Breaks(Net):
    """Its graph breaks in the middle; the parts around it are compiled."""

    def forward(self, x):
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.last(x)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [1, 3])
@pytest.mark.parametrize("make", [Recurrent, Breaks])
def test_graphs_that_break_train_as_on_one_device(make, way, backend, make_strategy):
    model = make()
    plain, plain_optimizer, expected = trained_plainly(copy.deepcopy(model), batches())
    strategy = make_strategy(3)
    call = torch.compile(strategy.mirror(model), backend=backend)
    optimizer = adam(model)
    loss = make_loss(call)
    step = make_step(model, optimizer, loss)
    assert_same(train(way, strategy, model, optimizer, loss, step, batches()), expected)
    assert_same_training(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize("way", [1, 3])
def test_an_embedding_that_renormalizes_stays_equal_on_all_replicas(way, make_strategy):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(7, 6, max_norm=0.5)
            self.head = nn.Linear(6, 3)

        def forward(self, tokens):
            return self.head(self.table(tokens).mean(1))

    generator = torch.Generator().manual_seed(2)
    data = [
        (torch.randint(7, (n, 2), generator=generator), torch.randint(3, (n,))) for n in (6, 5)
    ]
    model = Tokens()
    plain, plain_optimizer, expected = trained_plainly(copy.deepcopy(model), data)
    strategy = make_strategy(2)
    call = torch.compile(strategy.mirror(model), backend="aot_eager")
    optimizer = adam(model)
    loss = make_loss(call)
    step = make_step(model, optimizer, loss)
    assert_same(train(way, strategy, model, optimizer, loss, step, data), expected)
    assert_same_training(model, optimizer, plain, plain_optimizer)


def test_evaluation_and_training_modes_compile_apart(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(Net(nn.BatchNorm1d(8)))
    call = torch.compile(model, backend="aot_eager")
    x = torch.randn(6, 6)
    call(x).sum().backward()
    assert model.first.weight.grad is not None
    model.eval()
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            assert_same(call(x), copy.deepcopy(model)(x))
            assert call(x).requires_grad == torch.is_grad_enabled()


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


@pytest.mark.parametrize("where", ["model", "before the optimizer", "in the optimizer"])
@pytest.mark.parametrize("inside", [True, False])
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


def test_methods_of_torch_are_wrapped_at_first_use_and_once(make_strategy):
    program = "import torch, mirror; print(torch.nn.Module.compile.__module__)"
    imported = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
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


@pytest.mark.parametrize("compiled", ["model", pytest.param("method", marks=pytest.mark.slow)])
def test_llama_compiled(compiled, make_strategy):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    plain = copy.deepcopy(model)
    strategy = make_strategy(2)
    strategy.mirror(model)
    call = model
    if compiled == "model":
        call = torch.compile(model, backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
    optimizer, plain_optimizer = adam(model), adam(plain)
    for seed in range(2):
        tokens = torch.randint(17, (4, 5), generator=torch.Generator().manual_seed(seed))
        values = []
        for network, forward, opt in ((model, call, optimizer), (plain, plain, plain_optimizer)):
            opt.zero_grad()
            value = forward(input_ids=tokens, labels=tokens).loss
            value.backward()
            opt.step()
            values.append(value.detach())
            assert network.training
        assert_same(*values)
        strategy.check_replicas()
    assert_same_training(model, optimizer, plain, plain_optimizer, 5e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.parametrize("compiled", ["model", "method", "function"])
@pytest.mark.parametrize("way", [1, 2, 3])
def test_the_default_backend_trains_as_one_device(way, compiled, make_strategy):
    model = Net(nn.LayerNorm(8))
    plain, plain_optimizer, expected = trained_plainly(copy.deepcopy(model), batches())
    strategy = make_strategy(2)
    call = strategy.mirror(model)
    if compiled == "model":
        call = torch.compile(model)
    elif compiled == "method":
        model.compile()
    optimizer = adam(model)
    loss = make_loss(call)
    step = make_step(model, optimizer, loss)
    if compiled == "function":
        loss, step = torch.compile(loss), torch.compile(step)
    assert_same(train(way, strategy, model, optimizer, loss, step, batches()), expected)
    assert_same_training(model, optimizer, plain, plain_optimizer)


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
