"""Local gradients, wherever they are when a step wants them: in slots, in buckets, deferred."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same, assert_same_training, in_run, train, train_loop

SIZE, NUM_LAYERS = 6, 5


def net(num_layers=NUM_LAYERS, size=SIZE):
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(num_layers)))


def loss_of(model, batch):
    return model(batch).square().mean()


@pytest.fixture
def make(make_strategy):
    """Gives ``make(n, **options)``: a strategy whose buckets are of 64 bytes."""

    def make(n=2, **options):
        packs = mirror.CommunicationOptions(bytes_per_pack=64)
        return make_strategy(n, communication_options=packs, **options)

    return make


def pair(strategy, module=None):
    plain = net() if module is None else module
    return plain, strategy.mirror(copy.deepcopy(plain))


def assert_same_grads(strategy, model, plain):
    for name, parameter in plain.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None:
            assert grad.is_sparse == parameter.grad.is_sparse, name
            assert_same(grad, parameter.grad, name)
    strategy.check_replicas()


def train_changed(way, strategy, change, module=None, size=SIZE, num_steps=6):
    """Trains four steps, changes both models, and trains on."""
    plain, model = pair(strategy, module)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (plain, model)]
    for when in range(2):
        data = [torch.randn(8, size) for _ in range(4 if when == 0 else num_steps - 4)]
        train_loop(*pairs[0], data, loss_of)
        train(way, strategy, *pairs[1], data, loss_of)
        if when == 0:
            change(plain)
            change(model)
    assert_same_grads(strategy, model, plain)
    assert_same_training(*pairs[1], *pairs[0])


def freeze(*which):
    def change(model):
        for i in which:
            list(model.parameters())[i].requires_grad_(False)

    return change


def remove_the_first(model):
    model[0] = nn.Identity()


WHAT_IS_LEFT_OUT = {
    "the one whose gradient comes last": freeze(0),
    "the last two": freeze(0, 1),
    "one that ends a bucket": freeze(4),
    "all but the first to come": freeze(*range(2 * NUM_LAYERS - 1)),
    "all but the last to come": freeze(*range(1, 2 * NUM_LAYERS)),
    "the first layer, removed": remove_the_first,
}


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize("change", WHAT_IS_LEFT_OUT.values(), ids=WHAT_IS_LEFT_OUT.keys())
def test_a_step_without_some_parameters_has_the_gradients_of_the_others(
    make, change, way, schedule
):
    # With all gradients of a pass in buckets on their way and none behind them, nothing said that
    # there was something to reduce: the step had no gradients, and the next one had them twice.
    train_changed(way, make(schedule=schedule), change)


@pytest.mark.parametrize("way", [1, 3])
def test_a_frozen_parameter_of_a_large_model_with_default_options(make_strategy, way):
    # Weights of 13 MB: a bucket of 25 MiB holds one, and the frozen one was alone in the last.
    with torch.random.fork_rng():
        train_changed(way, make_strategy(2), freeze(0), net(size=1800), 1800, num_steps=5)


@pytest.mark.parametrize("way", [1, 3])
@pytest.mark.parametrize("which", range(2 * NUM_LAYERS))
def test_a_parameter_frozen_between_backward_and_step_and_thawed_again(make, which, way):
    strategy = make()
    plain, model = pair(strategy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]

    def require(m, step):
        if step in (1, 3, 5, 7):
            list(m.parameters())[which].requires_grad_(step in (3, 7))

    for step in range(10):
        batch = torch.randn(8, SIZE)
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            if m is model and way == 3:
                in_run(strategy, lambda x: loss_of(model, x).backward(), batch)
            else:
                loss_of(m, batch).backward()
            require(m, step)
            optimizer.step()
        assert_same_grads(strategy, model, plain)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_the_last_gradient_dropped_takes_no_others_along(make, where):
    strategy = make()
    plain, model = pair(strategy)

    def step(m, x):
        loss_of(m, x).backward()
        m[0].weight.grad = None

    for _ in range(5):
        batch = torch.randn(8, SIZE)
        step(plain, batch)
        if where == "inside":
            in_run(strategy, lambda x: step(model, x), batch)
        else:
            step(model, batch)
        assert_same_grads(strategy, model, plain)


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_a_model_of_one_bucket_less_than_it_had_does_not_part_the_replicas(make, schedule):
    # The replica whose pass completed the only bucket had nothing pending, and did not wait for
    # the reduction that the others waited for.
    strategy = make(3, schedule=schedule)
    plain, model = pair(strategy)

    def step(m, x):
        loss_of(m, x).backward()
        grads = [parameter.grad for parameter in m.parameters()]
        return sum(grad.square().sum() for grad in grads if grad is not None)

    for i in range(6):
        if i == 4:
            freeze(*range(2 * NUM_LAYERS - 1))(plain)
            freeze(*range(2 * NUM_LAYERS - 1))(model)
        batch = torch.randn(9, SIZE)
        norms = in_run(strategy, lambda x: step(model, x), batch)
        expected = step(plain, batch)
        for norm in strategy.local_results(norms):
            assert_same(norm, expected)


@pytest.mark.parametrize("value", [None, 2.0])
def test_a_gradient_set_where_a_replica_sits_out_goes_before_what_that_one_kept_back(make, value):
    strategy = make(3)
    plain, model = pair(strategy)

    def put(m):
        weight = m[1].weight
        weight.grad = None if value is None else torch.full_like(weight, value)

    batch, small = torch.randn(9, SIZE), torch.randn(2, SIZE)
    with strategy.no_sync():
        in_run(strategy, lambda x: loss_of(model, x).backward(), batch)
    loss_of(plain, batch).backward()
    in_run(strategy, lambda x: put(model), small)
    put(plain)
    assert_same_grads(strategy, model, plain)


def test_a_parameter_frozen_where_a_replica_sits_out_is_frozen_there_too(make):
    strategy = make(3)
    plain, model = pair(strategy)
    in_run(strategy, lambda x: freeze(2)(model), torch.randn(1, SIZE))
    freeze(2)(plain)
    for _ in range(3):
        batch = torch.randn(9, SIZE)
        loss_of(plain, batch).backward()
        in_run(strategy, lambda x: loss_of(model, x).backward(), batch)
        assert_same_grads(strategy, model, plain)


class Words(nn.Module):
    """An embedding that is looked up (a sparse gradient), summed (a dense one), or both."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, SIZE, sparse=True)

    def forward(self, words, use):
        x = words[:, None] * torch.ones(SIZE)
        if "sparse" in use:
            x = x + self.embedding(words).tanh()
        return x + self.embedding.weight[:2].sum(0) if "dense" in use else x


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("way", [1, 3])
def test_sparse_and_dense_gradients_join_in_any_order(make, way, no_sync, looks):
    strategy = make()
    plain, model = pair(strategy, Words())

    def backward(m, words, use):
        m(words, use).square().mean().backward()

    for use in ("sparse", "dense", "sparse", "sparse dense"):
        words = torch.randint(0, 5, (8,))
        with strategy.no_sync() if no_sync else nullcontext():
            if way == 3:
                in_run(strategy, partial(backward, model, use=use), words)
            else:
                backward(model, words, use)
        backward(plain, words, use)
        if looks:
            assert_same_grads(strategy, model, plain)
    assert_same_grads(strategy, model, plain)
    plain.zero_grad()
    model.zero_grad()
    # A replica that sat out had a sparse gradient, to which a dense one cannot be copied.
    in_run(strategy, partial(backward, model, use="sparse"), words)
    in_run(strategy, partial(backward, model, use="dense"), words[:1])
    backward(plain, words, "sparse")
    backward(plain, words[:1], "dense")
    assert_same_grads(strategy, model, plain)


