"""Training: a loop that resumes by itself, counts its steps, and has hooks.

A step begins when ``batches`` yields a batch, and ends when the loop requests the next one. If the
loop is left by ``break``, its last step ends with the next loop, or with the training. Requests to
save or to stop are handled there, in this order: hooks, a checkpoint, the end. The workers
exchange their requests at the end of each step, and all of them act at the same step. With
parameter servers a step may end later: see ``steps_in_flight.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import repeat
from types import TracebackType
from typing import Any, TypeVar

from mirror.errors import StrategyError, short_repr
from mirror.server.roles.worker_datasets import PerWorkerDataset, PerWorkerIterator
from mirror.strategy.mirrored import MirroredStrategy
from mirror.strategy.parameter_server import ParameterServerStrategy
from mirror.threads.user_frames import add_note, warn_user
from mirror.train.checkpoint.checkpoint import WorkerAgreement, worker_agreement_of
from mirror.train.checkpoint.manager import CheckpointManager
from mirror.train.loop.hook import AnyStrategy, Hook, TrainingState, check_count
from mirror.train.loop.hooks import SaveEvery
from mirror.train.loop.steps_in_flight import StepsInFlight, dataset_ended_error

T = TypeVar("T")


class Training(TrainingState):
    """Runs hooks, checkpoints and the end of a training around the user's own loop.

    ::

        hooks = [mirror.train.StopAtStep(10_000), mirror.train.LogEvery(100)]
        with mirror.train.Training(strategy, checkpoint=manager, hooks=hooks) as training:
            for batch in training.batches(dataset):
                loss = train_step(batch)
                training.log(loss=loss)

    It resumes from the newest checkpoint, and saves one at the end and, without a ``SaveEvery``
    hook, every ten minutes. After an error nothing is saved, because a step may be half done.

    With a ``ParameterServerStrategy`` the loop schedules its steps, and logs their RemoteValues::

        with mirror.train.Training(strategy, checkpoint=manager, hooks=hooks) as training:
            data = coordinator.create_per_worker_dataset(make_loader)
            for batch in training.batches(data):
                training.log(loss=coordinator.schedule(train_step, args=(batch,)))

    Args:
        strategy: the strategy that trains. Entering the training starts its servers and workers.
        checkpoint: saves and restores; ``None``: nothing is saved.
        hooks: the hooks, called in this order.

    Raises:
        TypeError: an argument has another type.
    """

    def __init__(
        self,
        strategy: AnyStrategy,
        *,
        checkpoint: CheckpointManager | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        _check(strategy, checkpoint, hooks)
        super().__init__(strategy, checkpoint)
        self._asked = tuple(hooks)
        self._hooks: tuple[Hook, ...] = ()
        self._workers: WorkerAgreement | None = None
        self._saved_at = -1
        self._is_in_step = False
        self._restores_data = False  # a state was loaded, by an object that has the dataset's, too

    def state_dict(self) -> dict[str, int]:
        """Returns the number of steps, for an ``ElasticState`` with the other objects.

        The step in progress counts: an optimizer has stepped when a commit is made.
        """
        return {"step": self.step + self._is_in_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues after so many steps; the dataset's position must be restored as well.

        Raises:
            StrategyError: the training has not begun, or has made a step.
        """
        self._check_open()
        if self._is_in_step or self.step != self.first_step:
            raise StrategyError(
                f"a Training is restored before its first step, and this one is at step "
                f"{self.step}; restore it after its with statement begins, before its batches"
            )
        self.step = self.first_step = int(state["step"])
        self._restores_data = True

    def __enter__(self) -> Training:
        if self._workers is not None:
            raise StrategyError("a Training is entered once; create another one")
        objects = {} if self.manager is None else self.manager.checkpoint.objects
        self._workers = worker_agreement_of(objects)
        if isinstance(self.strategy, ParameterServerStrategy):
            self._flight = StepsInFlight(self.strategy)
            self._flight.join()
        if self.manager is not None:
            restored = self.manager.restore_latest()
            if restored is not None:
                self.step = self.first_step = self._saved_at = restored
        is_chief = self._workers.is_chief
        self._hooks = tuple(h for h in self._add_saving() if is_chief or not h.chief_only)
        self._is_open = True
        begun: list[Hook] = []
        try:
            for hook in self._hooks:
                begun.append(hook)
                hook.begin(self)
            if self._flight is not None:
                self._flight.listen()
        except BaseException as error:
            self._hooks = tuple(begun)
            self._end(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failure = error
        try:
            if error is None:
                self._end_step(is_last=True)
                self._save_last()
            elif self._flight is not None and isinstance(error, StopIteration):
                raise dataset_ended_error() from error
        except BaseException as failed:
            failure = failed
            raise
        finally:
            self._end(failure)

    def batches(self, dataset: Iterable[T], *, epochs: int = 1) -> Iterator[T]:
        """Yields batches, one for each step, until the dataset or the training ends.

        A distributed dataset in the checkpoint, or in the ``ElasticState`` with this training,
        resumes at its position; any other dataset starts from the beginning after a restart, with
        a warning.

        A batch of a per-worker dataset stands for the next batch of the worker that runs the
        scheduled step. Such a dataset has no end here, and starts from the beginning after a
        restart: with a warning, unless it was created inside the with statement, where its
        function can read ``first_step``.

        Args:
            epochs: the number of passes, counted over all restarts. A resumed training makes the
                remaining passes, and needs a dataset with a length.

        Raises:
            StrategyError: the training has not begun, or is over; or it is resumed, and the number
                of finished passes is unknown; or several passes of a per-worker dataset.
            ValueError: ``epochs`` is below 1.
        """
        check_count("batches", "epochs", epochs)
        self._check_open()
        self._end_step(is_last=True)  # of a previous loop that was left
        of_workers = isinstance(dataset, (PerWorkerDataset, PerWorkerIterator))
        self.reads_input = not of_workers
        if of_workers and epochs > 1:
            raise StrategyError(
                f"each worker reads its own dataset, which has no passes here; got epochs={epochs}"
                "; leave it out, and end the training by StopAtStep(last_step)"
            )
        num_batches = _num_batches(dataset)
        is_resumed = 0 < self.first_step == self.step
        self.num_steps = num_batches and num_batches * epochs + (0 if is_resumed else self.step)
        if is_resumed:
            epochs -= self._passes_before(dataset, num_batches, epochs)
        if self.last_step is not None and self.step >= self.last_step:
            self.stop(f"step {self.step} was the last one")
        return self._batches(dataset, epochs, is_resumed)

    def _passes_before(self, dataset: Iterable[T], num_batches: int | None, epochs: int) -> int:
        """Returns the number of whole passes before this process began."""
        if isinstance(dataset, PerWorkerIterator):
            dataset = dataset.dataset
        if isinstance(dataset, PerWorkerDataset):
            if self._flight is not None and dataset.index < self._flight.num_datasets:
                warn_user(
                    f"the training goes on after step {self.step}, and each worker's dataset "
                    "starts again; create it inside the training's with statement, by a function "
                    "that begins elsewhere: for example with training.first_step in its seed"
                )
            return 0
        saved = {} if self.manager is None else self.manager.checkpoint.objects
        if not self._restores_data and all(dataset is not obj for obj in saved.values()):
            warn_user(
                f"the training goes on after step {self.step}, and its dataset starts again, as "
                "it is not in the checkpoint; pass it to mirror.Checkpoint(..., dataset=dataset)"
            )
        if num_batches:
            return min(self.step // num_batches, epochs)
        if epochs == 1:
            return 0
        raise StrategyError(
            f"the training goes on after step {self.step} of {epochs} epochs, but its dataset has "
            "no length; end it by StopAtStep(last_step) instead"
        )

    def _batches(self, dataset: Iterable[T], epochs: int, is_resumed: bool) -> Iterator[T]:
        while epochs > 0 and not self.reason:
            num_before, source = self.step, self._source(dataset)
            while not self.reason:
                begun = time.perf_counter()
                try:
                    batch = next(source)
                except StopIteration:
                    break
                finally:
                    self.seconds_waiting += time.perf_counter() - begun
                if self._flight is not None:
                    self._flight.begin()
                for hook in self._hooks:
                    hook.before_step(self)
                self._is_in_step = True
                yield batch
                self._end_step()
            self._end_step(is_last=True)
            # A resumed training may have stopped at the very end of a pass.
            epochs -= 0 if is_resumed and self.step == num_before else 1
            is_resumed = False

    def _source(self, dataset: Iterable[T]) -> Iterator[T]:
        if self.reads_input:
            return iter(dataset)
        batch: Any = dataset  # a worker replaces it by its next batch
        return repeat(batch)

    def _add_saving(self) -> Iterator[Hook]:
        yield from self._asked
        if self.manager is not None and not any(isinstance(h, SaveEvery) for h in self._asked):
            yield SaveEvery(seconds=600)

    def _end_step(self, *, is_last: bool = False) -> None:
        """Ends the current step, if there is one.

        Args:
            is_last: whether all steps in flight must end, too.
        """
        flight, was_in_step = self._flight, self._is_in_step
        self._is_in_step = False
        if flight is not None:
            if was_in_step:
                flight.leave()
            self._end_flight(flight, is_last=is_last)
        elif was_in_step:
            self._count_step()
        if self._is_to_save:
            self._is_to_save = False
            self._save(wait=False)

    def _end_flight(self, flight: StepsInFlight, *, is_last: bool) -> None:
        """Ends the steps that must end or have ended."""
        last = self.step + len(flight)
        while len(flight) and (
            is_last
            or self._is_to_save
            or self.reason
            or flight.is_full
            or flight.has_first_ended
            or any(hook.waits_for(last) for hook in self._hooks)
        ):
            for name, value in flight.take().items():
                self._record(name, value)
            self._count_step()

    def _count_step(self) -> None:
        self.step += 1
        for hook in self._hooks:
            hook.after_step(self)
        self._agree()

    def _agree(self) -> None:
        """Combines the requests of all workers."""
        workers = self._workers
        assert workers is not None
        if not workers.is_multi_worker:
            return
        wants = b"%d%s" % (self._is_to_save, self.reason.encode())
        for rank, request in enumerate(workers.all_gather_bytes("the end of a step", wants)):
            self._is_to_save |= request[:1] == b"1"
            if request[1:] and not self.reason:
                self.reason = f"worker {rank}: {request[1:].decode()}"

    def _save(self, *, wait: bool) -> None:
        assert self.manager is not None
        if self._saved_at != self.step:
            flight = self._flight
            if flight is not None:
                flight.settle(self.step)
            with nullcontext() if flight is None else flight.naming_losses():
                self.manager.save(self.step, wait=wait)
            self._saved_at = self.step
            for hook in self._hooks:
                hook.saved(self)

    def _save_last(self) -> None:
        if self.manager is None:
            return
        if self.step > self.first_step:
            self._save(wait=True)
        self.manager.wait()

    def _end(self, error: BaseException | None) -> None:
        """Ends all hooks, also if one fails."""
        self._is_open = False
        if self._flight is not None:
            self._flight.close()
        if error is not None and self.manager is not None:
            try:  # the newest checkpoint is complete when the error reaches the program
                self.manager.wait()
            except Exception as unsaved:
                add_note(
                    error, f"the checkpoint that was being written has failed, too: {unsaved}"
                )
        hooks, self._hooks = self._hooks, ()
        failed: BaseException | None = None
        for hook in hooks:
            try:
                hook.end(self, error)
            except Exception as one:
                failed = failed or one
        if failed is not None and error is None:
            raise failed


def _check(strategy: Any, checkpoint: Any, hooks: Any) -> None:
    if not isinstance(strategy, (MirroredStrategy, ParameterServerStrategy)):
        raise TypeError(f"Training takes a strategy first; got {short_repr(strategy)}")
    if checkpoint is not None and not isinstance(checkpoint, CheckpointManager):
        raise TypeError(
            f"checkpoint= takes a mirror.CheckpointManager, got {short_repr(checkpoint)}; pass "
            'mirror.CheckpointManager(mirror.Checkpoint(model=model, ...), "checkpoints")'
        )
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise TypeError(
                f"hooks are objects of mirror.train.Hook's subclasses; got {short_repr(hook)}"
            )


def _num_batches(dataset: object) -> int | None:
    """Returns ``len(dataset)``; ``None`` without a length, as for endless batches."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
