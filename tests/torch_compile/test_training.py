"""torch.compile of mirrored models: results as eager, one compilation per replica."""

import contextvars
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.oracle import assert_same, assert_same_training
from tests.pairs import EXHAUSTIVE, each_once, quick_of
from tests.torch_compile.compiled import (
    Backend,
    Net,
    adam,
    batches,
    make_loss,
    make_step,
    trained_plainly,
)

# The compiler reads .grad of everything that enters a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


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


def plain_sequence():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("make", [Net, pytest.param(plain_sequence, marks=pytest.mark.slow)])
@each_once(way=[1, 2, 3], compiled=["model", "method", "function"], mirrored=["first", "last"])
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


@each_once(way=[1, 2, 3], compiled=["model", "method"])
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


def test_no_step_leaves_a_variable_in_the_threads_context(make_strategy):
    """A context keeps what it is given, and each patch of torch's config gives it a variable."""
    strategy = make_strategy(2)
    with strategy.scope():
        model = Net()
    call = torch.compile(model, backend=Backend(), fullgraph=True)
    x = torch.ones(4, 6)
    numbers = []
    for _ in range(4):
        strategy.run(call, (x,))
        call(x)
        numbers.append(len(contextvars.copy_context()))
    assert numbers[1:] == numbers[1:2] * 3


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


@each_once(
    kind=[pytest.param(k, marks=[pytest.mark.slow] * (k == "attention")) for k in MODELS],
    way=[1, pytest.param(2, marks=pytest.mark.slow), 3],
    backend=["aot_eager", pytest.param("eager", marks=pytest.mark.slow)],
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
@each_once(make=[Recurrent, Breaks], way=[1, 3])
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


@pytest.mark.parametrize("way", [pytest.param(1, marks=pytest.mark.slow), 3])
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


def test_evaluation_and_training_modes_compile_separately(make_strategy):
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


@pytest.mark.slow
@pytest.mark.parametrize("compiled", quick_of(["model", "method"], ["method"]))
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
@each_once(way=[1, 2, 3], compiled=["model", "method", pytest.param("function", marks=EXHAUSTIVE)])
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