def test_a_change_of_a_sparse_gradient_that_is_joined_by_a_dense_one_reaches_all(make):
    strategy = make()
    plain, model = pair(strategy, Words())
    words = torch.arange(4)
    for m in (plain, model):
        outputs = [m(words, use).square().mean() for use in ("sparse", "dense")]
        outputs[0].backward()
        m.embedding.weight.grad.mul_(3)
        outputs[1].backward()
    assert_same_grads(strategy, model, plain)
    first, second = strategy.local_results(strategy.run(lambda: model.embedding.weight.grad))
    assert torch.equal(first, second)


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_look_in_the_middle_of_a_pass_sees_what_has_come(make, where, schedule):
    # Copies without hooks were found when the pass had ended: until then there was no gradient.
    strategy = make(schedule=schedule)
    plain, model = pair(strategy)
    seen = {}

    def note(m, replica_id):
        seen[m is model, replica_id] = copy.deepcopy(m[3].weight.grad)

    def step(m, x, replica_id):
        x = m[:2](x)
        if i > 2:
            x.register_hook(lambda grad: note(m, replica_id))
        m[2:](x).square().mean().backward()

    for i in range(5):
        batch = torch.randn(8, SIZE)
        step(plain, batch, 0)
        if where == "outside":
            step(model, batch, 0)
        else:
            in_run(
                strategy,
                lambda x: step(model, x, mirror.get_replica_context().replica_id_in_sync_group),
                batch,
            )
        expected = seen.pop((False, 0), None)
        assert len(seen) == (0 if i <= 2 else 1 if where == "outside" else 2)
        for grad in seen.values():
            assert_same(grad, expected)
        seen.clear()
        assert_same_grads(strategy, model, plain)


