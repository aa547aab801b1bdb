"""The gradients of several workers equal those of one device with all their examples."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.pairs import each_once
from tests.replica.multi_worker.programs import assert_as_one_device, cross_entropy, net


def trains(place):
    with place.scope():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for batch in place.batches:
        optimizer.zero_grad()
        place.backward(cross_entropy(model), *batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    place.keep(model, grads=False)


@each_once(way=[1, 2, 3], counts=[(1, 1), (2, 2), (1, 2)])
def test_training_is_that_of_one_device(worker_pool, counts, way):
    assert_as_one_device(worker_pool, trains, counts, way)


@pytest.mark.parametrize("counts", [(1, 1), (2, 2)])
def test_gradients_may_travel_in_half_precision(worker_pool, counts):
    coarse = mirror.CommunicationOptions(bytes_per_pack=200, wire_dtype=torch.bfloat16)
    options = {"communication_options": coarse, "tolerance": 1e-2}
    assert_as_one_device(worker_pool, trains, counts, 3, **options)


class Heads(nn.Module):
    """Has parts that a pass may leave out."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x, which):
        h = self.body(x).tanh()
        return sum(self.heads[i](h) for i in which)


def leaves_out(place):
    with place.scope():
        model = Heads()
    for step, batch in enumerate(place.batches):
        model.zero_grad()
        which = [(0,), (0, 1), (1,), (0, 1, 2), (2,)][step % 5]
        place.backward(lambda x, y, w=which: F.cross_entropy(model(x, w), y), *batch)
        place.keep(model)


class BySign(Heads):
    """The data of an example decide its head: workers use different heads."""

    def forward(self, x):
        h = self.body(x).tanh()
        up = x[:, 0] > 0
        found = h[:, :3] * 0.0
        for head, some in zip(self.heads, (up, ~up), strict=False):
            if some.any():
                found[some] = head(h[some])
        return found


def uses_by_sign(place):
    with place.scope():
        model = BySign()
    for batch in place.batches:
        model.zero_grad()
        place.backward(cross_entropy(model), *batch)
        place.keep(model)


def freezes(place):
    with place.scope():
        model = net()
    for step, batch in enumerate(place.batches * 2):
        model.zero_grad()
        model[0].requires_grad_(step < 3 or step > 10)
        model[4].requires_grad_(step % 2 == 0)
        place.backward(cross_entropy(model), *batch)
        place.keep(model)


def grows(place):
    """A module comes, and one goes, while training goes on."""
    with place.scope():
        model, other = net(), net(5)
    for step, batch in enumerate(place.batches):
        model.zero_grad()
        if step == 2:
            del other
        if step == 4:
            torch.manual_seed(3)
            with place.scope():
                last = nn.Linear(3, 3)
            model.append(last)
        place.backward(cross_entropy(model), *batch)
        place.keep(model)


def converts(place):
    """The dtype of all parameters, and the shape of one, change in mid-training."""
    with place.scope():
        model = net()
    for step, (x, y) in enumerate(place.batches):
        model.zero_grad()
        if step == 2:
            model.double()
        if step == 3:
            model[-1].weight.data = model[-1].weight.data.repeat(2, 1)
            model[-1].bias.data = model[-1].bias.data.repeat(2)
        place.backward(cross_entropy(model), x.to(model[0].weight.dtype), y)
        place.keep(model)


def accumulates(place):
    """Passes with and without no_sync before a read, of different sizes."""
    with place.scope():
        model = net()
    batches = iter(place.batches)
    for num_kept in (1, 2, 0):
        model.zero_grad()
        with place.no_sync():
            for _ in range(num_kept):
                place.backward(cross_entropy(model), *next(batches))
        for _ in range(2 if num_kept < 2 else 0):
            place.backward(cross_entropy(model), *next(batches))
        place.keep(model)


def passes_twice(place):
    """Two passes over one forward: gradients arrive again where some are on their way."""
    with place.scope():
        model = Heads()

    def loss_of(x, y):
        first, second = model(x, (0, 1)), model(x, (1,))
        F.cross_entropy(first, y).backward(retain_graph=True)
        return F.cross_entropy(first + second, y) * 2

    for batch in place.batches:
        model.zero_grad()
        place.backward(loss_of, *batch)
        place.keep(model)


