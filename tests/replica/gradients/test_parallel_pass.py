"""Backward passes outside run that come apart: at once where they may, the same bits always."""

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mirror
from mirror.concurrency import pace
from mirror.timeline import BACKWARD, CROSS
from tests.oracle import assert_same, finishes


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Has every turn count as a long one."""
    monkeypatch.setattr(pace, "LONG_SECONDS", -1.0)
    monkeypatch.setattr(pace, "LOOKS", 1)


@pytest.fixture(autouse=True)
def one_thread():
    """Has replicas compute with as many threads alone as at once: sums depend on how many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make(make_strategy):
    """Gives ``make(n)``: a strategy whose replicas start all at once."""

    def make(n=2, **options):
        strategy = make_strategy(n, schedule="staggered", **options)
        strategy.run(lambda: None)  # the first turn is looked at
        return strategy

    return make


class Watched(nn.Module):
    """A model whose hidden activation notes the thread that its gradient comes in."""

    def __init__(self, *body):
        super().__init__()
        self.body = nn.Sequential(*body)
        self.head = nn.LazyLinear(3)
        self.threads = []

    def forward(self, x):
        hidden = self.body(x)
        if hidden.requires_grad:
            hidden.register_hook(self.note)
        return self.head(hidden.flatten(1))

    def note(self, grad):
        self.threads.append(threading.get_ident())

    def ran_at_once(self):
        """Whether the last pass went through every replica in a thread of its own."""
        threads, self.threads = self.threads, []
        return threading.get_ident() not in threads and len(set(threads)) == len(threads) > 1


def small(*body):
    torch.manual_seed(0)
    model = Watched(*(body or (nn.Linear(6, 5), nn.Tanh())))
    model(torch.zeros(2, 6))
    model.threads.clear()
    return model


def mirrored(strategy, *body):
    return strategy.mirror(small(*body))


def grads_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def with_same_gradients(strategy, plain, loss):
    """Returns a mirrored copy of a module; a backward pass has left both the same gradients."""
    model = strategy.mirror(copy.deepcopy(plain))
    for m in (model, plain):
        loss(m).backward()
    assert_same(grads_of(model), grads_of(plain))
    return model


def assert_equal_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def batch_of(size=10, *shape):
    return torch.randn(size, *(shape or (6,))), torch.arange(size) % 3


def loss_of(strategy, model, batch, way):
    """Returns the loss of a batch: its forward split by the call, or in run."""
    x, y = batch
    if way == 1:
        return F.cross_entropy(model(x), y)
    (parts,) = strategy.distribute_dataset([(x, y)])
    losses = strategy.run(lambda part: F.cross_entropy(model(part[0]), part[1]), args=(parts,))
    return strategy.reduce("mean", losses)


ways = pytest.mark.parametrize("way", [1, 2])

# The same bits, at once


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(6, 4)

    def forward(self, x):
        state, states = x.new_zeros(len(x), 4), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return torch.stack(states, 1)


