"""Buffers are separate on each replica in run, and combined outside it."""

import copy
import io
import logging
import pickle

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same
from tests.pairs import EXHAUSTIVE
from tests.replica.params.coherence import N, assert_all_see, values_seen
from tests.toy_models import replica_id


def test_buffers_are_per_replica_and_read_as_the_mean(strategy, model):
    strategy.run(lambda: model.shift.fill_(float(replica_id())))
    assert_same([v[0].item() for v in values_seen(strategy, lambda: model.shift)], [0.0, 1.0, 2.0])
    assert_same(model.shift, torch.full((2,), 1.0))
    assert_same(model.state_dict()["shift"], torch.full((2,), 1.0))
    assert_same(dict(model.named_buffers())["shift"], torch.full((2,), 1.0))


READS = {
    "attribute": lambda m: m.shift.sum(),
    "item": lambda m: m.shift[0].item(),
    "repr": lambda m: repr(m.shift),
    "state_dict": lambda m: m.state_dict(),
    "saved": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "named_buffers": lambda m: dict(m.named_buffers()),
}
READ_AS_ONE = ("attribute", "item", "repr")


# Outside run nothing but whole states is read of a buffer that replicas do not agree on.
@pytest.mark.parametrize(
    ("read", "how"),
    [
        pytest.param(read, how, id=f"{name}-{how}", marks=() if i % 4 == j else EXHAUSTIVE)
        for i, (name, read) in enumerate(READS.items())
        for j, how in enumerate(["mean", "sum", "first", "none"])
        if how != "none" or name not in READ_AS_ONE
    ],
)
def test_reading_a_buffer_does_not_change_it_on_the_replicas(read, how, strategy, model):
    """A checkpoint in the middle of training must not touch what the replicas hold."""
    mirror.set_aggregation(model, "shift", how)
    strategy.run(lambda: model.shift.fill_(float(replica_id())))
    for _ in range(3):
        read(model)
    assert [v[0].item() for v in values_seen(strategy, lambda: model.shift)] == [0.0, 1.0, 2.0]


def test_running_statistics_are_the_mean_over_the_replicas(strategy, model):
    x = torch.randn(12, 2)
    copies = [copy.deepcopy(model) for _ in range(N)]
    model(x)
    for part, single in zip(torch.tensor_split(x, N), copies, strict=True):
        single(part)
    expected = torch.stack([single.norm.running_mean for single in copies]).mean(0)
    assert_same(model.norm.running_mean, expected)
    expected = torch.stack([single.norm.running_var for single in copies]).mean(0)
    assert_same(model.norm.running_var, expected)
    assert model.norm.num_batches_tracked.item() == 1
    assert model.state_dict()["norm.num_batches_tracked"].item() == 1


def test_integer_buffers_come_from_the_first_replica(strategy):
    module = nn.Module()
    module.register_buffer("count", torch.tensor(7))
    strategy.mirror(module)
    strategy.run(lambda: module.count.add_(replica_id()))
    assert module.count.item() == 7
    assert [v.item() for v in values_seen(strategy, lambda: module.count)] == [7, 8, 9]


def test_replicas_that_sat_out_take_the_mean_of_the_others_over(strategy, model):
    (batch,) = strategy.distribute_dataset([torch.ones(2, 2)])
    strategy.run(lambda x: model.shift.fill_(1.0 + 2 * replica_id()), args=(batch,))
    assert_same(model.shift, torch.full((2,), 2.0))
    assert values_seen(strategy, lambda: model.shift)[2][0].item() == 2.0


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.shift.fill_(6.0),
        lambda m: m.shift.copy_(torch.full((2,), 6.0)),
        lambda m: m.shift.data.fill_(6.0),
        lambda m: setattr(m, "shift", torch.full((2,), 6.0)),
        lambda m: m.shift.__setitem__(slice(None), 6.0),
        lambda m: m.load_state_dict({**m.state_dict(), "shift": torch.full((2,), 6.0)}),
        lambda m: m.load_state_dict(
            {**m.state_dict(), "shift": torch.full((2,), 6.0)}, assign=True
        ),
        lambda m: m.shift.mul_(0.0).add_(6.0),
        lambda m: dict(m.named_buffers())["shift"].fill_(6.0),
    ],
    ids=range(9),
)
def test_a_buffer_written_outside_run_reaches_every_replica(write, strategy, model):
    strategy.run(lambda: model.shift.fill_(float(replica_id())))
    write(model)
    assert_all_see(strategy, lambda: model.shift, torch.full((2,), 6.0))
    strategy.run(lambda: model.shift.add_(replica_id()))
    assert_same(model.shift, torch.full((2,), 7.0))


