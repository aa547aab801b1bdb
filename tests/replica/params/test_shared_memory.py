"""Where parameters lie: which share memory, and that each replica's tensors are one memory."""

import gc
import weakref

import pytest
import torch
from torch import nn

import mirror
from mirror.errors import ReplicaMismatchError
from mirror.replica.optimizers.param_groups import ParamGroupsView
from mirror.replica.params.mirrored_tensor import DATA, raw_set_data
from mirror.replica.params.shared_memory import lie_alike
from tests.gpu.fake import FakeGpus
from tests.oracle import assert_same, in_run
from tests.pairs import each_once

X = torch.linspace(-1, 1, 12).view(6, 2)


def pair():
    return nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})


def tie(model):
    model["b"].weight.data = model["a"].weight.data


def train(model, optimizer):
    optimizer.zero_grad()
    model["b"](model["a"](X)).square().mean().backward()
    optimizer.step()


def assert_tied(model):
    a, b = model["a"].weight._mirrored, model["b"].weight._mirrored
    assert all(map(lie_alike, a.targets, b.targets))
    assert a.explain_apart() is b.explain_apart() is None


# Ties


@pytest.mark.parametrize("is_mirrored", [False, True])
def test_with_a_parameter_device_ties_are_those_of_one_device(is_mirrored, central):
    plain = pair()
    strategy, model = central(2), pair()
    model.load_state_dict(plain.state_dict())
    for one in (plain, model):
        if one is plain or not is_mirrored:
            tie(one)
    strategy.mirror(model)
    if is_mirrored:
        tie(model)
    assert_tied(model)
    for one in (plain, model):
        train(one, torch.optim.SGD([one["a"].weight], lr=0.1))  # b's has no step of its own
    assert_same(model.state_dict(), plain.state_dict())
    with torch.no_grad():
        model["b"].weight.fill_(3.0)
    assert set(strategy.run(lambda: model["a"].weight.sum().item()).values) == {12.0}


def test_a_parameter_that_is_made_of_another_one_is_a_write_to_it(make_strategy):
    model = make_strategy(3).mirror(pair())
    model["b"].weight = nn.Parameter(model["a"].weight)
    assert_tied(model)
    with torch.no_grad():
        model["b"].weight.fill_(2.0)
    assert torch.equal(model["a"].weight, torch.full((2, 2), 2.0))