class Residual(nn.Module):
    """Uses a parameter and an activation several times: gradients add up in an order."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        x = torch.tanh(self.layer(x)) + x
        return self.layer(x) * x + x.sin() + torch.relu(self.layer(x))


BODIES = {
    "convolutional": lambda: (
        (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        (1, 8, 8),
    ),
    "recurrent": lambda: ((Recurrent(),), (5, 6)),
    "attention": lambda: (
        (nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),),
        (4, 6),
    ),
    "residual": lambda: ((Residual(),), (6,)),
}


@ways
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("body", BODIES)
def test_training_at_once_leaves_the_bits_of_a_single_pass(body, n, way, make, make_strategy):
    layers, shape = BODIES[body]()
    torch.manual_seed(0)
    model = Watched(*layers)
    model(torch.zeros(2, *shape))
    ends = []
    for strategy in (make_strategy(n), make(n)):
        own = strategy.mirror(copy.deepcopy(model))
        own.threads.clear()
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.05)
        torch.manual_seed(1)
        for size in (8, 8, 11, 7, 8):
            loss = loss_of(strategy, own, batch_of(size, *shape), way)
            optimizer.zero_grad()
            loss.backward()
            assert own.ran_at_once() == bool(ends)
            optimizer.step()
        strategy.check_replicas()
        ends.append(own.state_dict())
    assert_equal_bits(ends[1], ends[0])


@pytest.mark.parametrize("how", ["mean", "sum", "axis", "gather"])
def test_what_reduce_and_gather_join_comes_apart(how, make, make_strategy):
    grads = []
    for strategy in (make_strategy(2), make(2)):
        model = mirrored(strategy)
        (parts,) = strategy.distribute_dataset([torch.linspace(-1, 1, 42).view(7, 6)])
        outputs = strategy.run(lambda x, model=model: {"out": model(x)[:3]}, args=(parts,))
        if how == "gather":
            strategy.gather(outputs)["out"].square().mean().backward()
        else:
            axis = 0 if how == "axis" else None
            strategy.reduce("mean" if axis == 0 else how, outputs, axis)["out"].sum().backward()
        assert model.ran_at_once() == bool(grads)
        grads.append(grads_of(model))
    assert_equal_bits(*grads)


def test_replicas_of_short_turns_go_backward_in_one_thread(make_strategy, monkeypatch):
    monkeypatch.setattr(pace, "LONG_SECONDS", 1e9)
    strategy = make_strategy(2, schedule="staggered")
    model = mirrored(strategy)
    for _ in range(3):
        loss_of(strategy, model, batch_of(), 1).backward()
        assert set(model.threads) == {threading.get_ident()}


@pytest.mark.parametrize("size", [2, 3])
@ways
def test_replicas_that_sit_out_are_left_out(size, way, make):
    strategy, plain = make(4), small()
    model = strategy.mirror(copy.deepcopy(plain))
    for _ in range(2):
        batch = batch_of(size)
        loss_of(strategy, model, batch, way).backward()
        assert model.ran_at_once()
        F.cross_entropy(plain(batch[0]), batch[1]).backward()
    assert_same(grads_of(model), grads_of(plain))
    strategy.check_replicas()


def test_a_batch_of_one_goes_backward_in_one_thread(make):
    x, y = batch_of(1)
    model = with_same_gradients(make(2), small(), lambda m: F.cross_entropy(m(x), y))
    assert set(model.threads) == {threading.get_ident()}


def test_losses_of_two_calls_come_apart_together(make):
    x, y = batch_of()
    model = with_same_gradients(
        make(2), small(), lambda m: F.cross_entropy(m(x), y) + m(x + 1).square().mean()
    )
    assert len(set(model.threads)) == 2 < len(model.threads)
    assert threading.get_ident() not in model.threads


def test_several_outputs_of_a_call_come_apart(make):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small()

        def forward(self, x):
            out = self.inner(x)
            return {"out": out, "penalty": self.inner.head.weight.square().sum(), "again": out}

    strategy, plain = make(2), Two()
    model = strategy.mirror(copy.deepcopy(plain))
    x, y = batch_of()
    for m in (model, plain):
        outputs = m(x)
        loss = F.cross_entropy(outputs["out"], y) + outputs["again"].square().mean()
        (loss + outputs["penalty"]).backward()
    assert model.inner.ran_at_once()
    assert_same(grads_of(model), grads_of(plain))


def test_gradients_that_do_not_fit_one_bucket_are_reduced_all_the_same(make):
    strategy = make(2, communication_options=mirror.CommunicationOptions(bytes_per_pack=50))
    plain = small()
    model = strategy.mirror(copy.deepcopy(plain))
    for _ in range(4):
        batch = batch_of()
        for m in (model, plain):
            m.zero_grad()
            F.cross_entropy(m(batch[0]), batch[1]).backward()
        assert model.ran_at_once()
        assert_same(grads_of(model), grads_of(plain))


# Graphs kept and freed


@ways
def test_a_kept_graph_goes_backward_again(way, make):
    strategy = make(2)
    model = mirrored(strategy)
    loss = loss_of(strategy, model, batch_of(), way)
    loss.backward(retain_graph=True)
    once = grads_of(model)
    assert model.ran_at_once()
    loss.backward()
    assert model.ran_at_once()
    assert_equal_bits(grads_of(model), {name: grad * 2 for name, grad in once.items()})


@ways
def test_a_freed_graph_raises_torchs_error(way, make):
    strategy = make(2)
    model = mirrored(strategy)
    loss = loss_of(strategy, model, batch_of(), way)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_the_replicas_parts_of_a_freed_graph_raise_torchs_error(make):
    strategy = make(2)
    model = mirrored(strategy)
    output = model(batch_of()[0])
    output.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.sum().backward()


def test_what_the_forward_saved_is_freed_with_the_pass(make):
    class Saves(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))
            self.saved = []

        def forward(self, x):
            hidden = x.exp() * self.scale
            self.saved.append(weakref.ref(hidden))
            return hidden.square()

    strategy = make(2)
    model = strategy.mirror(Saves())
    loss = model(torch.ones(4, 6)).sum()
    gc.collect()
    assert len([saved for saved in model.saved if saved() is not None]) == 2
    loss.backward()
    assert [saved() for saved in model.saved] == [None, None]


# Passes of another kind


@ways
def test_other_passes_run_as_they_are(way, make, make_strategy):
    def through(strategy):
        model = mirrored(strategy)
        weight = model.body[0].weight

        def loss():
            return loss_of(strategy, model, (torch.ones(6, 6), torch.arange(6) % 3), way)

        yield torch.autograd.grad(loss(), weight)[0]
        loss().backward(inputs=[weight])
        yield weight.grad
        assert model.head.weight.grad is None
        weight.grad = None
        (grad,) = torch.autograd.grad(loss(), weight, create_graph=True)
        grad.square().sum().backward()
        yield weight.grad
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a reference cycle, once in a process
            loss().backward(create_graph=True)
        assert weight.grad.grad_fn is not None
        yield weight.grad
        model.zero_grad()
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            loss().backward()
        yield weight.grad
        assert set(model.threads) == {threading.get_ident()}
        model.zero_grad()

    for single, apart in zip(through(make_strategy(2)), through(make(2)), strict=True):
        assert_same(apart, single)


def test_a_pass_inside_a_pass_runs_as_it_is(make):
    strategy, plain = make(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    x, y = batch_of()
    for m in (model, plain):
        inner = F.cross_entropy(m(x), y)
        outer = torch.ones((), requires_grad=True)
        outer.register_hook(lambda grad, inner=inner: inner.backward())
        outer.backward()
    assert set(model.threads) == {threading.get_ident()}
    assert_same(grads_of(model), grads_of(plain))


def test_passes_of_another_thread_and_of_a_merge_run_as_they_are(make):
    strategy, plain = make(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    x, y = batch_of()
    F.cross_entropy(plain(x), y).backward()
    loss = loss_of(strategy, model, (x, y), 1)
    _, error, _ = finishes(loss.backward)
    assert error is None
    assert_same(grads_of(model), grads_of(plain))
    assert len(set(model.threads)) == 1

    model.zero_grad()
    model.threads.clear()

    def merged(strategy, losses):
        strategy.reduce("mean", losses).backward()

    def step(part):
        loss = F.cross_entropy(model(part[0]), part[1])
        mirror.get_replica_context().merge_call(merged, args=(loss,))

    (parts,) = strategy.distribute_dataset([(x, y)])
    strategy.run(step, args=(parts,))
    assert len(set(model.threads)) == 1
    assert_same(grads_of(model), grads_of(plain))


def test_a_pass_after_close_runs_as_it_is(make):
    strategy = make(2)
    model = mirrored(strategy)
    loss = loss_of(strategy, model, batch_of(), 1)
    strategy.close()
    loss.backward()
    assert set(model.threads) == {threading.get_ident()}


# What replicas have in common


def test_a_tensor_that_all_replicas_share_gets_the_whole_gradient(make):
    strategy = make(2)
    shared = torch.full((6,), 2.0, requires_grad=True)
    x = torch.arange(24.0).view(4, 6)
    losses = strategy.run(
        lambda part: (part * shared).sum(), args=(mirror.PerReplica(x.chunk(2)),)
    )
    strategy.reduce("sum", losses).backward()
    assert torch.equal(shared.grad, x.sum(0))


def test_an_input_that_requires_a_gradient_gets_it(make):
    strategy, plain = make(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    inputs = []
    for m in (model, plain):
        inputs.append(torch.linspace(-1, 1, 60).view(10, 6).requires_grad_())
        m(inputs[-1]).square().mean().backward()
    assert_same(inputs[0].grad, inputs[1].grad)
    assert_same(grads_of(model), grads_of(plain))


def test_a_chain_of_split_calls_goes_through_both(make):
    strategy = make(2)
    plain, plain_head = small(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model, head = strategy.mirror(copy.deepcopy(plain)), strategy.mirror(copy.deepcopy(plain_head))
    x, y = batch_of()
    for first, second in ((model, head), (plain, plain_head)):
        F.cross_entropy(second(first(x)), y).backward()
    assert_same(grads_of(model), grads_of(plain))
    assert_same(grads_of(head), grads_of(plain_head))


def test_a_chain_of_runs_comes_apart_as_a_whole(make):
    strategy, plain = make(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    x, _ = batch_of()
    (parts,) = strategy.distribute_dataset([x])
    hidden = strategy.run(lambda part: model(part), args=(parts,))
    losses = strategy.run(lambda part: part.square().mean(), args=(hidden,))
    strategy.reduce("mean", losses).backward()
    plain(x).square().mean().backward()
    assert model.ran_at_once()
    assert_same(grads_of(model), grads_of(plain))


def test_a_penalty_of_the_parameters_counts_beside_the_replicas_losses(make):
    strategy, plain = make(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    x, y = batch_of()
    for m in (model, plain):
        (F.cross_entropy(m(x), y) + sum(p.square().sum() for p in m.parameters())).backward()
    assert_same(grads_of(model), grads_of(plain))


def test_unmirrored_parameters_in_the_loss_get_their_gradients_and_hooks(make):
    strategy, plain = make(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    x, y = batch_of()
    seen = []
    for m in (model, plain):
        scale = torch.full((3,), 1.5, requires_grad=True)
        scale.register_hook(seen.append)
        scale.register_post_accumulate_grad_hook(lambda scale: seen.append(scale.grad))
        F.cross_entropy(m(x) * scale, y).backward()
    assert model.ran_at_once()
    assert_same(seen[:2], seen[2:])
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.parametrize("how", ["all_reduce", "SyncBatchNorm"])
def test_collectives_of_the_forward_keep_the_pass_in_one(how, make):
    strategy, plain = make(2), small(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh())
    model = copy.deepcopy(plain)
    x, y = batch_of(11)
    if how == "SyncBatchNorm":
        model = strategy.mirror(mirror.nn.convert_sync_batchnorm(model))
        for m in (model, plain):
            F.cross_entropy(m(x), y).backward()
        assert_same(grads_of(model), grads_of(plain))
        assert set(model.threads) == {threading.get_ident()}
        return
    factor = torch.full((3,), 2.0, requires_grad=True)

    def loss(part):
        total = mirror.get_replica_context().all_reduce("sum", (part * scale).sum(0))
        return (total * part.mean(0)).sum()

    layer = strategy.mirror(nn.Linear(3, 1))
    with torch.no_grad():
        layer.weight.copy_(factor)
    scale = layer.weight
    z = torch.arange(12.0).view(4, 3)
    losses = strategy.run(loss, args=(mirror.PerReplica(z.chunk(2)),))
    strategy.reduce("sum", losses).backward()
    means = sum(part.mean(0) for part in z.chunk(2))
    ((z * factor).sum(0) * means).sum().backward()
    assert_same(layer.weight.grad[0], factor.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_parts_keep_the_pass_in_one(reentrant, make):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small()
            self.last = nn.Linear(3, 3)

        def forward(self, x):
            # Without random states, for which the replicas would take turns.
            how = {"use_reentrant": reentrant, "preserve_rng_state": False}
            return checkpoint(self.inner, self.last(x[:, :3]).repeat(1, 2), **how)

    x, y = batch_of()
    model = with_same_gradients(make(2), Checkpointed(), lambda m: F.cross_entropy(m(x), y))
    assert set(model.inner.threads) == {threading.get_ident()}


def test_hidden_saved_tensors_keep_the_pass_in_one(make):
    class Writing(nn.Module):
        """Writes into a slice: what that has saved cannot be seen."""

        def __init__(self):
            super().__init__()
            self.inner = small()

        def forward(self, x):
            x = self.inner(x)
            x[:, 0] = x[:, 1] * 2
            return x

    x, y = batch_of()
    model = with_same_gradients(make(2), Writing(), lambda m: F.cross_entropy(m(x), y))
    assert set(model.inner.threads) == {threading.get_ident()}


# Hooks


def test_hooks_of_outputs_run_once_with_the_whole_gradient(make, make_strategy):
    def seen_by(strategy):
        model, seen = mirrored(strategy), []
        x, y = torch.linspace(-1, 1, 60).view(10, 6), torch.arange(10) % 3
        joined = model(x)
        joined.retain_grad()
        joined.register_hook(lambda grad: seen.append(grad.clone()))
        joined.register_hook(lambda grad: grad * 2)
        F.cross_entropy(joined, y).backward()
        seen.append(joined.grad)

        (parts,) = strategy.distribute_dataset([x])
        outputs = strategy.run(lambda part: model(part), args=(parts,))
        own = {}
        for r, output in enumerate(strategy.local_results(outputs)):
            output.retain_grad()
            output.register_hook(lambda grad, r=r: own.setdefault(r, []).append(grad.clone()))
            output.register_hook(lambda grad: grad * 2)
        strategy.reduce("mean", outputs, axis=0).square().sum().backward()
        for r, output in enumerate(strategy.local_results(outputs)):
            seen += [*own[r], output.grad]
        return model, seen

    single, expected = seen_by(make_strategy(2))
    model, seen = seen_by(make(2))
    assert len(seen) == len(expected) == 6
    assert all(map(torch.equal, seen, expected))
    assert_equal_bits(grads_of(model), grads_of(single))
    assert len(set(model.threads)) == 2
    assert threading.get_ident() not in model.threads


def test_parameter_hooks_see_the_reduced_gradient_once(make):
    strategy, plain = make(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    seen = []
    for m in (model, plain):
        m.head.weight.register_hook(lambda grad: (seen.append(grad.clone()), grad * 3)[1])
    x, y = batch_of()
    for m in (model, plain):
        F.cross_entropy(m(x), y).backward()
    assert len(seen) == 2
    assert_same(seen[0], seen[1])
    assert_same(grads_of(model), grads_of(plain))


def test_module_hooks_see_each_replicas_gradient(make):
    strategy, plain = make(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    x, y = batch_of()
    sizes = []
    model.head.register_full_backward_hook(lambda m, _, grads: sizes.append(len(grads[0])))
    for m in (model, plain):
        F.cross_entropy(m(x), y).backward()
    assert sizes == [5, 5]
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.parametrize("n", [2, 4])
def test_hooks_that_look_at_gradients_leave_them_whole(n, make):
    class Looking(Watched):
        def note(self, grad):
            super().note(grad)
            looked.append(self.head.weight.grad)

    torch.manual_seed(0)
    plain = Looking(nn.Linear(6, 5), nn.Tanh())
    looked = []
    plain(torch.zeros(2, 6))
    strategy = make(n)
    model = strategy.mirror(copy.deepcopy(plain))
    for _ in range(3):
        x, y = batch_of()
        looked.clear()
        for m in (model, plain):
            m.threads.clear()
            F.cross_entropy(m(x), y).backward()
        assert model.ran_at_once()
        assert len(looked) == n + 1
        assert_same(grads_of(model), grads_of(plain))


def test_hooks_that_drop_gradients_wait_for_the_others(make):
    class Dropping(Watched):
        def note(self, grad):
            super().note(grad)
            self.head.weight.grad = None

    torch.manual_seed(0)
    model = Dropping(nn.Linear(6, 5), nn.Tanh())
    model(torch.zeros(2, 6))
    strategy = make(2)
    strategy.mirror(model)
    x, y = batch_of()
    F.cross_entropy(model(x), y).backward()
    # Each hook comes after its replica's gradient of the head.
    assert model.head.weight.grad is None
    assert model.body[0].weight.grad is not None


def test_hooks_may_start_a_run(make):
    strategy = make(2)
    totals = []

    class Running(Watched):
        def note(self, grad):
            super().note(grad)
            add = lambda: mirror.get_replica_context().all_reduce("sum", torch.ones(()))  # noqa: E731
            totals.append(strategy.run(add).values[0])

    torch.manual_seed(0)
    plain = small()
    model = Running(nn.Linear(6, 5), nn.Tanh())
    model(torch.zeros(2, 6))
    model.load_state_dict(plain.state_dict())
    model.threads.clear()
    totals.clear()
    strategy.mirror(model)
    x, y = batch_of()
    for m in (model, plain):
        F.cross_entropy(m(x), y).backward()
    assert model.ran_at_once()
    assert totals == [2, 2]
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_replicas_pass_reaches_the_caller(failing, make):
    strategy, plain = make(2), small()
    model = strategy.mirror(copy.deepcopy(plain))

    class Broken(Exception):
        pass

    def forward(part):
        out = model(part)
        if mirror.get_replica_context().replica_id_in_sync_group == failing:

            def fail(grad):
                raise Broken("bad luck")

            out.register_hook(fail)
        return out.square().mean()

    x, y = batch_of()
    (parts,) = strategy.distribute_dataset([x])
    with pytest.raises(Broken, match="bad luck") as caught:
        strategy.reduce("mean", strategy.run(forward, args=(parts,))).backward()
    assert caught.value.__notes__ == [f"in replica {failing} of 2 (cpu)"]
    model.zero_grad()
    model.threads.clear()
    for m in (model, plain):
        F.cross_entropy(m(x), y).backward()
    assert model.ran_at_once()
    assert_same(grads_of(model), grads_of(plain))


# Beside other features


def test_no_sync_adds_up_passes_at_once(make):
    strategy, plain = make(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    batches = [batch_of(size) for size in (10, 7, 10)]
    with strategy.no_sync():
        for batch in batches[:2]:
            loss_of(strategy, model, batch, 1).backward()
            assert model.ran_at_once()
    loss_of(strategy, model, batches[2], 2).backward()
    for x, y in batches:
        F.cross_entropy(plain(x), y).backward()
    assert_same(grads_of(model), grads_of(plain))
    strategy.check_replicas()


def test_scaled_losses_step_and_skip_as_on_one_device(make):
    strategy, plain = make(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    batches = [batch_of() for _ in range(3)]
    batches[1][0][7] = torch.inf  # the second replica's
    for m in (model, plain):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        scaler = mirror.amp.GradScaler("cpu", init_scale=8.0)
        for x, y in batches:
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(m(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0
    assert len(set(model.threads)) == 2
    assert_same(model.state_dict(), plain.state_dict())


def test_autocast_of_the_forward_comes_apart(make, make_strategy):
    grads = []
    for strategy in (make_strategy(2), make(2)):
        model = mirrored(strategy)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(
                model(torch.linspace(-1, 1, 60).view(10, 6)), torch.arange(10) % 3
            )
        loss.backward()
        assert model.ran_at_once() == bool(grads)
        grads.append(grads_of(model))
    assert_equal_bits(*grads)


def test_compiled_models_go_backward_in_one_thread(make):
    strategy, plain = make(2), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model = strategy.mirror(copy.deepcopy(plain))
    call = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        x, y = batch_of()
        F.cross_entropy(call(x), y).backward()
        F.cross_entropy(plain(x), y).backward()
    assert_same(grads_of(model), grads_of(plain))


def test_strategies_in_one_loss_run_as_one_pass(make):
    plain = small()
    models = [make(2).mirror(copy.deepcopy(plain)) for _ in range(2)]
    x, y = batch_of()
    sum(F.cross_entropy(model(x), y) for model in models).backward()
    F.cross_entropy(plain(x), y).backward()
    for model in models:
        assert set(model.threads) == {threading.get_ident()}
        assert_same(grads_of(model), grads_of(plain))


def test_the_caller_keeps_its_threads_and_modes(make):
    strategy = make(2)
    model = mirrored(strategy)
    torch.set_num_threads(6)
    seen = []
    model.note = lambda grad: seen.append((torch.get_num_threads(), mirror.has_strategy()))
    loss = loss_of(strategy, model, batch_of(), 1)
    with strategy.scope(), torch.no_grad():
        loss.backward()
        assert not torch.is_grad_enabled()
    assert torch.get_num_threads() == 6
    assert seen == [(3, True), (3, True)]


def test_the_time_of_a_pass_is_on_the_replicas_lanes(make):
    strategy = make(2)
    model = mirrored(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(strategy, model, batch_of(), 1).backward()
        assert model.ran_at_once()
        optimizer.step()
    whole, sums = strategy._group.timeline.steps[-1]
    for lane in (0, 1, CROSS):
        assert 0 < sums[lane][BACKWARD] < whole
    assert strategy.report().backward < whole
