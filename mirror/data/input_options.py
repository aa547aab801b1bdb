"""Options of distributed input, and the contexts that input functions get."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mirror.base.migration_hints import call_with_hints
from mirror.errors import short_repr
from mirror.values import is_int

OptionsT = TypeVar("OptionsT")
SHARDINGS = ("auto", "data", "file", "off")


@call_with_hints
@dataclass(frozen=True)
class InputOptions:
    """Options of a distributed dataset.

    Attributes:
        prefetch: the number of batches that a background thread keeps ready, split and copied to
            their devices; 0 reads, splits and copies each batch when it is asked for.
        drop_remainder: drops a last batch that has fewer examples than the first one, or, with
            ``distribute_dataset_from_function``, that does not reach all replicas.
        weights: the split of a batch over devices of different speed: one number >= 0 per
            replica, see ``mirror.data.split_batch.split_sizes``; ``"auto"`` follows the replicas'
            measured speed, see ``mirror.data.split_batch.Balance``; ``None`` for equal parts.
        weight_of: computes a replica's weight in the gradient mean from its part of the batch on
            the host: ``lambda batch: batch["attention_mask"].sum()`` counts tokens. ``None``
            counts examples.
        sharding: the data that each of several workers reads. ``"data"``, the meaning of
            ``"auto"``: its part of global batches that are the same on all workers. ``"file"``: a
            shard of the records. ``"off"``: its own batches. See
            ``mirror.data.worker_sharding.choose_sharding``.

    Raises:
        ValueError: ``prefetch`` is negative or no integer; ``drop_remainder`` is not a bool;
            ``weights`` are not finite, negative, or all zero; ``weight_of`` is not callable;
            ``sharding`` is not one of these names.
    """

    prefetch: int = 2
    drop_remainder: bool = False
    weights: Sequence[float] | str | None = None
    weight_of: Callable[[Any], Any] | None = None
    sharding: str = "auto"

    def __post_init__(self) -> None:
        if not is_int(self.prefetch) or self.prefetch < 0:
            raise ValueError(
                "prefetch must be a number of batches, an int >= 0, got "
                f"{short_repr(self.prefetch)}"
            )
        if not isinstance(self.drop_remainder, bool):
            raise ValueError(
                f"drop_remainder must be a bool, got {short_repr(self.drop_remainder)}"
            )
        if self.weights is not None and not (
            isinstance(self.weights, str) and self.weights == "auto"
        ):
            object.__setattr__(self, "weights", _check_weights(self.weights))
        if self.weight_of is not None and not callable(self.weight_of):
            raise ValueError(
                "weight_of must be a function of a replica's part of the batch, got "
                f"{short_repr(self.weight_of)}"
            )
        if not isinstance(self.sharding, str) or self.sharding not in SHARDINGS:
            names = ", ".join(map(repr, SHARDINGS))
            raise ValueError(f"sharding must be one of {names}; got {short_repr(self.sharding)}")

    def policy(self, *, joins: bool) -> str:
        """Returns the sharding of a dataset.

        Args:
            joins: whether a function makes each worker's batches, one per replica.

        Raises:
            ValueError: the sharding would split the function's batches again.
        """
        if not joins:
            return self.sharding
        if self.sharding in ("data", "file"):
            raise ValueError(
                "the function of distribute_dataset_from_function makes every worker's own "
                "batches: have it shard by its InputContext's input_pipeline_id; got sharding="
                f"{self.sharding!r}"
            )
        return "off"


@dataclass(frozen=True)
class InputContext:
    """The argument of a function for ``distribute_dataset_from_function``.

    Attributes:
        num_input_pipelines: the number of calls of the function: one per process.
        input_pipeline_id: the index of this call.
        num_replicas_in_sync: the number of replicas over which the batches are distributed.

    Raises:
        ValueError: a number is not an int >= 1, or the index not one of the calls.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        for name in ("num_input_pipelines", "num_replicas_in_sync"):
            number = getattr(self, name)
            if not is_int(number) or number < 1:
                raise ValueError(f"{name} must be an int >= 1, got {short_repr(number)}")
        index = self.input_pipeline_id
        if not is_int(index) or not 0 <= index < self.num_input_pipelines:
            raise ValueError(
                f"input_pipeline_id must be an int from 0 to {self.num_input_pipelines - 1}, one "
                f"of the {self.num_input_pipelines} pipelines; got {short_repr(index)}"
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of examples of a global batch for each replica.

        Raises:
            ValueError: the global batch size is not an int >= 1, or not a multiple of the number
                of replicas.
        """
        if not is_int(global_batch_size) or global_batch_size < 1:
            raise ValueError(
                f"global_batch_size must be an int >= 1, got {short_repr(global_batch_size)}"
            )
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"global_batch_size must be a multiple of the {self.num_replicas_in_sync} "
                f"replicas, got {global_batch_size}; distribute_dataset splits any size"
            )
        return size


def resolve_options(options: OptionsT | None, kind: type[OptionsT]) -> OptionsT:
    """Returns the caller's options, or the default ones of ``kind`` for ``None``.

    Raises:
        TypeError: the options are not of this kind, but for instance a dict.
    """
    if options is None:
        return kind()
    if not isinstance(options, kind):
        raise TypeError(
            f"options must be a mirror.{kind.__name__} or None, got {short_repr(options)}; "
            f"options in a dict are passed as mirror.{kind.__name__}(**options)"
        )
    return options


def _check_weights(weights: Sequence[float] | str) -> tuple[float, ...]:
    rule = "weights must be one finite number >= 0 per replica, not all zero, or 'auto'"
    try:
        checked = tuple(float(weight) for weight in weights)
    except (TypeError, ValueError):
        checked = ()
    valid = all(math.isfinite(weight) and weight >= 0 for weight in checked)
    if isinstance(weights, (str, bytes)) or not valid or not any(checked):
        raise ValueError(f"{rule}; got {short_repr(weights)}")
    return checked


class ValueContext:
    """The argument of a function for ``distribute_values_from_function``.

    Attributes:
        replica_id_in_sync_group: the replica that the value is for.
        num_replicas_in_sync: the number of replicas.
    """

    def __init__(self, replica_id_in_sync_group: int, num_replicas_in_sync: int) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync

    def __repr__(self) -> str:
        replica = f"replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}"
        return f"{type(self).__name__}({replica})"
