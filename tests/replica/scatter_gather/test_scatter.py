"""Changes that forward makes to an argument of a split call equal one device, or are an error."""

import collections
import copy
import dataclasses
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import mirror
from mirror.errors import BatchError, StrategyError
from mirror.values import ABSENT
from tests.oracle import assert_same
from tests.pairs import each_once


class Plain:
    def __init__(self):
        self.layers, self.calls, self.last = [], 0, None


class Slotted:
    __slots__ = ("last", "total")

    def __init__(self):
        self.total, self.last = torch.zeros(3), None


@dataclasses.dataclass
class Record:
    states: dict = dataclasses.field(default_factory=dict)
    length: int = 0


class Cache:
    """Like a key-value cache: layers made when they are first needed, tensors that grow."""

    def __init__(self):
        self.layers = []
        self.me = self

    def update(self, key):
        if not self.layers:
            self.layers.append(Plain())
        layer = self.layers[0]
        layer.last = key if layer.last is None else torch.cat([layer.last, key], 1)
        layer.calls += 1
        return layer.last


class Model(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.change = change

    def forward(self, x, state):
        h = self.linear(x)
        found = self.change(h, state)
        return h if found is None else found


def append(h, state):
    state.append(h)
    state.append(h.mean())


def replace(h, state):
    state.clear()
    state.append(h)


def extend_by_example(h, state):
    state.extend(h.argmax(1).tolist())


def extend_rows(h, state):
    state.extend(h.unbind())


def set_keys(h, state):
    state["h"] = h
    state["calls"] = state.get("calls", 0) + 1


def nest(h, state):
    state["a"]["b"].append(h)
    state["a"]["c"] = (h, h.sum(1), "name")
    state["me"] = state


def add_elements(h, state):
    state.update(h.argmax(1).tolist())
    state.discard(-1)


def fill_object(h, state):
    state.layers.append(h)
    state.calls += 1
    state.last = state.layers[-1]


def fill_slots(h, state):
    state.total += 1
    state.last = h


def fill_record(h, state):
    state.states["h"] = h
    state.length += h.shape[1]


def return_it(h, state):
    state.last = h
    return {"h": h, "state": state}


def write_in_place(h, state):
    state.add_(1)
    return h + state


def write_inside(h, state):
    state["rows"].mul_(2)
    state["all"].add_(1)


CASES = {
    "list": (lambda n: [], append),
    "deque": (lambda n: collections.deque(maxlen=3), append),
    "replaced": (lambda n: ["a", 1, None], replace),
    "dict": (lambda n: {}, set_keys),
    "ordered dict": (lambda n: collections.OrderedDict(k=1), set_keys),
    "nested": (lambda n: {"a": {"b": []}}, nest),
    "set": (lambda n: {-1, 7}, add_elements),
    "object": (lambda n: Plain(), fill_object),
    "slots": (lambda n: Slotted(), fill_slots),
    "dataclass": (lambda n: Record(), fill_record),
    "returned": (lambda n: Plain(), return_it),
    "tensor": (lambda n: torch.zeros(n, 3), write_in_place),
    "whole tensor": (lambda n: torch.zeros(1, 3), write_in_place),
    "0-d tensor": (lambda n: torch.tensor(1), write_in_place),
    "tensors inside": (
        lambda n: {"rows": torch.ones(n, 2), "all": torch.zeros(4, 2)},
        write_inside,
    ),
    "array": (lambda n: np.zeros((n, 3)), lambda h, state: state.__iadd__(1) is None),
    "cache": (lambda n: Cache(), lambda h, state: state.update(h[:, None]).sum(1)),
}


def contents(value, seen=()):
    """Returns what a state holds in comparable form."""
    if id(value) in seen:
        return "itself"
    seen = (*seen, id(value))
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, (list, tuple, collections.deque)):
        return [contents(child, seen) for child in value]
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, Slotted):
        return {"total": value.total, "last": contents(value.last, seen)}
    if isinstance(value, (Plain, Record, Cache)):
        value = vars(value)
    if isinstance(value, dict):
        return {key: contents(child, seen) for key, child in value.items()}
    return value


