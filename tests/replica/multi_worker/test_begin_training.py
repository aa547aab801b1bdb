"""Calls before training decide nothing: training begins with worker 0's values in any case.

A catalogue: ways to call a module early, times ways in which values change afterwards.
"""

import contextlib
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from mirror.errors import DivergenceError
from tests.pairs import EXHAUSTIVE, each_once, quick_of
from tests.replica.multi_worker.programs import rank, strategy_of

BATCHES = torch.arange(96.0).reshape(3, 8, 4).sin()


class Net(nn.Module):
    """Two layers, a buffer that forward reads, and what calls a layer while it is made."""

    def __init__(self, early, seed=0):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.LazyLinear(2) if early == "lazy" else nn.Linear(6, 2)
        self.register_buffer("scale", torch.ones(2))
        if early == "spectral_norm":
            self.first = parametrizations.spectral_norm(self.first)
        if early == "weight_norm":
            self.first = parametrizations.weight_norm(self.first)
        if early in ("construction", "quiet construction"):
            with torch.set_grad_enabled(early == "construction"):
                found = self.first(torch.ones(2, 4))
            torch.manual_seed(seed)  # a run has drawn from the generator
            self.last = nn.Linear(found.shape[-1], 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale


class Place:
    """Where a program runs: on a worker, or on one device that is worker 0 and has all examples.

    Args:
        strategy: ``None`` for one device.
    """

    def __init__(self, strategy, num_workers):
        self.strategy, self.num_workers = strategy, num_workers
        self.rank = 0 if strategy is None else rank()

    def scope(self):
        return contextlib.nullcontext() if self.strategy is None else self.strategy.scope()

    def own(self, x):
        return x if self.strategy is None else x.chunk(self.num_workers)[self.rank]

    def run(self, fn, x):
        return fn(x) if self.strategy is None else self.strategy.run(fn, args=(x,))


def call_early(place, model, early):
    own = place.own(BATCHES[0])
    if early == "lazy":
        model(own)
        for p in model.last.parameters():  # drawn elsewhere than on one device
            nn.init.constant_(p, 0.1 + place.rank)
    if early in ("evaluation", "many evaluations"):
        with torch.no_grad():
            for _ in range(40 if early == "many evaluations" else 2):
                model(own)
    if early == "inference":
        with torch.inference_mode():
            model(own)
    if early == "calls with gradients":
        model.eval()
        model(own)
        model(own)
        model.train()
    if early == "run":
        place.run(model, own)
    if early == "chief's evaluation" and place.rank == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(own)
    if early == "different evaluations":
        model.eval()
        with torch.no_grad():
            for _ in range(2 + 3 * place.rank):
                model(own)
    model.train()
    if early == "reading" and place.rank == 0:
        assert model.last.weight.data.isfinite().all()


def change(place, model, way):
    """Changes values on worker 0 alone, but for "own initialisation"."""
    if way == "own initialisation":
        torch.manual_seed(place.rank)
        for p in model.parameters():
            nn.init.normal_(p, 0.1 * place.rank, 0.1)
        return
    if place.rank:
        return
    torch.manual_seed(7)
    loaded = {name: torch.full_like(v, 0.1) + 0.01 * v for name, v in model.state_dict().items()}
    if way == "load_state_dict":
        model.load_state_dict(loaded)
    if way == "assign":
        model.load_state_dict(loaded, assign=True)
    if way == "copy_":
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.full_like(p, 0.1))
    if way == "data":
        for p in model.parameters():
            p.data = torch.full_like(p, 0.1)
    if way == "data.copy_":
        for p in model.parameters():
            p.data.copy_(torch.full_like(p, 0.1))
    if way == "numpy":
        model.last.weight.detach().numpy()[:] = 0.1
    if way == "init":
        for p in model.parameters():
            nn.init.uniform_(p)
    if way == "buffer":
        model.scale.fill_(0.5)
    if way == "one parameter":
        with torch.no_grad():
            model.last.bias.add_(1.0)


def program(place, early, way, *, between, inside):
    """Returns an evaluation after the change and the values after training."""
    torch.manual_seed(place.rank)
    with place.scope() if inside else contextlib.nullcontext():
        with contextlib.nullcontext() if inside else place.scope():
            model = Net(early, place.rank)
        call_early(place, model, early)
        change(place, model, way)
        evaluated = None
        if between:
            with torch.no_grad():
                evaluated = [model.eval()(x).tolist() for x in BATCHES]
            model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in BATCHES:
            optimizer.zero_grad()
            model(place.own(batch)).square().mean().backward()
            optimizer.step()
    if place.strategy is not None:
        place.strategy.check_replicas()
    return evaluated, {name: value.tolist() for name, value in model.state_dict().items()}


def on_worker(num_local, *args, **kwargs):
    with strategy_of(num_local) as strategy:
        num_workers = strategy.num_replicas_in_sync // num_local
        return program(Place(strategy, num_workers), *args, **kwargs)


