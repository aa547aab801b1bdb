"""mirror.data: feeds batches to the replicas; knows no model."""

from mirror.data.arrays import from_arrays
from mirror.data.distributed.distribute import DistributedDataset
from mirror.data.tfrecord.dataset import TFRecordDataset, TFRecordStream
from mirror.data.tfrecord.example import parse_example, parse_sequence_example, serialize_example
from mirror.data.tfrecord.features import FixedLenFeature, VarLenFeature
from mirror.data.tfrecord.writer import TFRecordWriter
from mirror.errors import RecordError

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