SIZES = [2, 3, 5, 7]


@each_once(case=CASES, n=[2, 3])
def test_what_forward_changes_is_joined_into_the_callers_object(case, n, make_strategy):
    make, change = CASES[case]
    plain = Model(change)
    model = make_strategy(n).mirror(copy.deepcopy(plain))
    for size in SIZES:
        x, expected, actual = torch.randn(size, 3), make(size), make(size)
        if case == "tensors inside" and size == 4:
            continue
        for _ in range(3):
            result, joined = plain(x, expected), model(x, actual)
            if isinstance(joined, dict):
                assert joined["state"] is actual
            assert_same(contents(joined), contents(result))
            assert_same(contents(actual), contents(expected))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("change", [extend_by_example, extend_rows])
def test_a_list_that_grows_by_the_examples_has_them_in_order(change, n, make_strategy):
    plain = Model(change)
    model = make_strategy(n).mirror(copy.deepcopy(plain))
    for size in (5, 7):  # of parts of one example each, nothing tells
        x, expected, actual = torch.randn(size, 3), [], []
        plain(x, expected)
        model(x, actual)
        assert_same(actual, expected)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_counts_of_examples_stay_per_replica(size, make_strategy):
    def count(h, state):
        state["n"] = state.get("n", 0) + len(h)

    model = make_strategy(2).mirror(Model(count))
    state = {}
    for step in (1, 2):
        model(torch.randn(size, 3), state)
        assert sum(state["n"].values) == step * size
    with pytest.raises(TypeError, match="A split call has returned it"):
        state["n"] + 1


def test_gradients_flow_through_what_was_joined(make_strategy):
    plain = Model(set_keys)
    model = make_strategy(2).mirror(copy.deepcopy(plain))
    x = torch.randn(5, 3)
    for m in (plain, model):
        state = {}
        m(x, state)
        m(state["h"], state)
        state["h"].square().mean().backward()
    assert_same(model.linear.weight.grad, plain.linear.weight.grad)


@pytest.mark.parametrize("make", [lambda: iter([1]), lambda: (i for i in range(3)), zip])
def test_an_iterator_is_refused(make, make_strategy):
    model = make_strategy(2).mirror(Model(lambda h, state: next(state)))
    with pytest.raises(StrategyError, match=r"iterator .* pass a list"):
        model(torch.randn(4, 3), make())


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_argument_is_refused_if_it_would_be_split(layout, make_strategy):
    model = make_strategy(2).mirror(Model(lambda h, a: a @ h if len(h) == 4 else h))
    matrix = torch.eye(4).to_sparse(layout=getattr(torch, layout))
    with pytest.raises(BatchError, match=f"a {layout} tensor of shape .* strategy.run"):
        model(torch.randn(4, 3), matrix)
    assert model(torch.randn(5, 3), matrix).shape == (5, 3)  # it goes whole to every replica


def times_lengths(h, entries):
    return torch.stack([row * len(entry) for row, entry in zip(h, entries, strict=False)])


@pytest.mark.parametrize("size", [5, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: ["a" * i for i in range(n)],
        lambda n: tuple("a" * i for i in range(n)),
        lambda n: [torch.zeros(i + n + 1) for i in range(n)],
        lambda n: [dict.fromkeys(range(i), torch.zeros(i, 2)) for i in range(n)],
        lambda n: [[1] * i for i in range(n)],
    ],
)
def test_a_list_with_an_entry_for_each_example_warns_and_an_array_of_it_is_split(
    make, size, make_strategy
):
    plain = Model(times_lengths)
    model = make_strategy(2).mirror(copy.deepcopy(plain))
    x, entries = torch.randn(size, 3), make(size)
    with pytest.warns(UserWarning, match="only tensors and arrays are split") as told:
        model(x, entries)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, entries)  # once for each module
        array = np.fromiter(entries, dtype=object)
        assert_same(model(x, array), plain(x, array))
    assert [one.filename for one in told] == [__file__]


