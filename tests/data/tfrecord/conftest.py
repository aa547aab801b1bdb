"""Files of records, and a test that runs as one worker of several."""

import pytest

from tests.data.tfrecord.records import Worker, write


@pytest.fixture
def paths(tmp_path):
    return write(tmp_path)


@pytest.fixture
def as_worker(monkeypatch):
    def become(worker_id, num_workers):
        worker = None if worker_id is None else Worker(worker_id, num_workers)
        monkeypatch.setattr(
            "mirror.data.tfrecord.tfrecord_dataset.get_worker_info", lambda: worker
        )

    return become
