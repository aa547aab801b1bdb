"""TFRecord files and tf.train.Example: reading, writing, parsing."""
