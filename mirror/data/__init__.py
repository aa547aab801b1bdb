"""mirror.data: feeds batches to the replicas; knows no model."""

from typing import TYPE_CHECKING

from mirror.data.arrays import from_arrays
from mirror.data.distributed.distribute import DistributedDataset
from mirror.data.tfrecord.dataset import TFRecordDataset, TFRecordStream
from mirror.data.tfrecord.example import parse_example, parse_sequence_example, serialize_example
from mirror.data.tfrecord.features import FixedLenFeature, VarLenFeature
from mirror.data.tfrecord.writer import TFRecordWriter
from mirror.errors import RecordError
from mirror.signposts import names_of

__all__ = [
    "DistributedDataset",
    "FixedLenFeature",
    "RecordError",
    "TFRecordDataset",
    "TFRecordStream",
    "TFRecordWriter",
    "VarLenFeature",
    "from_arrays",
    "parse_example",
    "parse_sequence_example",
    "serialize_example",
]

if not TYPE_CHECKING:  # to which an unknown name is one
    __getattr__ = names_of("mirror.data")
