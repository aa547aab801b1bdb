"""What a dataset's state may hold, and that a changed state raises before anything changes."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import mirror
from mirror.base.bitwise import same_values
from mirror.data.resume_state import gather_states, select_own_state
from mirror.data.rng_state import capture_rng, restore_rng
from tests.data.reading import Pretended

STATE = {
    "numbers": [1, True, None, 0.1, math.inf, np.int64(3), np.float32(0.5)],
    "nested": ({"x": b"\0\xff"}, "text", (), {}),
    3: {(1, 2): "a key that JSON has not", 0.5: None},
    "empty": torch.empty(0, 3),
}


def test_states_arrive_as_they_are():
    state = gather_states(STATE, Pretended(1, (1, 1)))
    for rank in range(2):
        found = select_own_state(state, Pretended(rank, (1, 1)))
        assert torch.equal(found.pop("empty"), torch.empty(0, 3))
        assert found == {k: v for k, v in STATE.items() if k != "empty"}
        assert type(found["nested"]) is tuple


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64, torch.bfloat16, torch.bool])
def test_tensors_and_arrays_keep_their_bits(dtype):
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    state = {"t": tensor, "a": np.arange(3, dtype=np.uint32), "s": torch.tensor(2.5)}
    found = select_own_state(gather_states(state, Pretended(0, (1, 1))), Pretended(0, (1, 1)))
    assert torch.equal(found["t"], tensor)
    assert found["t"].dtype == dtype
    assert found["a"].tolist() == [0, 1, 2]
    assert found["a"].dtype == np.uint32
    assert float(found["s"]) == 2.5


def test_what_cannot_be_sent_is_named():
    with pytest.raises(TypeError, match=r"plain values, tensors and arrays; .*state\.x.*slice"):
        gather_states({"x": slice(3)}, Pretended(0, (1, 1)))


def test_what_is_no_state_is_refused():
    with pytest.raises(TypeError, match="returned; got 3"):
        select_own_state(3, Pretended(0, (1, 1)))
    with pytest.raises(ValueError, match="of 2 workers; this one is of 3 workers"):
        select_own_state({"workers": [{}] * 3}, Pretended(0, (1, 1)))


# A position that was saved with foreign values in any place


pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

loaders = pytest.importorskip("torchdata.stateful_dataloader")

DATA = TensorDataset(torch.arange(40.0).view(20, 2))
SOURCES = {
    "arrays": lambda: mirror.data.from_arrays(DATA.tensors[0], 4, shuffle=True, seed=1),
    "loader": lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator()),
    "stateful": lambda: loaders.StatefulDataLoader(DATA, 4, shuffle=True),
    "list": lambda: [torch.full((4, 2), float(i)) for i in range(5)],
}
GONE = object()
FOREIGN = [GONE, None, -1, 2**63, 10**30, math.nan, "x", [], {}, [1] * 700, torch.ones(3)]


def places(state, path=()):
    """Yields where something is in nested dicts and short lists, these included."""
    if isinstance(state, dict):
        for key in state:
            yield from places(state[key], (*path, key))
    elif isinstance(state, list) and len(state) < 10:
        for i in range(len(state)):
            yield from places(state[i], (*path, i))
    if path:
        yield path


def changed(state, path, value):
    made = copy.deepcopy(state)
    holder = made
    for key in path[:-1]:
        holder = holder[key]
    if value is GONE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return made


@pytest.mark.parametrize("name", SOURCES)
def test_a_state_with_anything_anywhere_is_refused_before_anything_changes(make_strategy, name):
    strategy, make = make_strategy(), SOURCES[name]
    dataset = strategy.distribute_dataset(make())
    iterator = iter(dataset)
    next(iterator)
    state = dataset.state_dict()
    # What a dataset says of itself it reads itself.
    where = [path for path in places(state) if path[0] != "own_state"]
    assert len(where) > 20
    fresh = strategy.distribute_dataset(make())
    before = capture_rng()
    refused = []
    values = itertools.cycle(FOREIGN)  # their number has no factor in common with 4
    for path, value in ((path, next(values)) for path in where for _ in range(4)):
        try:
            fresh.load_state_dict(changed(state, path, value))
        except (TypeError, ValueError) as error:
            refused.append(str(error))
            assert same_values(capture_rng(), before)
        else:
            restore_rng(before)
    assert len(refused) > 0.75 * 4 * len(where)
    assert min(map(len, refused)) > 30
    fresh.load_state_dict(state)
    assert len(list(fresh)) == 4


def test_a_state_that_counts_more_batches_than_there_are_is_refused(make_strategy):
    for name in ("arrays", "loader", "list"):
        dataset = make_strategy().distribute_dataset(SOURCES[name]())
        next(iter(dataset))
        state = changed(dataset.state_dict(), ("num_consumed",), 10**9)
        fresh = make_strategy().distribute_dataset(SOURCES[name]())
        fresh.load_state_dict(state)
        with pytest.raises(ValueError, match="this one ended after 5"):
            list(fresh)


class Own:
    """A dataset with a state of its own, that it refuses where it is none."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 5:
            self.next += 1
            yield torch.full((4, 2), float(self.next))

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = None
        self.next = state["next"] + 0


@pytest.mark.parametrize("own", [{}, {"next": "x"}, None, 5])
def test_what_a_dataset_itself_refuses_leaves_it_as_it_was(make_strategy, own):
    dataset = make_strategy().distribute_dataset(Own())
    next(iter(dataset))
    state = changed(dataset.state_dict(), ("own_state",), own)
    source = Own()
    source.next = 3
    fresh = make_strategy().distribute_dataset(source)
    with pytest.raises(ValueError, match="a Own rejects its saved state"):
        fresh.load_state_dict(state)
    assert source.next == 3


@pytest.mark.parametrize("key", ["_num_yielded", "_sampler_iter_yielded", "dataset_state"])
def test_what_a_loader_refuses_when_it_begins_is_said_then(make_strategy, key):
    dataset = make_strategy().distribute_dataset(SOURCES["stateful"]())
    next(iter(dataset))
    state = changed(dataset.state_dict(), ("own_state", key), GONE)
    fresh = make_strategy().distribute_dataset(SOURCES["stateful"]())
    fresh.load_state_dict(state)
    with pytest.raises(ValueError, match="a StatefulDataLoader rejects its saved state"):
        next(iter(fresh))


class ByEpoch:
    """An order that is a function of the epoch, as samplers have it."""

    def __init__(self, epoch):
        if epoch is not None:
            self.epoch = epoch

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __iter__(self):
        generator = torch.Generator().manual_seed(int(self.epoch))
        return iter(torch.randperm(8, generator=generator).tolist())


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8])
@pytest.mark.parametrize("first", [0, None], ids=["made with an epoch", "and without"])
def test_a_sampler_resumes_in_its_epoch_for_any_type_of_number(make_strategy, kind, first):
    def create(epoch):
        return DataLoader(torch.arange(8), batch_size=2, sampler=ByEpoch(epoch))

    dataset = make_strategy().distribute_dataset(create(kind(3)))
    whole = list(map(str, dataset))
    next(iter(dataset))
    state = dataset.state_dict()
    fresh = make_strategy().distribute_dataset(create(first))
    fresh.load_state_dict(state)
    assert list(map(str, fresh)) == whole[1:]
    other = make_strategy().distribute_dataset(DataLoader(torch.arange(8), batch_size=2))
    with pytest.raises(ValueError, match="this is no state of a SequentialSampler"):
        other.load_state_dict(state)
