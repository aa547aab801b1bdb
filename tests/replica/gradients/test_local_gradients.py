"""Local gradients are used from where a step finds them: slots, buckets, deferred."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same, assert_same_training, in_run, train, train_loop
from tests.pairs import each_once, quick_of
from tests.replica.gradients.bucketed import (
    NUM_LAYERS,
    SIZE,
    assert_same_grads,
    chain,
    loss_of,
    pair,
)


def train_changed(way, strategy, change, module=None, size=SIZE, num_steps=6):
    """Trains four steps, changes both models, and trains on."""
    plain, model = pair(strategy, module or chain())
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
    "the last gradient": freeze(0),
    "the last two": freeze(0, 1),
    "one that ends a bucket": freeze(4),
    "all but the first to come": freeze(*range(2 * NUM_LAYERS - 1)),
    "all but the last to come": freeze(*range(1, 2 * NUM_LAYERS)),
    "the first layer, removed": remove_the_first,
}


@each_once(way=[1, 2, 3], schedule=["lockstep", "staggered"])
@pytest.mark.parametrize("change", WHAT_IS_LEFT_OUT.values(), ids=WHAT_IS_LEFT_OUT.keys())
def test_a_step_without_some_parameters_has_the_gradients_of_the_others(
    make_small_buckets, change, way, schedule
):
    # With all gradients of a pass in buckets on their way and none behind them, nothing said that
    # there was something to reduce: the step had no gradients, and the next one had them twice.
    train_changed(way, make_small_buckets(schedule=schedule), change)


@pytest.mark.parametrize("way", quick_of([1, 3], [3]))
def test_a_frozen_parameter_of_a_large_model_with_default_options(make_strategy, way):
    # Weights of 13 MB: a bucket of 25 MiB holds one, and the frozen one was alone in the last.
    with torch.random.fork_rng():
        train_changed(way, make_strategy(2), freeze(0), chain(size=1800), 1800, num_steps=5)


@each_once(which=range(2 * NUM_LAYERS), way=[1, 3])
def test_a_parameter_frozen_between_backward_and_step_and_thawed_again(
    make_small_buckets, which, way
):
    strategy = make_small_buckets()
    plain, model = pair(strategy, chain())
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
def test_the_last_gradient_dropped_takes_no_others_along(make_small_buckets, where):
    strategy = make_small_buckets()
    plain, model = pair(strategy, chain())

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
def test_a_model_of_one_bucket_less_than_it_had_does_not_part_the_replicas(
    make_small_buckets, schedule
):
    # The replica that completed the only bucket had nothing pending, and did not wait for
    # the reduction that the others waited for.
    strategy = make_small_buckets(3, schedule=schedule)
    plain, model = pair(strategy, chain())

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
def test_a_gradient_set_where_a_replica_sits_out_goes_before_what_that_one_kept_back(
    make_small_buckets, value
):
    strategy = make_small_buckets(3)
    plain, model = pair(strategy, chain())

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


def test_a_parameter_frozen_where_a_replica_sits_out_is_frozen_there_too(make_small_buckets):
    strategy = make_small_buckets(3)
    plain, model = pair(strategy, chain())
    in_run(strategy, lambda x: freeze(2)(model), torch.randn(1, SIZE))
    freeze(2)(plain)
    for _ in range(3):
        batch = torch.randn(9, SIZE)
        loss_of(plain, batch).backward()
        in_run(strategy, lambda x: loss_of(model, x).backward(), batch)
        assert_same_grads(strategy, model, plain)


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_look_in_the_middle_of_a_pass_sees_what_has_come(make_small_buckets, where, schedule):
    # Copies without hooks were found when the pass had ended: until then there was no gradient.
    strategy = make_small_buckets(schedule=schedule)
    plain, model = pair(strategy, chain())
    seen = {}

    def record_grad(m, replica_id):
        seen[m is model, replica_id] = copy.deepcopy(m[3].weight.grad)

    def step(m, x, replica_id):
        x = m[:2](x)
        if i > 2:
            x.register_hook(lambda grad: record_grad(m, replica_id))
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


def test_one_gradient_given_to_all_replicas_is_each_ones_own(make_small_buckets):
    # It was one tensor for all of them: what each added to it came N times.
    strategy = make_small_buckets(3)
    plain, model = pair(strategy, chain())
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
def test_an_assignment_that_torch_refuses_changes_nothing(make_small_buckets, where):
    strategy = make_small_buckets()
    plain, model = pair(strategy, chain())
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


def test_a_weight_set_after_a_pass_with_all_gradients_in_flight(make_small_buckets):
    strategy = make_small_buckets()
    plain, model = pair(strategy, chain())

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
