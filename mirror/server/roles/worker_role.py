"""WorkerRole: the actor of a worker, which runs one step at a time, on its copy of the model."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.data.input_options import InputContext
from mirror.errors import ActorDied, StepError, StrategyError, short_repr
from mirror.replica.optimizers.optimizer_traits import hyperparameters_of, rebuild
from mirror.server.engine.engine_types import ActorClient
from mirror.server.engine.process_engine import connect_actor
from mirror.server.persistent_ids import PersistentId, dump, load_pickled
from mirror.server.recorded_model import Model, is_table_of_rows, watch
from mirror.server.roles.variable_client import VariableClient
from mirror.server.roles.worker_datasets import PerWorkerValues, WorkerIterator, num_examples
from mirror.server.servers_report import Traffic
from mirror.server.shard import PushMessage, PushResult
from mirror.values import map_structure


class WorkerModel:
    """Modules that pull before they are read, and optimizers that push.

    Args:
        pickled: the root modules, with persistent ids for tensors.
        specs: of each tensor the shape, dtype, device, ``requires_grad`` (None for a buffer), and
            whether it is a table.
        make_client: returns the client for the tensors.
        push: called with the index of an optimizer that steps.

    Attributes:
        largest_call: the largest number of examples of a call of a root module in this step.
    """

    def __init__(
        self,
        pickled: Any,
        specs: Sequence[Any],
        make_client: Callable[[Sequence[Tensor]], VariableClient],
        push: Callable[[int], None],
    ) -> None:
        tensors = [_empty_variable(*spec) for spec in specs]
        roots = load_pickled(pickled, lambda token: tensors[token[1]])
        self.model = Model(roots)
        self.tensors = tensors
        self.names = [variable.name for variable in self.model.variables]
        self.client = make_client(tensors)
        self.optimizers: list[Optimizer] = []
        self.largest_call = 0
        self._push = push
        self._options: list[Any] = []
        self._active_tables: set[int] = set()
        self._indices = {id(tensor): i for i, tensor in enumerate(tensors)}
        for module in self.model.modules:
            table = None
            if is_table_of_rows(module):
                table = self._indices[id(module.weight)]
                if self.client.layout.variables[table].by_rows:
                    self._pull_rows_in_calls(module, table)
            watch(module, self._make_read_hook(module, table))
        for root in roots:
            root.register_forward_pre_hook(self._record_call, with_kwargs=True)

    def add_optimizer(self, description: Any) -> None:
        """Creates an optimizer of the user's class; its ``step`` pushes."""
        optimizer = rebuild(description, lambda index: [self.tensors[index]])  # type: ignore[list-item]
        index = len(self.optimizers)

        def step(closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if repr(hyperparameters_of(optimizer)) != self._options[index]:
                raise StrategyError(
                    f"a step has changed the options of {type(optimizer).__name__}; change them, "
                    "and step schedulers, between steps, in the coordinator's process"
                )
            self._push(index)
            return loss

        optimizer.step = step  # type: ignore[method-assign]
        self.optimizers.append(optimizer)
        self._options.append(repr(hyperparameters_of(optimizer)))

    def set_options(self, index: int, options: Sequence[Any]) -> None:
        """Sets the hyperparameters that the coordinator's process has sent."""
        for group, values in zip(self.optimizers[index].param_groups, options, strict=True):
            group.update(values)
        self._options[index] = repr(hyperparameters_of(self.optimizers[index]))

    def members(self, index: int) -> list[int]:
        """Returns the indices of an optimizer's variables."""
        groups = self.optimizers[index].param_groups
        return [self._indices[id(p)] for group in groups for p in group["params"]]

    def begin(self, flags: Sequence[bool]) -> None:
        """Prepares a step: no gradients, the coordinator's modes, values to be pulled again."""
        self.client.is_fresh = False
        self.largest_call = 0
        for tensor in self.tensors:
            tensor.grad = None
        for module, flag in zip(self.model.modules, flags, strict=False):
            if module.training != flag:
                module.training = flag
        for tensor, flag in zip(self.tensors, flags[len(self.model.modules) :], strict=False):
            if tensor.requires_grad != flag:
                tensor.requires_grad_(flag)

    def _make_read_hook(
        self, module: nn.Module, table: int | None
    ) -> Callable[[str | None], None]:
        def pull_values(name: str | None) -> None:
            if not self.client.is_fresh:
                self.client.pull()
            if table is not None and name == "weight" and id(module) not in self._active_tables:
                self.client.pull_tables()

        return pull_values

    def _pull_rows_in_calls(self, module: nn.Module, table: int) -> None:
        def pull_rows(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.client.is_fresh:
                self.client.pull()
            ids = args[0] if args else kwargs["input"]
            self.client.pull_rows(table, ids)
            self._active_tables.add(id(module))

        def end_call(module: nn.Module, args: Any, output: Any) -> None:
            self._active_tables.discard(id(module))

        module.register_forward_pre_hook(pull_rows, with_kwargs=True)
        module.register_forward_hook(end_call, always_call=True)

    def _record_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        count = num_examples((*args, *kwargs.values()))
        self.largest_call = max(self.largest_call, count or 0)


def _empty_variable(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
    requires_grad: bool | None,
    by_rows: bool,
) -> Tensor:
    """Returns a parameter, or a buffer, without values."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if by_rows:
        tensor.fill_(torch.nan)  # so that reading a row before it is pulled is visible
    return tensor if requires_grad is None else nn.Parameter(tensor, requires_grad=requires_grad)


Header = dict[str, Any]
Answer = tuple[Header, Sequence[Any]]


class WorkerStrategy:
    """The strategy in a step on a worker, where there is one replica."""

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
        """Returns the value of the only replica; with an axis, reduces over that."""
        if axis is None or not isinstance(value, Tensor):
            return value
        name = str(getattr(op, "value", op)).lower()
        return value.mean(axis) if name == "mean" else value.sum(axis)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Returns the value."""
        return value

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns a tuple with only the value."""
        return (value,)


class WorkerRole:
    """One worker.

    Args:
        index: of this worker.
        num_workers: the number of workers.
        servers: the addresses of the servers.
        seed: of the first worker's random generator; a worker adds its index.
        timeout_seconds: the limit for a call of a server, after which that counts as lost.
    """

    def __init__(
        self,
        index: int,
        num_workers: int,
        servers: Sequence[Any],
        seed: int,
        timeout_seconds: float | None = None,
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed((seed + index) % 2**63)
        self._index = index
        self._context = InputContext(num_workers, index, num_workers)
        self._servers: list[ActorClient] = [
            connect_actor(address, timeout_seconds) for address in servers
        ]
        self._datasets: dict[int, WorkerIterator] = {}
        self._model: WorkerModel | None = None
        self._strategy = WorkerStrategy()
        # - The current step
        self._step: Header = {}
        self._num_pushes = 0
        self._results: list[PushResult] = []
        self._num_examples = 0

    def set_up(self, header: Header, buffers: Sequence[Any]) -> None:
        """Creates the modules and optimizers, in place of earlier ones."""
        layout, specs, descriptions = pickle.loads(bytes(buffers[1]))

        def make_client(tensors: Sequence[Tensor]) -> VariableClient:
            return VariableClient(
                layout,
                tensors,
                self._servers,
                is_sync=header["is_sync"],
                asks_first=header["asks_first"],
            )

        self._model = WorkerModel(buffers[0], specs, make_client, self._push)
        for description in descriptions:
            self._model.add_optimizer(description)

    def set_options(self, header: Header, buffers: Sequence[Any]) -> None:
        assert self._model is not None
        self._model.set_options(header["optimizer"], pickle.loads(bytes(buffers[0])))

    def make_dataset(self, header: Header, buffers: Sequence[Any]) -> Answer:
        try:
            dataset = load_pickled(buffers[0], self._resolve)
            iterator = WorkerIterator(dataset, self._context, self._count_examples)
            self._datasets[header["index"]] = iterator
        except Exception as error:
            return {"outcome": "raised"}, [_dump_error(error)]
        return {"outcome": "created"}, []

    def execute(self, header: Header, buffers: Sequence[Any]) -> Answer:
        """Runs a step; the answer has its result or its error."""
        begun = perf_counter()
        self._step, self._num_pushes, self._results, self._num_examples = header, 0, [], 0
        model = self._model
        if model is not None:
            model.begin(header["flags"])
        try:
            fn, args, kwargs = load_pickled(buffers[0], self._resolve)
            args, kwargs = map_structure(self._localize, (args, kwargs))
            value = fn(*args, **kwargs)
            if model is not None and model.client.is_fresh and model.client.find_changed():
                self._send(None, -1, [])  # only changes of buffers
            outcome, sent = "returned", self._dump_value(value)
        except ActorDied as error:
            outcome, sent = "lost", _dump_error(error)
        except BaseException as error:
            outcome, sent = "raised", _dump_error(error)
        traffic = Traffic() if model is None else model.client.traffic
        return {
            "outcome": outcome,
            "results": self._results,
            "updates": [] if model is None else model.client.updates,
            "traffic": traffic.take(),
            "seconds": perf_counter() - begun,
        }, [sent]

    def _dump_value(self, value: Any) -> bytes:
        try:
            return dump(map_structure(_detach, value), self._persistent_id)
        except Exception as error:
            raise StepError(
                f"a step has returned {short_repr(value)}, which cannot be sent to the "
                f"coordinator's process: {type(error).__name__}: {error}; return tensors and "
                "plain values"
            ) from error

    # - References in steps and their results

    def _resolve(self, persistent_id: PersistentId) -> Any:
        kind, index = persistent_id
        if kind in ("dataset", "iterator"):
            iterator = self._datasets[index]
            return _NextBatch(iterator) if kind == "dataset" else iterator
        if kind == "strategy":
            return self._strategy
        assert self._model is not None
        if kind == "module":
            return self._model.model.modules[index]
        if kind == "optimizer":
            return self._model.optimizers[index]
        return self._model.tensors[index]

    def _persistent_id(self, thing: Any) -> PersistentId | None:
        model = self._model
        if model is None or not isinstance(thing, (nn.Module, Tensor, torch.optim.Optimizer)):
            return None
        if isinstance(thing, nn.Module):
            indices = [i for i, module in enumerate(model.model.modules) if module is thing]
            return ("module", indices[0]) if indices else None
        if isinstance(thing, torch.optim.Optimizer):
            indices = [i for i, own in enumerate(model.optimizers) if own is thing]
            return ("optimizer", indices[0]) if indices else None
        return None

    def _localize(self, leaf: Any) -> Any:
        """Returns this worker's value for a dataset, or for a value of each worker."""
        if isinstance(leaf, _NextBatch):
            return next(leaf.iterator)
        return leaf.values[self._index] if isinstance(leaf, PerWorkerValues) else leaf

    # - Called by the running step

    def _count_examples(self, num_examples: int) -> None:
        self._num_examples += num_examples

    def _push(self, optimizer: int) -> None:
        assert self._model is not None
        if self._step["is_sync"] and self._num_pushes:
            raise StrategyError(
                "a synchronous step has one optimizer.step(): a second one would need an update "
                "to which other workers have not contributed yet; schedule a step for each"
            )
        if not self._model.client.is_fresh:
            self._model.client.pull()
        self._send(optimizer, self._num_pushes, self._model.members(optimizer))
        self._num_pushes += 1

    def _send(self, optimizer: int | None, number: int, members: Sequence[int]) -> None:
        assert self._model is not None
        client = self._model.client
        push = PushMessage(
            self._step["step"],
            number,
            self._step["attempt"],
            optimizer,
            client.pulled_version(optimizer),
            float(self._num_examples or self._model.largest_call or 1),
            self._step["done_below"],
        )
        self._results.append(client.push(push, members, self._model.names))


class _NextBatch:
    """A per-worker dataset in a step: the next batch as an argument, elsewhere the iterator."""

    def __init__(self, iterator: WorkerIterator) -> None:
        self.iterator = iterator

    def __iter__(self) -> WorkerIterator:
        return self.iterator

    def __next__(self) -> Any:
        return next(self.iterator)


def _detach(leaf: Any) -> Any:
    return leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf


def _dump_error(error: BaseException) -> bytes:
    """Returns the pickle of an exception and its traceback's text.

    Pickle cannot rebuild an exception if ``__init__`` takes arguments that are not in ``args``, so
    that is tried without ``__init__``, and without attributes that cannot be pickled. If the class
    itself cannot be pickled, a RuntimeError has its name and message.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    for sent in (error, _PickledError(error)):
        try:
            data = dump((sent, text), lambda thing: None)
            if str(load_pickled(data, lambda persistent_id: None)[0]) == str(error):
                return data
        except Exception:
            continue
    return dump((RuntimeError(f"{type(error).__name__}: {error}"), text), lambda thing: None)


class _PickledError:
    """An object that is pickled in place of an exception, and unpickled as that exception."""

    def __init__(self, error: BaseException) -> None:
        own = {name: value for name, value in vars(error).items() if _can_pickle(value)}
        self._args = type(error), error.args, own

    def __reduce__(self) -> Any:
        return rebuild_error, self._args


def _can_pickle(value: Any) -> bool:
    try:
        load_pickled(dump(value, lambda thing: None), lambda persistent_id: None)
        return True
    except Exception:
        return False


def rebuild_error(
    kind: type[BaseException], args: tuple[Any, ...], own: dict[str, Any]
) -> BaseException:
    """Returns an exception with these attributes, without calling ``__init__``."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(own)
    return error
