"""With optimizer_state="sharded" training is that of one device, and replicas hold parts."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.replica.optimizers.slice_plan import ParamSlice
from tests.oracle import assert_same, assert_same_training, train, train_loop
from tests.replica.optimizers.test_optim_db import NO_CLOSURE, pair_of_optimizers, problem

pytestmark = pytest.mark.filterwarnings("ignore:.*is experimental:UserWarning")


@pytest.fixture
def sharded(make_strategy):
    """Gives ``sharded(n)``: a strategy of n simulated devices with sharded state."""
    return lambda n=2, **options: make_strategy(n, optimizer_state="sharded", **options)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(sizes=(10, 11, 7, 2, 8)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 6, generator=generator) for size in sizes]


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def adamw(params, **options):
    return torch.optim.AdamW(params, lr=0.05, **options)


def compared(strategy, way, make_optimizer=adamw, **options):
    """Trains on one device and mirrored; returns the mirrored model and optimizer."""
    plain, model = net(), strategy.mirror(net())
    optimizers = [make_optimizer(plain.parameters()), make_optimizer(model.parameters())]
    expected = train_loop(plain, optimizers[0], batches(), loss_of, **options)
    actual = train(way, strategy, model, optimizers[1], batches(), loss_of, **options)
    assert_same(actual, expected, "losses")
    assert_same_training(model, optimizers[1], plain, optimizers[0])
    return model, optimizers[1]


def held_bytes(optimizer):
    """The bytes of state that each replica holds."""
    return optimizer._mirror.states.bytes_of_replicas()


def whole_bytes(optimizer):
    state = optimizer.state_dict()["state"]
    return sum(value.nbytes for entry in state.values() for value in entry.values())


IMPLEMENTATIONS = [{}, {"foreach": True}, {"fused": True}, {"foreach": False}]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize("info", NO_CLOSURE, ids=lambda info: info.name)
def test_every_optimizer_of_torch_equals_one_device(info, way, n, implementation, sharded):
    if n == 3 and info.name == "Muon":
        pytest.skip("a third is not dyadic")
    plain, data, loss = problem(info)
    strategy = sharded(n)
    model = strategy.mirror(copy.deepcopy(plain))
    if not implementation.keys() <= {*info.supported_impls}:
        pytest.skip("it has no such implementation")
    optimizers = pair_of_optimizers(info, implementation, plain, model)
    expected = train_loop(plain, optimizers[0], data, loss)
    actual = train(way, strategy, model, optimizers[1], data, loss)
    assert_same(actual, expected, "losses")
    assert optimizers[1]._mirror.sliced is not None
    assert_same_training(model, optimizers[1], plain, optimizers[0])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_program_inside_the_scope_and_outside_equals_one_device(n, inside, tmp_path):
    def program(scope, save):
        with scope():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with scope() if inside else contextlib.nullcontext():
            for x in batches():
                loss = F.mse_loss(model(x), torch.ones(len(x), 3))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                save(model, optimizer)
            return model.state_dict(), optimizer.state_dict()

    expected = program(contextlib.nullcontext, lambda *_: None)
    with mirror.MirroredStrategy(["cpu"] * n, optimizer_state="sharded") as strategy:

        def save(model, optimizer):
            mirror.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "c")
            strategy.check_replicas()

        assert_same(program(strategy.scope, save), expected)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("way", [1, 3])
def test_every_replica_holds_its_share_of_the_state(n, way, sharded):
    strategy = sharded(n)
    model = strategy.mirror(nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 6)))
    optimizer = adamw(model.parameters())
    data = [torch.randn(16, 64) for _ in range(3)]
    train(way, strategy, model, optimizer, data, loss_of)
    held = held_bytes(optimizer)
    whole = whole_bytes(optimizer)
    assert len(held) == n
    assert max(held) <= (1 / n + 0.02) * whole
    assert sum(held) <= 1.02 * whole


def test_state_read_is_gathered_and_scattered_by_the_next_step(sharded):
    model, optimizer = compared(sharded(2), 1)
    weight = model[0].weight
    assert optimizer.state[weight]["exp_avg"].shape == weight.shape
    held = held_bytes(optimizer)
    assert held[1] == 0
    loss_of(model, batches()[0]).backward()
    optimizer.step()
    held = held_bytes(optimizer)
    assert min(held) > 0.4 * sum(held)
    assert weight in optimizer.state
    assert len(optimizer.state) == 4
    assert set(dict(optimizer.state)) == set(model.parameters())


@pytest.mark.parametrize("change", ["in place", "new entry", "clear", "load"])
@pytest.mark.parametrize("way", [1, 3])
def test_what_the_program_changes_in_the_state_counts(way, change, sharded):
    strategy = sharded(3)
    plain, model = net(), strategy.mirror(net())
    optimizers = [adamw(plain.parameters()), adamw(model.parameters())]
    saved = None
    for step in range(3):
        x = batches()[step]
        train_loop(plain, optimizers[0], [x], loss_of)
        train(way, strategy, model, optimizers[1], [x], loss_of)
        for one, module in zip(optimizers, (plain, model), strict=True):
            state = one.state[module[0].weight]
            if change == "in place":
                state["exp_avg"].mul_(0.5)
            elif change == "new entry":
                one.state[module[0].weight] = {**state, "exp_avg": torch.ones(5, 6)}
            elif change == "clear":
                one.state.clear()
            elif step == 0:
                saved = copy.deepcopy(one.state_dict())
            else:
                one.load_state_dict(copy.deepcopy(saved))
    assert_same_training(model, optimizers[1], plain, optimizers[0])


@pytest.mark.parametrize("way", [1, 2, 3])
def test_frozen_tied_unused_and_later_parameters(way, sharded):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.two.weight = self.one.weight
            self.frozen = nn.Linear(6, 6).requires_grad_(False)
            self.unused = nn.Linear(6, 6)

        def forward(self, x):
            x = self.two(self.frozen(torch.tanh(self.one(x))))
            return x if not hasattr(self, "later") else self.later(x)

    strategy, results = sharded(3), []
    for run_way in (0, way):
        torch.manual_seed(0)
        model = Tied() if run_way == 0 else strategy.mirror(Tied())
        optimizer = torch.optim.AdamW(
            [
                {"params": [model.one.weight], "lr": 0.1},
                {"params": [model.one.bias, model.two.bias, *model.unused.parameters()]},
                {"params": list(model.frozen.parameters())},
            ],
            lr=0.01,
        )
        for i, x in enumerate(batches()):
            if i == 1:
                torch.manual_seed(1)
                model.later = nn.Linear(6, 4)
                optimizer.add_param_group({"params": list(model.later.parameters()), "lr": 0.2})
            if i == 3:
                model.frozen.requires_grad_(True)
                model.one.requires_grad_(False)
            if run_way == 0:
                train_loop(model, optimizer, [x], loss_of)
            else:
                train(way, strategy, model, optimizer, [x], loss_of)
            optimizer.zero_grad()
        results.append((model.state_dict(), optimizer.state_dict()))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("way", [1, 2, 3])
def test_hooks_of_the_step_run_once_around_it(way, sharded):
    counts, strategy = [], sharded(3)
    model = strategy.mirror(net())
    optimizer = adamw(model.parameters())

    def halve(optimizer, args, kwargs):
        counts.append("pre")
        for p in optimizer.param_groups[0]["params"]:
            p.grad.mul_(0.5)

    def after(optimizer, args, kwargs):
        counts.append("post")
        with torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                p.add_(0.001 * optimizer.state[p]["exp_avg"])

    plain = net()
    on_one = adamw(plain.parameters())
    on_one.register_step_pre_hook(halve)
    on_one.register_step_post_hook(after)
    train_loop(plain, on_one, batches(), loss_of)
    assert counts == ["pre", "post"] * 5
    counts.clear()
    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(after)
    train(way, strategy, model, optimizer, batches(), loss_of)
    assert counts == ["pre", "post"] * 5
    assert_same_training(model, optimizer, plain, on_one)


@pytest.mark.parametrize("way", [1, 2, 3])
def test_clipping_by_the_global_norm_sees_the_whole_gradient(way, sharded):
    compared(sharded(3), way, clip=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))


@pytest.mark.parametrize("name", ["channels_last", "complex", "bfloat16", "0-d", "empty"])
@pytest.mark.parametrize("way", [1, 3])
def test_parameters_of_every_kind(way, name, sharded):
    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.randn(6))
            if name == "channels_last":
                self.b = nn.Conv2d(6, 6, 3).to(memory_format=torch.channels_last).weight
            elif name == "complex":
                self.b = nn.Parameter(torch.randn(5, 6, dtype=torch.complex64))
            elif name == "bfloat16":
                self.b = nn.Parameter(torch.randn(5, 6).bfloat16())
            else:
                self.b = nn.Parameter(torch.randn(()) if name == "0-d" else torch.randn(0, 6))

        def forward(self, x):
            b = self.b.abs().float().sum() if self.b.numel() else self.b.sum()
            return x * self.a + b

    torch.manual_seed(0)
    plain, strategy = Kinds(), sharded(3)
    model = strategy.mirror(copy.deepcopy(plain))
    optimizers = [adamw(plain.parameters()), adamw(model.parameters())]
    train_loop(plain, optimizers[0], batches(), loss_of)
    train(way, strategy, model, optimizers[1], batches(), loss_of)
    tolerance = 1e-5 if name == "complex" else None
    assert_same_training(model, optimizers[1], plain, optimizers[0], tolerance)
    if name == "channels_last":
        state = optimizers[1].state[model.b]["exp_avg"]
        assert state.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("way", [1, 3])
def test_a_parameter_that_moves_to_another_storage_is_sliced_anew(way, sharded):
    strategy, results = sharded(2), []
    for run_way in (0, way):
        model = net() if run_way == 0 else strategy.mirror(net())
        optimizer = adamw(model.parameters())
        for x in batches():
            if run_way == 0:
                train_loop(model, optimizer, [x], loss_of)
            else:
                train(way, strategy, model, optimizer, [x], loss_of)
            for p in model.parameters():
                p.data = p.data.clone() * 0.9
        results.append((model.state_dict(), optimizer.state_dict()))
    assert_same(results[1], results[0])


def test_checkpoints_move_between_numbers_of_replicas_and_kinds_of_state(make_strategy, tmp_path):
    plain = net()
    on_one = adamw(plain.parameters())
    train_loop(plain, on_one, batches(), loss_of)
    train_loop(plain, on_one, batches(), loss_of)
    for first, second in (("sharded", "replicated"), ("replicated", "sharded")):
        one, other = (
            make_strategy(8, optimizer_state=first),
            make_strategy(2, optimizer_state=second),
        )
        model = one.mirror(net())
        optimizer = adamw(model.parameters())
        train(1, one, model, optimizer, batches(), loss_of)
        mirror.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / first)
        model = other.mirror(net(seed=1))
        optimizer = adamw(model.parameters())
        mirror.Checkpoint(model=model, optimizer=optimizer).restore(tmp_path / first)
        train(3, other, model, optimizer, batches(), loss_of)
        assert_same_training(model, optimizer, plain, on_one)


def test_copies_and_pickles_have_the_whole_state(sharded):
    model, optimizer = compared(sharded(3), 1)
    expected = optimizer.state_dict()
    loss_of(model, batches()[0]).backward()
    optimizer.zero_grad()
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert_same(made.state_dict(), expected)
        assert not mirror.is_mirrored(made)


@pytest.mark.parametrize("way", [1, 2, 3])
def test_a_closure_is_called_once(way, sharded):
    strategy, results = sharded(3), []
    for run_way in (0, way):
        model = net() if run_way == 0 else strategy.mirror(net())
        optimizer = adamw(model.parameters())

        def step(x, model=model, optimizer=optimizer):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        losses = []
        for x in batches():
            if run_way == 3:
                (part,) = strategy.distribute_dataset([x])
                losses.append(strategy.reduce("mean", strategy.run(step, args=(part,))))
            else:
                losses.append(step(x))
        results.append((losses, model.state_dict(), optimizer.state_dict()))
    assert_same(results[1], results[0])


def test_a_step_that_raises_leaves_all_replicas_equal(sharded):
    strategy = sharded(3)
    model = strategy.mirror(net())
    optimizer = adamw(model.parameters())
    train(1, strategy, model, optimizer, batches(), loss_of)

    def fail(optimizer, args, kwargs):
        raise KeyError("as planned")

    handle = optimizer.register_step_post_hook(fail)
    loss_of(model, batches()[0]).backward()
    with pytest.raises(KeyError, match="as planned"):
        optimizer.step()
    strategy.check_replicas()
    handle.remove()
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    strategy.check_replicas()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    train(3, strategy, model, optimizer, batches(), loss_of)


def test_check_replicas_finds_counts_that_differ_and_slices_that_do_not_cover(sharded):
    strategy = sharded(2)
    model = strategy.mirror(nn.Linear(3, 3, bias=False))
    optimizer = adamw(model.parameters())
    loss_of(model, torch.ones(4, 3)).backward()
    optimizer.step()
    assert strategy.check_replicas() == 1
    sliced, states = optimizer._mirror.sliced, optimizer._mirror.states
    states.shard_of(1)[sliced.stepped[1]]["step"] += 1
    with pytest.raises(mirror.ReplicaMismatchError, match=r"'step' of parameter.*replica 1 of 2"):
        strategy.check_replicas()
    states.shard_of(1)[sliced.stepped[1]]["step"] -= 1
    sliced.slices[1] = ParamSlice(0, 6, 9, 1)
    with pytest.raises(mirror.ReplicaMismatchError, match=r"element 5 of parameter 'weight'"):
        strategy.check_replicas()


def test_lbfgs_and_classes_of_the_program_step_whole_on_the_first_replica(sharded, caplog):
    class Own(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    _, optimizer = compared(sharded(2), 1, lambda params: Own(params, lr=0.05))
    held = held_bytes(optimizer)
    assert held[1] == 0
    assert "the state of Own is not sharded, and is on replica 0 of 2" in caplog.text


def test_a_compiled_step_is_refused_with_the_remedy(sharded):
    strategy = sharded(2)
    with pytest.raises(mirror.CompileError, match=r"optimizer_state=.sharded.*fallback='eager'"):
        strategy.compile(lambda x: x)
    assert strategy.compile(lambda x: x, fallback="eager") is not None


def test_options_are_checked():
    with pytest.raises(ValueError, match="optimizer_state must be one of replicated, sharded"):
        mirror.MirroredStrategy(["cpu"], optimizer_state="split")
    with pytest.raises(TypeError, match="optimizer_state"):
        mirror.CentralStorageStrategy(["cpu"] * 2, optimizer_state="sharded")
