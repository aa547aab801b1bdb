"""Checkpoint: all that a training run needs to go on, saved and restored together."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mirror.base.migration_hints import with_hints
from mirror.base.no_copy import NoCopy
from mirror.errors import CheckpointError, StrategyError
from mirror.execution.current_replica import enclosing_replica
from mirror.replica.params.mirrored_buffer import set_local_buffers
from mirror.threads.user_frames import add_note
from mirror.train.checkpoint.checkpoint_agreement import worker_agreement_of
from mirror.train.checkpoint.generator_state import give_global
from mirror.train.checkpoint.read_checkpoint import Contents, write_contents
from mirror.train.checkpoint.snapshot import Snapshot, copied, on_host, pack
from mirror.train.checkpoint.staging import StagingBuffers
from mirror.train.checkpoint.stateful_objects import VALUE, check, give, give_value, kind_of

_log = logging.getLogger("mirror")


@with_hints
class Checkpoint(NoCopy):
    """Saves objects to a directory, and restores them, together with the random generators.

    ::

        checkpoint = mirror.Checkpoint(model=model, optimizer=optimizer, data=batches, epoch=0)
        checkpoint.save("last")
        checkpoint.restore("last")["epoch"]

    It takes modules, optimizers, schedulers, distributed datasets, scalers, anything else with
    ``state_dict()`` and ``load_state_dict()``, generators of torch, Python and numpy, tensors, and
    plain values: numbers, strings, bytes, arrays of numpy, and containers of them. There is one
    logical copy of everything, the one that plain PyTorch has: how many replicas there are, or
    whether there are any, may change between saving and restoring. Gradients are not saved.

    A save is atomic: a process killed at any moment leaves the checkpoint that was there, or the
    new one. No pickle is read or written. docs/checkpoints.md has the format.

    Of several workers all save and restore, at one place of the program: the chief writes, and
    they return once that is done. See [Note: Checkpoints of workers].

    Attributes:
        objects: what is saved, by name. Plain values are saved as they are then: change
            containers in place, or put another value here.
    """

    _instead = "make one of the objects of the other process, and restore what this one saves"

    def __init__(self, /, **objects: object) -> None:
        """Takes the objects, by the names under which they are saved.

        Raises:
            CheckpointError: one can be neither saved nor restored.
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
            path: the directory; those above it are made.
            wait: whether to return when everything is on the disk. Otherwise as soon as it is
                copied to memory of the host, which is kept for the next save; a thread writes.
                What goes wrong there is raised by the next ``save``, ``restore`` or ``wait``. The
                next save, and the end of the program, wait for it.

        Raises:
            CheckpointError: an object has something that cannot be written, which is named, or
                the disk is full; a checkpoint that is there stays.
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
        """Saves, as ``save`` does, the state after some step.

        Args:
            write: is given what writes, in the thread where that happens.
        """
        _refuse_in_run("save")
        found = Path(os.path.abspath(path))
        with self._lock, torch.inference_mode(False):
            fellows = worker_agreement_of(self.objects)
            packed = fellows.packed("Checkpoint.save", self.objects, self.wait)

            def save() -> None:
                if wait:
                    whole = packed.with_tensors(on_host(packed.stored))
                    write(lambda: write_contents(found, whole, step))
                    return
                copies = packed.with_tensors(self._copies.copy(packed.stored))
                self._in_flight = _Writing(
                    found, lambda: write(lambda: write_contents(found, copies, step))
                )

            fellows.done("Checkpoint.save", save)

    def restore(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Restores everything from a checkpoint, and the random generators.

        All of it is verified first: names, shapes, dtypes, checksums. A plain value that is a
        container, an array or a tensor of the same shape is changed in place; another one is
        replaced in ``objects``.

        Returns:
            The plain values by name.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it is of other objects; the
                entry and tensor are named. Nothing is changed then.
            StrategyError: called inside ``run``.
        """
        _refuse_in_run("restore")
        fellows = worker_agreement_of(self.objects)
        fellows.done("Checkpoint.restore", self.wait)
        return self.restore_contents(fellows.read(path))

    def wait(self) -> None:
        """Waits for the save that goes on beside, if one does.

        Raises:
            CheckpointError: it went wrong.
        """
        writing, self._in_flight = self._in_flight, None
        if writing is not None:
            try:
                writing.wait()
            except BaseException:
                if writing.goes_on:  # an interrupt of the wait, not of the save
                    self._in_flight = writing
                raise

    def restore_contents(self, contents: Contents) -> dict[str, Any]:
        """Restores what was read; see ``restore``."""
        _refuse_in_run("restore")
        with self._lock, torch.inference_mode(False):
            self.wait()
            return self._restore(contents)

    def _restore(self, contents: Contents) -> dict[str, Any]:
        self._check_names(contents)
        kinds = {name: kind_of(name, obj) for name, obj in self.objects.items()}
        for name, saved in contents.packed.objects.items():
            _check_kind(name, kinds[name], saved.kind, contents)
            check(name, kinds[name], self.objects[name], saved.type_name, contents.states[name])
        before = pack(self.objects, values=False)
        before = before.with_tensors(copied(before.stored))
        begun: list[str] = []
        try:
            self._give_all(contents, kinds, begun)
        except BaseException as error:
            self._give_back(before, begun, error)
            raise
        for name, kind in kinds.items():
            if kind == VALUE:
                self.objects[name] = give_value(self.objects[name], contents.states[name])
        return {name: self.objects[name] for name, kind in kinds.items() if kind == VALUE}

    def _give_all(self, contents: Contents, kinds: dict[str, str], begun: list[str]) -> None:
        what = "random generators"
        try:
            give_global(contents.random)
            for name, kind in kinds.items():
                if kind != VALUE:
                    what = name
                    begun.append(name)
                    give(kind, self.objects[name], contents.states[name])
                    if name in contents.apart:
                        set_local_buffers(self.objects[name], contents.apart[name])
            give_global(contents.random)  # which datasets set, too
        except Exception as error:
            raise CheckpointError(
                f"{what!r} cannot be restored from {contents.path}: {type(error).__name__}: "
                f"{error}; nothing was changed"
            ) from error

    def _give_back(self, before: Snapshot, begun: list[str], error: BaseException) -> None:
        """Brings what was given a state back to what it was, the last one first."""
        states, apart = before.states(), before.kept_apart()
        for name in reversed(begun):
            try:
                give(before.objects[name].kind, self.objects[name], states[name])
                if name in apart:
                    set_local_buffers(self.objects[name], apart[name])
            except BaseException as another:  # a second Ctrl-C, too: the first one is raised
                add_note(error, f"{name!r} could not be brought back either: {another!r}")
        give_global(before.random_state())

    def _check_names(self, contents: Contents) -> None:
        saved = contents.packed.objects.keys()
        if saved != self.objects.keys():
            lacks = ", ".join(map(repr, self.objects.keys() - saved)) or "nothing"
            more = ", ".join(map(repr, saved - self.objects.keys())) or "nothing"
            raise CheckpointError(
                f"a checkpoint is restored under the names it was saved under; {contents.path} "
                f"lacks {lacks}, and has {more} that is not asked for; name the objects alike"
            )


class _Writing:
    """A save that goes on in a thread of its own."""

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self._path = path
        self._write = write
        self._error: BaseException | None = None
        # No daemon: the end of the program waits for it.
        self._thread = threading.Thread(target=self._run, name="mirror checkpoint")
        self._thread.start()

    @property
    def goes_on(self) -> bool:
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
        raise CheckpointError(
            f"{name!r} was saved as a {saved}, and is a {kind} here; restore {contents.path} into "
            "what it was saved from"
        )


def _refuse_in_run(what: str) -> None:
    if enclosing_replica() is not None:
        raise StrategyError(
            f"Checkpoint.{what} was called inside run, where a step is half done; call it between "
            "steps, after run has returned"
        )
