"""TFRecordDataset: TFRecord files as a dataset, by number and in order."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from mirror.data.input_options import is_int
from mirror.data.tfrecord.checksum import crc32c_function
from mirror.data.tfrecord.compressed import check_compression
from mirror.data.tfrecord.example import parse_example
from mirror.data.tfrecord.features import FixedLenFeature, VarLenFeature
from mirror.data.tfrecord.record_index import (
    MAX_DAMAGE,
    Numbering,
    OpenFiles,
    load_or_scan,
    scan,
    too_damaged,
)
from mirror.data.tfrecord.record_reader import RecordReader
from mirror.errors import RecordError


class _Part(NamedTuple):
    """What an iteration yields: of every ``file_step``-th file each ``record_step``-th record."""

    first_file: int
    file_step: int
    first_record: int
    record_step: int


class _Position(NamedTuple):
    """A place before a record of a file; ``number`` counts the records through all files."""

    file: int = 0
    record: int = 0
    offset: int = 0
    number: int = 0


class TFRecordDataset(Dataset[Any]):
    """The records of TFRecord files, in the order of the paths; checksums are verified.

    Uncompressed files are a map-style dataset: ``len(dataset)`` and ``dataset[i]`` read their
    lengths once (or a kept index), and a ``DataLoader`` may shuffle. A compressed file can only
    be read from its start: then the object is a ``TFRecordStream``, an iterable dataset.

    Iterating reads the files in order, without an index. In a worker process of a ``DataLoader``
    it yields the worker's share, so that no record comes twice.

    ========================  ================================================================
    ``on_damage``             what a damaged record does
    ========================  ================================================================
    ``"raise"``               ``RecordError`` with its file, number and offset
    ``"skip"``                it is left out, and noted in ``damaged_records``. For ``len`` and
                              ``dataset[i]`` all data are read once, to number what is intact.
                              Where a length is damaged the file is searched for the next
                              record; behind damaged compression the rest of the file is lost.
    ========================  ================================================================

    Neither covers what the checksums do: a record that is whole but does not parse is a
    ``RecordError``, as is a file with another ``compression``.

    Can be pickled and used by several threads; one object is iterated by one thread at a time.
    """

    def __new__(
        cls, paths: object = None, compression: str | None = None, **options: object
    ) -> TFRecordDataset:
        # DataLoader tells by the type which kind of dataset it has.
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
            features: parses the records as ``parse_example`` does: dicts of numpy arrays instead
                of ``bytes``. (``transform=parse_example`` parses whatever they hold.)
            transform: applied to every record, after ``features``.
            on_damage: ``"raise"`` or ``"skip"``, see above.
            save_index: keeps the index of every file beside it as ``<path>.index.npy``, and uses
                it as long as the file's size and time of modification stay.

        Raises:
            FileNotFoundError: a path names no file.
            ImportError: google-crc32c is not installed.
            TypeError: paths, features or a transform that are none.
            ValueError: an argument is none of the above, or there are no paths.
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
                    f"a TFRecordDataset reads files; {path!r} is none; a pattern is expanded by "
                    "sorted(glob.glob(pattern))"
                )
        self._features = _as_features(features)
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

    # --- by number -------------------------------------------------------------------------

    def __len__(self) -> int:
        """Returns the number of records; the first call reads the lengths of all.

        Raises:
            RecordError: a length is damaged (with ``on_damage="raise"``).
            TypeError: the files are compressed.
        """
        return len(self._numbered()[1])

    def __getitem__(self, index: int) -> Any:
        """Reads one record, from any thread or process.

        Raises:
            IndexError: there is no such record.
            RecordError: it is damaged, or does not parse.
            TypeError: the files are compressed.
        """
        numbering, numbers = self._numbered()
        try:
            number = int(numbers[operator.index(index)])
        except IndexError:
            raise IndexError(f"there are {len(numbers)} records; got index {index}") from None
        file, record, offset = numbering.locate(number)
        return self._convert(self._open_files.read(file, record, offset), file, record, offset)

    def _numbered(self) -> tuple[Numbering, NDArray[np.int64]]:
        """Returns the numbering of all records, and the numbers of this shard's intact ones."""
        if self._numbering is None:
            build = load_or_scan if self._saves_index else scan
            files = [build(path, verify=self._skips_damage) for path in self.paths]
            self._numbering = Numbering(files)
        if self._numbers is None:
            for error in self._numbering.damage:
                self._record(error)
            self._numbers = self._numbering.intact(*self._shard)
        return self._numbering, self._numbers

    # --- in order --------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yields the records in order; in a worker of a ``DataLoader``, the worker's share.

        Worker ``w`` of ``W`` yields every ``W``-th record of the shard from the ``w``-th. Of
        compressed files at least as many as workers, it yields every ``W``-th file instead, so
        that no file is decompressed twice (unless the dataset is a shard).

        Raises:
            RecordError: a record is damaged (with ``on_damage="raise"``), or does not parse.
            ValueError: it resumes a state of another number of workers.
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
        # A worker at the end of its share waits for the others, and resumed has nothing to give;
        # without workers it is the end of the epoch, and the next one is whole.
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
        """Returns where to begin: where a loaded state says, or with the first file."""
        state, self._resumed = self._resumed, None
        if state is None:
            self._position = _Position(file=part.first_file)
            return self._position
        for name, value in part._asdict().items():
            if state[name] != value:
                raise ValueError(
                    "a state is resumed by the DataLoader worker that it was taken from, one of "
                    f"as many; {name} was {state[name]} and is {value}"
                )
        return self._position

    def state_dict(self) -> dict[str, int]:
        """Returns how far the latest iteration of this very object has come.

        The next iteration after ``load_state_dict`` goes on with the next record; after a whole
        iteration it is whole. With worker processes it is their copies that are iterated, and
        have the state: a loader that saves it is torchdata's ``StatefulDataLoader``.
        """
        return {**self._position._asdict(), **(self._last_part or self._part())._asdict()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Lets the next iteration go on where the state was taken.

        Raises:
            ValueError: the state is that of another dataset or shard.
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

        Shards do not overlap, together are the whole, and can be sharded again. A shard is read
        by number and in order like the whole. (As ``tf.data.Dataset.shard``. For many files it
        costs less to give each process files of its own.)

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

        Those that the worker processes of a ``DataLoader`` skip are noted by their copies.
        """
        return tuple(self._damage.values())

    def _record(self, error: RecordError) -> None:
        self._damage[error.path, error.offset] = error.with_traceback(None)
        if len(self._damage) > MAX_DAMAGE:
            raise too_damaged(str(error.path)) from error

    def _convert(self, data: bytes, file: int, record: int, offset: int) -> Any:
        try:
            value: Any = data
            if self._features is not None:
                value = parse_example(data, self._features)
            return value if self._transform is None else self._transform(value)
        except RecordError as error:
            raise RecordError.at_record(self.paths[file], record, offset, str(error)) from error


class TFRecordStream(TFRecordDataset, IterableDataset[Any]):
    """A ``TFRecordDataset`` that is only iterated; the workers of a ``DataLoader`` share it.

    ``TFRecordDataset`` makes one of compressed files. Make one of uncompressed files where
    reading in order is what counts, and an index is not worth a scan.
    """

    def __len__(self) -> NoReturn:
        raise TypeError(self._no_random_access("has no length before it was read"))

    def __getitem__(self, index: int) -> NoReturn:
        raise TypeError(self._no_random_access("has no access by number"))

    def _no_random_access(self, what: str) -> str:
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
