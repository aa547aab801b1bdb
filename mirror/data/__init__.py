"""Feeds batches to the replicas; knows no model."""

from mirror.data.distribute import DistributedDataset
from mirror.data.example import parse_example, parse_sequence_example, serialize_example
from mirror.data.features import FixedLenFeature, VarLenFeature
from mirror.data.tfrecord_dataset import TFRecordDataset, TFRecordStream
from mirror.data.tfrecord_writer import TFRecordWriter
from mirror.errors import RecordError

__all__ = [
    "DistributedDataset",
    "FixedLenFeature",
    "RecordError",
    "TFRecordDataset",
    "TFRecordStream",
    "TFRecordWriter",
    "VarLenFeature",
    "parse_example",
    "parse_sequence_example",
    "serialize_example",
]
