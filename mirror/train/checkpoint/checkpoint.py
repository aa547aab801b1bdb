"""Checkpoint: everything that a training run needs to continue, saved and restored together.

``WorkerAgreement`` is what several workers do together: the chief writes a checkpoint, all workers
restore it, and all agree on it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirror.base.migration_hints import add_hints
from mirror.base.process_bound import NoCopy
from mirror.comm.workers.worker_group import LocalWorkerGroup
from mirror.errors import CheckpointError, StrategyError
from mirror.execution.run import enclosing_replica
from mirror.replica.params.replicated_buffers import set_local_buffers
from mirror.strategy.group import all_groups
from mirror.threads.user_frames import add_note
from mirror.train.checkpoint.snapshot import (
    Contents,
    Snapshot,
    StagingBuffers,
    contiguous_on_host,
    copy_to_host,
    read_contents,
    take_snapshot,
    take_worker_snapshot,
    write_contents,
)
from mirror.train.checkpoint.stateful_objects import (
    VALUE,
    check_state,
    kind_of,
    restore_global_rng,
    restore_state,
    restore_value,
)

_log = logging.getLogger("mirror")


@add_hints
class Checkpoint(NoCopy):
    """Saves objects to a directory, and restores them, together with the random generators.

    ::

        checkpoint = mirror.Checkpoint(model=model, optimizer=optimizer, data=batches, epoch=0)
        checkpoint.save("last")
        checkpoint.restore("last")["epoch"]

    It takes modules, optimizers, schedulers, distributed datasets, scalers, anything else with
    ``state_dict()`` and ``load_state_dict()``, generators of torch, Python and numpy, tensors, and
    plain values: numbers, strings, bytes, arrays of numpy, and containers of them. The state is
    that of one logical model, as in plain PyTorch: the number of replicas may change between
    saving and restoring, and either side may be plain PyTorch. Gradients are not saved.

    A save is atomic: a process killed at any moment leaves the checkpoint that was there, or the
    new one. No pickle is read or written. docs/checkpoints.md has the format.

    All workers save and restore at the same place of the program: the chief writes, and the calls
    return when the chief is done. See ``WorkerAgreement``.

    Attributes:
        objects: the saved objects, by name. A save takes a plain value from here: change
            containers in place, or replace the value.
    """

    _instead = "create one in the other process, and restore what this one saves"

    def __init__(self, /, **objects: object) -> None:
        """Takes the objects, by the names under which they are saved.

        Raises:
            CheckpointError: an object can be neither saved nor restored.
        """
        for name, obj in objects.items():
            kind_of(name, obj)
        self.objects: dict[str, Any] = objects
        self._copies = StagingBuffers()
        self._in_flight: _Writing | None = None
        self._lock = threading.RLock()

    def save(self, path: str | os.PathLike[str], *, wait: bool = True) -> None:
        """Saves everything to a directory, in place of a checkpoint that is there.

        Args:
            path: the directory; missing parents are created.
            wait: whether to return when everything is on the disk. Otherwise ``save`` returns
                when the state is copied to host memory, which the next save reuses, and a thread
                writes. The next ``save``, ``restore`` or ``wait`` raises its error. The next
                save, and the end of the program, wait for the thread.

        Raises:
            CheckpointError: a value cannot be written, which is named, or the disk is full; a
                checkpoint that is there stays.
            StrategyError: called inside ``run``.
        """
        self.save_step(path, None, wait=wait)

    def save_step(
        self,
        path: str | os.PathLike[str],
        step: int | None,
        *,
        wait: bool = True,
        write: Callable[[Callable[[], None]], None] = lambda write: write(),
    ) -> None:
        """Saves, as ``save`` does, with the number of steps done.

        Args:
            write: called with the function that writes, in the thread that writes.
        """
        refuse_in_run("Checkpoint.save")
        found = Path(os.path.abspath(path))
        with self._lock, torch.inference_mode(False):
            workers = worker_agreement_of(self.objects)
            snapshot = workers.take("Checkpoint.save", self.objects, self.wait)

            def save() -> None:
                if wait:
                    whole = snapshot.with_tensors(contiguous_on_host(snapshot.tensors))
                    write(lambda: write_contents(found, whole, step))
                    return
                copies = snapshot.with_tensors(self._copies.copy(snapshot.tensors))
                self._in_flight = _Writing(
                    found, lambda: write(lambda: write_contents(found, copies, step))
                )

            workers.run_on_chief("Checkpoint.save", save)

    def restore(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Restores everything from a checkpoint, and the random generators.

        All of it is verified first: names, shapes, dtypes, checksums. A plain value that is a
        container, an array or a tensor of the same shape is changed in place; any other plain
        value is replaced in ``objects``.

        Returns:
            The plain values by name.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it has other objects; names
                the entry and the tensor. Nothing is changed then.
            StrategyError: called inside ``run``.
        """
        refuse_in_run("Checkpoint.restore")
        workers = worker_agreement_of(self.objects)
        workers.run_on_chief("Checkpoint.restore", self.wait)
        return self.restore_contents(workers.read(path))

    def wait(self) -> None:
        """Waits for a save in flight, if there is one.

        Raises:
            CheckpointError: the save failed.
        """
        writing, self._in_flight = self._in_flight, None
        if writing is not None:
            try:
                writing.wait()
            except BaseException:
                if writing.is_alive:  # the wait was interrupted, not the save
                    self._in_flight = writing
                raise

    def restore_contents(self, contents: Contents) -> dict[str, Any]:
        """Restores a checkpoint that was read; see ``restore``."""
        refuse_in_run("Checkpoint.restore")
        with self._lock, torch.inference_mode(False):
            self.wait()
            return self._restore(contents)

    def _restore(self, contents: Contents) -> dict[str, Any]:
        self._check_names(contents)
        kinds = {name: kind_of(name, obj) for name, obj in self.objects.items()}
        for name, saved in contents.snapshot.objects.items():
            _check_kind(name, kinds[name], saved.kind, contents)
            check_state(
                name, kinds[name], self.objects[name], saved.type_name, contents.states[name]
            )
        before = take_snapshot(self.objects, values=False)
        before = before.with_tensors(copy_to_host(before.tensors))
        begun: list[str] = []
        try:
            self._restore_all(contents, kinds, begun)
        except BaseException as error:
            self._roll_back(before, begun, error)
            raise
        for name, kind in kinds.items():
            if kind == VALUE:
                self.objects[name] = restore_value(self.objects[name], contents.states[name])
        return {name: self.objects[name] for name, kind in kinds.items() if kind == VALUE}

    def _restore_all(self, contents: Contents, kinds: dict[str, str], begun: list[str]) -> None:
        what = "random generators"
        try:
            restore_global_rng(contents.random)
            for name, kind in kinds.items():
                if kind != VALUE:
                    what = name
                    begun.append(name)
                    restore_state(kind, self.objects[name], contents.states[name])
                    if name in contents.buffers:
                        set_local_buffers(self.objects[name], contents.buffers[name])
            restore_global_rng(contents.random)  # a dataset sets it, too
        except Exception as error:
            raise CheckpointError(
                f"{what!r} cannot be restored from {contents.path}: {type(error).__name__}: "
                f"{error}; nothing was changed"
            ) from error

    def _roll_back(self, before: Snapshot, begun: list[str], error: BaseException) -> None:
        """Restores the former states of the changed objects, the last one first."""
        states, buffers = before.states(), before.replica_buffers()
        for name in reversed(begun):
            try:
                restore_state(before.objects[name].kind, self.objects[name], states[name])
                if name in buffers:
                    set_local_buffers(self.objects[name], buffers[name])
            except BaseException as another:  # a second Ctrl-C, too: the first one is raised
                add_note(error, f"{name!r} could not be rolled back either: {another!r}")
        restore_global_rng(before.random_state())

    def _check_names(self, contents: Contents) -> None:
        saved = contents.snapshot.objects.keys()
        if saved != self.objects.keys():
            lacks = ", ".join(map(repr, self.objects.keys() - saved)) or "nothing"
            more = ", ".join(map(repr, saved - self.objects.keys())) or "nothing"
            raise CheckpointError(
                f"a checkpoint is restored under the names it was saved under; {contents.path} "
                f"lacks {lacks}, and has {more} that is not asked for; use the same names"
            )


