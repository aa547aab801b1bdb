"""Compiled steps of several workers equal one device, or run uncompiled on all workers."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirror
from mirror.errors import DivergenceError
from tests.compiler.training import batches, mlp, squared_step, usual_step
from tests.multi_worker import strategy_of
from tests.pairs import each_once, quick_of
from tests.replica.multi_worker.test_bucket_order import OfCpus

EVEN = [12, 12, 12, 12]
RAGGED = [12, 12, 12, 10, 12, 7, 12]
TINY = [12, 12, 12, 1, 12, 2, 12]  # a worker without any, and replicas with one
COUNTS = [(1, 1), (1, 2), (2, 2)]


def with_norm():
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), mirror.nn.SyncBatchNorm(8), nn.ReLU(), nn.Linear(8, 3)
    )


def with_large():
    return nn.Sequential(nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 600), nn.Linear(600, 3))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.turn = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x):
        return (self.first(x).to(torch.complex64) @ self.turn).abs()


def clipped_step(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        context = mirror.get_replica_context()
        return context.all_reduce("mean", loss.detach()), context.all_reduce("max", x.max())

    return step


def accumulating_step(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        for _ in range(2):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return x.sum().detach()

    return step


MODELS = {model.__name__: model for model in (mlp, with_norm, with_large, Complex)}
STEPS = {
    step.__name__: step for step in (usual_step, clipped_step, accumulating_step, squared_step)
}


def trained(counts, sizes, model="mlp", step="usual_step", mode="trace", begin=None, **options):
    """Returns losses, parameters and buffers, and how often the step was traced."""
    torch.manual_seed(0)
    with strategy_of(counts, **options) as strategy:
        if begin is not None:
            begin(strategy)
        with strategy.scope():
            net = MODELS[model]()
            optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        one = STEPS[step](net, optimizer)
        compiled = strategy.compile(one, mode=mode) if mode else lambda *a: strategy.run(one, a)
        data = strategy.distribute_dataset(batches(sizes))
        losses = [strategy.reduce("mean", compiled(*batch)) for batch in data]
        strategy.check_replicas()
        values = [value.detach().clone() for value in net.state_dict().values()]
        return losses, values, getattr(compiled, "num_traces", 0)


def check(worker_pool, counts, sizes, traces=1, **kinds):
    found = worker_pool(len(counts)).run(trained, counts, sizes, **kinds)
    losses, values, _ = trained((1,), sizes, **kinds | {"mode": None})
    for theirs, own, num_traces in found:
        assert num_traces == traces
        torch.testing.assert_close(theirs, losses, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(own, values, rtol=1e-4, atol=1e-6)
    first, *others = [own for _, own, _ in found]
    for own in others:
        assert all(map(torch.equal, first, own))


@each_once(sizes=[EVEN, RAGGED, TINY], counts=COUNTS)
def test_a_compiled_step_of_workers_is_that_of_one_device(worker_pool, counts, sizes):
    check(worker_pool, counts, sizes)


@each_once(counts=[(1, 1), (2, 1)], model=["with_norm", "with_large", "Complex"])
def test_buffers_large_and_complex_gradients_are_those_of_one_device(worker_pool, counts, model):
    check(worker_pool, counts, EVEN, model=model)


@pytest.mark.parametrize("step", ["clipped_step", "accumulating_step"])
def test_a_step_meets_the_other_workers_wherever_it_meets_replicas(worker_pool, step):
    losses = trained((1,), RAGGED, step=step, mode=None)[1]
    for _, own, traces in worker_pool(2).run(trained, (1, 2), RAGGED, step=step):
        assert traces == 1
        torch.testing.assert_close(own, losses, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("counts", quick_of(COUNTS, [(1, 2)]))
def test_a_worker_without_examples_traces_nothing(worker_pool, counts):
    kinds = {"sizes": [12, 1, 12, 12], "step": "squared_step"}
    _, whole, _ = trained((1,), mode=None, **kinds)
    for _, own, _ in worker_pool(len(counts)).run(trained, counts, **kinds):
        torch.testing.assert_close(own, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("counts", quick_of([(1, 1), (1, 2)], [(1, 2)]))
def test_programs_of_inductor_are_the_same(worker_pool, counts):
    check(worker_pool, counts, EVEN, mode="inductor")


def test_plain_sums_of_gradients_are_sums_over_all_workers(worker_pool):
    options = {"gradient_reduction": "sum"}
    whole = trained((3,), EVEN, mode=None, **options)[1]
    for _, own, traces in worker_pool(2).run(trained, (1, 2), EVEN, **options):
        assert traces == 1
        torch.testing.assert_close(own, whole, rtol=1e-4, atol=1e-6)


def test_gradients_travel_in_the_dtype_that_is_asked_for(worker_pool):
    options = {"communication_options": mirror.CommunicationOptions(wire_dtype=torch.bfloat16)}
    exact = trained((2,), EVEN)[1]
    for _, own, traces in worker_pool(2).run(trained, (1, 1), EVEN, **options):
        assert traces == 1
        assert not all(map(torch.equal, own, exact))
        torch.testing.assert_close(own, exact, rtol=0.05, atol=0.05)


def alternating(counts):
    """Compiled and uncompiled steps, evaluations and backward passes outside in turn."""
    torch.manual_seed(0)
    with strategy_of(counts) as strategy:
        with strategy.scope():
            net = with_norm()
            optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        step = usual_step(net, optimizer)
        compiled = strategy.compile(step, mode="trace")
        for i, batch in enumerate(strategy.distribute_dataset(batches([12] * 9))):
            if i % 3 == 2:
                strategy.run(step, batch)
            else:
                compiled(*batch)
        for x, y in batches([12] * 3):
            if len(counts) > 1:  # each worker calls the model with its own part
                first, n = strategy._group.replicas.workers.replica_offset, sum(counts)
                own = slice(first * 12 // n, (first + counts[int(first > 0)]) * 12 // n)
                x, y = x[own], y[own]
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        strategy.check_replicas()
        return [value.detach().clone() for value in net.state_dict().values()]


def test_compiled_and_other_steps_may_alternate(worker_pool):
    expected = alternating((1,))
    for own in worker_pool(2).run(alternating, (1, 2)):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def trained_by_replicas(counts, sizes, wire_dtype):
    """Trains over sums of all replicas at once, as NCCL makes them on GPUs."""
    sums = []

    def summing(strategy):
        workers = strategy._group.replicas.workers
        sums.append(OfCpus(workers))
        workers.sum_replicas_by(sums[0])

    options = mirror.CommunicationOptions(wire_dtype=wire_dtype)
    values = trained(counts, sizes, begin=summing, communication_options=options)[1]
    return values, sums[0].num_sums


@pytest.mark.parametrize(("wire_dtype", "most"), [(None, 1e-5), (torch.bfloat16, 0.05)])
def test_sums_over_all_replicas_at_once_are_those_of_one_device(worker_pool, wire_dtype, most):
    expected = trained((1,), RAGGED, mode=None)[1]
    for own, num_sums in worker_pool(2).run(trained_by_replicas, (1, 2), RAGGED, wire_dtype):
        assert num_sums > 0
        torch.testing.assert_close(own, expected, rtol=most, atol=most)


def drawing(counts):
    torch.manual_seed(5)
    with strategy_of(counts) as strategy:
        with strategy.scope():
            layer = nn.Linear(2, 2)

        def step(x):
            return torch.rand(4) + 0 * layer(x).sum().detach()

        compiled, found = strategy.compile(step, mode="trace"), []
        for batch in strategy.distribute_dataset([torch.zeros(6, 2)] * 3):
            own = strategy.local_results(compiled(batch))
            found.append([tuple(part.tolist()) for part in own])
        return found, compiled.num_traces, torch.rand(()).item()


def test_replicas_of_all_workers_draw_apart_and_the_program_alike(worker_pool):
    found = worker_pool(2).run(drawing, (1, 2))
    drawn = [part for steps, _, _ in found for parts in steps for part in parts]
    assert len(set(drawn)) == len(drawn) == 9
    assert [traces for _, traces, _ in found] == [1, 1]
    assert found[0][2] == found[1][2]


def bad_gradient(counts, at):
    guards = mirror.Guards(finite_gradients=True)
    with strategy_of(counts, guards=guards) as strategy:
        with strategy.scope():
            net = mlp()
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
        compiled = strategy.compile(usual_step(net, optimizer), mode="trace")
        data = batches([12] * 4)
        data[2][0][at, 0] = float("nan")
        said = []
        for batch in strategy.distribute_dataset(data):
            before = [p.detach().clone() for p in net.parameters()]
            try:
                compiled(*batch)
            except mirror.GradientError as error:
                said.append(str(error))
                assert all(map(torch.equal, before, net.parameters()))
        return said, compiled.num_traces


@pytest.mark.parametrize("at", quick_of([0, 11], [11]))
def test_a_gradient_that_is_not_finite_is_an_error_of_all_workers(worker_pool, at):
    (first, _), (second, traces) = worker_pool(2).run(bad_gradient, (1, 2), at)
    assert traces == 1
    assert len(first) == 1
    assert first == second
    replica = 0 if at == 0 else 2
    assert f"'0.weight' on replica {replica} of 3" in first[0]


def falling_back(counts):
    """One worker alone cannot follow the step: it asks for a value."""
    calls = []
    with strategy_of(counts) as strategy:
        asks = strategy._group.replicas.workers.rank == 1
        with strategy.scope():
            layer = nn.Linear(2, 1)

        def step(x):
            calls.append(1)
            total = layer(x).sum().detach()
            return total * 2 if asks and total.item() > 1e9 else total

        compiled = strategy.compile(step, mode="trace", fallback="eager")
        x = torch.arange(8.0).view(4, 2)
        found = [
            strategy.reduce("sum", compiled(batch)).item()
            for batch in strategy.distribute_dataset([x] * 5)
        ]
        return len(set(found)), len(calls), compiled.num_traces


def test_what_one_worker_cannot_compile_runs_uncompiled_on_all(worker_pool, caplog):
    with caplog.at_level(logging.ERROR):
        (first, of_first, _), (second, of_second, traces) = worker_pool(2).run(
            falling_back, (1, 1)
        )
    assert (first, second) == (1, 1)
    assert traces == 0
    assert min(of_first, of_second) >= 5  # no call was made by a program


def parting(counts):
    with strategy_of(counts) as strategy:
        rank = strategy._group.replicas.workers.rank
        with strategy.scope():
            net = mlp()
            optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            if rank == 1 and seen[0] > 1:
                mirror.get_replica_context().all_reduce("sum", loss.detach())
            return loss

        seen = [0]
        compiled = strategy.compile(step, mode="trace")
        try:
            for batch in strategy.distribute_dataset(batches([12] * 4)):
                seen[0] += 1
                compiled(*batch)
        except DivergenceError as error:
            return str(error)
        return "no error"


def test_programs_that_meet_for_different_things_are_an_error_on_all_workers(worker_pool):
    for said in worker_pool(2).run(parting, (1, 1)):
        assert "gradients of 6 parameters (" in said
        assert "gradients of 6 parameters, sum (" in said


def apart(counts):
    """Worker 1 makes an uncompiled step where worker 0 makes a compiled one."""
    with strategy_of(counts) as strategy:
        rank = strategy._group.replicas.workers.rank
        with strategy.scope():
            net = mlp()
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
        step = usual_step(net, optimizer)
        compiled = strategy.compile(step, mode="trace")
        try:
            for i, batch in enumerate(strategy.distribute_dataset(batches([12] * 4))):
                if i == 3 and rank == 1:
                    strategy.run(step, batch)
                else:
                    compiled(*batch)
        except DivergenceError as error:
            return str(error)
        return "no error"


def test_a_worker_that_compiles_and_one_that_does_not_end_in_an_error(worker_pool):
    found = worker_pool(2).run(apart, (1, 1))
    assert all("all workers must reach the same operations" in said for said in found)
    # The first worker to look sees both; the other one may see that the first has exited.
    assert any("worker 0 of 2: waits in a compiled step at " in said for said in found)


def rebuild_the_optimizer(counts):
    """Only one worker has a trace, which keeps the former optimizer; then checks all replicas."""
    with strategy_of(counts) as strategy, strategy.scope():
        torch.manual_seed(0)
        model = mlp()
        optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)]

        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            return loss

        compiled = strategy.compile(step, mode="trace")
        for own in strategy.distribute_dataset(batches([12, 1])):
            compiled(*own)
        num_traces = compiled.num_traces
        optimizers[0] = torch.optim.SGD(model.parameters(), 0.1)
        return num_traces, strategy.check_replicas()


def test_an_optimizer_that_only_the_trace_of_one_worker_keeps_is_no_difference(worker_pool):
    found = worker_pool(2).run(rebuild_the_optimizer, (2, 1))
    assert [checked for _, checked in found] == [6, 6]
    assert len({num_traces for num_traces, _ in found}) == 2
