"""mirror/data/tfrecord/checksum.py: known values, and what happens without google-crc32c."""

from mirror.data.tfrecord.checksum import crc32c_function, masked_crc32c

WITHOUT = """
import sys
sys.modules["google_crc32c"] = None
from mirror.data import TFRecordDataset, TFRecordWriter
for make in (TFRecordDataset, TFRecordWriter):
    try:
        make(sys.argv[1])
    except ImportError as error:
        print(error)
"""


def test_the_checksum_is_that_of_rfc_3720():
    assert crc32c_function()(b"\x00" * 32) == 0x8A9136AA
    assert crc32c_function()(b"\xff" * 32) == 0x62A8AB43
    assert crc32c_function()(bytes(range(32))) == 0x46DD794E


def test_the_mask_rotates_by_15_bits_and_adds():
    assert masked_crc32c(b"\x00" * 32) == (0x6D551522 + 0xA282EAD8) % 2**32


def test_without_the_package_the_extra_is_named_and_no_file_is_made(script_pool, tmp_path):
    path = tmp_path / "a.tfrecord"
    done = script_pool.run(WITHOUT, path)
    messages = done.stdout.splitlines()
    assert len(messages) == 2
    assert all("pip install 'mirror-strategy[tfrecord]'" in message for message in messages)
    assert not path.exists()
