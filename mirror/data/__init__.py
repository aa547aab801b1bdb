"""The public names of ``mirror.data``: distributed datasets, arrays and TFRecord files."""

from typing import TYPE_CHECKING

from mirror.base.migration_hints import names_of
from mirror.data.distributed_dataset import DistributedDataset
from mirror.data.from_arrays import from_arrays
from mirror.errors import RecordError

if TYPE_CHECKING:
    from mirror.data.tfrecord.example import (
        FixedLenFeature,
        VarLenFeature,
        parse_example,
        parse_sequence_example,
        serialize_example,
    )
    from mirror.data.tfrecord.record_writer import TFRecordWriter
    from mirror.data.tfrecord.tfrecord_dataset import TFRecordDataset, TFRecordStream
else:  # hidden from type checkers, which must report unknown names
    __getattr__ = names_of(
        "mirror.data",
        lazy={
            "FixedLenFeature": "mirror.data.tfrecord.example",
            "TFRecordDataset": "mirror.data.tfrecord.tfrecord_dataset",
            "TFRecordStream": "mirror.data.tfrecord.tfrecord_dataset",
            "TFRecordWriter": "mirror.data.tfrecord.record_writer",
            "VarLenFeature": "mirror.data.tfrecord.example",
            "parse_example": "mirror.data.tfrecord.example",
            "parse_sequence_example": "mirror.data.tfrecord.example",
            "serialize_example": "mirror.data.tfrecord.example",
        },
    )

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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
