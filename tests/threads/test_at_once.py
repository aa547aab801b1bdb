"""Parallel replicas: the values that each computes with, and that all of them end."""

import contextvars
import copy
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import mirror
from mirror.threads import schedule
from tests.oracle import assert_same, finishes, in_run
from tests.pairs import each_once
from tests.toy_models import meet, replica_id

N = 3


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_replicas_that_run_at_once_use_their_own_weights(
    make_strategy, monkeypatch, kind
):
    # Where forward computes a weight, an RNN makes a list of its weights in every call, and reads
    # it a moment later: if it were one for all, what another replica had put there in between.
    monkeypatch.setattr(schedule, "LONG_TURN_SECONDS", -1.0)  # all start at once
    monkeypatch.setattr(schedule, "NUM_TURNS", 1)
    both_have_made_theirs = threading.Barrier(2, timeout=60)

    class Met(kind):
        def _init_flat_weights(self):
            super()._init_flat_weights()
            if mirror.has_strategy():
                both_have_made_theirs.wait()

    plain = weight_norm(Met(3, 2, batch_first=True), "weight_hh_l0")
    strategy = make_strategy(2, schedule="staggered")
    strategy.run(lambda: None)
    layer = strategy.mirror(copy.deepcopy(plain))

    def grads(x, layer=layer):
        return torch.autograd.grad(layer(x)[0].sum(), list(layer.parameters()))

    x = torch.randn(4, 5, 3)
    own, error, _ = finishes(lambda: strategy.local_results(in_run(strategy, grads, x)))
    assert error is None
    assert_same(list(own), [grads(part, plain) for part in x.chunk(2)])


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


# Replicas that run at once


@each_once(turns=["long", "short"], n=[2, 3, 4])
def test_an_adversarial_step_is_that_of_one_device(make_strategy, request, n, turns):
    # Two models, two optimizers, two steps each, a scaler, SyncBatchNorm, clipping, buckets.
    if turns == "long":
        request.getfixturevalue("eager")
    packs = mirror.CommunicationOptions(bytes_per_pack=100)
    strategy = make_strategy(n, schedule="staggered", communication_options=packs)
    plain = [mirror.nn.convert_sync_batchnorm(net(seed)) for seed in (1, 2)]
    models = [strategy.mirror(copy.deepcopy(m)) for m in plain]

    def tools(models, scaler):
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in models]
        return *models, *optimizers, scaler("cpu", init_scale=8.0, growth_interval=3)

    def step(x, g, d, g_optimizer, d_optimizer, scaler):
        for _ in range(2):
            d_optimizer.zero_grad()
            loss = F.softplus(d(g(x).detach())).mean() + F.softplus(-d(x)).mean()
            scaler.scale(loss).backward()
            scaler.step(d_optimizer)
            g_optimizer.zero_grad()
            scaler.scale(F.softplus(-d(g(x))).mean()).backward()
            scaler.unscale_(g_optimizer)
            nn.utils.clip_grad_norm_(g.parameters(), 0.5)
            scaler.step(g_optimizer)
            scaler.update()

    mirrored = tools(models, mirror.amp.GradScaler)
    single = tools(plain, torch.amp.GradScaler)
    for _ in range(4):
        x = torch.randn(11, 4)
        _, error, _ = finishes(
            lambda x=x: in_run(strategy, lambda x: step(x, *mirrored), x), hang_after=60
        )
        assert error is None
        step(x, *single)
        strategy.check_replicas()
        for model, expected in zip(models, plain, strict=True):
            assert_same(model.state_dict(), expected.state_dict())


def test_many_short_runs_at_once_all_end(make_strategy, eager):
    strategy = make_strategy(8, schedule="staggered")

    def use():
        for i in range(50):
            assert strategy.run(lambda i=i: i).values == (i,) * 8
            assert strategy.run(meet).values == (8,) * 8

    _, error, _ = finishes(use, hang_after=60)
    assert error is None


