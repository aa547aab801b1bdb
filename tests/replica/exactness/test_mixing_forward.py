"""A forward that combines the examples of its part is reported, in all three ways."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror

MIXES = {
    "softmax": lambda m, x: m.out(F.softmax(m.hidden(x), 0)),
    "cumsum": lambda m, x: m.out(m.hidden(x).cumsum(0)),
    "flip": lambda m, x: m.out(x + m.hidden(x).flip(0)),
    "roll": lambda m, x: m.out(m.hidden(x).roll(1, 0)),
    "sort": lambda m, x: m.out(m.hidden(x).sort(0).values),
    "mean": lambda m, x: m.out(m.hidden(x) - m.hidden(x).mean(0)),
    "sum": lambda m, x: m.out(m.hidden(x) / m.hidden(x).sum()),
    "std": lambda m, x: m.out(m.hidden(x) / m.hidden(x).std(0)),
    "linalgvectornorm": lambda m, x: m.out(F.normalize(m.hidden(x), dim=0)),
    "max": lambda m, x: m.out(m.hidden(x) - m.hidden(x).max(0).values),
    "mm": lambda m, x: m.out(F.softmax(m.hidden(x) @ m.hidden(x).T, -1) @ x),
    "mean of another dimension": lambda m, x: m.out(
        (m.hidden(x).T[None] - m.hidden(x).T[None].mean(2, keepdim=True))[0].T
    ),
}
KEEPS = {
    "functions of each example": lambda m, x: m.out(F.softmax(m.hidden(x), 1).flip(1).cumsum(1)),
    "products with parameters": lambda m, x: m.hidden(x) @ (m.out.weight @ m.hidden.weight.T).T,
    "a mean over tokens": lambda m, x: m.out(m.hidden(x[:, None].expand(-1, 5, -1)).mean(1)),
    "steps first": lambda m, x: m.out(
        (F.softmax(m.hidden(x).expand(7, *x.shape), 0) * m.hidden(x)).sum(0)
    ),
    "what all give": lambda m, x: m.out(m.hidden(x) - gathered(m.hidden(x)).mean(0)),
    "a sum over replicas": lambda m, x: m.out(m.hidden(x) - total(m.hidden(x).sum(0))),
}


def gathered(value):
    return mirror.get_replica_context().all_gather(value)


def total(value):
    return mirror.get_replica_context().all_reduce("sum", value)


class Net(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x)


def train(compute, num_examples, way):
    """Takes two steps, on three replicas."""
    with mirror.MirroredStrategy(["cpu"] * 3) as strategy, strategy.scope():
        model = Net(compute)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(x):
            return model(x).square().mean()

        def step(x):
            optimizer.zero_grad()
            loss_of(x).backward()
            optimizer.step()

        for x in strategy.distribute_dataset([torch.randn(num_examples, 4)] * 2):
            if way == 3:
                strategy.run(step, (x,))
                continue
            optimizer.zero_grad()
            if way == 1:
                loss_of(strategy.gather(x)).backward()
            else:
                strategy.reduce("mean", strategy.run(loss_of, (x,))).backward()
            optimizer.step()


@pytest.mark.parametrize("name", MIXES)
def test_a_forward_that_mixes_examples_warns_once(name):
    with pytest.warns(UserWarning, match=f"^{name.partition(' ')[0]} in the forward") as caught:
        train(MIXES[name], 7, 1)
    assert len(caught) == 1
    assert "in the forward of Net computes over the examples" in str(caught[0].message)
    assert "all_gather" in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("way", [2, 3])
@pytest.mark.parametrize("name", ["softmax", "flip", "mean", "std", "mm"])
def test_so_does_one_inside_run(name, way):
    with pytest.warns(UserWarning, match="computes over the examples of the batch|differ"):
        train(MIXES[name], 7, way)


@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize("name", KEEPS)
def test_a_forward_of_each_example_does_not_warn(name, way):
    train(KEEPS[name], 7, way)


def without_a_graph(model, x):
    return model.out(model.hidden(x)) - x.mean(0).sum()


# Which dimension has the examples, only uneven parts show; and what has no graph, none.
UNSEEN = {"even parts": (MIXES["softmax"], 6), "no graph": (without_a_graph, 7)}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_graphs_do_not_show_is_seen_by_the_comparison_of_split_calls(name):
    compute, num_examples = UNSEEN[name]
    with pytest.warns(UserWarning, match="a split call of Net does not return what one") as caught:
        train(compute, num_examples, 1)
    assert len(caught) == 1
    for way in (2, 3):
        train(compute, num_examples, way)


def test_so_is_an_evaluation():
    told = pytest.warns(UserWarning, match="a split call of Net does not return what one device")
    with mirror.MirroredStrategy(["cpu"] * 3) as strategy, torch.no_grad(), told:
        strategy.mirror(Net(MIXES["softmax"]))(torch.randn(7, 4))
