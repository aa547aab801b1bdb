"""What the cross-replica context changes reaches every replica; objects stay what they were."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from tests.oracle import assert_same

N = 3


class Net(nn.Module):
    """Linear, BatchNorm and a buffer of its own; small values, so that changes stand out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x):
        return self.norm(self.linear(x) + self.shift)


@pytest.fixture
def strategy(make_strategy):
    return make_strategy(N)


@pytest.fixture
def model(strategy):
    return strategy.mirror(Net())


def here():
    return mirror.get_replica_context().replica_id_in_sync_group


def seen(strategy, read):
    """What ``read()`` gives on each replica; tensors are copied."""

    def fn():
        value = read()
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    return strategy.local_results(strategy.run(fn))


def assert_all_see(strategy, read, expected):
    for r, value in enumerate(seen(strategy, read)):
        assert_same(value, expected, f"replica {r}", tolerance=0)
    assert_same(read(), expected, "cross-replica context", tolerance=0)


def train_a_step(strategy, model, optimizer, x=None):
    """Leaves gradients, optimizer state and used buffers behind."""
    x = torch.randn(12, 2) if x is None else x
    optimizer.zero_grad()
    model(x).square().sum(1).mean().backward()
    optimizer.step()


# Every way to change a parameter. Afterwards it is full of sevens.

NEW = torch.full((2, 2), 7.0)


def no_grad(change):
    def changed(model):
        with torch.no_grad():
            change(model)

    return changed


def assign_data(model):
    model.linear.weight.data = NEW.clone()


def keep_a_handle_to_data(model):
    handle = model.linear.weight.data
    handle.fill_(7.0)


def swap_with_set(model):
    model.linear.weight.set_(NEW.clone())


def load_state(model):
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict({**state, "linear.weight": NEW})


def load_state_assign(model):
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict({**state, "linear.weight": NEW.clone()}, assign=True)


def write_to_state_dict(model):
    model.state_dict()["linear.weight"].fill_(7.0)


def write_to_detached(model):
    model.linear.weight.detach().fill_(7.0)


def write_to_view(model):
    view = model.linear.weight.view(4)
    view[:2] = 7.0
    view[2:] = 7.0


def write_through_numpy(model):
    model.linear.weight.data.numpy()[:] = 7.0


def write_with_foreach(model):
    torch._foreach_mul_([model.linear.weight], 0.0)
    torch._foreach_add_([model.linear.weight], 7.0)


def new_parameter(model):
    model.linear.weight = nn.Parameter(NEW.clone())


def new_module(model):
    model.linear = nn.Linear(2, 2)
    with torch.no_grad():
        model.linear.weight.fill_(7.0)


def apply_function(model):
    model.apply(lambda m: m.weight.data.fill_(7.0) if isinstance(m, nn.Linear) else None)


def vector_to_parameters(model):
    nn.utils.vector_to_parameters(torch.full((4,), 7.0), [model.linear.weight])