def test_ties_that_replicas_make_in_run_are_kept(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(pair())
    strategy.run(lambda: tie(model))
    assert_tied(model)
    c = nn.Linear(2, 2)
    c.weight.data = model["b"].weight.data
    strategy.mirror(c)
    assert all(map(lie_alike, c.weight._mirrored.targets, model["a"].weight._mirrored.targets))


def test_memory_that_was_given_back_ties_nothing(make_strategy):
    """An address is used again: what lies there now is not in a parameter that has left."""
    strategy = make_strategy(2)
    model = strategy.mirror(pair())
    a = model["a"].weight
    for _ in range(20):
        a.data = torch.ones(2, 2)
        model["b"].weight.data = torch.ones(2, 2)
        mine, others = a._mirrored.targets, model["b"].weight._mirrored.targets
        assert not any(map(lie_alike, mine, others))
    assert len(strategy._group.variables.memory._by_storage) == 4


def test_a_model_that_is_gone_leaves_no_memory(make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(pair())
    strategy.run(lambda: None)
    seen = [weakref.ref(copy) for copy in model["a"].weight._mirrored.copies]
    del model
    gc.collect()
    memory = strategy._group.variables.memory
    assert [reference() for reference in seen] == [None, None]
    assert memory._by_storage == memory._storages == {}


def test_a_tied_model_with_sharded_state_warns_that_it_is_not(make_strategy, caplog):
    strategy = make_strategy(2, optimizer_state="sharded")
    model = strategy.mirror(pair())
    tie(model)
    train(model, torch.optim.Adam(model.parameters(), lr=0.1))
    assert "its parameters 'a.weight' and 'b.weight' share memory" in caplog.text
    strategy.check_replicas()


@pytest.mark.parametrize("value", [torch.empty(0, 2), torch.eye(2).to_sparse()], ids=str)
def test_parameters_without_an_address(value, make_strategy):
    strategy = make_strategy(2)
    model = nn.Linear(2, 2)
    model.other = nn.Parameter(value, requires_grad=False)
    strategy.mirror(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        model(x).square().mean().backward()
        optimizer.step()

    in_run(strategy, step, X)
    strategy.check_replicas()


@each_once(kind=["make_strategy", "central"])
def test_a_tensor_that_replicas_write_in_run_is_named_by_its_parameter(kind, request, caplog):
    strategy = request.getfixturevalue(kind)(2)
    model = strategy.mirror(nn.Linear(2, 2))
    flat = torch.zeros(6)
    model.weight.data = flat[:4].view(2, 2)

    def write(*_):
        flat.add_(1.0)

    strategy.run(lambda: mirror.get_replica_context().merge_call(write))
    write()
    assert set(strategy.run(lambda: model.weight.sum().item()).values) == {8.0}
    assert not caplog.records
    for _ in range(2):
        strategy.run(write)
    (record,) = caplog.records
    assert "shares the memory of parameter 'weight'" in record.getMessage()
    assert "made 2 times" in record.getMessage()


def with_buffer():
    model = nn.Linear(2, 2)
    model.register_buffer("kept", model.weight.detach())
    return model


def test_a_buffer_in_a_parameters_memory_is_there_on_every_replica(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(with_buffer())
    assert all(map(lie_alike, model.kept._mirrored.copies, model.weight._mirrored.targets))

    def write():
        with torch.no_grad():
            model.kept.fill_(2.0)
        return model.weight.sum().item()

    assert strategy.run(write).values == (8.0,) * 3
    assert torch.equal(model.weight, model.kept)


def test_a_buffer_may_lie_in_the_memory_of_a_layer_below(make_strategy):
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("kept", model[0].weight.detach())
    make_strategy(2).mirror(model)
    assert all(map(lie_alike, model.kept._mirrored.copies, model[0].weight._mirrored.targets))


def in_run_by_data(strategy, model):
    strategy.run(lambda: setattr(model.kept, "data", torch.zeros(2, 2)))


def in_run_by_name(strategy, model):
    strategy.run(lambda: setattr(model, "kept", torch.zeros(2, 2)))


def outside_by_data(strategy, model):
    model.kept.data = torch.zeros(2, 2)


@pytest.mark.parametrize("assign", [in_run_by_data, in_run_by_name, outside_by_data])
def test_a_buffer_that_gets_other_memory_leaves_the_parameter_as_it_is(assign, make_strategy):
    strategy = make_strategy(2)
    model = strategy.mirror(with_buffer())
    weight = model.weight.detach().clone()
    assign(strategy, model)
    assert torch.equal(model.kept, torch.zeros(2, 2))
    assert torch.equal(model.weight, weight)
    kept, weights = strategy.run(lambda: (model.kept.sum().item(), model.weight.detach().clone()))
    assert kept.values == (0.0, 0.0)
    assert all(torch.equal(one, weight) for one in weights.values)


def test_after_a_write_that_is_dropped_training_goes_on(make_strategy):
    strategy = make_strategy(2)
    model = with_buffer()
    model.kept = torch.zeros(2, 2)
    strategy.mirror(model)
    state = model.state_dict()
    strategy.run(lambda: model.kept.add_(1.0))
    state["kept"].fill_(5.0)
    with pytest.raises(mirror.StrategyError, match=r"buffer 'kept'.*is dropped"):
        strategy.run(lambda: None)
    assert torch.equal(model.kept, torch.ones(2, 2))
    strategy.run(lambda: model.kept.add_(1.0))
    assert torch.equal(model.kept, torch.full((2, 2), 2.0))


# One memory for all tensors of a parameter


def moved_copy(variable):
    DATA.__set__(variable.copies[1], torch.ones(2, 2))
    return r"copies\[1\] and targets\[1\]"


def moved_target(variable):
    DATA.__set__(variable.targets[0], torch.ones(2, 2))
    return r"copies\[0\] and targets\[0\]"


def moved_object(variable):
    raw_set_data(variable.owner(), torch.ones(2, 2))
    return "the parameter object and its first copy"


def transposed_copy(variable):
    DATA.__set__(variable.copies[1], variable.copies[1].detach().t())
    return r"copies\[1\] and targets\[1\]"


@each_once(
    move=[moved_copy, moved_target, moved_object, transposed_copy],
    kind=["replicated", "sharded", "central"],
)
def test_check_replicas_names_a_parameter_that_lies_in_two_places(move, kind, request):
    if kind == "central":
        strategy = request.getfixturevalue("central")(2)
    else:
        strategy = request.getfixturevalue("make_strategy")(2, optimizer_state=kind)
    model = strategy.mirror(pair())
    variable = model["a"].weight._mirrored
    kept = [DATA.__get__(tensor) for tensor in (*variable.copies, *variable.targets)]
    what = move(variable)
    if move is moved_target and kind != "central":
        strategy.check_replicas()  # what optimizers step follows what forward reads
        return
    with pytest.raises(ReplicaMismatchError, match=rf"'a\.weight' lies in two places: {what}"):
        strategy.check_replicas()
    for tensor, data in zip((*variable.copies, *variable.targets), kept, strict=True):
        DATA.__set__(tensor, data)
    raw_set_data(variable.owner(), variable.shown.detach())


def test_values_that_code_below_python_sets_reach_all_replicas(make_strategy):
    strategy = make_strategy(3)
    model = strategy.mirror(pair())
    weight = model["a"].weight
    DATA.__set__(weight._mirrored.shown, torch.full((2, 2), 5.0))
    assert set(strategy.run(lambda: model["a"].weight.sum().item()).values) == {20.0}
    assert torch.equal(weight, torch.full((2, 2), 5.0))
    strategy.check_replicas()


@pytest.mark.parametrize("way", [1, 3])
def test_what_a_step_assigns_before_it_raises_stays(way, make_strategy):
    strategy = make_strategy(2, own_steps=True)
    model = strategy.mirror(nn.Linear(2, 2))

    class Raising(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                p.data = torch.full_like(p, 7.0)
            raise ArithmeticError

    optimizer = Raising(model.parameters(), lr=0.1)

    def step(x):
        model(x).square().mean().backward()
        optimizer.step()

    with pytest.raises(ArithmeticError):
        step(X) if way == 1 else in_run(strategy, step, X)
    assert set(strategy.run(lambda: model.weight.sum().item()).values) == {28.0}
    strategy.check_replicas()


def test_different_values_that_replicas_set_below_python_are_refused(make_strategy):
    strategy = make_strategy(2, own_steps=True)
    model = strategy.mirror(pair())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        r = mirror.get_replica_context().replica_id_in_sync_group
        value = torch.full((2, 2), float(r))
        with torch.no_grad():
            torch.ops.aten.set_.source_Tensor(model["a"].weight, value)
        model["a"](x).square().mean().backward()
        optimizer.step()

    with pytest.raises(mirror.StrategyError, match=r"\.data of parameter 'a\.weight'"):
        in_run(strategy, step, X)


def test_a_learning_rate_on_a_gpu_is_on_each_replicas_own():
    with FakeGpus(2), mirror.MirroredStrategy(["cuda:0", "cuda:1"], "naive") as strategy:
        model = strategy.mirror(nn.Linear(2, 2))
        rate, on_cpu = torch.tensor(0.5, device="cuda:0"), torch.tensor(0.5)
        for given, expected in ((rate, ["cuda:0", "cuda:1"]), (on_cpu, ["cpu", "cpu"])):
            groups = [{"params": list(model.parameters()), "lr": given}]
            view = ParamGroupsView(groups)
            rates = [view.groups_of(r, groups)[0]["lr"] for r in (0, 1)]
            assert [str(rate.device) for rate in rates] == expected
            assert rates[1] is not given
