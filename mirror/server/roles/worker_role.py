"""WorkerRole: runs steps, one at a time, over variables that it pulls and pushes."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from mirror.data.input_options import InputContext
from mirror.errors import ActorDied, StepError, StrategyError, short_repr
from mirror.server.engine.engine_types import ActorClient as Connection
from mirror.server.engine.socket_client import connect
from mirror.server.persistent_ids import PersistentId, dump, load
from mirror.server.roles.variable_client import VariableClient
from mirror.server.roles.worker_datasets import PerWorkerValues, WorkerIterator
from mirror.server.roles.worker_model import WorkerModel
from mirror.server.servers_report import Traffic
from mirror.server.shard import PushMessage

Header = dict[str, Any]
Answer = tuple[Header, Sequence[Any]]


class WorkerStrategy:
    """What the strategy is to a step on a worker: one replica."""

    num_replicas_in_sync = 1

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls ``fn``."""
        return fn(*args, **(kwargs or {}))

    def reduce(self, op: Any, value: Any, axis: int | None = None) -> Any:
        """Returns the value: there is one replica; with an axis, reduced over it."""
        if axis is None or not isinstance(value, Tensor):
            return value
        name = str(getattr(op, "value", op)).lower()
        return value.mean(axis) if name == "mean" else value.sum(axis)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Returns the value."""
        return value

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the value as the only one."""
        return (value,)


