"""schedule="parallel": replicas run at once, or take turns for what they share per process."""

import copy
import random
import threading
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import mirror
from mirror.execution import parallel_runs
from mirror.replica.modules import per_replica_values, replica_attributes
from tests.oracle import assert_same, finishes
from tests.pairs import pairwise
from tests.toy_models import replica_id as me

WIDTH = 8


class Recurrent(nn.Module):
    """A GRU, an attribute that every replica sets, and a buffer that it changes in place."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.last = self.gru(x.unsqueeze(1).expand(-1, 3, -1))[0]
        self.seen += len(x)
        return self.head(sum(self.last.unbind(1)))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 3)),
    "norms": lambda: nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3)
    ),
    "synchronized": lambda: nn.Sequential(
        nn.Linear(WIDTH, 16), mirror.nn.SyncBatchNorm(16), nn.ReLU(), nn.Linear(16, 3)
    ),
    "recurrent": Recurrent,
}
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
}


def batches(num=6):
    made = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, WIDTH, generator=made), torch.randint(3, (size,), generator=made))
        for size in [12] * (num - 1) + [7]
    ]


def program(strategy, model, optimizer, way, is_inside):
    """Trains as the README does; returns the losses and the model's state."""

    def loss_of(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def step(batch):
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def train():
        losses = []
        if way == 1:
            losses = [step(batch) for batch in batches()]
        for batch in strategy.distribute_dataset(batches()) if way > 1 else ():
            if way == 3:
                losses.append(strategy.reduce("mean", strategy.run(step, (batch,))))
            else:
                optimizer.zero_grad()
                losses.append(strategy.reduce("mean", strategy.run(loss_of, (batch,))))
                losses[-1].backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return [loss.detach().clone() for loss in losses]

    if is_inside:
        with strategy.scope():
            return train(), model.state_dict()
    return train(), model.state_dict()


def trained(make_strategy, schedule, n, model, optimizer, way=3, is_inside=True):
    strategy = make_strategy(n, schedule=schedule)
    torch.manual_seed(0)
    with strategy.scope():
        made = MODELS[model]()
        steps = OPTIMIZERS[optimizer](made.parameters())
    result, error, _ = finishes(
        lambda: program(strategy, made, steps, way, is_inside), hang_after=60
    )
    assert error is None
    strategy.check_replicas()
    return result


@pytest.mark.usefixtures("one_thread")
@pairwise(model=MODELS, way=[1, 2, 3], n=[1, 2, 3])
def test_parallel_replicas_have_the_bits_of_lockstep(make_strategy, model, way, n):
    wanted = trained(make_strategy, "lockstep", n, model, "adamw", way)
    assert_same(trained(make_strategy, "parallel", n, model, "adamw", way), wanted)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
def test_they_have_them_with_every_optimizer_inside_and_outside_the_scope(
    make_strategy, optimizer, is_inside
):
    wanted = trained(make_strategy, "lockstep", 2, "norms", optimizer, is_inside=is_inside)
    found = trained(make_strategy, "parallel", 2, "norms", optimizer, is_inside=is_inside)
    assert_same(found, wanted)


def test_all_replicas_run_at_once_from_the_second_run_on(make_strategy):
    strategy = make_strategy(3, schedule="parallel")
    assert [len(set(strategy.run(threading.get_ident).values))] == [1]  # turns, in one thread
    barrier = threading.Barrier(3, timeout=30)
    _, error, _ = finishes(lambda: strategy.run(barrier.wait), hang_after=60)
    assert error is None


def test_one_warning_says_that_replicas_share_the_gil(monkeypatch):
    monkeypatch.setattr("mirror.strategy.mirrored.is_gil_enabled", lambda: True)
    with pytest.warns(
        UserWarning, match=r'schedule="parallel".* this interpreter has a GIL'
    ) as said:
        strategy = mirror.MirroredStrategy(["cpu"] * 2, schedule="parallel")
    with strategy:
        for _ in range(3):
            strategy.run(lambda: None)
    assert len(said) == 1


@pytest.mark.parametrize("n", [1, 2])
def test_nothing_is_said_of_one_replica_or_without_the_gil(monkeypatch, n):
    monkeypatch.setattr("mirror.strategy.mirrored.is_gil_enabled", lambda: n == 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mirror.MirroredStrategy(["cpu"] * n, schedule="parallel").close()


DRAWS = {
    "torch's generator of the CPU": lambda: torch.rand(()),
    "Python's random": random.random,
    "numpy.random": lambda: np.random.rand(),
}


@pytest.mark.parametrize("drawn", DRAWS)
def test_replicas_that_draw_from_what_they_share_take_turns_and_say_so(
    make_strategy, drawn, monkeypatch
):
    monkeypatch.setattr(parallel_runs, "LOOK_EVERY", 1)
    draws = {}
    for schedule in ("lockstep", "parallel"):
        strategy = make_strategy(2, schedule=schedule)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        if schedule == "parallel":
            with pytest.warns(UserWarning, match=f"random numbers from {drawn}.*run at once$"):
                draws[schedule] = [strategy.run(DRAWS[drawn]).values]
        else:
            draws[schedule] = [strategy.run(DRAWS[drawn]).values]
        draws[schedule] += [strategy.run(DRAWS[drawn]).values for _ in range(5)]
    assert_same(draws["parallel"], draws["lockstep"])


def test_a_later_draw_is_noticed_after_its_run(make_strategy):
    strategy = make_strategy(2, schedule="parallel")
    for _ in range(3):
        strategy.run(lambda: None)
    rule = "take turns, as in .*; in this run the clock has decided"
    with pytest.warns(UserWarning, match=rule):
        strategy.run(lambda: torch.rand(()))
    assert len(set(strategy.run(threading.get_ident).values)) == 1


def test_replicas_take_turns_once_torch_compile_has_compiled_in_run(make_strategy):
    strategy = make_strategy(2, schedule="parallel")
    with strategy.scope():
        model = nn.Linear(WIDTH, 3)
    compiled = torch.compile(model, backend="eager")

    def step(x):
        return compiled(x), threading.get_ident()

    x = torch.ones(4, WIDTH)
    with pytest.warns(UserWarning, match=r"take turns.*torch\.compile.*strategy\.compile"):
        strategy.run(step, (x,))
    found, threads = strategy.run(step, (x,))
    assert len(set(threads.values)) == 1
    assert_same(found.values[1], model(x))


def test_no_replica_clears_the_casts_of_another_one(make_strategy):
    strategy = make_strategy(2, schedule="parallel")
    strategy.run(lambda: None)
    assert strategy.run(torch.is_autocast_cache_enabled).values == (False, False)
    assert torch.is_autocast_cache_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert strategy.run(torch.is_autocast_cache_enabled).values == (False, False)
        assert strategy.run(torch.get_autocast_dtype, ("cpu",)) == torch.bfloat16
    assert torch.is_autocast_cache_enabled()


def keeping(container, keep):
    """Returns a module that ``keep`` changes a container of in forward, or replaces it.

    Each has a class of its own: the class remembers that a replica has set an attribute.
    """

    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.kept = nn.Linear(WIDTH, 3), container

        def forward(self, x):
            keep(self, x)
            return self.linear(x)

    return Keeping()


CHANGES = {
    "list": ([], lambda self, x: self.kept.append(len(x))),
    "dict": ({"last": None}, lambda self, x: self.kept.update(last=x)),
    "set": (set(), lambda self, x: self.kept.add(x)),
}


@pytest.mark.parametrize("container", CHANGES)
def test_replicas_whose_forward_changes_a_container_take_turns_from_the_first_run_on(
    make_strategy, container
):
    kept = {}
    for schedule in ("lockstep", "parallel"):
        strategy = make_strategy(2, schedule=schedule)
        with strategy.scope():
            model = keeping(*copy.deepcopy(CHANGES[container]))
        batch = (torch.ones(5, WIDTH),)
        said = nullcontext()
        if schedule == "parallel":
            said = pytest.warns(UserWarning, match="take turns.* a list, dict or set of a module")
        with said:
            strategy.run(model, batch)
        for _ in range(3):
            strategy.run(model, batch)
        kept[schedule] = model.kept
    if container == "list":
        assert kept["parallel"] == kept["lockstep"] == [5] * 8
    assert len(kept["parallel"]) == len(kept["lockstep"])


def test_a_container_that_forward_replaces_needs_no_turns(make_strategy):
    strategy = make_strategy(2, schedule="parallel")

    def replace(self, x):
        self.kept = [*self.kept[-1:], len(x)]

    with strategy.scope():
        model = keeping([], replace)
    for _ in range(20):
        strategy.run(model, (torch.ones(4, WIDTH),))
    assert len(set(strategy.run(threading.get_ident).values)) == 2


def test_replicas_at_once_use_one_record_of_an_attribute_that_is_new(make_strategy, monkeypatch):
    # Each would make a record of its own, and the values in one of them would be lost.
    strategy = make_strategy(2, schedule="parallel")
    strategy.run(lambda: None)
    with strategy.scope():
        model = nn.Linear(WIDTH, 3)
    both_make_one = threading.Barrier(2, timeout=60)

    class Made(replica_attributes.PerReplicaAttribute):
        __slots__ = ()

        def __init__(self, *args):
            super().__init__(*args)
            both_make_one.wait()

    monkeypatch.setattr(replica_attributes, "PerReplicaAttribute", Made)

    def step(x):
        for i in range(20):
            setattr(model, f"own{i}", x)

    x = torch.arange(4.0)
    _, error, _ = finishes(lambda: strategy.run(step, (x,)), hang_after=60)
    assert error is None
    assert all(torch.equal(getattr(model, f"own{i}"), x) for i in range(20))


def test_a_replica_waits_until_another_one_has_begun_an_attributes_run(make_strategy, monkeypatch):
    # The cross-replica context has set another value: those that replicas left are dropped.
    strategy = make_strategy(2, schedule="parallel")
    with strategy.scope():
        model = nn.Linear(WIDTH, 3)
        model.state = torch.zeros(())

    def step():
        model.state = model.state + 1
        return model.state

    for _ in range(2):
        strategy.run(step)
    model.state = torch.full((), 10.0)
    begins, other_has_read = threading.Event(), threading.Event()
    versions = per_replica_values._versions

    def begin_slowly(value):
        if me() == 0 and not begins.is_set():
            begins.set()
            other_has_read.wait(0.2)  # as long as it can
        return versions(value)

    def read_second():
        if me() == 1:
            assert begins.wait(60)
        value = model.state
        if me() == 1:
            other_has_read.set()
        return value

    monkeypatch.setattr(per_replica_values, "_versions", begin_slowly)
    found, error, _ = finishes(lambda: strategy.run(read_second), hang_after=60)
    assert error is None
    assert [value.item() for value in found.values] == [10.0, 10.0]


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_checkpointed_segments_take_turns_from_the_first_run_on(make_strategy, rate):
    ends = {}
    for schedule in ("lockstep", "parallel"):
        strategy = make_strategy(2, schedule=schedule)
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(rate), nn.Linear(16, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            outputs = checkpoint(model, batch[0], use_reentrant=False)
            F.cross_entropy(outputs, batch[1]).backward()
            optimizer.step()

        said = nullcontext()
        if schedule == "parallel":
            said = pytest.warns(UserWarning, match="take turns.* as activation checkpointing does")
        with said:
            for batch in strategy.distribute_dataset(batches()):
                strategy.run(step, (batch,))
        ends[schedule] = model.state_dict()
    assert_same(ends["parallel"], ends["lockstep"])


def test_replicas_that_cache_parametrized_weights_take_turns(make_strategy):
    # Torch has one cache: a replica would use the weights of another one, with its graph.
    ends = {}
    for schedule in ("lockstep", "parallel"):
        strategy = make_strategy(2, schedule=schedule)
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            with parametrize.cached():
                F.cross_entropy(model(batch[0]) + model(-batch[0]), batch[1]).backward()
            optimizer.step()

        said = nullcontext()
        if schedule == "parallel":
            said = pytest.warns(UserWarning, match=r"take turns.* entered parametrize\.cached")
        with said:
            for batch in strategy.distribute_dataset(batches()):
                strategy.run(step, (batch,))
        ends[schedule] = model.state_dict()
    assert_same(ends["parallel"], ends["lockstep"])


def test_a_replica_among_others_waits_for_its_turn_to_cache_weights(make_strategy):
    strategy = make_strategy(2, schedule="parallel")
    with strategy.scope():
        model = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, 3))
    both_run = threading.Barrier(2, timeout=30)
    strategy.run(lambda: None)

    def enter():
        both_run.wait()
        with parametrize.cached():
            weight, again = model.weight, model.weight
            mirror.get_replica_context().all_reduce("sum", torch.ones(1))
            return weight is again is model.weight, weight

    with pytest.warns(UserWarning, match="take turns"):
        found, error, _ = finishes(lambda: strategy.run(enter), hang_after=60)
    assert error is None
    (are_cached, weights) = found
    assert are_cached.values == (True, True)
    assert weights.values[0] is not weights.values[1]
    assert parametrize._cache_enabled == 0 == len(parametrize._cache)


def test_a_run_within_a_merge_is_parallel_as_the_run_around_it(make_strategy):
    strategy = make_strategy(2, schedule="parallel")

    def outer(met):
        return mirror.get_replica_context().merge_call(
            lambda strategy: len(set(strategy.run(met).values))
        )

    assert strategy.run(outer, (threading.get_ident,)).values == (1, 1)
    barrier = threading.Barrier(2, timeout=30)

    def meet():
        barrier.wait()
        return threading.get_ident()

    found, error, _ = finishes(lambda: strategy.run(outer, (meet,)), hang_after=60)
    assert error is None
    assert found.values == (2, 2)


def test_errors_and_divergence_of_parallel_replicas_reach_the_caller(make_strategy):
    strategy = make_strategy(3, schedule="parallel")
    strategy.run(lambda: None)

    def fail():
        if me() == 1:
            raise KeyError("planted")
        mirror.get_replica_context().merge_call(lambda strategy: None)

    def diverge():
        if me() > 0:
            mirror.get_replica_context().merge_call(lambda strategy: None)

    for _ in range(20):
        _, error, _ = finishes(lambda: strategy.run(fail), hang_after=60)
        assert isinstance(error, KeyError)
        assert "replica 1 of 3" in error.__notes__[0]
        _, error, _ = finishes(lambda: strategy.run(diverge), hang_after=60)
        assert isinstance(error, mirror.DivergenceError)
    assert strategy.run(me).values == (0, 1, 2)
