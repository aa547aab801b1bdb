"""TFRecordDataset: TFRecord files as a dataset, read by index or in order."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from mirror.data.tfrecord.example import (
    FixedLenFeature,
    VarLenFeature,
    message_classes,
    parse_example,
)
from mirror.data.tfrecord.record_index import (
    MAX_DAMAGE,
    Numbering,
    OpenFiles,
    damage_error,
    load_or_scan,
    scan,
)
from mirror.data.tfrecord.record_reader import RecordReader, check_compression, crc32c_function
from mirror.errors import RecordError
from mirror.values import is_int


class _Part(NamedTuple):
    """An iteration's share: each ``record_step``-th record of every ``file_step``-th file."""

    first_file: int
    file_step: int
    first_record: int
    record_step: int


class _Position(NamedTuple):
    """A position before a record of a file; ``number`` counts the records of all files."""

    file: int = 0
    record: int = 0
    offset: int = 0
    number: int = 0


class TFRecordDataset(Dataset[Any]):
    """The records of TFRecord files, in the order of the paths; checksums are verified.

    Uncompressed files are a map-style dataset: ``len(dataset)`` and ``dataset[i]`` read all
    lengths once (or a saved index), and a ``DataLoader`` may shuffle. A compressed file can only
    be read from its start: then the object is a ``TFRecordStream``, an iterable dataset.

    Iteration reads the files in order, without an index. In a worker process of a ``DataLoader``
    it yields the worker's share, so that no record is read twice.

    ========================  ================================================================
    ``on_damage``             effect of a damaged record
    ========================  ================================================================
    ``"raise"``               ``RecordError`` with its file, number and offset
    ``"skip"``                it is skipped, and listed in ``damaged_records``. ``len`` and
                              ``dataset[i]`` read all data once, to number intact records. If a
                              length is damaged, the file is searched for the next record; if
                              the compression is damaged, the rest of the file is lost.
    ========================  ================================================================

    With both, an intact record that does not parse, and a file with another ``compression``,
    raise ``RecordError``. The dataset can be pickled and used by several threads; only one thread
    at a time may iterate over one object.
    """

    def __new__(
        cls, paths: object = None, compression: str | None = None, **options: object
    ) -> TFRecordDataset:
        # DataLoader distinguishes kinds of datasets by their type.
        return super().__new__(TFRecordStream if compression and cls is TFRecordDataset else cls)

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        compression: str | None = None,
        *,
        features: Mapping[str, FixedLenFeature | VarLenFeature] | None = None,
        transform: Callable[[Any], Any] | None = None,
        on_damage: str = "raise",
        save_index: bool = False,
    ) -> None:
        """Names the files; nothing is read yet.

        Args:
            paths: one or several files; patterns are not expanded.
            compression: ``None``, ``"GZIP"`` or ``"ZLIB"``, of all files.
            features: the features to parse, as for ``parse_example``: records become dicts of
                NumPy arrays instead of ``bytes``. (``transform=parse_example`` parses all.)
            transform: a function that is applied to every record, after ``features``.
            on_damage: ``"raise"`` or ``"skip"``, see above.
            save_index: saves the index of every file beside it as ``<path>.index.npy``, and uses
                it while the file's size and time of modification are unchanged.

        Raises:
            FileNotFoundError: a path names no file.
            ImportError: google-crc32c is not installed; or protobuf, where ``features`` are given.
            TypeError: paths, features or transform have a wrong type.
            ValueError: another argument has none of the values above, or there are no paths.
        """
        self.paths = _as_paths(paths)
        self.compression = check_compression(compression)
        if not self.paths:
            raise ValueError("a TFRecordDataset needs at least one path; got none")
        if on_damage not in ("raise", "skip"):
            raise ValueError(f"on_damage must be 'raise' or 'skip'; got {on_damage!r}")
        crc32c_function()
        for path in self.paths:
            if not os.path.isfile(path):
                raise FileNotFoundError(
                    f"a TFRecordDataset reads files; {path!r} is none; expand a pattern with "
                    "sorted(glob.glob(pattern))"
                )
        self._features = _as_features(features)
        if self._features is not None:
            message_classes()
        if transform is not None and not callable(transform):
            raise TypeError(f"transform is a function of a record; got {transform!r}")
        self._transform = transform
        self._skips_damage = on_damage == "skip"
        self._saves_index = save_index
        self._numbering: Numbering | None = None
        self._open_files = OpenFiles(self.paths)
        self._become_shard(1, 0)

    def _become_shard(self, num_shards: int, index: int) -> None:
        self._shard = (num_shards, index)
        self._numbers: NDArray[np.int64] | None = None
        self._position = _Position()
        self._resumed: dict[str, int] | None = None
        self._last_part: _Part | None = None
        self._damage: dict[tuple[str | None, int | None], RecordError] = {}

    # --- by index --------------------------------------------------------------------------

    def __len__(self) -> int:
        """Returns the number of records; the first call reads the lengths of all records.

        Raises:
            RecordError: a length is damaged (with ``on_damage="raise"``).
            TypeError: the files are compressed.
        """
        return len(self._number_records()[1])

    def __getitem__(self, index: int) -> Any:
        """Reads one record, from any thread or process.

        Raises:
            IndexError: there is no such record.
            RecordError: the record is damaged, or does not parse.
            TypeError: the files are compressed.
        """
        numbering, numbers = self._number_records()
        try:
            number = int(numbers[operator.index(index)])
        except IndexError:
            raise IndexError(f"there are {len(numbers)} records; got index {index}") from None
        file, record, offset = numbering.locate(number)
        return self._convert(self._open_files.read(file, record, offset), file, record, offset)

    def _number_records(self) -> tuple[Numbering, NDArray[np.int64]]:
        """Returns the numbering of all records, and the numbers of this shard's intact records."""
        if self._numbering is None:
            build = load_or_scan if self._saves_index else scan
            files = [build(path, verify=self._skips_damage) for path in self.paths]
            self._numbering = Numbering(files)
        if self._numbers is None:
            for error in self._numbering.damage:
                self._record(error)
            self._numbers = self._numbering.intact_numbers(*self._shard)
        return self._numbering, self._numbers

    # --- in order --------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yields the records in order; in a worker of a ``DataLoader``, the worker's share.

        Worker ``w`` of ``W`` yields every ``W``-th record of the shard from the ``w``-th. If
        there are at least as many compressed files as workers, it yields every ``W``-th file
        instead, so that no file is decompressed twice (unless the dataset is a shard).

        Raises:
            RecordError: a record is damaged (with ``on_damage="raise"``), or does not parse.
            ValueError: a state of another number of workers is resumed.
        """
        part = self._last_part = self._part()
        start = self._start(part)
        number = start.number
        for file in range(start.file, len(self.paths), part.file_step):
            begin = start if file == start.file else _Position()
            with RecordReader(
                self.paths[file], self.compression, offset=begin.offset, record=begin.record
            ) as reader:
                while True:
                    record, offset = reader.record, reader.offset
                    chosen = number % part.record_step == part.first_record
                    try:
                        data = reader.read() if chosen else reader.skip() or None
                    except RecordError as error:
                        if not self._skips_damage:
                            raise
                        self._record(error)
                        number += reader.record - record
                        reader.recover()
                        continue
                    if data is None:
                        break
                    number += 1
                    self._position = _Position(file, reader.record, reader.offset, number)
                    if isinstance(data, bytes):
                        yield self._convert(data, file, record, offset)
        # A worker at the end of its share has nothing left if it is resumed there. Without
        # workers the epoch ends, and the next one is whole.
        worker = get_worker_info()
        self._position = _Position(file=len(self.paths), number=number) if worker else _Position()

    def _part(self) -> _Part:
        num_shards, shard = self._shard
        worker = get_worker_info()
        if worker is None:
            return _Part(0, 1, shard, num_shards)
        if self.compression and num_shards == 1 and len(self.paths) >= worker.num_workers:
            return _Part(worker.id, worker.num_workers, 0, 1)
        return _Part(0, 1, shard + worker.id * num_shards, num_shards * worker.num_workers)

    def _start(self, part: _Part) -> _Position:
        """Returns the position of a loaded state, or the start of the first file."""
        state, self._resumed = self._resumed, None
        if state is None:
            self._position = _Position(file=part.first_file)
            return self._position
        for name, value in part._asdict().items():
            if state[name] != value:
                raise ValueError(
                    "a state can only be resumed by the same DataLoader worker, among as many "
                    f"workers; {name} was {state[name]} and is {value}"
                )
        return self._position

    def state_dict(self) -> dict[str, int]:
        """Returns the position of this object's latest iteration.

        The next iteration after ``load_state_dict`` continues with the next record; after a
        complete iteration it starts again. Worker processes iterate over copies, which have their
        own states: torchdata's ``StatefulDataLoader`` saves these.
        """
        return {**self._position._asdict(), **(self._last_part or self._part())._asdict()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Makes the next iteration continue at the position of the state.

        Raises:
            ValueError: the state is of another dataset or shard.
        """
        names = {*_Position._fields, *_Part._fields}
        fits = isinstance(state, Mapping) and set(state) == names
        fits = fits and all(is_int(value) and value >= 0 for value in state.values())
        if not fits or state["file"] > len(self.paths):
            raise ValueError(
                f"this is no state of a TFRecordDataset of {len(self.paths)} files: {state!r}"
            )
        self._position = _Position(**{name: state[name] for name in _Position._fields})
        begun = self._position.offset or self._position.number
        self._resumed = dict(state) if begun else None

    # --- both ------------------------------------------------------------------------------

    def shard(self, num_shards: int, index: int) -> TFRecordDataset:
        """Returns the dataset of every ``num_shards``-th record from number ``index``.

        Shards do not overlap, cover the dataset, and can be sharded again, as with
        ``tf.data.Dataset.shard``. A shard can be read by index and in order. With many files it is
        cheaper to give each process its own files.

        Raises:
            ValueError: the index is not one of ``0 .. num_shards - 1``.
        """
        num_shards, index = operator.index(num_shards), operator.index(index)
        if not 0 <= index < num_shards:
            raise ValueError(
                f"a shard has an index from 0 to num_shards - 1; got {index} of {num_shards}"
            )
        outer, first = self._shard
        part = copy.copy(self)
        part._become_shard(outer * num_shards, first + outer * index)
        return part

    @property
    def damaged_records(self) -> tuple[RecordError, ...]:
        """The damaged records that this object has skipped so far, each once, in any order.

        Worker processes of a ``DataLoader`` list their damaged records in their own copies.
        """
        return tuple(self._damage.values())

    def _record(self, error: RecordError) -> None:
        self._damage[error.path, error.offset] = error.with_traceback(None)
        if len(self._damage) > MAX_DAMAGE:
            raise damage_error(str(error.path)) from error

    def _convert(self, data: bytes, file: int, record: int, offset: int) -> Any:
        try:
            value: Any = data
            if self._features is not None:
                value = parse_example(data, self._features)
            return value if self._transform is None else self._transform(value)
        except RecordError as error:
            raise RecordError.at_record(self.paths[file], record, offset, str(error)) from error


