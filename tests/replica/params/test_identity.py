"""Mirroring keeps the objects: identity, state_dict, copies and pickles."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same
from tests.replica.params.coherence import Net, momentum, train_a_step
from tests.toy_models import replica_id


def test_the_objects_stay_what_they_were(strategy):
    plain = Net()
    before = list(plain.named_parameters())
    kind = type(plain)
    optimizer = momentum(plain.parameters())
    model = strategy.mirror(plain)

    def check():
        assert type(model) is kind
        assert isinstance(model, Net)
        for (name, p), (old, q) in zip(model.named_parameters(), before, strict=True):
            assert name == old
            assert p is q
            assert isinstance(p, nn.Parameter)
            assert isinstance(p, torch.Tensor)
        held = optimizer.param_groups[0]["params"]
        assert all(p is q for p, (_, q) in zip(held, before, strict=True))
        assert isinstance(model.linear.weight, nn.Parameter)

    check()
    strategy.run(check)
    with strategy.scope():
        check()
    train_a_step(strategy, model, optimizer)
    check()
    assert model.linear.weight is before[0][1]


def test_parameters_can_be_distinguished_and_looked_up(strategy, model):
    parameters = list(model.parameters())
    assert len(set(parameters)) == len(parameters)
    names = {p: name for name, p in model.named_parameters()}
    assert strategy.run(lambda: [names[p] for p in model.parameters()]) == [
        name for name, _ in model.named_parameters()
    ]


def test_every_reference_stands_for_the_current_replicas_copy(strategy, model):
    """Captured in a list, a closure and an optimizer before mirroring's first use."""
    captured = list(model.parameters())

    def fn():
        with torch.no_grad():
            model.linear.weight.fill_(float(replica_id()))
            return captured[0].sum().item(), torch.stack(captured[:1]).sum().item()

    direct, stacked = strategy.run(fn)
    assert direct.values == (0.0, 4.0, 8.0)
    assert stacked.values == (0.0, 4.0, 8.0)


def test_state_dict_has_the_plain_keys_and_plain_tensors(strategy, model):
    plain = Net()
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert type(state) is type(plain.state_dict())
    assert state._metadata == plain.state_dict()._metadata
    for key, value in state.items():
        assert type(value) is torch.Tensor, key
        assert not mirror.is_mirrored(value)
        assert not value.requires_grad
    plain.load_state_dict(state)
    plain.load_state_dict(torch.load(saved(state), weights_only=True))


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def test_state_dict_in_run_is_the_replicas_own(strategy, model):
    strategy.run(lambda: model.shift.fill_(float(replica_id())))
    states = strategy.run(lambda: model.state_dict()["shift"].clone())
    assert [v[0].item() for v in states.values] == [0.0, 1.0, 2.0]


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": lambda module: torch.load(saved(module), weights_only=False),
}


@pytest.mark.parametrize("in_scope", [False, True])
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES.keys())
def test_a_copy_is_plain_and_independent(make, in_scope, strategy, model):
    optimizer = momentum(model.parameters())
    train_a_step(strategy, model, optimizer)
    if in_scope:
        with strategy.scope():
            duplicate = make(model)
            duplicate(torch.randn(6, 2))
    else:
        duplicate = make(model)
    assert type(duplicate) is Net
    assert not mirror.is_mirrored(duplicate)
    for tensor in (*duplicate.parameters(), *duplicate.buffers()):
        assert not mirror.is_mirrored(tensor)
        assert type(tensor) in (nn.Parameter, torch.Tensor)
    if not in_scope:
        assert_same(duplicate.state_dict(), model.state_dict(), tolerance=0)
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        duplicate.linear.weight.fill_(100.0)
    assert_same(model.state_dict(), state, tolerance=0)
    calls = []
    duplicate.register_forward_hook(lambda *_: calls.append(1))
    duplicate(torch.randn(6, 2)).sum().backward()
    assert len(calls) == 1  # not split


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES.keys())
def test_a_copy_can_be_mirrored_again(make, strategy, model):
    duplicate = make(model)
    strategy.mirror(duplicate)
    x = torch.randn(9, 2)
    assert_same(duplicate.eval()(x), model.eval()(x))
    assert mirror.is_mirrored(duplicate)


def test_a_copy_made_in_run_is_the_replicas_own_and_plain(strategy, model):
    def fn():
        duplicate = copy.deepcopy(model)
        assert not mirror.is_mirrored(duplicate.linear.weight)
        return duplicate.shift.sum()

    strategy.run(lambda: model.shift.fill_(float(replica_id())))
    assert [v.item() for v in strategy.run(fn).values] == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("make", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copied_optimizer_is_plain(make, strategy, model):
    optimizer = momentum(model.parameters())
    train_a_step(strategy, model, optimizer)
    duplicate_model, duplicate = make((model, optimizer))
    assert not mirror.is_mirrored(duplicate)
    held = duplicate.param_groups[0]["params"]
    assert all(p is q for p, q in zip(held, duplicate_model.parameters(), strict=True))
    assert_same(duplicate.state_dict(), optimizer.state_dict(), tolerance=0)
    duplicate_model(torch.randn(8, 2)).sum().backward()
    duplicate.step()


def test_a_copied_parameter_is_plain(strategy, model):
    duplicate = copy.deepcopy(model.linear.weight)
    assert type(duplicate) is nn.Parameter
    assert not mirror.is_mirrored(duplicate)
    assert not mirror.is_mirrored(model.linear.weight.detach().clone())
    assert not mirror.is_mirrored(model.linear.weight * 2)


def test_is_mirrored_takes_every_kind_of_object(strategy, model):
    optimizer = momentum(model.parameters())
    mirrored = [model, model.linear, model.linear.weight, model.shift, optimizer]
    plain = Net()
    plain_optimizer = momentum(plain.parameters())
    unmirrored = [plain, plain.linear.weight, plain.shift, plain_optimizer, torch.ones(1), 3]
    assert [mirror.is_mirrored(x) for x in mirrored] == [True] * 5
    assert [mirror.is_mirrored(x) for x in unmirrored] == [False] * 6


def test_mirroring_twice_changes_nothing(strategy, model):
    before = copy.deepcopy(model.state_dict())
    assert strategy.mirror(model) is model
    assert_same(model.state_dict(), before, tolerance=0)
    assert strategy.check_replicas() == 4


def test_a_model_belongs_to_one_strategy(strategy, model, make_strategy):
    with pytest.raises(mirror.StrategyError):
        make_strategy(2).mirror(model)
    assert_same(model(torch.ones(6, 2)).shape, (6, 2))


def test_a_model_without_references_is_freed(strategy):
    """Also after its gradients were looked at in the cross-replica context."""

    def use():
        model = strategy.mirror(Net())
        train_a_step(strategy, model, momentum(model.parameters()))
        strategy.run(lambda: model.linear.weight.sum())
        weight = model.linear.weight
        return [weakref.ref(x) for x in (model, weight, weight.data, weight.grad)]

    references = use()
    gc.collect()
    strategy.run(lambda: None)
    gc.collect()
    assert [r() for r in references] == [None] * 4
    assert strategy.check_replicas() == 0
