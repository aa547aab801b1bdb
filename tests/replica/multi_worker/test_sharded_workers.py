"""Sharded optimizer state over the devices of all workers."""

import os

import pytest
import torch
from torch import nn

import mirror
from tests.multi_worker import both, strategy_of
from tests.oracle import assert_same
from tests.pairs import each_once, quick_of

SIZES = (11, 8, 5)


def trained(counts, way, state):
    """Returns, for each local replica, the losses, the values and the state after some steps."""
    with strategy_of(counts, optimizer_state=state) as strategy:
        with strategy.scope():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(1)
        batches = [torch.randn(size, 4, generator=generator) for size in SIZES]

        def loss_of(x):
            return (model(x) - 1).square().mean()

        def step(x):
            optimizer.zero_grad()
            loss_of(x).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        for part in strategy.distribute_dataset(batches):
            if way == 3:
                strategy.run(step, args=(part,))
            else:
                optimizer.zero_grad()
                strategy.reduce("mean", strategy.run(loss_of, args=(part,))).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            strategy.check_replicas()
        mirrored = optimizer._mirror
        held = mirrored.states.bytes_of_replicas()
        result = (model.state_dict(), optimizer.state_dict(), held)
        return [result for _ in strategy.devices]


COUNTS = [pytest.param(value, id=str(value)) for value in [(2, 2), (1, 3), (1, 1, 1), (3, 1)]]


@each_once(way=[2, 3], counts=COUNTS)
def test_workers_with_sharded_state_train_as_one_process(worker_pool, counts, way):
    of_workers, of_one = both(worker_pool, trained, counts, way, "sharded")
    (expected, *_) = trained((sum(counts),), way, "replicated")
    for model, state, _ in (*of_workers, *of_one):
        assert_same((model, state), expected[:2])


def mismatch(counts, name, values):
    with pytest.raises(mirror.StrategyError) as refused:
        strategy_of(counts, **{name: values[int(os.environ["RANK"])]})
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [("optimizer_state", ("sharded", "replicated")), ("gradient_reduction", ("mean", "sum"))],
)
def test_workers_with_different_options_are_refused_at_the_start(worker_pool, name, values):
    for message in worker_pool(2).run(mismatch, (2, 2), name, values):
        assert message == (
            f"{name} must be the same on all workers, and it is {values[0]!r} on worker 0, "
            f"{values[1]!r} on worker 1; pass the same value on each"
        )


def held(counts):
    """Returns the bytes of state that the local replicas hold, and those of the whole state."""
    with strategy_of(counts, optimizer_state="sharded") as strategy, strategy.scope():
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 40)).sum().backward()
            optimizer.step()
        of_replicas = strategy.report().state_bytes
        return of_replicas, [8 * sum(p.numel() for p in model.parameters())]


@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (1, 1)])
def test_each_device_holds_its_share_of_the_state(worker_pool, counts):
    for of_replicas, (whole,) in worker_pool(len(counts)).run(held, counts):
        for num_bytes in of_replicas:
            counters = 4 * 5  # a count of steps for each part of a parameter
            assert num_bytes == pytest.approx(whole / sum(counts), abs=16 + counters)


def sent(counts, state):
    """Returns the bytes that a step gives to sums and gathers between the workers."""
    with strategy_of(counts, optimizer_state=state) as strategy, strategy.scope():
        model = nn.Linear(80, 30)
        optimizer = torch.optim.AdamW(model.parameters())
        workers = strategy._group.replicas.workers
        summed, gathered = [], []

        def step():
            optimizer.zero_grad()
            model(torch.ones(4, 80)).sum().backward()
            optimizer.step()

        step()
        all_reduce, all_gather = workers.all_reduce, workers.all_gather

        def spy_sum(what, buffer):
            summed.append(buffer.nbytes)
            return all_reduce(what, buffer)

        def spy_gather(what, buffers):
            gathered.append(buffers[0].nbytes)
            all_gather(what, buffers)

        workers.all_reduce, workers.all_gather = spy_sum, spy_gather
        step()
        return sum(summed), sum(gathered)


def test_a_step_sums_whole_gradients_and_gathers_each_value_once(worker_pool):
    whole = 4 * 81 * 30
    for summed, gathered in worker_pool(2).run(sent, (2, 2), "sharded"):
        assert summed == pytest.approx(whole, rel=0.05)  # and a trailer
        assert gathered == pytest.approx(whole, rel=0.01)
    for summed, gathered in worker_pool(2).run(sent, (2, 2), "replicated"):
        assert (summed == pytest.approx(whole, rel=0.05), gathered) == (True, 0)


