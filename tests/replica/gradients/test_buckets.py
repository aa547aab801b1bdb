"""Gradients are reduced in buckets during the backward pass, in the order learnt before."""

import json
import threading

import pytest
import torch

import mirror
from mirror.replica.gradients.local_reduction import bucket_ends
from tests.oracle import assert_same, assert_same_training, in_run, train, train_loop
from tests.pairs import pairwise
from tests.replica.gradients.bucketed import (
    NUM_LAYERS,
    SIZE,
    assert_same_grads,
    backward_in_run,
    batches,
    learn,
    loss_of,
    pair,
)


def layer_names(*indices):
    return [[f"layers.{i}.bias", f"layers.{i}.weight"] for i in indices]


ALL_BUT_LAST = [4, 3, 2, 1]  # layers in the order of their gradients; the last stays


# Which buckets


def test_a_bucket_ends_before_it_grows_too_large():
    assert bucket_ends([], 10) == []
    assert bucket_ends([1, 1, 3, 1, 1, 1], 3) == [2, 3, 6]
    assert bucket_ends([7, 7], 0) == [1, 2]
    # The first one is of a megabyte at most: it is what there is to wait for first.
    assert bucket_ends([2**19] * 4, 2**30) == [2, 4]


@pairwise(way=[1, 2, 3], schedule=["lockstep", "staggered"], n=[2, 3, 4])
def test_every_step_but_the_first_launches_all_buckets_but_the_last(
    make_bucketed, launches, n, schedule, way
):
    strategy = make_bucketed(n, schedule=schedule)
    plain, model = pair(strategy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (plain, model)]
    data = batches(6)
    losses = train(way, strategy, model, optimizers[1], data, loss_of)
    assert [sorted(names) for names in launches] == layer_names(*ALL_BUT_LAST) * 5
    assert_same(losses, train_loop(plain, optimizers[0], data, loss_of))
    assert_same_training(model, optimizers[1], plain, optimizers[0])


def test_a_model_of_less_than_a_bucket_launches_nothing(make_strategy, launches, leaks):
    strategy = make_strategy(2)
    plain, model = pair(strategy)
    for batch in batches(3):
        for m in (model, plain):
            loss_of(m, batch).backward()
    assert_same_grads(strategy, model, plain)
    assert not launches
    assert leaks.threads("mirror side") == []


def test_a_trace_shows_buckets_overlapped_with_the_backward_pass(
    make_bucketed, tmp_path, monkeypatch
):
    strategy = make_bucketed(2)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    begun = threading.Event()
    communicator = strategy._group.replicas.communicator
    reduce = communicator.all_reduce_checked

    def record(*args):
        begun.set()
        reduce(*args)

    def step(x):
        x = model.layers[0](x)
        if mirror.get_replica_context().replica_id_in_sync_group == 1:
            x.register_hook(lambda grad: (begun.wait(10), None)[1])
        for layer in model.layers[1:]:
            x = layer(x)
        x.square().mean().backward()

    monkeypatch.setattr(communicator, "all_reduce_checked", record)
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


# Passes that differ from the one learnt


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
@pytest.mark.parametrize("skip", range(NUM_LAYERS))
def test_unused_parameters_are_left_alone_and_the_others_reduced(
    make_bucketed, launches, schedule, skip
):
    strategy = make_bucketed(3, schedule=schedule)
    plain, model = pair(strategy)
    learn(strategy, model, plain)
    for _ in range(3):
        batch = torch.randn(10, SIZE)
        backward_in_run(strategy, model, batch, skip=skip)
        plain(batch, skip=skip).square().mean().backward()
    assert model.layers[skip].weight.grad is None
    assert_same_grads(strategy, model, plain)


def test_parameters_that_one_replica_does_not_use_count_zero_for_it(make_bucketed):
    strategy = make_bucketed(2)
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
def test_another_order_is_right_at_once_and_learnt_when_it_stays(make_bucketed, launches, way):
    strategy = make_bucketed(2)
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


def test_models_that_take_turns_keep_the_order_of_the_first(make_bucketed, launches):
    # As a GAN does: the generator's pass goes through the discriminator first.
    strategy = make_bucketed(2)
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
def test_two_backward_passes_before_a_look_are_summed(make_bucketed, n, schedule):
    strategy = make_bucketed(n, schedule=schedule)
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
def test_gradients_dropped_before_a_look_do_not_come_back(make_bucketed, schedule, where, how):
    # A replica that had set its gradients to None and gone through a second pass met, in one
    # bucket, the first pass of the next replica.
    strategy = make_bucketed(2, schedule=schedule)
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


def test_a_gradient_set_by_hand_before_the_look_goes_before_what_arrived(make_bucketed):
    strategy = make_bucketed(2)
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
def test_no_sync_launches_nothing_and_the_pass_after_it_reduces_all(
    make_bucketed, launches, where
):
    strategy = make_bucketed(2)
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