def drops(place):
    """Gradients are set, or dropped, before they are read."""
    with place.scope():
        model = net()
    for step, batch in enumerate(place.batches):
        place.backward(cross_entropy(model), *batch)
        first, *rest = model.parameters()
        if step % 3 == 0:
            rest[-1].grad = None
            first.grad = torch.ones_like(first)
        if step % 3 == 1:
            place.backward(cross_entropy(model), *batch)
            rest[0].grad = None
        place.keep(model)


def hooks(place):
    with place.scope():
        model = net()
    seen = []
    model[2].weight.register_hook(lambda grad: grad * 2)
    model[0].bias.register_hook(lambda grad: seen.append(grad.clone()))
    for batch in place.batches:
        model.zero_grad()
        place.backward(cross_entropy(model), *batch)
        place.keep(model)
    place.kept += seen


def looks_up(place):
    """Sparse gradients, and such that are sparse in some passes."""
    with place.scope():
        words = nn.Embedding(9, 4, sparse=True)
        often = nn.Embedding(9, 4, sparse=True)
        head = nn.Linear(4, 3)

    def loss_of(step):
        def loss(x, y):
            index = (x[:, 0] * 3).long().clamp(-4, 4) + 4
            h = words(index) + x
            if step % 2:
                h = h + often(index)
            if step % 3 == 2:
                h = h + often.weight.sum(0)
            return F.cross_entropy(head(h), y)

        return loss

    for step, batch in enumerate(place.batches):
        for module in (words, often, head):
            module.zero_grad()
        place.backward(loss_of(step), *batch)
        place.keep(words, head)
        grad = often.weight.grad
        place.kept.append(None if grad is None else grad.to_dense())


