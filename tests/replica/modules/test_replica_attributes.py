"""Attributes that forward sets on a module: as on one device, in every context."""

import collections
import contextlib
import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.oracle import assert_same, assert_same_training
from tests.pairs import each_once, pairwise


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.last = nn.Linear(5, 3)


class CountsInPython(Base):
    steps = 0

    def forward(self, x):
        self.steps += 1
        return self.last(torch.tanh(self.first(x))) / self.steps


class KeepsAuxiliaryLoss(Base):
    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        self.penalty = hidden.square().mean()
        return self.last(hidden)


class KeepsConstantLoss(Base):
    """Its loss is 1 on every replica, and yet each part has a gradient of its own."""

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        self.penalty = (hidden - hidden.detach()).mean() + 1
        return self.last(hidden)


class Recurrent(Base):
    """Carries its state from call to call, one row per example."""

    def __init__(self):
        super().__init__()
        self.state = None

    def forward(self, x):
        previous = x.new_zeros(len(x), 5) if self.state is None else self.state
        hidden = torch.tanh(self.first(x) + previous)
        self.state = hidden.detach()
        return self.last(hidden)


class CarriesLSTMState(Base):
    """Carries a structure; its batch is not the first dimension."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x):
        state = self.state if hasattr(self, "state") else None
        out, state = self.lstm(x.unsqueeze(1), state)
        self.state = tuple(part.detach() for part in state)
        return self.last(out[:, 0])


class Averages(Base):
    """Keeps a running mean in a plain attribute that it replaces."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, x):
        if self.training:
            self.mean = self.mean + 1
        return self.last(torch.tanh(self.first(x - 0.1 * self.mean)))


class DeletesWhatItSets(Base):
    def forward(self, x):
        self.scratch = self.first(x)
        out = self.last(torch.tanh(self.scratch))
        del self.scratch
        assert not hasattr(self, "scratch")
        return out


class LooksAtASize(Base):
    """Recreates something if more than the number of examples has changed."""

    size = None
    made = 0

    def forward(self, x):
        hidden = self.first(x)
        if self.size != hidden.shape[1:]:
            self.size = hidden.shape[1:]
            self.made += 1
        return self.last(torch.tanh(hidden)) / self.made


class KeepsAGrid(Base):
    """Keeps a tensor with a first dimension of 1, and only reads it afterwards."""

    grid = None

    def forward(self, x):
        if self.grid is None:
            self.grid = torch.linspace(-1, 1, 5).unsqueeze(0)
        return self.last(torch.tanh(self.first(x) + self.grid.repeat(len(x), 1)))


MODELS = [
    CountsInPython,
    KeepsAGrid,
    LooksAtASize,
    KeepsAuxiliaryLoss,
    KeepsConstantLoss,
    Recurrent,
    CarriesLSTMState,
    Averages,
    DeletesWhatItSets,
]


class DeletesAndSets(Base):
    """Deletes what the module was made with, before any forward has set it."""

    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.cache = torch.ones(3)

    def forward(self, x):
        scale = self.scale
        del self.scale
        assert not hasattr(self, "scale")
        if hasattr(self, "cache"):
            del self.cache
        self.scale = scale
        return self.last(torch.tanh(self.first(x))) * scale


def make_step(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if isinstance(model, (KeepsAuxiliaryLoss, KeepsConstantLoss)):
            loss = loss + model.penalty
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def batches(sizes):
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator))
        for n in sizes
    ]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, data, strategy=None):
    """Steps in an unchanged loop, or inside run of the strategy; returns the losses."""
    step = make_step(model, optimizer)
    if strategy is None:
        return [step(*batch) for batch in data]
    return [
        strategy.reduce("mean", strategy.run(step, args=batch))
        for batch in strategy.distribute_dataset(data)
    ]


@each_once(kind=MODELS, n=[2, 3], in_run=[False, True])
def test_forward_sets_attributes_as_on_one_device(kind, n, in_run, make_strategy):
    carries = kind in (Recurrent, CarriesLSTMState)
    data = batches((7, 7, 7) if carries else (7, 5, 2, 1, 8))
    plain = kind()
    model, strategy = copy.deepcopy(plain), make_strategy(n)
    strategy.mirror(model)
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    expected = train(plain, plain_optimizer, data)
    assert_same(train(model, optimizer, data, strategy if in_run else None), expected)
    assert_same_training(model, optimizer, plain, plain_optimizer)
    strategy.check_replicas()
    for name in vars(plain).keys() - vars(nn.Module()).keys():
        if kind not in (CarriesLSTMState, KeepsAGrid):
            assert_same(getattr(model, name), getattr(plain, name))