# Small models: some workers step nothing.


class Scheduled(torch.optim.Optimizer):
    """Not torch's: counts its steps in its groups and in an attribute."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "k": 0})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.add_(p.grad)
                    p.sub_(mean, alpha=group["lr"] / group["k"])


def nesterov(params):
    """Steps by lists, which write into the gradients."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


def of_few_elements(counts, make, state):
    """Returns what a model of one element leaves, with a second group from the third step on."""
    with strategy_of(counts, optimizer_state=state) as strategy, strategy.scope():
        model = nn.ParameterDict({"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(3)})
        optimizer = make([model["a"]])
        grads = []
        for i in range(5):
            if i == 2:
                optimizer.add_param_group({"params": [model["b"], model["c"]]})
            model["c"].requires_grad_(i != 3)
            optimizer.zero_grad()
            used = ("a", "b", "c") if i > 2 else ("a", "c") if i > 1 else ("a",)
            sum((i + 1) * model[name].square().sum() for name in used).backward()
            optimizer.step()
            strategy.check_replicas()
            grads.append([None if p.grad is None else p.grad.clone() for p in model.values()])
        options = [group.get("k") for group in optimizer.param_groups]
        numbers = options, getattr(optimizer, "num_steps", None)
        order = [len(p) for p in optimizer.state]  # as they got their first gradients
        values = [p.detach().clone() for p in model.values()]
        return values, optimizer.state_dict()["state"], grads, numbers, order


@each_once(
    make=[Scheduled, nesterov, torch.optim.AdamW, torch.optim.Adafactor],
    counts=[pytest.param(value, id=str(value)) for value in [(2, 2), (1, 1), (1, 1, 1), (1, 2)]],
)
def test_groups_and_gradients_that_change_are_those_of_one_device(worker_pool, counts, make):
    expected = of_few_elements((1,), make, "replicated")
    for result in worker_pool(len(counts)).run(of_few_elements, counts, make, "sharded"):
        assert_same(result, expected)


class ManyKinds(nn.Module):
    """Parameters of several dtypes and layouts, one of no element, one with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.sparse = nn.Embedding(7, 3, sparse=True)
        self.channels_last = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.doubles = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.empty(0, dtype=torch.float16))
        self.pairs = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, i):
        x = self.sparse(i)[:, :, None, None].expand(-1, 3, 4, 4)
        rest = self.doubles.sum().float() + self.pairs.abs().sum() + self.nothing.sum().float()
        return self.channels_last(x).mean((1, 2, 3)) + rest


def trained_kinds(counts, schedule, state):
    """Returns what a model of many kinds of parameters leaves; each step changes its state."""
    options = {"optimizer_state": state, "schedule": schedule}
    with strategy_of(counts, **options) as strategy, strategy.scope():
        torch.manual_seed(0)
        model = ManyKinds()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

        def step(i):
            optimizer.zero_grad()
            model(i).square().mean().backward()
            optimizer.step()
            for parameter in model.parameters():
                optimizer.state[parameter]["sum"].mul_(0.5)

        for part in strategy.distribute_dataset([torch.arange(8) * k % 7 for k in (1, 2, 3)]):
            strategy.run(step, args=(part,))
        strategy.check_replicas()
        return model.state_dict(), optimizer.state_dict()["state"]


@pytest.mark.filterwarnings("ignore")  # of torch: complex and sparse are experimental
@each_once(
    schedule=quick_of(["auto", "staggered", "parallel"], ["staggered", "parallel"]),
    counts=[pytest.param(value, id=str(value)) for value in [(2, 2), (1, 2)]],
)
def test_every_kind_of_parameter_is_gathered_and_changed_inside_run(worker_pool, schedule, counts):
    expected = trained_kinds((1,), "auto", "replicated")
    for result in worker_pool(2).run(trained_kinds, counts, schedule, "sharded"):
        assert_same(result, expected, tolerance=1e-5)


def loss_of_closures(counts, make, state):
    """Returns each replica's losses of steps with closures, where gradients are added."""
    options = {"optimizer_state": state, "gradient_reduction": "sum"}
    with strategy_of(counts, **options) as strategy, strategy.scope():
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = make(model.parameters())

        def step(x):
            def closure():
                optimizer.zero_grad()
                loss = model(x).square().sum() / 8
                loss.backward()
                return loss

            return optimizer.step(closure)

        parts = strategy.distribute_dataset([torch.ones(8, 4)] * 2)
        runs = [strategy.local_results(strategy.run(step, args=(part,))) for part in parts]
        return [[loss.detach() for loss in losses] for losses in zip(*runs, strict=True)]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_step_made_once_returns_the_losses_of_one_process(worker_pool, make):
    of_workers, of_one = both(worker_pool, loss_of_closures, (2, 2), make, "sharded")
    assert_same(of_workers, of_one)


# What is read is gathered by all workers.


def restored(counts, path, is_first):
    """Trains one step; saves, or restores and trains another one."""
    with strategy_of(counts, optimizer_state="sharded") as strategy, strategy.scope():
        torch.manual_seed(1)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        checkpoint = mirror.Checkpoint(model=model, optimizer=optimizer)
        if not is_first:
            checkpoint.restore(path)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 5)).square().sum().backward()
            optimizer.step()
        if is_first:
            checkpoint.save(path)
        return [value.detach().clone() for value in model.parameters()]