def test_one_gradient_given_to_all_replicas_is_each_ones_own(make):
    # It was one tensor for all of them: what each added to it came N times.
    strategy = make(3)
    plain, model = pair(strategy)
    batch = torch.randn(9, SIZE)

    def step(m, x, given):
        m[1].weight.grad = given
        loss_of(m, x).backward()
        torch.nn.utils.clip_grad_value_(m.parameters(), 0.9)

    given = torch.full((SIZE, SIZE), 0.5)
    step(plain, batch, given.clone())
    in_run(strategy, lambda x: step(model, x, given), batch)
    assert_same_grads(strategy, model, plain)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_an_assignment_that_torch_refuses_changes_nothing(make, where):
    strategy = make()
    plain, model = pair(strategy)
    batch = torch.randn(8, SIZE)

    def step(m, x):
        loss_of(m, x).backward()
        with pytest.raises(RuntimeError, match="size"):
            m[1].weight.grad = torch.zeros(1, 2, 3)

    step(plain, batch)
    if where == "inside":
        in_run(strategy, lambda x: step(model, x), batch)
    else:
        step(model, batch)
    assert_same_grads(strategy, model, plain)


def test_a_hook_of_a_parameter_that_was_frozen_when_it_was_mirrored(make):
    strategy = make()
    plain = net()
    plain[1].weight.requires_grad_(False)
    model = copy.deepcopy(plain)
    for m in (plain, model):
        m[1].weight.requires_grad_(True)
        m[1].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        m[1].weight.requires_grad_(False)
    strategy.mirror(model)
    for requires_grad in (False, True, False, True):
        batch = torch.randn(8, SIZE)
        for m in (plain, model):
            m[1].weight.requires_grad_(requires_grad)
            loss_of(m, batch).backward()
        assert_same_grads(strategy, model, plain)


@pytest.mark.parametrize("no_sync", [True, False])
def test_a_hook_does_not_see_the_gradient_of_a_pass_before_it_was_registered(make, no_sync):
    strategy = make()
    plain, model = pair(strategy)
    for _ in range(2):
        batch = torch.randn(8, SIZE)
        with strategy.no_sync() if no_sync else nullcontext():
            for m in (plain, model):
                loss_of(m, batch).backward()
                m[1].weight.register_hook(lambda grad: 2 * grad)
    assert_same_grads(strategy, model, plain)


def test_a_weight_set_after_a_pass_whose_gradients_are_all_on_their_way(make):
    strategy = make()
    plain, model = pair(strategy)

    def step(x):
        loss_of(model, x).backward()
        mirror.get_replica_context().weight = 1.0

    for i in range(6):
        if i == 3:
            freeze(*range(2 * NUM_LAYERS - 1))(plain)
            freeze(*range(2 * NUM_LAYERS - 1))(model)
        batch = torch.randn(8, SIZE)
        loss_of(plain, batch).backward()
        in_run(strategy, step, batch)
        assert_same_grads(strategy, model, plain)


def test_a_known_step_has_no_hook_but_those_that_end_buckets(make, monkeypatch):
    strategy = make()
    _, model = pair(strategy)
    for _ in range(4):
        in_run(strategy, lambda x: loss_of(model, x).backward(), torch.randn(8, SIZE))
    hooks = [
        len(getattr(copy, "_post_accumulate_grad_hooks", None) or ())
        for parameter in model.parameters()
        for copy in parameter._mirrored.copies
    ]
    ends = len(strategy._group.gradients.buckets._plan.ends)
    assert sum(hooks) == 2 * ends