class Lookup(nn.Module):
    """An embedding with sparse gradients, and heads that may be frozen, left out or added."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 4, sparse=True)
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x, heads):
        index = (x[:, 0] * 3).long().clamp(-4, 4) + 4
        return sum(head(self.words(index) + x) for head in heads)


def freeze_a_head(step, model):
    model.heads[1].requires_grad_(step % 6 == 0)
    return model.heads


def leave_out_a_head(step, model):
    return model.heads[: 1 + step % 2]


def add_a_head(step, model):
    if step == 2:
        model.heads.append(nn.Linear(4, 3))
        with torch.no_grad():
            model.heads[2].weight.fill_(0.1)
            model.heads[2].bias.fill_(0.2)
    return model.heads


def freeze_the_words(step, model):
    model.words.weight.requires_grad_(step not in (1, 2))
    return model.heads


CHANGES = [freeze_a_head, leave_out_a_head, add_a_head, freeze_the_words]
SPARSE_OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "nesterov": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),
    "sparse adam": lambda ps: torch.optim.SparseAdam(ps, 0.1),
}


def trains_sparsely(place, change, optimizer):
    with place.scope():
        model = Lookup()
        words = SPARSE_OPTIMIZERS[optimizer](list(model.words.parameters()))
        heads = torch.optim.SGD(model.heads.parameters(), 0.1)
    for step, batch in enumerate(place.batches):
        used = change(step, model)
        model.zero_grad()
        place.backward(lambda x, y, used=used: F.cross_entropy(model(x, used), y), *batch)
        place.keep(model.words)
        words.step()
        heads.step()
        place.keep(model, grads=False)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # Adagrad's own tensors
@each_once(optimizer=SPARSE_OPTIMIZERS, change=CHANGES, way=[1, 3])
def test_sparse_gradients_stay_sparse_for_the_optimizer(worker_pool, optimizer, change, way):
    program = partial(trains_sparsely, change=change, optimizer=optimizer)
    assert_as_one_device(worker_pool, program, (1, 2), way)


class Odd(nn.Module):
    """Has parameters of several dtypes and layouts."""

    def __init__(self):
        super().__init__()
        self.wave = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.fine = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.none = nn.Parameter(torch.randn(0, 3))

    def forward(self, x):
        y = (x.to(torch.complex64) @ self.wave).abs() + (x.double() @ self.fine).float()
        y = y + torch.cat([x, x[:, :1]], 1) @ self.turned + self.none.sum(0)
        return y + self.conv(x.reshape(-1, 2, 2, 1).expand(-1, 2, 2, 2)).flatten(1)[:, :3]


def mixes_dtypes(place):
    with place.scope():
        model = Odd()
    for batch in place.batches:
        model.zero_grad()
        place.backward(cross_entropy(model), *batch)
        place.keep(model)


def asks_for_losses(place):
    """An optimizer that takes a closure, and decides by its loss."""
    with place.scope():
        model = net()
        optimizer = torch.optim.LBFGS(
            model.parameters(), max_iter=4, line_search_fn="strong_wolfe"
        )
    for batch in place.batches[:2]:

        def closure(batch=batch):
            optimizer.zero_grad()
            return place.backward(cross_entropy(model), *batch)

        optimizer.step(closure)
        place.keep(model, grads=False)


PROGRAMS = [
    leaves_out,
    uses_by_sign,
    grows,
    converts,
    passes_twice,
    drops,
    hooks,
    looks_up,
    mixes_dtypes,
]


@pytest.mark.parametrize("way", [1, 2])
def test_workers_decide_by_the_loss_of_all(worker_pool, way):
    assert_as_one_device(worker_pool, asks_for_losses, way=way, tolerance=1e-3)


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_of_one_device(worker_pool, program):
    assert_as_one_device(worker_pool, program, way=3)


def test_gradients_of_passes_outside_run_may_be_dropped(worker_pool):
    assert_as_one_device(worker_pool, drops)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("counts", [(1, 1), (2, 2), (1, 2), (1, 1, 1)])
@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_of_one_device_in_all_ways(worker_pool, program, way, counts):
    assert_as_one_device(worker_pool, program, counts, way)


# A worker without examples makes every pass, also where its loss depends on no parameter

SIZES = (8, 1, 5, 1, 2, 1)


class Experts(nn.Module):
    """Calls the layers that its examples choose: none, without examples."""

    def __init__(self, sparse=False):
        super().__init__()
        self.words = nn.Embedding(5, 4, sparse=sparse)
        self.experts = nn.ModuleList([nn.Linear(4, 3) for _ in range(3)])
        self.unused = nn.Parameter(torch.ones(()))  # the smallest of all

    def forward(self, x):
        y = x.new_zeros(len(x), 3)
        chosen = x[:, 0].gt(0).long() + x[:, 1].gt(0)
        for k in chosen.unique().tolist():
            found = self.experts[k](x + self.words(chosen))
            y = y + (chosen == k)[:, None] * found
        return y


LOSSES = {
    "mean": lambda model, x, y: F.cross_entropy(model(x), y),
    "sum over a number": lambda model, x, y: F.mse_loss(model(x), F.one_hot(y, 3).float()),
    "quotient": lambda model, x, y: (model(x) - F.one_hot(y, 3)).square().sum() / (3 * len(x)),
    "smoothed": lambda model, x, y: F.cross_entropy(model(x), y, label_smoothing=0.1),
    "scaled": lambda model, x, y: 4.0 * F.cross_entropy(model(x), y),
}


def trains_without_examples(place, loss, make=Experts, no_sync=False):
    with place.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for i, batch in enumerate(place.batches):
        if no_sync and i % 3 != 2:
            with place.no_sync():
                place.backward(partial(LOSSES[loss], model), *batch)
            continue
        place.backward(partial(LOSSES[loss], model), *batch)
        place.keep(model)
        optimizer.step()
        optimizer.zero_grad()
    place.keep(model, grads=False)


@each_once(loss=LOSSES, way=[1, 2, 3])
def test_layers_that_no_example_chooses(worker_pool, loss, way):
    assert_as_one_device(
        worker_pool, partial(trains_without_examples, loss=loss), (1, 1), way, SIZES
    )


@each_once(
    counts=[(1, 2), (2, 1)],
    options=[{"make": partial(Experts, sparse=True)}, {"no_sync": True}],
    way=[1, 2, 3],
)
def test_layers_that_no_example_chooses_among_more_replicas(worker_pool, counts, options, way):
    program = partial(trains_without_examples, loss="mean", **options)
    assert_as_one_device(worker_pool, program, counts, way, SIZES)


def trains_from_a_dataset(place, loss, make):
    with place.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x, y):
            optimizer.zero_grad()
            LOSSES[loss](model, x, y).backward()
            optimizer.step()

        if hasattr(place, "strategy"):
            for batch in place.strategy.distribute_dataset(place.batches):
                place.strategy.run(step, args=batch)
        else:
            for batch in place.batches:
                step(*batch)
    place.keep(model, grads=False)


@each_once(loss=LOSSES, make=[net, Experts])
def test_batches_of_a_distributed_dataset(worker_pool, loss, make):
    program = partial(trains_from_a_dataset, loss=loss, make=make)
    assert_as_one_device(worker_pool, program, (1, 2), sizes=SIZES)


def asks_for_gradients(place):
    with place.scope():
        model = Experts()
    for batch in place.batches:
        if hasattr(place, "own_parts"):
            batch = [torch.cat(leaf) for leaf in zip(*place.own_parts(batch), strict=True)]
        loss = LOSSES["mean"](model, *batch)
        place.kept += torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def test_autograd_grad_of_a_loss_that_depends_on_no_parameter(worker_pool):
    assert_as_one_device(worker_pool, asks_for_gradients, (1, 1), 1, SIZES)


class WithPenalty(nn.Module):
    """Returns a 0-d value beside, or instead of, one per example."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = net(), kind

    def forward(self, x, y):
        out = self.inner(x)
        loss, penalty = F.cross_entropy(out, y), out.square().mean()
        return {"loss": loss, "tuple": (out, penalty), "dict": {"out": out, "aux": penalty}}[
            self.kind
        ]


