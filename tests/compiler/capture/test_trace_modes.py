"""Values that a trace would freeze are refused, and the error names the line."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mirror
from tests.compiler.training import Beside, batches, usual_step
from tests.pairs import each_once, quick_of

outside = torch.ones(3)


def item(loss, model):
    return loss.item()


def branch(loss, model):
    return loss * 2 if loss > 0 else loss


def to_list(loss, model):
    return loss.detach().tolist()


def to_numpy(loss, model):
    return loss.detach().numpy()


def sized_by_values(loss, model):
    return (loss > 0).nonzero()


def change_what_is_outside(loss, model):
    outside.add_(1)
    return loss


def index_of_the_replica(loss, model):
    return loss * mirror.get_replica_context().replica_id_in_sync_group


def merge(loss, model):
    mirror.get_replica_context().merge_call(lambda strategy: None)
    return loss


def after_a_call(what):
    """Returns two runs of a step that ends with ``what``, after one call, and the next batch."""

    def make_step(model, optimizer):
        usual = usual_step(model, optimizer)

        def step(x, y):
            return what(usual(x, y), model)

        return step

    beside = Beside(2, make_step=make_step)
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    return beside, second


@pytest.mark.parametrize(
    "what",
    [
        item,
        branch,
        to_list,
        to_numpy,
        sized_by_values,
        change_what_is_outside,
        index_of_the_replica,
        merge,
    ],
)
def test_what_a_trace_would_freeze_is_refused_with_its_line(what):
    beside, second = after_a_call(what)
    before = [p.detach().clone() for p in beside.model.parameters()]
    line = what.__code__.co_firstlineno
    with pytest.raises(
        mirror.CompileError, match=rf"test_trace_modes.py:({line + 1}|{line + 2}) "
    ):
        beside.compiled(*second)
    for parameter, value in zip(beside.model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach(), value)
    F.relu(beside.model(second[0].values[0]))  # all is as before


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class WithFunction(nn.Module):
    """Gives a parameter to a custom function, as an attribute or from ``parameters()``."""

    def __init__(self, *, listed):
        super().__init__()
        self.weight, self.listed = nn.Parameter(torch.randn(6, 3)), listed

    def forward(self, x):
        weight = next(self.parameters()) if self.listed else self.weight
        return Product.apply(x, weight)


class Recomputed(nn.Module):
    """Activations that the backward pass computes again."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.first, self.body = nn.Linear(6, 6), nn.Linear(6, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.body, self.first(x), use_reentrant=self.use_reentrant)


WITH_USERS_CODE = {
    "function": lambda: WithFunction(listed=False),
    "function, listed": lambda: WithFunction(listed=True),
    "checkpoint": lambda: Recomputed(use_reentrant=False),
    "reentrant checkpoint": lambda: Recomputed(use_reentrant=True),
}


@each_once(name=WITH_USERS_CODE, num_replicas=[1, 2, 3])
def test_custom_functions_and_backward_passes_see_what_stands_for_parameters(name, num_replicas):
    beside = Beside(num_replicas, WITH_USERS_CODE[name])
    beside.train(batches([6] * 4))
    assert beside.compiled.num_traces == 1


def cleared_after(model, optimizer):
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("num_replicas", quick_of([1, 2], [2]))
def test_a_custom_functions_parameter_is_updated_where_gradients_are_cleared_last(num_replicas):
    make = WITH_USERS_CODE["function"]
    Beside(num_replicas, make, make_step=cleared_after).train(batches([6] * 4))


def ask_float(loss, model):
    return float(loss.detach())


def ask_weight(loss, model):
    return loss * int(mirror.get_replica_context().weight)


def train_what_is_not_mirrored(loss, model):
    return loss + not_mirrored.weight.sum()


not_mirrored = nn.Linear(2, 2)


def refusal_of(what):
    beside, second = after_a_call(what)
    with pytest.raises(mirror.CompileError) as refused:
        beside.compiled(*second)
    return str(refused.value)


@pytest.mark.parametrize("what", [item, ask_float])
def test_the_remedy_for_a_number_is_to_return_the_tensor(what):
    said = refusal_of(what)
    assert "return the tensor from the step and read it after the call" in said


def test_the_number_of_a_weight_is_refused():
    assert "multiply by it as it is" in refusal_of(ask_weight)


def test_a_parameter_that_is_not_mirrored_is_refused():
    assert "make its module in strategy.scope()" in refusal_of(train_what_is_not_mirrored)


def test_a_sparse_gradient_is_refused():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.embedding(x.abs().long().clamp(max=8)).mean(1))

    beside = Beside(2, Sparse, lambda p: torch.optim.SGD(p, 0.1))
    first, second = beside.strategy.distribute_dataset(batches([8, 8]))
    beside.compiled(*first)
    with pytest.raises(mirror.CompileError, match="use sparse=False"):
        beside.compiled(*second)
