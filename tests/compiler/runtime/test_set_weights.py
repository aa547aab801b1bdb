"""A compiled step may set its replica's weight: gradients and means are those of one device."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirror
from tests.pairs import each_once, quick_of

SIZES = [6, 6, 5, 6, 2]


def data():
    generator = torch.Generator().manual_seed(2)
    found = []
    for size in SIZES:
        x = torch.randn(size, 4, 3, generator=generator)
        y = torch.randint(3, (size, 4), generator=generator)
        y[torch.arange(4) >= torch.randint(1, 5, (size, 1), generator=generator)] = -1
        found.append((x, y))
    return found


def build(weight):
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x, y):
        optimizer.zero_grad()
        weight(y)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)
        loss.backward()
        optimizer.step()
        return loss

    return model, step


def number_of_tokens(y):
    mirror.get_replica_context().weight = (y >= 0).sum()


@pytest.mark.parametrize("num_replicas", quick_of([1, 2, 3], [2]))
def test_a_weight_of_tokens_gives_the_mean_over_tokens(num_replicas):
    expected, plain = build(lambda y: None)
    with mirror.MirroredStrategy(["cpu"] * num_replicas) as strategy:
        with strategy.scope():
            model, step = build(number_of_tokens)
        compiled = strategy.compile(step, mode="trace")
        for (x, y), batch in zip(data(), strategy.distribute_dataset(data()), strict=True):
            loss = strategy.reduce("mean", compiled(*batch))
            torch.testing.assert_close(loss, plain(x, y).detach())
        for a, b in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a.detach(), b.detach())
        assert compiled.num_traces == 1
        strategy.check_replicas()


@each_once(
    weight=[
        lambda y: setattr(mirror.get_replica_context(), "weight", len(y) ** 2),
        lambda y: setattr(mirror.get_replica_context(), "weight", 2.5),
        lambda y: setattr(mirror.get_replica_context(), "weight", 0 * y.sum()),
        number_of_tokens,
    ],
    reduction=["mean", "sum"],
)
def test_weights_count_as_in_an_uncompiled_step(weight, reduction):
    found = []
    for is_compiled in (False, True):
        with mirror.MirroredStrategy(["cpu"] * 3, gradient_reduction=reduction) as strategy:
            with strategy.scope():
                model, step = build(weight)
            compiled = strategy.compile(step, mode="trace")
            losses = []
            for batch in strategy.distribute_dataset(data()):
                made = compiled(*batch) if is_compiled else strategy.run(step, batch)
                losses.append(strategy.reduce("mean", made))
            found.append([*losses, *[p.detach().clone() for p in model.parameters()]])
    torch.testing.assert_close(found[1], found[0])


def test_a_weight_that_is_negative_raises():
    with mirror.MirroredStrategy(["cpu"] * 2) as strategy, strategy.scope():
        compiled = strategy.compile(
            build(
                lambda y: setattr(mirror.get_replica_context(), "weight", (y >= 0).sum() * sign[0])
            )[1],
            mode="trace",
        )
        sign = [torch.tensor(0)]
        batches = list(strategy.distribute_dataset(data()))
        compiled(*batches[0])
        compiled(*batches[1])
        sign[0].fill_(-10)
        with pytest.raises(ValueError, match="a replica's weight is one finite number >= 0"):
            compiled(*batches[0])