class _Writing:
    """A save in flight: a thread writes it."""

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self._path = path
        self._write = write
        self._error: BaseException | None = None
        # Not a daemon thread: the end of the program waits for it.
        self._thread = threading.Thread(target=self._run, name="mirror checkpoint")
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
            _log.error("the checkpoint %s was not written: %s", self._path, error)


def _check_kind(name: str, kind: str, saved: str, contents: Contents) -> None:
    if kind != saved:
        saved, kind = (f"an {k}" if k[0] in "aeiou" else f"a {k}" for k in (saved, kind))
        raise CheckpointError(
            f"{name!r} was saved as {saved}, and is {kind} here; restore {contents.path} into "
            "an object of the saved kind"
        )


def refuse_in_run(what: str) -> None:
    """Raises ``StrategyError`` if the caller is inside ``run``."""
    if enclosing_replica() is not None:
        raise StrategyError(
            f"{what} was called inside run, where a step is not finished; call it "
            "between steps, after run has returned"
        )


_ONE_WORKER = LocalWorkerGroup(1)
_SHARED = "; all workers must see the same directory, on a file system that their machines share"
_FAILED, _DONE = b"!", b"."  # the first byte of a worker's message


class WorkerAgreement:
    """The workers that save and restore together.

    Worker 0, the chief, writes the state of the one logical model. Some states may differ between
    workers: random generators, and per-replica buffers. If they do, the chief receives them, and
    they go into the same checkpoint. So every worker calls ``save`` and ``restore``, at the same
    place of the program. The calls return when the chief's file is on the disk, or raise on all
    workers.

    On restoring, each worker reads the checkpoint, and the workers compare what they have read.
    The error names a worker that sees another directory, for example because it is not shared
    between machines. With another number of workers, all continue with the chief's state.

    Args:
        workers: the group.
        is_open: whether their strategy is still open.
    """

    def __init__(self, workers: LocalWorkerGroup, *, is_open: bool) -> None:
        self._workers = workers
        self.rank, self.size = workers.rank, workers.size
        self.is_chief = workers.rank == 0
        self.is_multi_worker = workers.is_multi_process and is_open

    def take(self, what: str, objects: Mapping[str, Any], wait: Callable[[], None]) -> Snapshot:
        """Returns the states of objects, with the own states of all workers.

        All workers call it, as some states are combined from all workers, and get the same states.

        Args:
            wait: waits for the save before; may raise its error.

        Raises:
            CheckpointError: on all workers, a worker has a value that cannot be written.
        """
        found: list[Snapshot] = []

        def digest() -> bytes:
            found.append(take_snapshot(objects))  # first: all workers gather state that is sharded
            wait()
            return take_worker_snapshot(objects).digest() if self.is_multi_worker else b""

        if not self.is_multi_worker:
            digest()
            return found[0]
        if len(set(self._exchange(what, digest))) == 1:
            return found[0]
        snapshot = take_worker_snapshot(objects, f"worker {self.rank}/")
        messages = self._workers.exchange_tensors(what, "own", snapshot.to_tensors())
        chief, *others = (Snapshot.from_tensors(message.tensors) for message in messages)
        whole = found[0] if self.is_chief else found[0].with_chief(chief)
        return whole.with_workers(others)

    def run_on_chief(self, what: str, fn: Callable[[], None]) -> None:
        """Calls a function on the chief; the other workers wait for it.

        Raises:
            CheckpointError: on all workers, it failed.
        """
        if not self.is_multi_worker:
            if self.is_chief:
                fn()
            return

        def call() -> bytes:
            if self.is_chief:
                fn()
            return b""

        self._exchange(what, call)

    def choose(self, what: str, fn: Callable[[], str]) -> str:
        """Returns what a function returns on the chief.

        Raises:
            CheckpointError: on all workers, it failed.
        """
        if not self.is_multi_worker:
            return fn()
        return self._exchange(what, lambda: fn().encode() if self.is_chief else b"")[0].decode()

    def read(self, path: str | os.PathLike[str], known: Contents | None = None) -> Contents:
        """Reads a checkpoint, and compares it with what the other workers read.

        Args:
            known: the checkpoint, if it was read already.

        Raises:
            CheckpointError: on all workers, a worker cannot read it, or has read another one.
        """
        found = [] if known is None else [known]

        def digest() -> bytes:
            if not found:
                found.append(read_contents(path, self.rank, self.size))
            return found[0].snapshot.manifest.digest

        if not self.is_multi_worker:
            digest()
            return found[0]

        digests = self._exchange("what was read of a checkpoint", digest)
        others = [w for w, one in enumerate(digests) if one != digests[0]]
        if others:
            raise CheckpointError(
                f"all workers must restore the same checkpoint; worker {others[0]} of {self.size} "
                f"has read another one than worker 0 (here: {path}); give all workers one "
                "directory, on a file system that their machines share"
            )
        return found[0]

    def agree(self, what: str, urgency: int) -> int:
        """Returns the highest urgency, from 0, of any worker."""
        if not self.is_multi_worker:
            return urgency
        return max(map(int, self._workers.exchange(what, payload=lambda: b"%d" % urgency)))

    def broadcast(
        self, what: str, head: bytes, tensors: Sequence[Tensor]
    ) -> tuple[bytes, list[Tensor]]:
        """Returns bytes and tensors of the chief; those of the other workers are not used."""
        described = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        own = json.dumps([head.hex(), described]).encode() if self.is_chief else b""
        text, described = json.loads(self.all_gather_bytes(what, own)[0])
        if not self.is_chief:
            tensors = [torch.empty(shape, dtype=getattr(torch, name)) for name, shape in described]
        self._workers.broadcast(what, tensors)
        return bytes.fromhex(text), list(tensors)

    def all_gather_bytes(self, what: str, message: bytes) -> list[bytes]:
        """Returns the messages of all workers, in the order of their ranks."""
        return self._workers.exchange(what, payload=lambda: message)

    def _exchange(self, what: str, fn: Callable[[], bytes]) -> list[bytes]:
        """Returns what a function returns on each worker; raises on all if it fails on one."""
        error: Exception | None = None
        try:
            own = _DONE + fn()
        except Exception as failed:
            error, own = failed, _FAILED + str(failed).encode()
        messages = self._workers.exchange(what, payload=lambda: own)
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message.startswith(_FAILED):
                raise CheckpointError(
                    f"worker {rank} of {self.size}: {message[1:].decode()}"
                    + (_SHARED if rank else "")
                )
        return [message[1:] for message in messages]


def worker_agreement_of(objects: Mapping[str, Any]) -> WorkerAgreement:
    """Returns the workers that train these objects together; one worker by default."""
    groups = [group for group in all_groups() if group.replicas.workers.is_multi_process]
    if not groups:
        return WorkerAgreement(_ONE_WORKER, is_open=False)
    for tensor in (tensor for obj in objects.values() for tensor in _tensors(obj)):
        for group in groups:
            if group.registry.owns(tensor):
                return WorkerAgreement(group.replicas.workers, is_open=not group.runner.is_closed)
    open_groups = [group for group in groups if not group.runner.is_closed]
    if not open_groups:
        return WorkerAgreement(_ONE_WORKER, is_open=False)
    return WorkerAgreement(open_groups[0].replicas.workers, is_open=True)


def _tensors(obj: object) -> list[Tensor]:
    if isinstance(obj, nn.Module):
        return [*obj.parameters(), *obj.buffers()]
    if isinstance(obj, Optimizer):
        return [parameter for group in obj.param_groups for parameter in group["params"]]
    return []