def assert_as_one_device(worker_pool, num_workers, num_local, *args, **kwargs):
    expected = program(Place(None, 1), *args, **kwargs)
    for evaluated, values in worker_pool(num_workers).run(on_worker, num_local, *args, **kwargs):
        torch.testing.assert_close(evaluated, expected[0], rtol=1e-4, atol=1e-5)
        assert values.keys() == expected[1].keys()
        for name, value in values.items():
            torch.testing.assert_close(value, expected[1][name], rtol=1e-4, atol=1e-5, msg=name)


EARLY = [
    "nothing", "spectral_norm", "weight_norm", "construction", "quiet construction", "lazy",
    "evaluation", "inference", "calls with gradients", "run", "chief's evaluation", "reading",
]  # fmt: skip
WAYS = [
    "nothing", "load_state_dict", "assign", "copy_", "data", "data.copy_", "numpy", "init",
    "buffer", "one parameter", "own initialisation",
]  # fmt: skip
# Each early one with one way, and each way with one; the rest is exhaustive.
SOME = [
    pytest.param(early, way, marks=() if (j - i) % len(WAYS) == 0 else EXHAUSTIVE)
    for i, early in enumerate(EARLY)
    for j, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("early", "way"), SOME)
def test_training_begins_with_worker_0s_values(worker_pool, early, way):
    inside = (EARLY.index(early) + WAYS.index(way)) % 2 == 0
    between = (EARLY.index(early) + WAYS.index(way)) % 3 == 0 and early != "chief's evaluation"
    assert_as_one_device(worker_pool, 2, 1, early, way, between=between, inside=inside)


@each_once(
    **{"num_workers,num_local": [(2, 2), (3, 1)]},
    early=["many evaluations", "different evaluations", "spectral_norm"],
)
def test_however_many_there_are(worker_pool, early, num_workers, num_local):
    options = {"between": False, "inside": True}
    assert_as_one_device(worker_pool, num_workers, num_local, early, "load_state_dict", **options)


def by_hand():
    with strategy_of(2) as strategy:
        torch.manual_seed(rank())
        with strategy.scope():
            model = nn.Linear(4, 2)
        sent = []
        broadcast = strategy._group.replicas.workers.broadcast
        strategy._group.replicas.workers.broadcast = lambda *a: (sent.append(a[0]), broadcast(*a))
        for _ in range(6):
            model.zero_grad()
            model(torch.ones(4, 4)).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        strategy.check_replicas()
        return len(sent)


def test_updates_without_an_optimizer_are_the_beginning_of_training(worker_pool):
    assert worker_pool(2).run(by_hand) == [2, 2]


def evaluates_alone():
    with strategy_of() as strategy:
        with strategy.scope():
            model = nn.Linear(4, 2)
        with torch.no_grad():
            for _ in range(20 + 5 * rank()):
                model(torch.ones(2, 4))
        return True


def test_a_program_that_never_trains_may_have_different_numbers_of_batches(worker_pool):
    assert worker_pool(2).run(evaluates_alone) == [True, True]


def too_late():
    with strategy_of() as strategy:
        with strategy.scope():
            model = nn.Linear(4, 2)
        if rank() == 0:
            model(torch.ones(2, 4))
            with torch.no_grad():
                model.weight.fill_(0.5)
        with pytest.raises(DivergenceError, match="the values of 'weight' have changed after"):
            model(torch.ones(2, 4)).sum().backward()
            assert model.weight.grad is not None


def test_values_that_change_after_the_first_forward_of_others_are_refused(worker_pool):
    worker_pool(2).run(too_late)


def stale(alone):
    """Evaluates so that worker 1 cannot know that worker 0 has changed values in between."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("mirror").addHandler(handler)
    try:
        with strategy_of() as strategy:
            with strategy.scope():
                model = nn.Linear(4, 2)
            x = torch.ones(2, 4)
            with torch.no_grad():
                if alone and rank() == 0:
                    model(x)
                for i in range(30):
                    if rank() == 0 and i == (0 if alone else 25):
                        nn.init.ones_(model.weight)
                    model(x)
            model(x).sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
            strategy.check_replicas()
    finally:
        logging.getLogger("mirror").removeHandler(handler)
    return [one for one in told if "worker 0 has changed values before training" in one]


@pytest.mark.parametrize(
    ("alone", "how"), [(True, "at other lines of the program"), (False, "more often")]
)
def test_an_evaluation_with_the_values_from_before_warns(worker_pool, alone, how):
    first, second = worker_pool(2).run(stale, alone)
    assert first == []
    assert len(second) == 1
    assert how in second[0]


def compiled(way):
    with strategy_of(2) as strategy:
        torch.manual_seed(rank())
        with strategy.scope():
            model = Net("spectral_norm")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(4, 4))

            @strategy.compile
            def step(x):
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                return loss

            change(Place(strategy, 2), model, way)
            for batch in BATCHES:
                step(batch.chunk(2)[rank()])
        strategy.check_replicas()
        return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("way", quick_of(["load_state_dict", "data"], ["data"]))
def test_compiled_steps_begin_with_worker_0s_values(worker_pool, way):
    first, second = worker_pool(2).run(compiled, way)
    assert first == second


def test_the_catalogue_changes_what_it_says():
    for way in WAYS[1:]:
        torch.manual_seed(0)
        model = Net("nothing")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        change(Place(None, 1), model, way)
        assert any(not torch.equal(v, before[n]) for n, v in model.state_dict().items()), way