CHANGES = {
    "data-assigned": assign_data,
    "data-copied": lambda m: m.linear.weight.data.copy_(NEW),
    "data-filled": lambda m: m.linear.weight.data.fill_(7.0),
    "data-indexed": lambda m: m.linear.weight.data.__setitem__(slice(None), 7.0),
    "data-handle": keep_a_handle_to_data,
    "copied": no_grad(lambda m: m.linear.weight.copy_(NEW)),
    "filled": no_grad(lambda m: m.linear.weight.fill_(7.0)),
    "indexed": no_grad(lambda m: m.linear.weight.__setitem__(slice(None), 7.0)),
    "in-place-arithmetic": no_grad(lambda m: m.linear.weight.mul_(0).add_(7)),
    "set": no_grad(swap_with_set),
    "init": lambda m: nn.init.constant_(m.linear.weight, 7.0),
    "load_state_dict": load_state,
    "load_state_dict-assign": load_state_assign,
    "state_dict-written": write_to_state_dict,
    "detached-written": write_to_detached,
    "view-written": no_grad(write_to_view),
    "numpy-written": write_through_numpy,
    "foreach": no_grad(write_with_foreach),
    "new-parameter": new_parameter,
    "new-module": new_module,
    "apply": apply_function,
    "vector_to_parameters": vector_to_parameters,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("used_before", [False, True])
def test_a_changed_parameter_reaches_every_replica(used_before, change, strategy, model):
    if used_before:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train_a_step(strategy, model, optimizer)
    change(model)
    assert_all_see(strategy, lambda: model.linear.weight, NEW)
    strategy.check_replicas()
    assert mirror.is_mirrored(model.linear.weight)


def test_a_handle_to_data_kept_for_long_writes_to_every_replica(strategy, model):
    handle = model.linear.weight.data
    for value in (1.0, 2.0, 3.0):
        handle.fill_(value)
        assert_all_see(strategy, lambda: model.linear.weight, torch.full((2, 2), value))
        train_a_step(strategy, model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_parameter_is_used_by_the_next_transparent_call(change, strategy, model):
    plain = Net().eval()
    model.eval()
    model(torch.randn(9, 2))
    change(model)
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    x = torch.randn(9, 2)
    assert_same(model(x), plain(x))
    if change is not new_module:
        assert_same(plain.linear.weight.detach(), NEW, tolerance=0)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_training_goes_on_from_a_changed_parameter(change, strategy):
    """SGD without momentum, as a new parameter has no state; a fresh optimizer sees it."""
    plain = nn.Sequential()
    plain.linear = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(11, 2)
    for m in (plain, model):
        m.linear(x).square().mean().backward()
        change(m)
        if change is new_module:
            m.linear.bias = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            m.linear(x).square().mean().backward()
            optimizer.step()
    assert_same(model.state_dict(), plain.state_dict())
    strategy.check_replicas()


# Gradients


def with_gradients(strategy):
    plain = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(10, 2)
    for m in (plain, model):
        m(x).square().mean().backward()
    return plain, model


def set_grad(p):
    p.grad = torch.full_like(p, 3.0)


def set_grad_data(p):
    p.grad.data = torch.full_like(p, 3.0)


def mul_under_no_grad(p):
    with torch.no_grad():
        p.grad *= 2.0


GRADIENT_CHANGES = {
    "assigned": set_grad,
    "none": lambda p: setattr(p, "grad", None),
    "multiplied": lambda p: p.grad.mul_(0.5),
    "multiplied-data": lambda p: p.grad.data.mul_(0.5),
    "data-assigned": set_grad_data,
    "no-grad": mul_under_no_grad,
    "copied": lambda p: p.grad.copy_(torch.ones_like(p)),
    "zeroed": lambda p: p.grad.zero_(),
    "indexed": lambda p: p.grad.__setitem__(0, 9.0),
    "clipped": lambda p: nn.utils.clip_grad_value_([p], 0.01),
    "noise": lambda p: p.grad.add_(torch.arange(p.numel()).view_as(p)),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("change", GRADIENT_CHANGES.values(), ids=GRADIENT_CHANGES.keys())
def test_a_changed_gradient_reaches_every_replica(change, inside, strategy):
    plain, model = with_gradients(strategy)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for m in (plain, model):
        change(m.weight)
    expected = plain.weight.grad
    for value in seen(strategy, lambda: model.weight.grad):
        assert_same(value, expected)
    optimizers[0].step()
    if inside:
        strategy.run(optimizers[1].step)
    else:
        optimizers[1].step()
    assert_same(model.state_dict(), plain.state_dict())
    strategy.check_replicas()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("who", ["model", "optimizer"])
def test_zero_grad_outside_run_clears_every_replica(who, set_to_none, strategy):
    _, model = with_gradients(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model if who == "model" else optimizer).zero_grad(set_to_none=set_to_none)
    for value in seen(strategy, lambda: model.weight.grad):
        assert value is None if set_to_none else torch.equal(value, torch.zeros(2, 2))


def test_zero_grad_inside_run_clears_what_the_cross_replica_context_sees(strategy):
    _, model = with_gradients(strategy)
    strategy.run(model.zero_grad)
    assert model.weight.grad is None
    with_gradients(strategy)


def test_gradients_accumulate_over_contexts(strategy):
    plain, model = with_gradients(strategy)
    x = torch.randn(7, 2)
    (batch,) = strategy.distribute_dataset([x])
    strategy.run(lambda part: model(part).square().mean().backward(), args=(batch,))
    plain(x).square().mean().backward()
    assert_same(model.weight.grad, plain.weight.grad)
    for m in (plain, model):
        m.weight.grad.mul_(2.0)
        m(x).square().mean().backward()
    assert_same(model.weight.grad, plain.weight.grad)


def test_a_backward_outside_run_that_touches_a_parameter_directly_is_whole(strategy):
    """An L2 term alone: no replica has a gradient of its own."""
    plain, model = with_gradients(strategy)
    for m in (plain, model):
        m.zero_grad()
        m.weight.square().sum().backward()
    for value in seen(strategy, lambda: model.weight.grad):
        assert_same(value, plain.weight.grad)


def test_requires_grad_reaches_every_replica(strategy):
    model = strategy.mirror(nn.Linear(2, 2))
    weight = model.weight
    weight.requires_grad_(False)
    assert_all_see(strategy, lambda: model.weight.requires_grad, False)
    assert not model(torch.ones(6, 2)).sum().backward()
    assert model.weight.grad is None
    assert model.bias.grad is not None
    weight.requires_grad = True
    assert_all_see(strategy, lambda: model.weight.requires_grad, True)
    model(torch.ones(6, 2)).sum().backward()
    assert model.weight.grad is not None
    model.requires_grad_(False)
    assert_all_see(strategy, lambda: [p.requires_grad for p in model.parameters()], [False] * 2)


# Optimizers


def trained_pair(strategy, make):
    """The model and optimizer of one device and of the strategy, after one equal step."""
    plain = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    optimizers = [make(m.parameters()) for m in (plain, model)]
    x = torch.randn(10, 2)
    for m, optimizer in zip((plain, model), optimizers, strict=True):
        train_a_step(strategy, m, optimizer, x)
    return plain, model, optimizers


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def load_other_state(optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        for value in entry.values():
            value.mul_(2.0)
    state["param_groups"][0]["lr"] = 0.03
    optimizer.load_state_dict(state)


def edit_state(optimizer):
    for entry in optimizer.state.values():
        for value in entry.values():
            value.mul_(3.0)


def replace_state(optimizer):
    for entry in optimizer.state.values():
        for key in list(entry):
            entry[key] = entry[key] * 5.0


def clear_state(optimizer):
    optimizer.state.clear()


def set_lr(optimizer):
    optimizer.param_groups[0]["lr"] = 0.7


def set_weight_decay(optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.5


OPTIMIZER_CHANGES = [
    load_other_state,
    edit_state,
    replace_state,
    clear_state,
    set_lr,
    set_weight_decay,
]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", [momentum, adam])
@pytest.mark.parametrize("change", OPTIMIZER_CHANGES, ids=lambda fn: fn.__name__)
def test_a_changed_optimizer_reaches_every_replica(change, make, inside, strategy):
    plain, model, optimizers = trained_pair(strategy, make)
    x = torch.randn(10, 2)
    for optimizer in optimizers:
        change(optimizer)
    for _ in range(2):
        train_a_step(strategy, plain, optimizers[0], x)
        if inside:
            (batch,) = strategy.distribute_dataset([x])
            strategy.run(
                lambda part: train_a_step(strategy, model, optimizers[1], part), args=(batch,)
            )
        else:
            train_a_step(strategy, model, optimizers[1], x)
        strategy.check_replicas()
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())


def test_optimizer_state_can_be_looked_at_in_run(strategy):
    _, model, (plain_optimizer, optimizer) = trained_pair(strategy, momentum)
    (expected, _) = [entry["momentum_buffer"] for entry in plain_optimizer.state.values()]
    keys = set(optimizer.state)

    def look():
        held = optimizer.param_groups[0]["params"][0]
        return (
            optimizer.state[held]["momentum_buffer"].clone(),
            optimizer.state[model.weight]["momentum_buffer"].clone(),
        )

    for result in strategy.local_results(strategy.run(look)):
        assert_same(result, (expected, expected))
    assert set(optimizer.state) == keys
    assert_same(optimizer.state_dict(), plain_optimizer.state_dict())


def test_looking_for_state_in_run_leaves_none_behind(strategy):
    """``optimizer.state`` is a defaultdict: asking for another key would add one."""
    _, model, (plain_optimizer, optimizer) = trained_pair(strategy, momentum)
    strategy.run(lambda: optimizer.state.get(model.weight) is None)
    strategy.run(lambda: len(optimizer.state[model.weight]))
    assert_same(optimizer.state_dict(), plain_optimizer.state_dict())


@pytest.mark.parametrize("way", ["inside", "outside"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers_update_every_replica(name, way, strategy):
    """They do not bump version counters."""
    plain = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    make = getattr(torch.optim, name)
    optimizers = [make(m.parameters(), lr=0.1, fused=True) for m in (plain, model)]
    for _ in range(3):
        x = torch.randn(10, 2)
        train_a_step(strategy, plain, optimizers[0], x)
        if way == "inside":
            (batch,) = strategy.distribute_dataset([x])
            strategy.run(
                lambda part: train_a_step(strategy, model, optimizers[1], part), args=(batch,)
            )
        else:
            train_a_step(strategy, model, optimizers[1], x)
        strategy.check_replicas()
    assert_same(model.state_dict(), plain.state_dict())
    for value in seen(strategy, lambda: model.weight):
        assert_same(value, plain.weight)


def test_a_parameter_group_added_later_is_trained_on_every_replica(strategy):
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(10, 2)
    for m in (plain, model):
        optimizer = momentum(m[0].parameters())
        train_a_step(strategy, m, optimizer, x)
        optimizer.add_param_group({"params": m[1].parameters(), "lr": 0.2})
        train_a_step(strategy, m, optimizer, x)
    assert_same(model.state_dict(), plain.state_dict())
    strategy.check_replicas()


@pytest.mark.parametrize("n", [2, 3])
def test_parameters_that_are_not_mirrored_train_along(n, make_strategy):
    """An optimizer over a mirrored module and a plain temperature, in the unchanged loop."""
    plain = nn.Linear(2, 2)
    model = make_strategy(n).mirror(copy.deepcopy(plain))
    x = torch.randn(10, 2)
    temperatures = []
    for m in (plain, model):
        temperature = nn.Parameter(torch.tensor(2.0))
        optimizer = momentum([*m.parameters(), temperature])
        for _ in range(3):
            optimizer.zero_grad()
            (m(x) * temperature).square().mean().backward()
            optimizer.step()
        temperatures.append(temperature)
    assert_same(temperatures[1], temperatures[0])
    assert_same(model.state_dict(), plain.state_dict())


# Structure of the module


def test_a_submodule_replaced_later_is_mirrored_and_trained(strategy):
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(10, 2)
    model(x)
    head = nn.Linear(2, 1)
    plain[1], model[1] = head, copy.deepcopy(head)
    for m in (plain, model):
        optimizer = momentum(m.parameters())
        for _ in range(3):
            train_a_step(strategy, m, optimizer, x)
    assert mirror.is_mirrored(model[1].weight)
    assert strategy.check_replicas() == 4
    assert_same(model.state_dict(), plain.state_dict())
    for value in seen(strategy, lambda: model[1].weight):
        assert_same(value, plain[1].weight)


def test_a_module_added_later_is_mirrored(strategy):
    model = strategy.mirror(nn.Sequential(nn.Linear(2, 2)))
    model(torch.ones(6, 2))
    model.append(nn.Linear(2, 3))
    assert model(torch.ones(6, 2)).shape == (6, 3)
    assert mirror.is_mirrored(model[1].weight)
    pointers = strategy.run(lambda: model[1].weight.data_ptr())
    assert len(set(pointers.values)) == N


def test_a_parameter_removed_later_is_gone_everywhere(strategy):
    model = strategy.mirror(nn.Linear(2, 2))
    model.bias = None
    assert strategy.run(lambda: model.bias) is None
    assert_same(model(torch.eye(2)), model.weight.detach().t())


def test_a_change_of_the_module_needs_no_copying(strategy):
    """eval(), hooks and attributes act on the one object that all replicas share."""
    model = strategy.mirror(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    model.eval()
    assert strategy.run(lambda: model[1].training).values == (False,) * N
    calls = []
    handle = model[0].register_forward_hook(lambda *_: calls.append(here()))
    model(torch.ones(6, 2))
    handle.remove()
    model(torch.ones(6, 2))
    assert sorted(calls) == [0, 1, 2]
    model[1].p = 0.0
    assert_same(model.train()(torch.ones(6, 2)), model.eval()(torch.ones(6, 2)))


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_registered_later_is_mirrored(persistent, strategy, model):
    model(torch.randn(6, 2))
    model.register_buffer("later", torch.full((2,), 4.0), persistent=persistent)
    assert_all_see(strategy, lambda: model.later, torch.full((2,), 4.0))
    assert mirror.is_mirrored(model.later)
    strategy.run(lambda: model.later.add_(here()))
    assert_same(model.later, torch.full((2,), 5.0))
    assert ("later" in model.state_dict()) == persistent


def test_to_another_dtype_keeps_the_model_mirrored(strategy):
    plain = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    plain.double()
    assert model.double() is model
    x = torch.randn(7, 2, dtype=torch.float64)
    for m in (plain, model):
        m(x).square().mean().backward()
    assert model.weight.dtype == torch.float64
    assert_same(model.weight.grad, plain.weight.grad)
    assert [v.dtype for v in seen(strategy, lambda: model.weight)] == [torch.float64] * N


# Buffers


def test_buffers_are_per_replica_and_read_as_the_mean(strategy, model):
    strategy.run(lambda: model.shift.fill_(float(here())))
    assert_same([v[0].item() for v in seen(strategy, lambda: model.shift)], [0.0, 1.0, 2.0])
    assert_same(model.shift, torch.full((2,), 1.0))
    assert_same(model.state_dict()["shift"], torch.full((2,), 1.0))
    assert_same(dict(model.named_buffers())["shift"], torch.full((2,), 1.0))


READS = {
    "attribute": lambda m: m.shift.sum(),
    "item": lambda m: m.shift[0].item(),
    "state_dict": lambda m: m.state_dict(),
    "saved": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "named_buffers": lambda m: dict(m.named_buffers()),
    "repr": lambda m: repr(m.shift),
}


@pytest.mark.parametrize("how", ["mean", "sum", "first", "none"])
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reading_a_buffer_does_not_change_it_on_the_replicas(read, how, strategy, model):
    """A checkpoint in the middle of training must not touch what the replicas hold."""
    mirror.set_aggregation(model, "shift", how)
    strategy.run(lambda: model.shift.fill_(float(here())))
    if how == "none" and read in (READS["attribute"], READS["item"], READS["repr"]):
        pytest.skip("is not read outside run")
    for _ in range(3):
        read(model)
    assert [v[0].item() for v in seen(strategy, lambda: model.shift)] == [0.0, 1.0, 2.0]


def test_running_statistics_are_the_mean_over_the_replicas(strategy, model):
    x = torch.randn(12, 2)
    copies = [copy.deepcopy(model) for _ in range(N)]
    model(x)
    for part, single in zip(torch.tensor_split(x, N), copies, strict=True):
        single(part)
    expected = torch.stack([single.norm.running_mean for single in copies]).mean(0)
    assert_same(model.norm.running_mean, expected)
    expected = torch.stack([single.norm.running_var for single in copies]).mean(0)
    assert_same(model.norm.running_var, expected)
    assert model.norm.num_batches_tracked.item() == 1
    assert model.state_dict()["norm.num_batches_tracked"].item() == 1


def test_integer_buffers_come_from_the_first_replica(strategy):
    module = nn.Module()
    module.register_buffer("count", torch.tensor(7))
    strategy.mirror(module)
    strategy.run(lambda: module.count.add_(here()))
    assert module.count.item() == 7
    assert [v.item() for v in seen(strategy, lambda: module.count)] == [7, 8, 9]


def test_replicas_that_sat_out_take_the_mean_of_the_others_over(strategy, model):
    (batch,) = strategy.distribute_dataset([torch.ones(2, 2)])
    strategy.run(lambda x: model.shift.fill_(1.0 + 2 * here()), args=(batch,))
    assert_same(model.shift, torch.full((2,), 2.0))
    assert seen(strategy, lambda: model.shift)[2][0].item() == 2.0


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.shift.fill_(6.0),
        lambda m: m.shift.copy_(torch.full((2,), 6.0)),
        lambda m: m.shift.data.fill_(6.0),
        lambda m: setattr(m, "shift", torch.full((2,), 6.0)),
        lambda m: m.shift.__setitem__(slice(None), 6.0),
        lambda m: m.load_state_dict({**m.state_dict(), "shift": torch.full((2,), 6.0)}),
        lambda m: m.load_state_dict(
            {**m.state_dict(), "shift": torch.full((2,), 6.0)}, assign=True
        ),
        lambda m: m.shift.mul_(0.0).add_(6.0),
        lambda m: dict(m.named_buffers())["shift"].fill_(6.0),
    ],
    ids=range(9),
)
def test_a_buffer_written_outside_run_reaches_every_replica(write, strategy, model):
    strategy.run(lambda: model.shift.fill_(float(here())))
    write(model)
    assert_all_see(strategy, lambda: model.shift, torch.full((2,), 6.0))
    strategy.run(lambda: model.shift.add_(here()))
    assert_same(model.shift, torch.full((2,), 7.0))


@pytest.mark.parametrize("name", ["weight", "running_mean"])
def test_raw_storage_that_another_strategys_replica_writes_to_reaches_every_replica(
    name, make_strategy
):
    # The code of that replica belongs to none of this strategy's: it hands out what is combined.
    strategy, other = make_strategy(2), make_strategy(2)
    norm = strategy.mirror(nn.BatchNorm1d(2))
    before = getattr(norm, name).detach().clone()

    def write():
        if mirror.get_replica_context().replica_id_in_sync_group == 0:
            getattr(norm, name).data.add_(5)

    other.run(write)
    for value in strategy.local_results(strategy.run(lambda: getattr(norm, name).clone())):
        assert torch.equal(value, before + 5)


def test_arithmetic_on_a_combined_buffer_starts_from_what_it_reads(strategy, model):
    strategy.run(lambda: model.shift.fill_(float(here())))  # reads 1
    model.shift.add_(10.0)
    assert_all_see(strategy, lambda: model.shift, torch.full((2,), 11.0))


AGGREGATIONS = {"mean": 1.0, "sum": 3.0, "first": 0.0}


@pytest.mark.parametrize(("how", "expected"), AGGREGATIONS.items())
def test_set_aggregation_changes_how_a_buffer_is_read(how, expected, strategy, model):
    mirror.set_aggregation(model, "shift", how)
    strategy.run(lambda: model.shift.fill_(float(here())))
    assert_same(model.shift, torch.full((2,), expected))
    assert_same(model.state_dict()["shift"], torch.full((2,), expected))
    model.shift.fill_(5.0)
    assert_same(model.shift, torch.full((2,), 5.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_a_summed_buffer_counts_exactly(dtype, strategy):
    """7 stays 7, also through a state_dict; TensorFlow makes 6 of it."""
    module = nn.Module()
    module.register_buffer("count", torch.zeros(1, dtype=dtype))
    strategy.mirror(module)
    mirror.set_aggregation(module, "count", "sum")
    module.count.fill_(7)
    assert [v.item() for v in seen(strategy, lambda: module.count)] == [7, 0, 0]
    assert module.count.item() == 7
    strategy.run(lambda: module.count.add_(here() + 1))
    assert module.count.item() == 13
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    assert module.count.item() == 13
    assert sum(v.item() for v in seen(strategy, lambda: module.count)) == 13


def test_a_buffer_without_aggregation_is_not_read_outside_run(strategy, model):
    mirror.set_aggregation(model, "shift", "none")
    strategy.run(lambda: model.shift.fill_(4.0 + here()))
    with pytest.raises(mirror.StrategyError, match=r"shift|aggregation"):
        model.shift.sum()
    assert_same(model.state_dict()["shift"], torch.full((2,), 4.0))
    assert_same(copy.deepcopy(model).shift, torch.full((2,), 4.0))
    assert [v[0].item() for v in seen(strategy, lambda: model.shift)] == [4.0, 5.0, 6.0]


@pytest.mark.parametrize("how", ["median", "MAX", ""])
def test_an_unknown_aggregation_is_a_value_error(how, model):
    with pytest.raises(ValueError, match=r"aggregation|mean"):
        mirror.set_aggregation(model, "shift", how)


# Identity and copies


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


def test_parameters_can_be_told_apart_and_looked_up(strategy, model):
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
            model.linear.weight.fill_(float(here()))
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
    strategy.run(lambda: model.shift.fill_(float(here())))
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

    strategy.run(lambda: model.shift.fill_(float(here())))
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


def test_is_mirrored_tells_for_everything(strategy, model):
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


def test_a_model_that_nobody_holds_is_freed(strategy):
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


# autograd


def test_autograd_grad_outside_run_is_the_whole_gradient(strategy):
    plain = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(10, 2)
    results = []
    for m in (plain, model):
        loss = m(x).square().mean() + m.weight.square().sum()
        results.append(torch.autograd.grad(loss, list(m.parameters())))
        assert m.weight.grad is None
    assert_same(results[1], results[0])


def test_autograd_grad_in_run_is_the_replicas_own(strategy):
    plain = nn.Linear(2, 2)
    model = strategy.mirror(copy.deepcopy(plain))
    x = torch.randn(10, 2)
    (batch,) = strategy.distribute_dataset([x])

    def fn(part):
        return torch.autograd.grad(model(part).square().mean(), list(model.parameters()))

    results = strategy.local_results(strategy.run(fn, args=(batch,)))
    for part, result in zip(torch.tensor_split(x, N), results, strict=True):
        expected = torch.autograd.grad(plain(part).square().mean(), list(plain.parameters()))
        assert_same(result, expected)
    assert model.weight.grad is None


def test_a_gradient_penalty_equals_one_device(strategy):
    """Double backward through autograd.grad with create_graph, in run and through a call."""
    plain = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model = strategy.mirror(copy.deepcopy(plain))

    def penalty(m, x):
        x = x.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return gradient.square().sum(1).mean()

    x = torch.randn(10, 2)
    penalty(plain, x).backward()
    penalty(model, x).backward()
    expected = [p.grad for p in plain.parameters()]
    assert_same([p.grad for p in model.parameters()], expected, "transparent")
    model.zero_grad()
    (batch,) = strategy.distribute_dataset([x])
    strategy.run(lambda part: penalty(model, part).backward(), args=(batch,))
    assert_same([p.grad for p in model.parameters()], expected, "in run")


def test_parameters_work_in_any_expression_outside_run(strategy, model):
    w = model.linear.weight
    plain = w.detach().clone().requires_grad_()
    for expression in (
        lambda w: (w @ w).sum(),
        lambda w: torch.cat([w, w]).square().sum(),
        lambda w: F.linear(torch.ones(1, 2), w).sum(),
        lambda w: torch.einsum("ij,kj->ik", w, w).sum(),
        lambda w: nn.utils.parameters_to_vector([w, w]).sum(),
        lambda w: (2.0 - w).norm(),
    ):
        model.zero_grad()
        plain.grad = None
        assert_same(expression(w).detach(), expression(plain).detach())
        expression(w).backward()
        expression(plain).backward()
        assert_same(w.grad, plain.grad)
    assert f"{w[0, 0].item():.3f}"[:3] in repr(w)
    assert len(w) == 2
    assert w.tolist() == plain.tolist()


def test_functional_call_takes_the_given_parameters(strategy):
    model = strategy.mirror(nn.Linear(2, 2))
    other = {"weight": torch.eye(2), "bias": torch.ones(2)}
    x = torch.randn(6, 2)

    def fn():
        return torch.func.functional_call(model, other, (x,))

    for value in strategy.local_results(strategy.run(fn)):
        assert_same(value, x + 1)


def test_weight_norm_and_parametrizations_train_as_on_one_device(strategy):
    plain = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    model.load_state_dict(plain.state_dict())
    strategy.mirror(model)
    optimizers = [momentum(m.parameters()) for m in (plain, model)]
    for _ in range(3):
        x = torch.randn(10, 2)
        train_a_step(strategy, plain, optimizers[0], x)
        train_a_step(strategy, model, optimizers[1], x)
    assert_same(model.state_dict(), plain.state_dict())
    strategy.check_replicas()