class WorkerRole:
    """One worker.

    Args:
        index: which.
        num_workers: how many there are.
        servers: addresses.
        seed: of the random generators of the first worker; the others count on.
    """

    def __init__(self, index: int, num_workers: int, servers: Sequence[Any], seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed((seed + index) % 2**63)
        self._index = index
        self._context = InputContext(num_workers, index, num_workers)
        self._servers: list[Connection] = [connect(address) for address in servers]
        self._datasets: dict[int, WorkerIterator] = {}
        self._model: WorkerModel | None = None
        self._strategy = WorkerStrategy()
        self._now: Header = {}
        self._pushed = 0
        self._said: list[str] = []
        self._examples = 0

    def set_up(self, header: Header, buffers: Sequence[Any]) -> None:
        """Makes modules and optimizers anew."""
        layout, specs, descriptions = pickle.loads(bytes(buffers[1]))

        def client(tensors: Sequence[Tensor]) -> VariableClient:
            return VariableClient(
                layout,
                tensors,
                self._servers,
                is_sync=header["is_sync"],
                asks_first=header["asks_first"],
            )

        self._model = WorkerModel(buffers[0], specs, header["flags"], client, self._push)
        for description in descriptions:
            self._model.add_optimizer(description)

    def set_options(self, header: Header, buffers: Sequence[Any]) -> None:
        assert self._model is not None
        self._model.set_options(header["optimizer"], pickle.loads(bytes(buffers[0])))

    def make_dataset(self, header: Header, buffers: Sequence[Any]) -> Answer:
        try:
            make = load(buffers[0], self._thing)
            self._datasets[header["index"]] = WorkerIterator(make, self._context, self._drew)
        except Exception as error:
            return {"outcome": "raised"}, [_of_error(error)]
        return {"outcome": "made"}, []

    def execute(self, header: Header, buffers: Sequence[Any]) -> Answer:
        """Runs a step; whatever it raises is an answer."""
        begun = perf_counter()
        self._now, self._pushed, self._said, self._examples = header, 0, [], 0
        model = self._model
        if model is not None:
            model.begin(header["flags"])
        lost = None
        try:
            fn, args, kwargs = load(buffers[0], self._thing)
            value = fn(*self._own(args), **self._own(kwargs))
            if model is not None and model.client.is_fresh and model.client.changed():
                self._push_changes()
            outcome, sent = "returned", self._of_value(value)
        except ActorDied as error:
            outcome, sent, lost = "lost", _of_error(error), error.name
        except BaseException as error:
            outcome, sent = "raised", _of_error(error)
        traffic = Traffic() if model is None else model.client.traffic
        return {
            "outcome": outcome,
            "lost": lost,
            "said": self._said,
            "updates": [] if model is None else model.client.updates,
            "traffic": traffic.take(),
            "seconds": perf_counter() - begun,
            "pid": os.getpid(),
        }, [sent]

    def _of_value(self, value: Any) -> bytes:
        try:
            return dump(_apart(value), self._token)
        except Exception as error:
            raise StepError(
                f"a step has returned {short_repr(value)}, which cannot be sent to the "
                f"coordinator's process: {type(error).__name__}: {error}; return tensors and "
                "plain values"
            ) from error

    # What steps hold

    def _thing(self, token: PersistentId) -> Any:
        kind, index = token
        if kind in ("dataset", "iterator"):
            found = self._datasets[index]
            return _NextBatch(found) if kind == "dataset" else found
        if kind == "strategy":
            return self._strategy
        assert self._model is not None
        if kind == "module":
            return self._model.model.modules[index]
        if kind == "optimizer":
            return self._model.optimizers[index]
        return self._model.tensors[index]

    def _token(self, thing: Any) -> PersistentId | None:
        model = self._model
        if model is None or not isinstance(thing, (nn.Module, Tensor, torch.optim.Optimizer)):
            return None
        if isinstance(thing, nn.Module):
            found = [i for i, module in enumerate(model.model.modules) if module is thing]
            return ("module", found[0]) if found else None
        if isinstance(thing, torch.optim.Optimizer):
            found = [i for i, own in enumerate(model.optimizers) if own is thing]
            return ("optimizer", found[0]) if found else None
        return None

    def _own(self, value: Any) -> Any:
        """Puts this worker's batches and values into arguments."""
        if isinstance(value, _NextBatch):
            return next(value.iterator)
        if isinstance(value, PerWorkerValues):
            return value.values[self._index]
        if isinstance(value, dict):
            return {name: self._own(entry) for name, entry in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[self._own(entry) for entry in value])
        if type(value) in (tuple, list):  # no map: it would take a StopIteration for its own end
            return type(value)([self._own(entry) for entry in value])
        if is_dataclass(value) and not isinstance(value, type):
            own = {f.name: self._own(getattr(value, f.name)) for f in fields(value) if f.init}
            return replace(value, **own)
        return value

    # What steps do

    def _drew(self, num_examples: int) -> None:
        self._examples += num_examples

    def _push(self, optimizer: int) -> None:
        assert self._model is not None
        if self._now["is_sync"] and self._pushed:
            raise StrategyError(
                "a synchronous step has one optimizer.step(): the next one would be based on an "
                "update for which other workers are still needed; schedule a step for each"
            )
        if not self._model.client.is_fresh:
            self._model.client.pull()
        self._send(optimizer, self._pushed, self._model.members(optimizer))
        self._pushed += 1

    def _push_changes(self) -> None:
        self._send(None, -1, [])

    def _send(self, optimizer: int | None, number: int, members: Sequence[int]) -> None:
        assert self._model is not None
        client = self._model.client
        push = PushMessage(
            self._now["step"],
            number,
            self._now["attempt"],
            optimizer,
            client.based_on(optimizer),
            float(self._examples or self._model.largest_call or 1),
            self._now["done_below"],
        )
        self._said.append(client.push(push, members, self._model.names))


class _NextBatch:
    """Stands for the next batch in arguments; elsewhere it is the iterator."""

    def __init__(self, iterator: WorkerIterator) -> None:
        self.iterator = iterator

    def __iter__(self) -> WorkerIterator:
        return self.iterator

    def __next__(self) -> Any:
        return next(self.iterator)


def _apart(value: Any) -> Any:
    """Returns results without graphs and without parameters of this process."""
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {name: _apart(entry) for name, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_apart, value))
    if type(value) in (tuple, list):
        return type(value)(map(_apart, value))
    return value


def _of_error(error: BaseException) -> bytes:
    """Returns an exception and its traceback: as itself, else without what cannot travel.

    Many classes take in ``__init__`` what is not in ``args``, so pickle cannot make them again;
    they are made without it. If the class itself cannot go, it is told of in words.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    for sent in (error, _Parts(error)):
        try:
            data = dump((sent, text), lambda thing: None)
            if str(load(data, lambda token: None)[0]) == str(error):
                return data
        except Exception:
            continue
    return dump((RuntimeError(f"{type(error).__name__}: {error}"), text), lambda thing: None)


class _Parts:
    """Stands for an exception in a pickle, and is one when it is read."""

    def __init__(self, error: BaseException) -> None:
        own = {name: value for name, value in vars(error).items() if _travels(value)}
        self._made_of = type(error), error.args, own

    def __reduce__(self) -> Any:
        return remade, self._made_of


def _travels(value: Any) -> bool:
    try:
        load(dump(value, lambda thing: None), lambda token: None)
        return True
    except Exception:
        return False


def remade(kind: type[BaseException], args: tuple[Any, ...], own: dict[str, Any]) -> BaseException:
    """Returns an exception of a class, made without calling it."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(own)
    return error
