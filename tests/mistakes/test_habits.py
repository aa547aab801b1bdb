"""Habits of DataParallel, DistributedDataParallel and other frameworks."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mirror
from mirror import BatchError, StrategyError
from tests.mistakes.mistake import (
    X,
    Y,
    loader,
    loss_of,
    mirrored,
    net,
    plain,
    refused,
    same,
    sgd,
    step,
    warned,
)
from tests.toy_models import replica_id

DATASET = TensorDataset(X, Y)
HALF: DistributedSampler = DistributedSampler(DATASET, num_replicas=2, rank=0)


@refused(BatchError, "DistributedSampler", "shuffle=True")
def test_a_distributed_sampler_in_a_distributed_loader(strategy):
    strategy.distribute_dataset(DataLoader(DATASET, batch_size=4, sampler=HALF))


@refused(BatchError, "DistributedSampler")
def test_a_distributed_sampler_in_a_batch_sampler(strategy):
    batches = BatchSampler(HALF, batch_size=2, drop_last=False)
    strategy.distribute_dataset(DataLoader(DATASET, batch_sampler=batches))


@warned("DistributedSampler", "1 / 2", "shuffle=True")
def test_a_distributed_sampler_in_an_unchanged_loop(strategy):
    model, optimizer, _ = mirrored(strategy)
    for x, y in DataLoader(DATASET, batch_size=4, sampler=HALF):
        step(model, optimizer, x, y)


def test_a_distributed_sampler_of_one_process(strategy):
    sampler = DistributedSampler(DATASET, num_replicas=1, rank=0)
    batches = strategy.distribute_dataset(DataLoader(DATASET, batch_size=4, sampler=sampler))
    sampler.set_epoch(1)
    assert len(list(batches)) == 2


@refused(StrategyError, "DataParallel", "leave it out")
def test_data_parallel_around_a_mirrored_model(strategy):
    DataParallel(mirrored(strategy)[0])


@refused(StrategyError, "DataParallel", "leave it out")
def test_data_parallel_around_what_holds_a_mirrored_module(strategy):
    DataParallel(nn.Sequential(mirrored(strategy)[0]))


@refused(StrategyError, "leave it out: transformers' Trainer", "arguments._n_gpu = 1")
def test_data_parallel_in_transformers_trainer(strategy):
    names = {"__name__": "transformers.trainer", "wrap": DataParallel}
    exec("def wrap_model(model): return wrap(model)", names)
    names["wrap_model"](mirrored(strategy)[0])


@refused(StrategyError, "DistributedDataParallel", "leave it out")
def test_ddp_around_a_mirrored_model(strategy):
    DistributedDataParallel(mirrored(strategy)[0])


@refused(StrategyError, "DistributedDataParallel", "leave it out")
def test_ddp_around_a_mirrored_model_in_run(strategy):
    model, _, _ = mirrored(strategy)
    strategy.run(lambda: DistributedDataParallel(model))


@refused(StrategyError, "DataParallel", "leave it out")
def test_data_parallel_made_in_the_scope(strategy):
    with strategy.scope():
        DataParallel(net())


@refused(StrategyError, "DataParallel", "model.module")
def test_a_data_parallel_model_mirrored(strategy):
    strategy.mirror(DataParallel(net()))


@refused(StrategyError, "1 is a DataParallel", "model.module")
def test_data_parallel_inside_a_model(strategy):
    strategy.mirror(nn.Sequential(nn.Linear(3, 3), DataParallel(net())))


def normalized(convert=lambda model: model):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return convert(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))


@pytest.mark.parametrize("way", [1, 3])
def test_torchs_sync_batch_norm_sees_the_whole_batch(way, strategy):
    expected = normalized()
    model = strategy.mirror(normalized(nn.SyncBatchNorm.convert_sync_batchnorm))
    optimizers = sgd(expected), sgd(model)
    for _ in range(2):
        step(expected, optimizers[0])
        if way == 1:
            step(model, optimizers[1])
        else:
            for batch in strategy.distribute_dataset(loader()):
                strategy.run(step, args=(model, optimizers[1], *batch))
    assert same(model, expected)
    assert type(model[1]) is nn.SyncBatchNorm
    assert torch.allclose(model.eval()(X), expected.eval()(X), atol=1e-6)


def test_sync_batch_norm_converted_by_torch_after_mirroring(strategy):
    model = strategy.mirror(normalized())
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    expected = normalized()
    optimizers = sgd(expected), sgd(model)
    for _ in range(2):
        step(expected, optimizers[0])
        step(model, optimizers[1])
    assert same(model, expected)


def test_the_device_of_the_context(strategy):
    model, _, batch = mirrored(strategy)

    def program(x):
        return model(x.to(mirror.get_replica_context().device))

    strategy.run(program, args=batch[:1])


def test_moving_the_batch_to_the_models_device(strategy):
    model, optimizer, _ = mirrored(strategy)
    device = next(model.parameters()).device
    for _ in range(2):
        step(model, optimizer, X.to(device), Y.to(device))
    assert same(model, plain())


def test_printing_on_the_first_replica_alone(strategy, capsys):
    def program():
        if replica_id() == 0:
            print("step")

    strategy.run(program)
    assert capsys.readouterr().out == "step\n"


def test_saving_on_the_first_replica_alone(strategy, tmp_path):
    model, optimizer, batch = mirrored(strategy)

    def program(x, y):
        step(model, optimizer, x, y)
        if replica_id() == 0:
            torch.save(model.state_dict(), tmp_path / "model.pt")

    strategy.run(program, args=batch)
    loaded = net()
    loaded.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert same(loaded, plain(steps=1))


# Modes


@refused(StrategyError, "replica 0 called eval()", "outside")
def test_eval_on_one_replica_alone(strategy):
    model, _, batch = mirrored(strategy)

    def program(x, y):
        if replica_id() == 0:
            model.eval()
        return model(x)

    strategy.run(program, args=batch)


@refused(StrategyError, "replica 1 called train()", "every replica")
def test_unlike_modes(strategy):
    model, _, _batch = mirrored(strategy)
    strategy.run(lambda: model.train(replica_id() == 1))


@refused(StrategyError, "replica 0 called eval()")
def test_eval_on_one_replica_before_a_collective_and_train_after_it(strategy):
    model, _, batch = mirrored(strategy)

    def program(x, y):
        if replica_id() == 0:
            model.eval()
        mirror.get_replica_context().all_reduce("sum", model(x).sum().detach())
        model.train()

    strategy.run(program, args=batch)


def test_eval_on_every_replica(strategy):
    model, _, batch = mirrored(strategy)

    def program(x, y):
        model.eval()
        with torch.no_grad():
            output = model(x)
        model.train()
        return output

    outputs = strategy.run(program, args=batch)
    assert torch.allclose(strategy.gather(outputs), net()(X), atol=1e-6)
    assert model.training


def test_eval_where_a_replica_sits_out(strategy):
    model, _, _ = mirrored(strategy)
    (batch,) = strategy.distribute_dataset([(X[:1], Y[:1])])
    strategy.run(lambda x, y: model.eval()(x), args=batch)
    assert not model.training


@refused(RuntimeError, "inference")
def test_training_on_what_inference_mode_made(strategy):
    model, _optimizer, _batch = mirrored(strategy)
    with torch.inference_mode():
        made = X * 2
    loss_of(model, made).backward()


@refused(RuntimeError, "does not require grad")
def test_training_in_inference_mode(strategy):
    model, optimizer, batch = mirrored(strategy)
    with torch.inference_mode():
        strategy.run(step, args=(model, optimizer, *batch))


def test_a_forward_in_inference_mode_leaves_training_as_it_was(strategy):
    model, optimizer, _ = mirrored(strategy)
    with torch.inference_mode():
        model(X)
    for _ in range(2):
        step(model, optimizer)
    assert same(model, plain())
