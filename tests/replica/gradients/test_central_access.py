"""Gradients at home: those of one device, and one object as long as they are the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.oracle import assert_same, in_run
from tests.toy_models import ONES, mirrored_layer, sgd

SIZES = [7, 3, 1]


@pytest.mark.parametrize("within", [True, False])
def test_accumulated_gradients_equal_one_device(within, central):
    torch.manual_seed(2)
    plain = nn.Linear(6, 3)
    strategy = central(2)
    model = strategy.mirror(copy.deepcopy(plain))
    optimizers = sgd(plain), sgd(model)
    batches = [(torch.randn(n, 6), torch.randint(3, (n,))) for n in (4, 5, 3)]

    def backward(batch, model):
        F.cross_entropy(model(batch[0]), batch[1]).backward()

    def go(model, place):
        with strategy.no_sync():
            place(batches[0], model)
            place(batches[1], model)
        place(batches[2], model)

    for batch in batches:
        backward(batch, plain)
    optimizers[0].step()
    go(model, lambda b, m: in_run(strategy, backward, b, m) if within else backward(b, m))
    optimizers[1].step()
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("within", [True, False])
def test_sparse_embeddings_scaled_losses_and_batch_statistics_equal_one_device(within, central):
    torch.manual_seed(3)

    class Model(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.table, self.norm = nn.Embedding(9, 4, sparse=True), norm
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.norm(self.table(x)))

    plain = Model(nn.BatchNorm1d(4))
    strategy = central(2)
    model = Model(mirror.nn.SyncBatchNorm(4))
    model.load_state_dict(plain.state_dict())
    strategy.mirror(model)

    def make(model, scaler):
        dense = [*model.norm.parameters(), *model.head.parameters()]
        optimizers = (
            torch.optim.SparseAdam(model.table.parameters(), lr=0.1),
            torch.optim.SGD(dense, lr=0.1, momentum=0.9),
        )

        def step(x, y):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizers[1])
            nn.utils.clip_grad_norm_(dense, 0.1)
            optimizers[0].param_groups[0]["lr"] = 0.1
            scaler.step(optimizers[1])
            with torch.no_grad():
                model.table.weight.grad = model.table.weight.grad / 4.0
            optimizers[0].step()
            scaler.update()
            return loss.detach()

        return step, optimizers

    scale = {"device": "cpu", "init_scale": 4.0}
    step, plain_optimizers = make(plain, torch.amp.GradScaler(**scale))
    mirrored, optimizers = make(model, mirror.amp.GradScaler(**scale))
    for size in (6, 5):
        batch = torch.randint(9, (size,)), torch.randint(3, (size,))
        expected = step(*batch)
        if within:
            (parts,) = strategy.distribute_dataset([batch])
            actual = strategy.reduce("mean", strategy.run(mirrored, args=parts))
        else:
            actual = mirrored(*batch)
        assert_same(actual, expected)
    assert_same(model.state_dict(), plain.state_dict())
    for mine, plains in zip(optimizers, plain_optimizers, strict=True):
        assert_same(mine.state_dict(), plains.state_dict())
    strategy.check_replicas()


def test_gradients_at_home_are_there_for_steps_and_for_those_who_look(central):
    strategy = central(2)
    layer = mirrored_layer(strategy)
    optimizer = sgd(layer)
    layer(ONES).sum().backward()
    optimizer.step()
    variable = layer.weight._mirrored
    assert variable.home.grad is None
    seen = layer.weight.grad
    assert seen is layer.weight.grad
    assert seen.data_ptr() not in {target.grad.data_ptr() for target in variable.targets}
    seen.mul_(0.5)  # what is changed here is what the replicas have
    grads = strategy.local_results(strategy.run(lambda: layer.weight.grad.clone()))
    assert [grad.item() for grad in grads] == [2.0, 2.0]
    layer(ONES).sum().backward()
    assert layer.weight.grad is seen
    assert seen.item() == 6.0
    optimizer.zero_grad()
    assert layer.weight.grad is None
    assert variable.home.grad is None