@pytest.mark.parametrize(
    ("first", "second"), [((1, 1), (2,)), ((2,), (1, 1)), ((1, 1), (1, 1, 1)), ((2, 2), (1,))]
)
def test_a_checkpoint_restores_with_any_number_of_workers(worker_pool, tmp_path, first, second):
    def run(counts, is_first):
        args = (counts, str(tmp_path / "checkpoint"), is_first)
        return (
            [restored(*args)]
            if len(counts) == 1
            else worker_pool(len(counts)).run(restored, *args)
        )

    run(first, True)
    expected = run((2,), False)
    for result in run(second, False):
        assert_same(result, expected[0])


def read_alone(counts):
    """The chief reads the state, and the other worker goes on."""
    with strategy_of(counts, optimizer_state="sharded") as strategy, strategy.scope():
        model = nn.Linear(5, 3)
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            model(torch.ones(4, 5)).sum().backward()
            optimizer.step()

        step()
        with pytest.raises(mirror.DivergenceError) as raised:
            if int(os.environ["RANK"]) == 0:
                optimizer.state_dict()
            step()
    return str(raised.value), getattr(raised.value, "__notes__", [])


def test_a_worker_that_reads_the_state_alone_is_told(worker_pool):
    (message, (note,)), _ = worker_pool(2).run(read_alone, (1, 1))
    assert "optimizer state of parameter 'weight' at" in message
    assert "all of them must read it, at the same place of the program" in note


def read_late(counts):
    with strategy_of(counts, optimizer_state="sharded") as strategy, strategy.scope():
        model = nn.Linear(5, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 5)).sum().backward()
        optimizer.step()
    with pytest.raises(mirror.StrategyError, match="closed") as raised:
        optimizer.state_dict()
    return raised.value.__notes__


def test_state_in_parts_is_read_before_the_strategy_is_closed(worker_pool):
    for (note,) in worker_pool(2).run(read_late, (1, 1)):
        assert "while their strategy is in use" in note


class Odd:
    """A value that no checkpoint holds."""


class WithOdd(torch.optim.SGD):
    """Has state that cannot be sent."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["odd"] = Odd()
                p.sub_(p.grad)


def unsendable(counts):
    with strategy_of(counts, optimizer_state="sharded") as strategy, strategy.scope():
        model = nn.Linear(5, 3, bias=False)  # one parameter, of one worker
        optimizer = WithOdd(model.parameters(), lr=0.1)
        model(torch.ones(4, 5)).sum().backward()
        optimizer.step()
        with pytest.raises(mirror.StrategyError) as raised:
            optimizer.state_dict()
        model(torch.ones(4, 5)).sum().backward()
        optimizer.step()  # the workers go on together
    return str(raised.value)


def test_state_that_cannot_be_sent_is_told_on_all_workers(worker_pool):
    for message in worker_pool(2).run(unsendable, (1, 1)):
        assert "'weight' is in parts on several workers, and a part cannot be sent" in message
        assert message.endswith('use optimizer_state="replicated"')


def test_one_device_has_nothing_to_shard():
    assert mirror.MirroredStrategy(["cpu"], optimizer_state="sharded").num_replicas_in_sync == 1