def test_replicas_that_never_meet_need_no_threads_and_have_their_own_state(make_strategy, leaks):
    strategy = make_strategy(N, schedule="lockstep")
    number = contextvars.ContextVar("number", default=-1)
    ran_in = []

    def fn():
        assert number.get() == -1
        assert torch.is_grad_enabled()
        number.set(replica_id())
        torch.set_grad_enabled(False)
        ran_in.append(threading.current_thread())

    for _ in range(3):
        strategy.run(fn)
    assert ran_in == [threading.current_thread()] * 3 * N
    assert torch.is_grad_enabled()
    assert leaks.threads("mirror replica") == []


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be moved here")
def test_replicas_compute_on_every_cpu_that_the_caller_may_use(make_strategy):
    strategy, allowed = make_strategy(N), os.sched_getaffinity(0)

    def fn():
        seen = [os.sched_getaffinity(0)]
        for _ in range(3):
            meet()
            seen.append(os.sched_getaffinity(0))
        return all(affinity == allowed for affinity in seen)

    for _ in range(3):
        assert strategy.run(fn).values == (True,) * N
        assert os.sched_getaffinity(0) == allowed


def test_a_replica_in_the_callers_thread_may_meet_the_later_ones(make_strategy):
    # The first one has returned, so the second one runs, and waits, in the caller's thread, too.
    strategy = make_strategy(N)
    strategy.run(meet)
    for _ in range(2):
        with pytest.raises(mirror.DivergenceError, match=r"replica 0 of 3 .*has returned"):
            strategy.run(lambda: replica_id() and meet())
    assert strategy.run(meet).values == (N,) * N


def test_replicas_whose_turns_get_short_again_take_them(make_strategy, monkeypatch, eager):
    strategy = make_strategy(N, schedule="staggered")

    def threads():
        ran_in = set()
        strategy.run(lambda: ran_in.add(threading.current_thread()))
        return ran_in

    for _ in range(3):
        threads()
    assert len(threads()) == N
    monkeypatch.setattr(schedule, "LONG_TURN_SECONDS", float("inf"))
    threads()
    assert threads() == {threading.current_thread()}


# Random numbers that are drawn again


def test_checkpointed_dropout_draws_its_masks_again_where_replicas_might_run_at_once(
    make_strategy, eager
):
    strategy = make_strategy(N, schedule="staggered", gradient_reduction="sum")
    model = strategy.mirror(nn.ParameterDict({"offset": nn.Parameter(torch.ones(64))}))

    def dropped(hidden):
        for _ in range(3):
            hidden = torch.dropout(hidden, 0.3, True)
        return hidden

    def fn(x):
        out = checkpoint(dropped, x + model["offset"], use_reentrant=False)
        out.sum().backward()
        return out.detach().sum(0)

    for _ in range(5):
        model.zero_grad()
        kept = strategy.reduce("sum", in_run(strategy, fn, torch.zeros(64, 64)))
        torch.testing.assert_close(model["offset"].grad, kept)


def test_checkpointing_around_a_split_call_is_the_same_where_replicas_might_run_at_once(
    make_strategy, eager
):
    plain = net()
    model = make_strategy(N, schedule="staggered").mirror(copy.deepcopy(plain))
    x = torch.randn(12, 4, requires_grad=True)
    plain.eval(), model.eval()
    ran_in = []
    model[0].register_forward_hook(lambda *_: ran_in.append(threading.current_thread()))
    for _ in range(4):
        for each in (plain, model):
            each.zero_grad()
            checkpoint(each, x, use_reentrant=False).square().mean().backward()
    # In turns: what is saved is counted on, in the order in which it was.
    assert set(ran_in) == {threading.current_thread()}
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_saving_the_random_state_among_replicas_at_once_waits_for_a_turn(make_strategy, eager):
    strategy = make_strategy(N, schedule="staggered")
    for _ in range(3):
        strategy.run(meet)
    before = torch.get_rng_state()
    states = strategy.run(torch.get_rng_state).values
    in_turns = make_strategy(N, schedule="lockstep").run(torch.get_rng_state).values
    assert all(map(torch.equal, states, in_turns))
    assert all(map(torch.equal, strategy.run(torch.get_rng_state).values, in_turns))
    assert torch.equal(torch.get_rng_state(), before)
