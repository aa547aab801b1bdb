"""A seed makes a run reproducible, with a stream for each replica."""

import torch
from torch import nn


def test_a_seed_makes_a_run_reproducible_with_unlike_streams(make_strategy):
    strategy = make_strategy(3)

    def draw():
        return [t.tolist() for t in strategy.run(lambda: torch.rand(4)).values]

    torch.manual_seed(5)
    first = [draw(), draw()]
    torch.manual_seed(5)
    assert [draw(), draw()] == first
    rows = [tuple(row) for rows in first for row in rows]
    assert len(set(rows)) == 6
    torch.manual_seed(6)
    assert draw() != first[0]


def test_a_seed_before_another_strategy_gives_the_same_streams(make_strategy):
    drawn = []
    for _ in range(2):
        strategy = make_strategy(2)
        torch.manual_seed(9)
        drawn.append([t.tolist() for t in strategy.run(lambda: torch.rand(4)).values])
    assert drawn[0] == drawn[1]


def test_dropout_masks_differ_between_the_parts_of_a_transparent_call(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5)))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1.0)
    y = model(torch.ones(2, 1))
    assert not torch.equal(y[0], y[1])
    torch.manual_seed(1)
    first = model(torch.ones(2, 1))
    torch.manual_seed(1)
    assert torch.equal(model(torch.ones(2, 1)), first)
