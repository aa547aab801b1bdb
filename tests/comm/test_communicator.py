"""mirror/comm/communicator.py: what a user's own communicator needs, and what it gets for that."""

import pytest
import torch

from mirror import comm


class Recorder(comm.Communicator):
    """Sums in the simplest way and records what it was called with."""

    def __init__(self, devices):
        super().__init__(devices)
        self.sizes = []

    def all_reduce(self, tensors, op="sum", scale=1.0):
        self.sizes.append(tensors[0].numel())
        assert all(tensor.is_contiguous() for tensor in tensors)
        total = torch.stack(list(tensors)).sum(0) * scale
        for tensor in tensors:
            tensor.copy_(total)

    def broadcast(self, tensors, root=0):
        raise NotImplementedError

    def reduce_scatter(self, tensors, op="sum"):
        raise NotImplementedError

    def all_gather(self, tensors):
        raise NotImplementedError


class Independent(Recorder):
    """Keeps its own state and calls nothing of the base class."""

    def __init__(self, devices):
        self.devices = tuple(torch.device(device) for device in devices)
        self.sizes = []

    def close(self):
        pass


@pytest.mark.parametrize("kind", [Recorder, Independent])
def test_a_users_communicator_reduces_lists_in_packs(kind):
    communicator = kind(["cpu", "cpu"])
    lists = [[torch.full((i + 1,), float(i)) for i in range(4)] for _ in range(2)]
    communicator.all_reduce_lists(lists, scale=0.5, bytes_per_pack=12)
    assert communicator.sizes == [3, 3, 4]
    for column in lists:
        assert [tensor.tolist() for tensor in column] == [[0], [1] * 2, [2] * 3, [3] * 4]


def test_one_contiguous_tensor_travels_without_a_copy():
    communicator = Recorder(["cpu", "cpu"])
    seen = []
    communicator.all_reduce = lambda tensors, op, scale: seen.extend(tensors)
    one, other = torch.ones(3), torch.ones(3)
    communicator.all_reduce_lists([[one], [other]])
    assert seen[0] is one
    assert seen[1] is other


def test_a_class_that_lacks_a_collective_cannot_be_made():
    class Incomplete(comm.Communicator):
        def all_reduce(self, tensors, op="sum", scale=1.0):
            pass

    with pytest.raises(TypeError, match="all_gather"):
        Incomplete(["cpu"])


def test_a_communicator_is_named_after_its_class_until_registered():
    assert Recorder(["cpu"]).name == "Recorder"
    assert comm.create("naive", ["cpu"]).name == "naive"


def test_devices_are_resolved():
    assert Recorder(["CPU:0", "cpu:1"]).devices == (torch.device("cpu"),) * 2