@pytest.mark.parametrize("name", ["weight", "running_mean"])
def test_raw_storage_that_another_strategys_replica_writes_to_reaches_every_replica(
    name, make_strategy
):
    # The code of that replica belongs to none of this strategy's: it hands out what is combined.
    strategy, other = make_strategy(2), make_strategy(2)
    norm = strategy.mirror(nn.BatchNorm1d(2))
    before = getattr(norm, name).detach().clone()

    def write():
        if mirror.get_replica_context().replica_id_in_sync_group == 0:
            getattr(norm, name).data.add_(5)

    other.run(write)
    for value in strategy.local_results(strategy.run(lambda: getattr(norm, name).clone())):
        assert torch.equal(value, before + 5)


def test_arithmetic_on_a_combined_buffer_starts_from_what_it_reads(strategy, model):
    strategy.run(lambda: model.shift.fill_(float(replica_id())))  # reads 1
    model.shift.add_(10.0)
    assert_all_see(strategy, lambda: model.shift, torch.full((2,), 11.0))


AGGREGATIONS = {"mean": 1.0, "sum": 3.0, "first": 0.0}


@pytest.mark.parametrize(("how", "expected"), AGGREGATIONS.items())
def test_set_aggregation_changes_how_a_buffer_is_read(how, expected, strategy, model):
    mirror.set_aggregation(model, "shift", how)
    strategy.run(lambda: model.shift.fill_(float(replica_id())))
    assert_same(model.shift, torch.full((2,), expected))
    assert_same(model.state_dict()["shift"], torch.full((2,), expected))
    model.shift.fill_(5.0)
    assert_same(model.shift, torch.full((2,), 5.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_summed_buffer_counts_exactly(dtype, strategy):
    """7 stays 7, also through a state_dict; TensorFlow makes 6 of it."""
    module = nn.Module()
    module.register_buffer("count", torch.zeros(1, dtype=dtype))
    strategy.mirror(module)
    mirror.set_aggregation(module, "count", "sum")
    module.count.fill_(7)
    assert [v.item() for v in values_seen(strategy, lambda: module.count)] == [7, 0, 0]
    assert module.count.item() == 7
    strategy.run(lambda: module.count.add_(replica_id() + 1))
    assert module.count.item() == 13
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    assert module.count.item() == 13
    assert sum(v.item() for v in values_seen(strategy, lambda: module.count)) == 13


def test_a_buffer_without_aggregation_is_not_read_outside_run(strategy, model):
    mirror.set_aggregation(model, "shift", "none")
    strategy.run(lambda: model.shift.fill_(4.0 + replica_id()))
    with pytest.raises(mirror.StrategyError, match=r"shift|aggregation"):
        model.shift.sum()
    assert_same(model.state_dict()["shift"], torch.full((2,), 4.0))
    assert_same(copy.deepcopy(model).shift, torch.full((2,), 4.0))
    assert [v[0].item() for v in values_seen(strategy, lambda: model.shift)] == [4.0, 5.0, 6.0]


@pytest.mark.parametrize("how", ["median", "MAX", ""])
def test_an_unknown_aggregation_is_a_value_error(how, model):
    with pytest.raises(ValueError, match=r"aggregation|mean"):
        mirror.set_aggregation(model, "shift", how)


def test_one_tensor_assigned_to_a_buffer_in_run_is_not_shared(make_strategy):
    # The replicas' buffers became one tensor, so every in-place update counted N times.
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, start):
            self.count = start
            mirror.get_replica_context().all_reduce("sum", 1.0)  # all have it now
            self.count.add_(1)

    strategy = make_strategy(3)
    with strategy.scope():
        counter = Counter()
    start = torch.full((1,), 5.0)
    strategy.run(counter, args=(start,))
    assert counter.count.item() == 6.0


def test_float16_buffers_are_averaged_without_overflow(make_strategy):
    # The sum of four values of 30000 is beyond float16: their mean was inf.
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.full((1,), 30000.0, dtype=torch.float16))

        def forward(self, x):
            self.shift.add_(32 * x.mean().half())
            return x

    strategy = make_strategy(4)
    with strategy.scope():
        module = Shift()
    module(torch.arange(4.0).view(4, 1))
    assert module.shift.item() == 30048.0


class Keeps(nn.Module):
    """Writes a buffer of its own in forward, by ``write``."""

    def __init__(self, write, value):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("kept", value)
        self.write = write

    def forward(self, x):
        with torch.no_grad():
            self.write(self, x)
        return self.linear(x)


def enqueue(m, x):
    m.kept[:, : len(x)] = x.T


def assign(m, x):
    m.kept = torch.maximum(m.kept, x.max(0).values)


def gathered(m, x):
    m.kept.copy_(mirror.get_replica_context().all_gather(x).sum(0))


