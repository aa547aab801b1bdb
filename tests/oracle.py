"""Oracles in plain PyTorch, and the comparison of mirrored training with them."""

import dataclasses
import threading
import time
from collections.abc import Mapping

import torch

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2}


def assert_same(actual, expected, where="value", tolerance=None):
    """Compares two nested values; tensors to the tolerance of their dtype, the rest exactly."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{where}: {actual!r} is not a tensor"
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype}, not {expected.dtype}"
        if expected.layout is not torch.strided:
            actual, expected = actual.to_dense(), expected.to_dense()
        bound = TOLERANCE.get(expected.dtype, 0.0) if tolerance is None else tolerance
        torch.testing.assert_close(
            actual.detach().cpu(),
            expected.detach().cpu(),
            rtol=bound,
            atol=bound,
            equal_nan=True,
            msg=lambda text: f"{where}: {text}",
        )
    elif isinstance(expected, Mapping):
        assert set(actual) == set(expected), f"{where}: keys {set(actual)} not {set(expected)}"
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]", tolerance)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{where}: {len(actual)} entries"
        for i, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_same(left, right, f"{where}[{i}]", tolerance)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            left, right = getattr(actual, field.name), getattr(expected, field.name)
            assert_same(left, right, f"{where}.{field.name}", tolerance)
    elif isinstance(expected, float):
        bound = 1e-5 if tolerance is None else tolerance
        assert abs(actual - expected) <= bound * max(1.0, abs(expected)), (
            f"{where}: {actual} not {expected}"
        )
    else:
        assert actual == expected, f"{where}: {actual!r} not {expected!r}"


def assert_same_training(model, optimizer, plain_model, plain_optimizer, tolerance=None):
    """Parameters, buffers and optimizer state of mirrored training are those of one device."""
    assert_same(model.state_dict(), plain_model.state_dict(), "state_dict", tolerance)
    assert_same(optimizer.state_dict(), plain_optimizer.state_dict(), "optimizer", tolerance)


def in_run(strategy, step, batch, *args):
    """One batch, split over the replicas: ``step(part, *args)`` on each."""
    (distributed,) = strategy.distribute_dataset([batch])
    return strategy.run(step, args=(distributed, *args))


def train_loop(model, optimizer, batches, loss_fn, *, scheduler=None, clip=None, check=None):
    """An existing loop: knows nothing of replicas. The oracle, and way 1 when mirrored."""
    losses = []
    for batch in batches:

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            if clip is not None:
                clip(model)
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            loss = optimizer.step(closure)
        else:
            loss = closure()
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if check is not None:
            check()
        losses.append(loss.detach())
    return losses


def train_reduced(
    strategy, model, optimizer, batches, loss_fn, *, scheduler=None, clip=None, check=None
):
    """Way 2: forward and loss in run; backward, clipping and step outside."""
    losses = []
    for batch in strategy.distribute_dataset(batches):
        loss = strategy.reduce("mean", strategy.run(loss_fn, args=(model, batch)))
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            clip(model)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if check is not None:
            check()
        losses.append(loss.detach())
    return losses


def train_replicated(
    strategy,
    model,
    optimizer,
    batches,
    loss_fn,
    *,
    scheduler=None,
    clip=None,
    check=None,
    reduce="mean",
):
    """Way 3: the whole step in run."""

    def step(batch):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        if clip is not None:
            clip(model)
        optimizer.step()
        return loss.detach()

    losses = []
    for batch in strategy.distribute_dataset(batches):
        losses.append(strategy.reduce(reduce, strategy.run(step, args=(batch,))))
        if scheduler is not None:
            scheduler.step()
        if check is not None:
            check()
    return losses


def train(way, strategy, model, optimizer, batches, loss_fn, **options):
    """One of the three ways of api.md, with the replicas compared bit for bit after each step."""
    options["check"] = strategy.check_replicas
    if way == 1:
        return train_loop(model, optimizer, batches, loss_fn, **options)
    ways = {2: train_reduced, 3: train_replicated}
    return ways[way](strategy, model, optimizer, batches, loss_fn, **options)


def finishes(fn, *, hang_after=60.0):
    """Calls ``fn`` in a thread of its own, so that a hang fails one test and not the session.

    Returns:
        ``(result, error, seconds)``; one of result and error is None.
    """
    outcome = [None, None]

    def target():
        try:
            outcome[0] = fn()
        except BaseException as error:
            outcome[1] = error

    thread = threading.Thread(target=target, daemon=True)
    start = time.monotonic()
    thread.start()
    thread.join(hang_after)
    seconds = time.monotonic() - start
    assert not thread.is_alive(), f"hangs: nothing happened for {hang_after} s"
    return outcome[0], outcome[1], seconds
