"""Writes the files of this folder with TensorFlow.

``python -m tests.data.tfrecord.files.make_files`` runs it.

TensorFlow is in none of the project's extras: install it where it does no harm.
"""

from pathlib import Path

import tensorflow as tf

from tests.data.tfrecord.files.values import CONTEXT, EXAMPLES, KINDS, RECORDS, STEPS

FOLDER = Path(__file__).parent


def feature(name, values):
    kind = KINDS[name] if name in KINDS else type(values[0])
    if kind is bytes:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if kind is float:
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def features(values):
    return tf.train.Features(feature={name: feature(name, v) for name, v in values.items()})


def step(values):
    if not values:
        return tf.train.Feature(bytes_list=tf.train.BytesList())
    return feature("", values)


def write(name, records, compression=None):
    with tf.io.TFRecordWriter(str(FOLDER / name), compression) as writer:
        for record in records:
            writer.write(record)


write("records.tfrecord", RECORDS)
write("records.tfrecord.gz", RECORDS, "GZIP")
write("records.tfrecord.zlib", RECORDS, "ZLIB")
write("empty.tfrecord", [])
write("empty.tfrecord.gz", [], "GZIP")
# Deterministic: entries of a map in the order of their keys.
messages = [tf.train.Example(features=features(values)) for values in EXAMPLES]
write("examples.tfrecord", [m.SerializeToString(deterministic=True) for m in messages])
sequence = tf.train.SequenceExample(
    context=features(CONTEXT),
    feature_lists=tf.train.FeatureLists(
        feature_list={
            name: tf.train.FeatureList(feature=[step(values) for values in steps])
            for name, steps in STEPS.items()
        }
    ),
)
write("sequence.tfrecord", [sequence.SerializeToString(deterministic=True)])