def test_lists_of_batched_tensors_sizes_and_states_do_not_warn(make_strategy):
    model = make_strategy(2).mirror(Model(lambda h, others: h))
    x, state = torch.randn(2, 3), torch.zeros(1, 2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, [[x, x.sin()], (4, 4), (state, state), {"x": x, "y": x}, ["one"], ["a", 1]])


def test_a_change_that_cannot_be_joined_names_the_argument_and_changes_nothing(make_strategy):
    def grow(h, state):
        state["seen"] += [1] * int(h.sum() > 0)

    model = make_strategy(2).mirror(Model(grow))
    with torch.no_grad():
        model.linear.weight.copy_(torch.eye(3))
        model.linear.bias.zero_()
    state = {"seen": [0]}
    x = torch.tensor([[1.0, 1, 1], [1, 1, 1], [-1, -1, -1], [-1, -1, -1]])
    with pytest.raises(StrategyError, match=r"argument 1 \(dict, a list in it\)"):
        model(x, state)
    assert state == {"seen": [0]}


def test_a_change_of_an_object_that_replicas_share_is_refused(make_strategy):
    class Holder:
        def __init__(self, module):
            self.module, self.calls = module, 0

    def count(h, state):
        state.calls += 1

    model = make_strategy(2).mirror(Model(count))
    with pytest.raises(StrategyError, match=r"argument 1 \(Holder\).*all replicas share"):
        model(torch.randn(4, 3), Holder(nn.Linear(1, 1)))
    unchanged = make_strategy(2).mirror(Model(lambda h, state: None))
    assert unchanged(torch.zeros(4, 3), Holder(nn.Linear(1, 1))).shape == (4, 3)


def test_a_large_tensor_that_all_share_may_be_read_but_not_written(make_strategy):
    large = torch.zeros(3, 2**18)
    read = make_strategy(2).mirror(Model(lambda h, state: h + state.sum()))
    assert read(torch.randn(4, 3), large).shape == (4, 3)
    write = make_strategy(2).mirror(Model(write_inside))
    with pytest.raises(StrategyError, match="in place a tensor of shape"):
        write(torch.randn(4, 3), {"rows": torch.ones(4, 2), "all": large})


@pytest.mark.parametrize("n", [2, 3])
def test_a_hidden_state_that_cannot_be_joined_goes_into_the_next_call(n, make_strategy):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x, hidden=None):
            return self.lstm(x, hidden)

    plain = Recurrent()
    model = make_strategy(n).mirror(copy.deepcopy(plain))
    x = torch.randn(5, 6, 3)
    expected, hidden = plain(x[:, :3])
    expected, _ = plain(x[:, 3:], hidden)
    _, hidden = model(x[:, :3])
    assert isinstance(hidden[0], mirror.PerReplica)
    with pytest.raises(
        TypeError, match=r"A split call has returned it: its replicas had .* of shape \(1, "
    ):
        hidden[0] + 1
    actual, _ = model(x[:, 3:], hidden)
    assert_same(actual, expected)
    expected.sum().backward()
    actual.sum().backward()
    assert_same(model.lstm.weight_hh_l0.grad, plain.lstm.weight_hh_l0.grad)
    with pytest.raises(BatchError, match="no part for replica 1"):
        model(x, [mirror.PerReplica([h.values[0], *[ABSENT] * (n - 1)]) for h in hidden])