OF_OUTPUTS = {
    "loss": lambda out, y: out,
    "tuple": lambda out, y: F.cross_entropy(out[0], y) + 0.1 * out[1],
    "dict": lambda out, y: F.cross_entropy(out["out"], y) + 0.1 * out["aux"],
}


def trains_with_scalar_outputs(place, kind):
    with place.scope():
        model = WithPenalty(kind)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for batch in place.batches:
            place.backward(lambda x, y: OF_OUTPUTS[kind](model(x, y), y), *batch)
            optimizer.step()
            optimizer.zero_grad()
    place.keep(model, grads=False)


@each_once(kind=OF_OUTPUTS, counts=[(1, 1), (2, 2)])
def test_scalar_outputs_of_a_split_call_without_examples(worker_pool, kind, counts):
    program = partial(trains_with_scalar_outputs, kind=kind)
    assert_as_one_device(worker_pool, program, counts, 1, SIZES)


@each_once(make=[net, Experts], counts=[(1, 1), (1, 2)])
def test_a_loss_of_all_workers_where_gradients_are_added(worker_pool, make, counts):
    program = partial(trains_without_examples, loss="mean", make=make)
    assert_as_one_device(worker_pool, program, counts, 2, SIZES, gradient_reduction="sum")


def normalized():
    return nn.Sequential(nn.Linear(4, 6), mirror.nn.SyncBatchNorm(6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("counts", [(1, 1), (1, 2)])
def test_collectives_in_the_model_where_gradients_are_added(worker_pool, counts):
    program, sizes = partial(trains_without_examples, loss="mean", make=normalized), (8, 5, 3, 7)
    assert_as_one_device(worker_pool, program, counts, 2, sizes, gradient_reduction="sum")


def trains_on_shuffled_noisy_examples(place):
    with place.scope():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in place.batches:
            order = torch.randperm(len(x))
            place.kept.append(order)
            noise = 0.1 * torch.randn(len(x), 4)
            place.backward(cross_entropy(model), x[order] + noise, y[order])
            optimizer.step()
            optimizer.zero_grad()
    place.keep(model, grads=False)


@each_once(counts=[(1, 1), (1, 2)], way=[1, 2, 3])
def test_draws_between_runs_are_those_of_one_device(worker_pool, counts, way):
    assert_as_one_device(worker_pool, trains_on_shuffled_noisy_examples, counts, way, SIZES)


def draw_masks(num_runs):
    """Returns the masks of dropout in some runs, those after a seed, and after other draws."""
    strategy = mirror.MultiWorkerMirroredStrategy(["cpu"])

    def masks():
        run = partial(strategy.run, lambda: F.dropout(torch.ones(16)))
        return [run().values[-1].tolist() for _ in range(num_runs)]

    torch.manual_seed(3)
    first = masks()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        again = masks()
    more = masks()
    strategy.close()
    return first, again, more


def test_workers_draw_other_masks_in_each_run_and_the_same_after_a_seed(worker_pool):
    found = worker_pool(2).run(draw_masks, 3)
    for first, again, _ in found:
        assert again == first
    masks = [mask for first, _, more in found for mask in (*first, *more)]
    assert len({tuple(mask) for mask in masks}) == len(masks) == 12