class TFRecordStream(TFRecordDataset, IterableDataset[Any]):
    """A ``TFRecordDataset`` that can only be iterated; the workers of a ``DataLoader`` share it.

    ``TFRecordDataset`` returns one for compressed files. Use it for uncompressed files if records
    are only read in order, since it needs no scan for an index.
    """

    def __len__(self) -> NoReturn:
        raise TypeError(self._describe_limit("has no length before it was read"))

    def __getitem__(self, index: int) -> NoReturn:
        raise TypeError(self._describe_limit("has no access by number"))

    def _describe_limit(self, what: str) -> str:
        why = "a TFRecordStream is read in order"
        if self.compression is not None:
            why = f"a file with compression={self.compression!r} can only be read from its start"
        return f"{why}, so this dataset {what}; iterate over it, or write the records uncompressed"


def _as_paths(paths: object) -> tuple[str, ...]:
    names = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    if isinstance(names, Iterable):
        found = tuple(names)
        if all(isinstance(name, (str, os.PathLike)) for name in found):
            return tuple(os.fspath(name) for name in found)
    raise TypeError(f"paths are a string, an os.PathLike, or several of them; got {paths!r}")


def _as_features(features: object) -> dict[str, FixedLenFeature | VarLenFeature] | None:
    if features is None:
        return None
    if isinstance(features, Mapping):
        kinds = (FixedLenFeature, VarLenFeature)
        if all(isinstance(feature, kinds) for feature in features.values()):
            return dict(features)
    raise TypeError(
        f"features are a FixedLenFeature or VarLenFeature for each name; got {features!r}"
    )