OF_PARTS = {
    "a queue": (enqueue, torch.zeros(2, 12)),
    "a maximum, assigned": (assign, torch.zeros(2)),
    "a moving mean": (lambda m, x: m.kept.lerp_(x.mean(0), 0.1), torch.zeros(2)),
    "a number of examples": (lambda m, x: m.kept.add_(len(x)), torch.tensor(0)),
    "a histogram": (
        lambda m, x: m.kept.add_((x > 0).long().sum(0)),
        torch.zeros(2, dtype=torch.long),
    ),
    "data": (lambda m, x: setattr(m.kept, "data", x.mean(0)), torch.zeros(2)),
}
OF_ALL = {
    "a count of calls": (lambda m, x: m.kept.add_(1), torch.tensor(0)),
    "what all give": (gathered, torch.zeros(2)),
    "nothing": (lambda m, x: None, torch.zeros(2)),
}


@pytest.mark.parametrize("in_run", [False, True])
@pytest.mark.parametrize("name", [*OF_PARTS, *OF_ALL])
def test_a_buffer_that_replicas_leave_different_warns_once(name, in_run, strategy, caplog):
    write, value = (OF_PARTS | OF_ALL)[name]
    model = strategy.mirror(Keeps(write, value.clone()))
    x = torch.randn(7, 2)
    for _ in range(3):
        for batch in strategy.distribute_dataset([x]):
            strategy.run(model, (batch,)) if in_run else model(x)
    told = [r.getMessage() for r in caplog.records if r.name == "mirror"]
    assert len(told) == (name in OF_PARTS)
    if told:
        assert "buffer 'kept'" in told[0]
        assert "set_aggregation" in told[0]
        assert ("the mean" in told[0]) == value.is_floating_point()


def test_a_buffer_with_a_given_aggregation_does_not_warn(strategy, caplog):
    model = strategy.mirror(Keeps(*OF_PARTS["a moving mean"]))
    mirror.set_aggregation(model, "kept", "mean")
    model(torch.randn(7, 2))
    assert not caplog.records


class Norms(nn.Module):
    """A batch normalisation that is called in the third step first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.late = nn.BatchNorm1d(2)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        x = self.linear(x)
        return self.late(x) if self.num_calls > 2 else x


@pytest.mark.parametrize("way", [1, 2, 3])
def test_statistics_of_parts_are_logged_once(way, strategy, caplog):
    caplog.set_level(logging.INFO, "mirror")
    layers = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2)
    model = strategy.mirror(nn.Sequential(*layers))

    def loss_of(x):
        return model(x).square().mean()

    for x in strategy.distribute_dataset([torch.randn(7, 2)] * 3):
        if way == 1:
            loss_of(strategy.gather(x)).backward()
        elif way == 2:
            strategy.reduce("mean", strategy.run(loss_of, (x,))).backward()
        else:
            strategy.run(lambda x: loss_of(x).backward(), (x,))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    text = record.getMessage()
    assert text.startswith(
        "BatchNorm1d(2) '1' normalises with mean and variance of its replica's part"
    )
    assert "1 more such layer" in text
    assert "mirror.nn.convert_sync_batchnorm(model), or mirror run --sync-batch-norm" in text


def test_statistics_of_a_layer_that_is_called_late_are_logged_too(strategy, caplog):
    caplog.set_level(logging.INFO, "mirror")
    model = strategy.mirror(Norms())
    for _ in range(3):
        assert not caplog.records
        model(torch.randn(7, 2))
    assert "BatchNorm1d(2) 'late'" in caplog.text


def test_statistics_of_the_whole_batch_and_of_each_example_are_not_logged(strategy, caplog):
    caplog.set_level(logging.INFO, "mirror")
    for norm in (
        mirror.nn.convert_sync_batchnorm(nn.BatchNorm1d(2)),
        nn.SyncBatchNorm(2),
        nn.BatchNorm1d(2).eval(),
        nn.BatchNorm1d(2, track_running_stats=False),
    ):
        model = strategy.mirror(nn.Sequential(nn.Linear(2, 2), norm))
        model[0](torch.randn(7, 2)), model(torch.randn(7, 2))
    strategy.mirror(nn.InstanceNorm1d(2, affine=True))(torch.randn(7, 2, 4))
    assert not caplog.records


def test_a_run_that_fails_on_the_way_logs_nothing(strategy, caplog):
    caplog.set_level(logging.INFO, "mirror")
    model = strategy.mirror(nn.BatchNorm1d(2))

    def step(x):
        if replica_id() == 1:
            raise KeyError("no data")
        model(x)

    (batch,) = strategy.distribute_dataset([torch.randn(7, 2)])
    with pytest.raises(KeyError):
        strategy.run(step, (batch,))
    assert not caplog.records
