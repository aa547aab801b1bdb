"""Losses over the replicas' examples are those of one device, or a warning is issued.

Above the loss: in a split call of the model. Inside run: of the whole step, or of its forward.
"""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

import mirror
from tests.pairs import EXHAUSTIVE
from tests.replica.exactness.losses import (
    BRANCHES,
    EXACT,
    FEATURES,
    INEXACT,
    SUMS,
    Model,
    looped,
)

SIZES = [(2, 8), (2, 7), (3, 7), (3, 9)]  # replicas, examples
WAYS = ["split", "reduced", "stepped"]


def gradients(way, loss, replicas, n, **options):
    """Returns the gradients of one device, and those of a step in run."""
    torch.manual_seed(0)
    plain, x = Model(), torch.randn(n, FEATURES)
    loss(plain, plain(x)).backward()
    strategy = mirror.MirroredStrategy(["cpu"] * replicas, **options)
    with strategy.scope():
        model = strategy.mirror(copy.deepcopy(plain))
        model.zero_grad()

        def forward(part):
            return loss(model, model(part))

        def step(part):
            forward(part).backward()

        for batch in strategy.distribute_dataset([x]):
            if way == "reduced":
                strategy.reduce("mean", strategy.run(forward, args=(batch,))).backward()
            else:
                strategy.run(step, args=(batch,))
    return [p.grad for p in plain.parameters()], [p.grad for p in model.parameters()]


def outputs(loss, replicas, n, verify="first"):
    """Returns the loss of one device, and of a split call."""

    class Whole(Model):  # a class of its own, since it warns once for each
        def forward(self, x):
            return loss(self, super().forward(x))

    torch.manual_seed(0)
    plain, x = Whole(), torch.randn(n, FEATURES)
    strategy = mirror.MirroredStrategy(["cpu"] * replicas, verify=verify)
    return plain(x), strategy.mirror(copy.deepcopy(plain))(x)


def cases(losses, sizes):
    """Parametrizes a test by way and loss: two ways, each with one size, of every loss.

    The rest is exhaustive.
    """
    found = []
    for (i, way), (j, name) in itertools.product(enumerate(WAYS), enumerate(losses)):
        for k, size in enumerate(sizes):
            is_quick = j % len(WAYS) != i and (i + j) % len(sizes) == k
            number = f"{way}-{name}-{size[0]}-{size[1]}"
            found.append(
                pytest.param(way, name, *size, id=number, marks=() if is_quick else EXHAUSTIVE)
            )
    return pytest.mark.parametrize(("way", "name", "replicas", "n"), found)


@cases(EXACT, [*SIZES, (2, 10), (3, 3)])
def test_an_exact_loss_is_that_of_one_device_without_a_warning(way, name, replicas, n):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if way == "split":
            expected, found = outputs(EXACT[name], replicas, n)
        else:
            expected, found = gradients(way, EXACT[name], replicas, n)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@cases([*INEXACT, *SUMS], SIZES)
def test_an_inexact_loss_warns(way, name, replicas, n):
    if way != "split":
        with pytest.warns(UserWarning, match="differ from one device's") as told:
            gradients(way, (INEXACT | SUMS)[name], replicas, n)
        assert [one.filename for one in told] == [__file__]
    elif name in INEXACT:
        with pytest.warns(UserWarning, match="this output is"):
            outputs(INEXACT[name], replicas, n)


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_gradients_are_exact_for_sums(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, found = gradients("stepped", SUMS[name], 2, 7, gradient_reduction="sum")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*INEXACT, *SUMS])
def test_one_replica_does_not_warn(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients("stepped", (INEXACT | SUMS)[name], 1, 8)
        gradients("reduced", (INEXACT | SUMS)[name], 1, 8)


def test_a_function_of_what_all_replicas_give_is_exact():
    def root(m, h):
        context = mirror.get_replica_context()
        mean = h.square().sum() / (h.numel() if context.num_replicas_in_sync == 1 else 1)
        if context.num_replicas_in_sync > 1:
            mean = context.all_reduce("sum", mean) / context.all_reduce("sum", h.numel())
        return mean.sqrt()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, found = gradients("stepped", root, 2, 7)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_set_makes_a_mean_over_other_numbers_exact():
    def ignoring(m, h):
        targets = torch.where(h.detach()[:, 0] > 0, 1, -100)
        mirror.get_replica_context().weight = (targets > 0).sum()
        return F.cross_entropy(h, targets)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients("stepped", ignoring, 2, 7)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize(("replicas", "n"), [(2, 8), (3, 7)])
def test_a_part_that_takes_another_branch_warns(way, name, replicas, n):
    def loss(m, h):
        context = mirror.get_replica_context()
        chosen = torch.arange(len(h)) < (2 if context.replica_id_in_sync_group == 0 else 0)
        value = BRANCHES[name](m, h, chosen)
        # A constant takes no pass.
        return value if way != "stepped" or value.requires_grad else value + h.sum() * 0

    with pytest.warns(UserWarning, match="the result of another branch on some replicas"):
        outputs(loss, replicas, n, "off") if way == "split" else gradients(way, loss, replicas, n)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BRANCHES)
def test_parts_that_take_the_same_branch_do_not_warn_of_one(way, name):
    def loss(m, h):
        return BRANCHES[name](m, h, torch.ones(len(h), dtype=torch.bool))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*another branch")
        outputs(loss, 2, 7) if way == "split" else gradients(way, loss, 2, 7)


SOME = {
    "all but the first": lambda h: range(1, len(h)),
    "the last one twice": lambda h: [*range(len(h)), -1],
    "one for another": lambda h: [0, 0, *range(2, len(h))],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("replicas", "n"), [(2, 8), (2, 7), (3, 8)])
def test_a_loop_that_leaves_out_an_example_of_each_part_warns(way, name, replicas, n):
    def loss(m, h):
        return looped(h, SOME[name](h))

    with pytest.warns(UserWarning, match="leaves some out, or counts some twice"):
        gradients(way, loss, replicas, n) if way != "split" else outputs(loss, replicas, n)


@pytest.mark.parametrize(("replicas", "n"), [(2, 8), (2, 7), (3, 7)])
def test_sums_of_single_examples_are_added_up(replicas, n):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected, found = outputs(SUMS["sum of single examples"], replicas, n)
    torch.testing.assert_close(found, expected)
