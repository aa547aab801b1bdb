"""What belongs to a process says so when it is copied or pickled, and shows itself briefly."""

import copy
import io
import pickle

import pytest
import torch

import mirror

# What is short


class Own(mirror.comm.Communicator):
    """Of a user."""

    def all_reduce(self, tensors, op="sum", scale=1.0):
        pass

    broadcast = reduce_scatter = all_gather = all_reduce


def test_reprs_are_short_and_say_what_it_is(objects):
    strategy = objects["MirroredStrategy"]
    dataset = strategy.distribute_dataset([torch.zeros(1000)] * 3)
    iterator = iter(dataset)
    next(iterator)
    assert repr(strategy) == "MirroredStrategy([cpu, cpu], backend='host')"
    assert repr(dataset) == "DistributedDataset(list of 3 batches, [cpu, cpu])"
    assert repr(iterator) == f"DistributedIterator(1 delivered, of {dataset!r})"
    assert repr(strategy.distribute_dataset(iter([]))) == (
        "DistributedDataset(list_iterator, [cpu, cpu])"
    )
    assert repr(objects["ReplicaContext"]) == "ReplicaContext(replica 0 of 2 (cpu))"
    values = strategy.distribute_values_from_function(repr)
    assert values.values[1] == "ValueContext(replica 1 of 2)"
    communicator = mirror.comm.create("ring", ["cpu"] * 2)
    assert repr(communicator) == "RingCommunicator([cpu, cpu])"
    communicator.close()
    assert repr(communicator) == "RingCommunicator([cpu, cpu]) (closed)"
    for options in (mirror.InputOptions(), mirror.CommunicationOptions()):
        assert len(repr(options)) < 120


# What is neither copied nor pickled


def _torch_save(value):
    torch.save(value, io.BytesIO())


@pytest.mark.parametrize(
    "copier", [copy.copy, copy.deepcopy, pickle.dumps, _torch_save], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("MirroredStrategy", "make a strategy in each process"),
        ("ReplicaContext", r"mirror\.get_replica_context\(\)"),
        ("DistributedDataset", r"state_dict\(\)"),
        ("DistributedIterator", r"state_dict\(\)"),
        ("HostCommunicator", r"mirror\.comm\.create"),
        ("Own", r"mirror\.comm\.create"),
    ],
)
def test_what_belongs_to_a_process_says_so(objects, kind, remedy, copier):
    value = {
        **objects,
        "DistributedIterator": iter(objects["DistributedDataset"]),
        "HostCommunicator": mirror.comm.create("host", ["cpu"] * 2),
        "Own": Own(["cpu"]),
    }[kind]
    for held in (value, [value]) if copier is not copy.copy else (value,):
        with pytest.raises(TypeError, match=rf"a {kind} belongs to the process.*{remedy}"):
            copier(held)


def test_options_and_values_are_copied_and_pickled():
    for value in (mirror.InputOptions(prefetch=5), mirror.CommunicationOptions()):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
    values = pickle.loads(pickle.dumps(mirror.PerReplica([1, 2])))
    assert values.values == (1, 2)