def test_parts_of_a_loader_go_into_a_call_as_they_are(make_strategy):
    strategy = make_strategy(3)
    plain = nn.Linear(3, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(7, 3)
    options = mirror.InputOptions(weights=[3, 1, 1])
    (parts,) = strategy.distribute_dataset([x], options)
    assert_same(model(parts), plain(x))


def test_one_object_given_twice_is_one_object_in_forward(make_strategy):
    class Same(nn.Linear):
        def forward(self, a, b, state):
            assert a is b
            assert state["x"] is a
            return super().forward(a)

    x = torch.randn(4, 3)
    make_strategy(2).mirror(Same(3, 3))(x, x, {"x": x})


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("how", ["keyword", "positional", "nested"])
def test_a_sum_over_the_number_of_items_is_exact_for_ragged_items(how, as_tensor, make_strategy):
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x, mask, num_items_in_batch=None, loss_kwargs=None):
            items = (loss_kwargs or {}).get("num_items_in_batch", num_items_in_batch)
            y = self.linear(x).squeeze(-1)
            return (y.square() * mask).sum() / items + y.mean()

    plain = Summed()
    model = make_strategy(3).mirror(copy.deepcopy(plain))
    for size in (1, 2, 5, 7):
        x, mask = torch.randn(size, 4, 3), torch.rand(size, 4) < 0.5
        mask[0, 0] = True
        items = mask.sum() if as_tensor else int(mask.sum())
        losses = []
        for m in (plain, model):
            m.zero_grad()
            if how == "keyword":
                loss = m(x, mask, num_items_in_batch=items)
            elif how == "positional":
                loss = m(x, mask, items)
            else:
                loss = m(x, mask, loss_kwargs={"num_items_in_batch": items})
            loss.backward()
            losses.append(loss)
        assert_same(losses[1], losses[0])
        assert_same(model.linear.weight.grad, plain.linear.weight.grad)


def test_an_error_inside_a_split_call_says_how_it_was_split(make_strategy):
    class Masked(nn.Linear):
        def forward(self, x, mask, *, scale):
            return super().forward(x) * scale + mask @ x

    model = make_strategy(2).mirror(Masked(3, 3))
    with pytest.raises(RuntimeError, match=r"shapes cannot|size mismatch") as caught:
        model(torch.randn(4, 3), torch.eye(4), scale=torch.ones(3))
    notes = "\n".join(caught.value.__notes__)
    assert "in replica 0 of 2" in notes
    assert "call of Masked was split over 2 replicas by the first dimension, 4" in notes
    assert "argument 1 of shape (4, 4) went as (2, 4), (2, 4)" in notes
    assert "whole, to every replica, went argument 'scale' of shape (3,)" in notes
    assert "strategy.run" in notes
    assert any(entry.name == "forward" for entry in caught.traceback)


class Failing(nn.Linear):
    def __init__(self, error):
        super().__init__(3, 3)
        self.make = error

    def forward(self, x):
        raise self.make


@pytest.mark.parametrize(
    ("error", "has_note"),
    [
        (ValueError("Expected input batch_size (8) to match target batch_size (4)."), True),
        (IndexError("index 4 is out of bounds"), True),
        (NotImplementedError("Could not run 'aten::equal' with 'SparseCPU'"), False),
        (ValueError("Expected more than 1 value per channel when training"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (mirror.BatchError("has its own remedy"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_note_on_the_split_is_added_where_another_split_may_be_the_remedy(
    error, has_note, make_strategy
):
    model = make_strategy(2).mirror(Failing(error))
    with pytest.raises(type(error)) as caught:
        model(torch.ones(4, 3))
    assert any("was split over" in note for note in caught.value.__notes__) == has_note


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, kept):
        kept["names"] = frozenset(["a", "b"])
        kept["sizes"] = frozenset([len(x)])
        return self.linear(x)


def test_what_cannot_change_is_joined_where_all_parts_have_the_same(make_strategy):
    kept = {}
    make_strategy(2).mirror(Frozen())(torch.ones(6, 2), kept)
    assert kept["names"] == frozenset(["a", "b"])


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, scores):
        return self.linear(x).squeeze(1) * scores


def test_what_has_the_examples_as_its_only_dimension_is_split(make_strategy):
    x, scores, plain = torch.arange(12.0).view(6, 2), torch.arange(6.0), Scored()
    expected = plain(x, scores)
    assert_same(make_strategy(2).mirror(plain)(x, scores), expected)
