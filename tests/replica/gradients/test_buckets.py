"""Gradients reduced beside the backward pass: which buckets, when, and what is left to the end."""

import copy
import gc
import json
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mirror
from mirror.replica.gradients.buckets import bucket_ends
from tests.oracle import assert_same, assert_same_training, in_run, train, train_loop

SIZE = 8  # a weight of 64 floats is 256 bytes, a bias 32: a layer is a bucket
NUM_LAYERS = 5


class Deep(nn.Module):
    """Layers of one bucket each; with ``skip``, one is left out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(NUM_LAYERS))

    def forward(self, x, skip=None, backwards=False):
        layers = [layer for i, layer in enumerate(self.layers) if i != skip]
        for layer in reversed(layers) if backwards else layers:
            x = layer(x).tanh()
        return x


def loss_of(model, batch):
    return model(batch).square().mean()


@pytest.fixture
def make(make_strategy):
    """Gives ``make(n, **options)``: a strategy with a bucket per layer."""

    def make(n=2, **options):
        packs = mirror.CommunicationOptions(bytes_per_pack=300)
        return make_strategy(n, communication_options=packs, **options)

    return make


@pytest.fixture
def launches(monkeypatch):
    """The names of the variables of every bucket launched."""
    launched = []
    original = mirror.replica.gradients.buckets.Buckets._launch

    def launch(self, order, part):
        before = len(self.on_their_way)
        original(self, order, part)
        if len(self.on_their_way) > before:
            launched.append([variable.name for variable in self.on_their_way[-1].variables])

    monkeypatch.setattr(mirror.replica.gradients.buckets.Buckets, "_launch", launch)
    return launched


def layer_names(*indices):
    return [[f"layers.{i}.bias", f"layers.{i}.weight"] for i in indices]


ALL_BUT_LAST = [4, 3, 2, 1]  # layers in the order of their gradients; the last stays


def batches(count, size=10):
    return [torch.randn(size, SIZE) for _ in range(count)]


def pair(strategy):
    """A model, and the same mirrored."""
    plain = Deep()
    return plain, strategy.mirror(copy.deepcopy(plain))


def backward_in_run(strategy, model, batch, **options):
    in_run(strategy, lambda x: model(x, **options).square().mean().backward(), batch)


def assert_same_grads(strategy, model, plain, tolerance=None):
    for name, parameter in plain.named_parameters():
        assert_same(model.get_parameter(name).grad, parameter.grad, name, tolerance)

    def grads():
        return [parameter.grad for parameter in model.parameters()]

    first, *others = strategy.local_results(strategy.run(grads))
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a.to_dense(), b.to_dense())


def learn(strategy, model, plain):
    """One step, after which the order is known."""
    batch = torch.randn(10, SIZE)
    for m in (model, plain):
        loss_of(m, batch).backward()
        m.zero_grad()


def end_threads(strategy):
    strategy.close()
    return [thread for thread in threading.enumerate() if "mirror" in thread.name]


# Which buckets


def test_a_bucket_ends_before_it_grows_too_large():
    assert bucket_ends([], 10) == []
    assert bucket_ends([1, 1, 3, 1, 1, 1], 3) == [2, 3, 6]
    assert bucket_ends([7, 7], 0) == [1, 2]
    # The first one is of a megabyte at most: it is what there is to wait for first.
    assert bucket_ends([2**19] * 4, 2**30) == [2, 4]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("way", [1, 2, 3])
def test_every_step_but_the_first_launches_all_buckets_but_the_last(
    make, launches, n, schedule, way
):
    strategy = make(n, schedule=schedule)
    plain, model = pair(strategy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (plain, model)]
    data = batches(6)
    losses = train(way, strategy, model, optimizers[1], data, loss_of)
    assert [sorted(names) for names in launches] == layer_names(*ALL_BUT_LAST) * 5
    assert_same(losses, train_loop(plain, optimizers[0], data, loss_of))
    assert_same_training(model, optimizers[1], plain, optimizers[0])


def test_a_model_of_less_than_a_bucket_launches_nothing(make_strategy, launches):
    strategy = make_strategy(2)
    plain, model = pair(strategy)
    for batch in batches(3):
        for m in (model, plain):
            loss_of(m, batch).backward()
    assert_same_grads(strategy, model, plain)
    assert not launches
    assert not any("side" in thread.name for thread in threading.enumerate())


def test_a_trace_shows_buckets_beside_the_backward_pass(make, tmp_path, monkeypatch):
    strategy = make(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    begun = threading.Event()
    communicator = strategy._group.communicator
    reduce = communicator.all_reduce_checked

    def noted(*args):
        begun.set()
        reduce(*args)

    def step(x):
        x = model.layers[0](x)
        if mirror.get_replica_context().replica_id_in_sync_group == 1:
            x.register_hook(lambda grad: (begun.wait(10), None)[1])
        for layer in model.layers[1:]:
            x = layer(x)
        x.square().mean().backward()

    monkeypatch.setattr(communicator, "all_reduce_checked", noted)
    with strategy.trace(tmp_path / "trace.json"):
        in_run(strategy, step, torch.randn(10, SIZE))
    trace = json.loads((tmp_path / "trace.json").read_text())
    lanes = {
        event["args"]["name"]: event["tid"] for event in trace["traceEvents"] if event["ph"] == "M"
    }
    beside = [
        event
        for event in trace["traceEvents"]
        if event["tid"] == lanes["reductions beside backward"] and event["ph"] == "X"
    ]
    names = [f"bucket {i}: 2 parameters" for i in range(1, 5)]
    assert [event["name"] for event in beside] == names
    backwards = [event for event in trace["traceEvents"] if event.get("cat") == "backward"]
    last = max(event["ts"] + event["dur"] for event in backwards)
    assert all(min(e["ts"] for e in backwards) < event["ts"] for event in beside)
    assert beside[0]["ts"] < last
    assert 0 <= trace["otherData"]["hidden_share_of_communication"] <= 1


# Passes unlike the one learnt


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("skip", range(NUM_LAYERS))
def test_unused_parameters_are_left_alone_and_the_others_reduced(make, launches, schedule, skip):
    strategy = make(3, schedule=schedule)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    for _ in range(3):
        batch = torch.randn(10, SIZE)
        backward_in_run(strategy, model, batch, skip=skip)
        plain(batch, skip=skip).square().mean().backward()
    assert model.layers[skip].weight.grad is None
    assert_same_grads(strategy, model, plain)


def test_parameters_that_one_replica_does_not_use_count_zero_for_it(make):
    strategy = make(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    batch = torch.randn(10, SIZE)

    def step(x):
        skip = 2 if mirror.get_replica_context().replica_id_in_sync_group == 0 else None
        model(x, skip=skip).square().mean().backward()

    in_run(strategy, step, batch)
    for part, skip in ((batch[:5], 2), (batch[5:], None)):
        (plain(part, skip=skip).square().mean() / 2).backward()
    assert_same_grads(strategy, model, plain)


@pytest.mark.parametrize("way", ["inside", "outside"])
def test_another_order_is_right_at_once_and_learnt_when_it_stays(make, launches, way):
    strategy = make(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    counts = []
    for backwards in [False, True, False, True, True, True, True]:
        batch = torch.randn(10, SIZE)
        if way == "inside":
            backward_in_run(strategy, model, batch, backwards=backwards)
        else:
            model(batch, backwards=backwards).square().mean().backward()
        plain(batch, backwards=backwards).square().mean().backward()
        assert_same_grads(strategy, model, plain)
        counts.append(len(launches))
        launches.clear()
    # One pass tells that the order is another one (a bucket may be complete all the same), the
    # hooks of the next learn it.
    assert counts == [4, 1, 0, 1, 0, 4, 4]


def test_models_that_take_turns_keep_the_order_of_the_first(make, launches):
    # As a GAN does: the generator's pass goes through the discriminator first.
    strategy = make(2)
    (plain_d, d), (plain_g, g) = pair(strategy), pair(strategy)
    for _ in range(3):
        x = torch.randn(10, SIZE)
        in_run(strategy, lambda x: d(x).square().mean().backward(), x)
        plain_d(x).square().mean().backward()
        assert_same_grads(strategy, d, plain_d)
        in_run(strategy, lambda x: d(g(x)).square().mean().backward(), x)
        plain_d(plain_g(x)).square().mean().backward()
        assert_same_grads(strategy, d, plain_d)
        assert_same_grads(strategy, g, plain_g)
    assert len(launches) == 4 * 5


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_two_backward_passes_before_a_look_are_summed(make, n, schedule):
    strategy = make(n, schedule=schedule)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    for _ in range(2):
        batch = torch.randn(10, SIZE)

        def step(x):
            loss_of(model, x).backward()
            loss_of(model, 2 * x).backward()

        in_run(strategy, step, batch)
        (loss_of(plain, batch) + loss_of(plain, 2 * batch)).backward()
    assert_same_grads(strategy, model, plain)


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("how", ["zero_grad", "assignment", "not to none"])
def test_gradients_dropped_before_a_look_do_not_come_back(make, schedule, where, how):
    # A replica that had set its gradients to None and gone through a second pass met, in one
    # bucket, the first pass of the next replica.
    strategy = make(2, schedule=schedule)
    plain, model = pair(strategy)
    learn(strategy, model, plain)

    def drop(m):
        if how == "assignment":
            for parameter in m.parameters():
                parameter.grad = None
        else:
            m.zero_grad(set_to_none=how == "zero_grad")

    def step(m, x):
        loss_of(m, x).backward()
        drop(m)
        loss_of(m, 2 * x).backward()

    for _ in range(2):
        batch = torch.randn(10, SIZE)
        if where == "inside":
            in_run(strategy, lambda x: step(model, x), batch)
        else:
            step(model, batch)
        step(plain, batch)
        assert_same_grads(strategy, model, plain)


def test_a_gradient_set_by_hand_before_the_look_goes_before_what_arrived(make):
    strategy = make(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    weight = model.layers[3].weight

    def step(x):
        loss_of(model, x).backward()
        weight.grad = torch.ones(SIZE, SIZE)

    batch = torch.randn(10, SIZE)
    in_run(strategy, step, batch)
    loss_of(plain, batch).backward()
    plain.layers[3].weight.grad = torch.ones(SIZE, SIZE)
    assert_same_grads(strategy, model, plain)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_no_sync_launches_nothing_and_the_pass_after_it_reduces_all(make, launches, where):
    strategy = make(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)

    def backward(batch):
        if where == "inside":
            backward_in_run(strategy, model, batch)
        else:
            loss_of(model, batch).backward()
        loss_of(plain, batch).backward()

    for _ in range(2):
        with strategy.no_sync():
            backward(torch.randn(10, SIZE))
            backward(torch.randn(10, SIZE))
        assert not launches
        backward(torch.randn(10, SIZE))
        assert_same_grads(strategy, model, plain)
        backward(torch.randn(10, SIZE))
        assert_same_grads(strategy, model, plain)
        assert launches
        launches.clear()


# Parts that count differently


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("size", [9, 4, 3, 1])
def test_uneven_and_missing_parts_count_by_their_examples(make, schedule, size):
    strategy = make(4, schedule=schedule)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    for batch in batches(2, size):
        backward_in_run(strategy, model, batch)
        loss_of(plain, batch).backward()
    assert_same_grads(strategy, model, plain)


def test_a_replica_of_weight_zero_counts_nothing_not_even_nan(make):
    # The bucket's list of gradients had None for it, and the reduction beside raised.
    strategy = make(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)

    def step(x):
        context = mirror.get_replica_context()
        context.weight = context.replica_id_in_sync_group
        (loss_of(model, x) / context.replica_id_in_sync_group).backward()

    batch = torch.randn(10, SIZE)
    in_run(strategy, step, batch)
    loss_of(plain, batch[5:]).backward()
    assert_same_grads(strategy, model, plain)


# What lists of dense gradients cannot hold


def test_gradient_hooks_see_the_whole_gradient_once(make):
    strategy = make(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    seen = []
    for m in (plain, model):
        m.layers[2].weight.register_hook(lambda grad: (seen.append(grad.clone()), grad * 2)[1])
    for batch in batches(2):
        loss_of(plain, batch).backward()
        backward_in_run(strategy, model, batch)
        expected, actual = seen
        assert_same(actual, expected)
        seen.clear()
    assert_same_grads(strategy, model, plain)


def test_sparse_gradients_stay_sparse(make, launches):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(6, SIZE, sparse=True)
            self.deep = Deep()

        def forward(self, words):
            return self.deep(self.embedding(words))

    strategy = make(2)
    plain = Words()
    model = strategy.mirror(copy.deepcopy(plain))
    for _ in range(3):
        words = torch.randint(0, 6, (10,))
        in_run(strategy, lambda words: loss_of(model, words).backward(), words)
        loss_of(plain, words).backward()
    assert model.embedding.weight.grad.is_sparse
    assert_same_grads(strategy, model, plain)
    assert len(launches) >= 4


def test_gradients_with_a_graph_keep_it(make):
    strategy = make(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    batch = torch.randn(10, SIZE)

    def penalized(m, x):
        grads = torch.autograd.grad(loss_of(m, x), list(m.parameters()), create_graph=True)
        return sum(grad.square().sum() for grad in grads)

    def step(x):
        penalized(model, x).backward()

    in_run(strategy, step, batch)
    for part in batch.tensor_split(2):
        (penalized(plain, part) / 2).backward()
    assert_same_grads(strategy, model, plain)
    with pytest.warns(UserWarning, match="create_graph"):
        in_run(strategy, lambda x: loss_of(model, x).backward(create_graph=True), batch)
    loss_of(plain, batch).backward()
    assert_same_grads(strategy, model, plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_in_the_backward_pass(make, launches, reentrant):
    strategy = make(2)
    plain, model = pair(strategy)

    def forward(m, x):
        x = m.layers[0](x)
        for layer in m.layers[1:]:
            x = checkpoint(layer, x, use_reentrant=reentrant).tanh()
        return x.square().mean()

    for batch in batches(3):
        in_run(strategy, lambda x: forward(model, x).backward(), batch)
        forward(plain, batch).backward()
        assert_same_grads(strategy, model, plain)
    assert len(launches) == 8


def test_a_gradient_that_shares_memory_with_one_still_to_be_passed_on(make_strategy):
    # The gradient of `p` in `x + p.view(1, -1)` is a view of that of `x`, which the bucket
    # weighed and reduced in place before the layers below got it.
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.below, self.above = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
            self.positions = nn.Parameter(torch.randn(SIZE))
            self.halves = nn.ParameterList(torch.randn(SIZE // 2) for _ in range(2))

        def forward(self, x):
            x = self.below(x) + self.positions.view(1, -1)
            return self.above(x.tanh()) * torch.cat(list(self.halves))

    packs = mirror.CommunicationOptions(bytes_per_pack=16)
    strategy = make_strategy(2, communication_options=packs)
    plain = Positions()
    model = strategy.mirror(copy.deepcopy(plain))

    def step(x):
        context = mirror.get_replica_context()
        context.weight = 1 + context.replica_id_in_sync_group
        loss_of(model, x).backward()

    for batch in batches(3, size=2):
        in_run(strategy, step, batch)
        (loss_of(plain, batch[:1]) / 3 + loss_of(plain, batch[1:]) * 2 / 3).backward()
        assert_same_grads(strategy, model, plain)


# What is on its way when something ends


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_an_error_while_a_bucket_is_on_its_way_leaves_nothing_behind(make, schedule):
    strategy = make(2, schedule=schedule)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    reached = threading.Event()

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            if mirror.get_replica_context().replica_id_in_sync_group == 1:
                assert schedule == "staggered" or strategy._group.gradients.buckets.on_their_way
                reached.set()
                raise ValueError("in backward")
            return grad

    def failing(x):
        x = Failing.apply(model.layers[0](x).tanh())
        for layer in model.layers[1:]:
            x = layer(x).tanh()
        x.square().mean().backward()

    with pytest.raises(ValueError, match="in backward"):
        in_run(strategy, failing, torch.randn(10, SIZE))
    assert reached.is_set()
    assert all(parameter.grad is None for parameter in model.parameters())
    batch = torch.randn(10, SIZE)
    backward_in_run(strategy, model, batch)
    loss_of(plain, batch).backward()
    assert_same_grads(strategy, model, plain)


def test_a_failing_reduction_is_raised_where_it_is_awaited(make, monkeypatch):
    strategy = make(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)

    def failing(*args):
        raise OSError("cable cut")

    with monkeypatch.context() as patch:
        patch.setattr(strategy._group.communicator, "all_reduce_checked", failing)
        with pytest.raises(OSError, match="cable cut"):
            backward_in_run(strategy, model, torch.randn(10, SIZE))
    batch = torch.randn(10, SIZE)
    backward_in_run(strategy, model, batch)
    loss_of(plain, batch).backward()
    assert_same_grads(strategy, model, plain)


def test_a_model_that_dies_after_backward_takes_no_gradients_of_another(make):
    # What was on its way of it was still counted, and as many gradients of the next model's pass
    # were left out of their reduction.
    strategy = make(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    loss_of(model, torch.randn(10, SIZE)).backward()
    gone = weakref.ref(model.layers[4].weight)
    variable = weakref.ref(model.layers[4].weight._mirrored)
    del model
    gc.collect()
    assert gone() is None
    plain, model = pair(strategy)
    for batch in batches(2):
        backward_in_run(strategy, model, batch)
        loss_of(plain, batch).backward()
        assert_same_grads(strategy, model, plain)
    gc.collect()
    assert variable() is None


def test_a_layer_replaced_after_backward_takes_no_gradients_of_the_others(make):
    strategy = make(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    batch = torch.randn(10, SIZE)
    for m in (plain, model):
        loss_of(m, batch).backward()
        m.layers[3] = nn.Linear(SIZE, SIZE)
        gc.collect()
    model.layers[3].load_state_dict(plain.layers[3].state_dict())
    assert_same_grads(strategy, model, plain)
    backward_in_run(strategy, model, batch)
    loss_of(plain, batch).backward()
    assert_same_grads(strategy, model, plain)


def test_closing_ends_the_thread_that_reduces(make):
    strategy = make(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    loss_of(model, torch.randn(10, SIZE)).backward()
    assert any("side" in thread.name for thread in threading.enumerate())
    assert end_threads(strategy) == []
    del model
    gc.collect()


def test_a_strategy_that_is_gone_leaves_no_threads(make_strategy):
    def use():
        packs = mirror.CommunicationOptions(bytes_per_pack=300)
        strategy = mirror.MirroredStrategy(["cpu"] * 2, communication_options=packs)
        model = strategy.mirror(Deep())
        for batch in batches(3):
            backward_in_run(strategy, model, batch)

    before = set(threading.enumerate())
    use()
    gc.collect()
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(5)
        assert not thread.is_alive()