@pytest.mark.parametrize("in_run", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_a_tensor_set_after_mirroring_is_each_replicas_own(n, in_run, make_strategy):
    class CountsInPlace(Base):
        def forward(self, x):
            self.calls += 1
            return self.last(torch.tanh(self.first(x))) / self.calls

    plain = CountsInPlace()
    model, strategy = copy.deepcopy(plain), make_strategy(n)
    strategy.mirror(model)
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    for start in (0.0, 5.0):
        for network in (model, plain):
            network.calls = torch.tensor(start)
        data = batches((7, 5, 2, 1))
        expected = train(plain, plain_optimizer, data)
        assert_same(train(model, optimizer, data, strategy if in_run else None), expected)
        assert float(model.calls) == float(plain.calls) == start + 4


@pytest.mark.parametrize("n", [2, 3])
def test_what_is_read_and_then_changed_in_place_is_joined_again(n, make_strategy):
    class Collects(Base):
        def forward(self, x):
            if self.means is None:
                self.means = []
            self.means.append(x.mean())
            return self.last(torch.tanh(self.first(x))) * len(self.means)

    plain = Collects()
    plain.means = None
    model = make_strategy(n).mirror(copy.deepcopy(plain))
    for size in (7, 7, 7):
        x = torch.randn(size, 4)
        assert_same(model(x), plain(x))
        assert_same(list(model.means), plain.means)


@pytest.mark.parametrize("n", [2, 3])
def test_an_own_tensor_is_updated_in_place_by_its_replica_alone(n, make_strategy):
    class Counts(Base):
        def forward(self, x):
            if self.calls is None:
                self.calls = torch.zeros(())
            self.calls += 1
            return self.last(torch.tanh(self.first(x))) / self.calls

    plain = Counts()
    plain.calls = None
    model = make_strategy(n).mirror(copy.deepcopy(plain))
    for size in (1, 7, 2, 5, 1, 6):  # with replicas that sit out
        x = torch.randn(size, 4)
        assert_same(model(x), plain(x))
        assert_same(model.calls, plain.calls)


def test_what_cannot_be_joined_reads_as_the_parts_and_is_refused_as_a_tensor(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(CarriesLSTMState())
    model(torch.randn(7, 4))
    hidden, _ = model.state
    assert [part.shape for part in strategy.local_results(hidden)] == [(1, 4, 5), (1, 3, 5)]
    with pytest.raises(TypeError, match="PerReplica"):
        hidden + 1


@pytest.mark.parametrize("in_run", [False, True])
def test_what_the_cross_replica_context_sets_goes_to_the_replicas(in_run, make_strategy):
    plain = Recurrent()
    model, strategy = copy.deepcopy(plain), make_strategy(3)
    strategy.mirror(model)
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    data = batches((7, 7))

    def both(change):
        for network in (model, plain):
            change(network)
        expected = train(plain, plain_optimizer, data)
        assert_same(train(model, optimizer, data, strategy if in_run else None), expected)
        assert_same(model.state, plain.state)

    def replace(network):
        network.state = torch.linspace(0, 1, 35).reshape(7, 5)

    def change_in_place(network):
        network.state.mul_(-1)

    def reset(network):
        network.state = None

    def delete(network):
        del network.state
        network.state = None

    for change in (reset, replace, change_in_place, delete):
        both(change)


def test_features_of_a_larger_batch_are_joined_like_those_of_a_smaller_one(make_strategy):
    """Two replicas' parts of a batch of 4 have the shape that the batch of 2 before had."""

    class KeepsFeatures(Base):
        def forward(self, x):
            self.features = self.first(x)
            return self.last(self.features)

    strategy = make_strategy(2)
    model = strategy.mirror(KeepsFeatures())
    for n in (1, 2, 4, 1, 8, 3):
        x = torch.randn(n, 4)
        model(x)
        assert_same(model.features, model.first(x))


def test_a_module_with_own_attributes_is_freed_with_its_last_reference(make_strategy):
    model = make_strategy(2).mirror(KeepsAuxiliaryLoss())
    model(torch.ones(4, 4))
    seen = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert seen() is None
    finally:
        gc.enable()


def test_a_replica_sees_its_own_value_until_the_run_ends(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(Base())

    def step():
        context = mirror.get_replica_context()
        seen = [getattr(model, "record", None)]
        model.record = context.replica_id_in_sync_group
        context.all_reduce("sum", 1)
        seen.append(model.record)
        inside = context.merge_call(lambda strategy: model.record)
        return seen[0] is None, seen[1], inside

    first, own, inside = strategy.run(step)
    assert first.values == (True,) * 3
    assert own.values == inside.values == (0, 1, 2)
    assert model.record.values == (0, 1, 2)


def test_a_run_that_fails_leaves_attributes_as_they_were(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(CountsInPython())
    model(torch.ones(4, 4))

    def step():
        model(torch.ones(2, 4))
        if mirror.get_replica_context().replica_id_in_sync_group == 1:
            raise ArithmeticError("asked for")

    with pytest.raises(ArithmeticError):
        strategy.run(step)
    assert model.steps == 1
    model(torch.ones(4, 4))
    assert model.steps == 2


def test_a_bool_says_that_something_shared_is_done(make_strategy):
    class InstallsOnce(Base):
        def forward(self, x):
            if not getattr(self, "installed", False):
                self.first.register_forward_hook(lambda module, args, out: out * 2)
                self.installed = True
            return self.first(x)

    plain = InstallsOnce()
    model = make_strategy(3).mirror(copy.deepcopy(plain))
    x = torch.randn(6, 4)
    assert_same([model(x), model(x)], [plain(x), plain(x)])
    assert model.installed is True
    assert len(model.first._forward_hooks) == 1


def test_bools_that_differ_between_replicas_are_refused(make_strategy):
    class Alternates(Base):
        turn = False

        def forward(self, x):
            self.turn = not self.turn
            return self.first(x)

    strategy = make_strategy(2)
    model = strategy.mirror(Alternates())
    with pytest.raises(mirror.StrategyError, match="left attribute 'turn' different"):
        model(torch.ones(4, 4))
    assert strategy.run(lambda: 1).values == (1, 1)


def test_copies_and_other_instances_are_ordinary(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(CountsInPython())
    model(torch.ones(4, 4))
    other = CountsInPython()
    for module, steps in (
        (copy.deepcopy(model), 1),
        (pickle.loads(pickle.dumps(model)), 1),
        (other, 0),
    ):
        assert module.steps == steps
        module(torch.ones(2, 4))
        assert module.steps == vars(module)["steps"] == steps + 1
    del other.steps
    assert other.steps == CountsInPython.steps == 0
    assert model.steps == 1


def test_properties_and_modes_work_inside_run(make_strategy):
    class Scaled(Base):
        @property
        def scale(self):
            return self.kept

        @scale.setter
        def scale(self, value):
            self.kept = value * 2

        def forward(self, x):
            self.scale = 1.0
            return self.first(x) * self.scale

    strategy = make_strategy(2)
    model = strategy.mirror(Scaled())
    x = torch.randn(4, 4)
    assert_same(model(x), 2 * model.first(x))
    assert isinstance(Scaled.scale, property)
    assert model.kept == 2.0

    strategy.run(model.eval)
    assert not any(module.training for module in model.modules())


def test_a_value_that_replicas_sat_out_is_missed_with_an_error(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(CarriesLSTMState())
    model(torch.randn(4, 4))
    model(torch.randn(4, 4))
    del model.state
    model(torch.randn(1, 4))
    with pytest.raises((mirror.StrategyError, RuntimeError), match=r"sat out|size"):
        model(torch.randn(4, 4))


@each_once(kind=[*MODELS], in_run=[False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_models_set_attributes_as_on_one_device(kind, in_run, make_strategy):
    torch.compiler.reset()
    data = batches((7, 7, 7))

    class Fresh(kind):  # no replica has set its attributes yet
        pass

    plain = Fresh()
    model, strategy = copy.deepcopy(plain), make_strategy(2)
    strategy.mirror(model)
    model.compile(backend="eager")
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    expected = train(plain, plain_optimizer, data)
    assert_same(train(model, optimizer, data, strategy if in_run else None), expected)
    assert_same_training(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize("in_run", [False, True])
def test_an_attribute_may_be_deleted_before_a_forward_has_set_it(in_run, make_strategy):
    strategy = make_strategy(3)
    plain = DeletesAndSets()
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(6, 4)
    for _ in range(2):
        expected = plain(x)
        if in_run:
            strategy.run(model, (x,))
        else:
            assert_same(model(x), expected)
        assert model.scale == 2.0
        assert not hasattr(model, "cache")
    with pytest.raises(AttributeError, match="never"):
        strategy.run(lambda: delattr(model, "never"))


class SetsTwice(Base):
    def forward(self, x):
        self.state = [1]
        self.state = True
        assert self.state is True
        return self.last(self.first(x))


@pytest.mark.parametrize("n", [2, 3])
def test_a_flag_takes_the_place_of_what_was_set_before(n, make_strategy):
    model = make_strategy(n).mirror(SetsTwice())
    model(torch.ones(6, 4))
    assert model.state is True


def with_auxiliary_loss(loss):
    """A model of a class of its own, as each class is reported once."""

    class WithAuxiliaryLoss(nn.Module):
        """Keeps a 0-d loss as an attribute, as mixtures of experts do."""

        def __init__(self):
            super().__init__()
            self.inner, self.auxiliary = nn.Linear(3, 2), None

        def forward(self, x):
            out = self.inner(x)
            self.auxiliary = loss(out)
            return out

    return WithAuxiliaryLoss()


def train_with_auxiliary_loss(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x in batches:
        loss = model(x).square().mean() + 0.1 * model.auxiliary
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@each_once(
    loss=[torch.mean, torch.sum, lambda out: out.mean(0).square().sum()],
    inside=[True, False],
    n=[1, 2, 3],
)
def test_a_loss_kept_as_an_attribute_is_exact_or_reported(loss, n, inside, make_strategy):
    batches = [torch.randn(size, 3) for size in (7, 7, 5)]
    plain, strategy = with_auxiliary_loss(loss), make_strategy(n)
    expected = train_with_auxiliary_loss(copy.deepcopy(plain), batches)
    with strategy.scope() if inside else contextlib.nullcontext():
        model = strategy.mirror(plain)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = train_with_auxiliary_loss(model, batches)
    if n > 1 and loss not in (torch.mean, torch.sum):
        assert "0-d output of WithAuxiliaryLoss" in str(told[0].message)
        return
    assert not told
    torch.testing.assert_close(found, expected)


CHANGES = {
    "list": (list, lambda seen: seen.append(5)),
    "dict": (dict, lambda seen: seen.__setitem__(len(seen), 5)),
    "set": (set, lambda seen: seen.add(len(seen))),
    "deque": (collections.deque, lambda seen: seen.append(5)),
    "tensor": (lambda: torch.zeros(2), lambda seen: seen.add_(1)),
    "number": (lambda: 3, lambda seen: None),
}


@pairwise(kind=CHANGES, n=[1, 2, 3], inside=[False, True])
def test_what_replicas_did_with_another_module_of_a_class_changes_nothing(kind, n, inside):
    make, change = CHANGES[kind]

    class Keeps(nn.Module):
        def __init__(self, *, replaces):
            super().__init__()
            self.layer, self.seen, self.replaces = nn.Linear(2, 2), make(), replaces

        def forward(self, x):
            if self.replaces:
                self.seen = make()
            else:
                change(self.seen)
            return self.layer(x)

    seen = []
    for replaced_before in (False, True):
        with mirror.MirroredStrategy(["cpu"] * n) as strategy:
            with strategy.scope():
                other, module = Keeps(replaces=True), Keeps(replaces=False)
            with strategy.scope() if inside else contextlib.nullcontext():
                if replaced_before:
                    strategy.run(lambda model=other: model(torch.ones(1, 2)))
                for _ in range(3):
                    strategy.run(lambda model=module: model(torch.ones(1, 2)))
            found = module.seen
            seen.append(found.tolist() if isinstance(found, torch.Tensor) else found)
    assert seen[0] == seen[1]
