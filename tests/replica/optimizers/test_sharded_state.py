"""With optimizer_state="sharded" training is that of one device, and replicas hold parts."""

import contextlib
import copy
import gc
import random
import weakref

import pytest
import torch
from torch import nn

import mirror
from mirror.comm.host_backends import NaiveCommunicator
from mirror.replica.gradients.slice_plan import ParamSlice
from tests.oracle import assert_same, assert_same_training, train, train_loop
from tests.pairs import each_once, pairwise
from tests.replica.gradients.test_slice_plan import gpt2, resnet50
from tests.replica.optimizers.kinds import Plain
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


@each_once(
    info=[pytest.param(info, id=info.name) for info in NO_CLOSURE],
    way=[1, 2, 3],
    n=[2, 3],
    implementation=[pytest.param(value, id=str(value)) for value in IMPLEMENTATIONS],
)
def test_every_optimizer_of_torch_equals_one_device(info, way, n, implementation, sharded):
    plain, data, loss = problem(info)
    strategy = sharded(2 if info.name == "Muon" else n)  # a third is not dyadic
    model = strategy.mirror(copy.deepcopy(plain))
    if not implementation.keys() <= {*info.supported_impls}:
        implementation = {}
    optimizers = pair_of_optimizers(info, implementation, plain, model)
    expected = train_loop(plain, optimizers[0], data, loss)
    actual = train(way, strategy, model, optimizers[1], data, loss)
    assert_same(actual, expected, "losses")
    assert optimizers[1]._mirror.sharded.sliced is not None
    assert_same_training(model, optimizers[1], plain, optimizers[0])


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


class Listed(nn.Module):
    """Has parameters of the sizes of a known model, each divided by 256."""

    def __init__(self, sizes):
        super().__init__()
        self.all = nn.ParameterList(torch.randn(max(1, size // 256)) for size in sizes)

    def forward(self, x):
        return torch.stack([(parameter * x.mean()).sum() for parameter in self.all])


@each_once(
    sizes=[pytest.param(resnet50(), id="ResNet-50"), pytest.param(gpt2(), id="GPT-2")],
    inside=[True, False],
)
def test_eight_replicas_have_equal_shards_of_an_eighth_of_the_state(sizes, inside):
    with mirror.MirroredStrategy(["cpu"] * 8, optimizer_state="sharded") as strategy:
        with strategy.scope():
            model = Listed(sizes)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with strategy.scope() if inside else contextlib.nullcontext():
            for x in strategy.distribute_dataset([torch.randn(8, 2)] * 3):

                def step(x):
                    optimizer.zero_grad()
                    model(x).mean().backward()
                    optimizer.step()

                strategy.run(step, args=(x,))
            held = strategy.report().state_bytes
            strategy.check_replicas()
        whole = whole_bytes(optimizer)
    assert max(held) <= (1 / 8 + 0.02) * whole
    assert max(held) <= 1.1 * sum(held) / 8


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


@each_once(way=[1, 3], name=["channels_last", "complex", "bfloat16", "0-d", "empty"])
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
            b = self.b.abs().float().sum() if self.b.numel() else 0.0
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
    sliced, states = optimizer._mirror.sharded.sliced, optimizer._mirror.states
    states.shard_of(1)[sliced.stepped[1]]["step"] += 1
    with pytest.raises(mirror.ReplicaMismatchError, match=r"'step' of parameter.*replica 1 of 2"):
        strategy.check_replicas()
    states.shard_of(1)[sliced.stepped[1]]["step"] -= 1
    sliced.slices[1] = ParamSlice(0, 6, 9, 1)
    with pytest.raises(mirror.ReplicaMismatchError, match=r"element 5 of parameter 'weight'"):
        strategy.check_replicas()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("way", [1, 2])
def test_beside_a_parameter_of_no_module_the_state_is_on_the_first_replica(
    way, inside, sharded, caplog
):
    strategy, results = sharded(2), []
    for run_way in (0, way):
        scope = strategy.scope if run_way else contextlib.nullcontext
        with scope():
            model, scale = net(), torch.ones((), requires_grad=True)
            optimizer = adamw([*model.parameters(), scale])
        with scope() if inside else contextlib.nullcontext():
            for x in batches():
                optimizer.zero_grad()
                if run_way < 2:
                    loss = loss_of(model, x) * scale
                else:
                    (part,) = strategy.distribute_dataset([x])
                    loss = strategy.reduce("mean", strategy.run(loss_of, (model, part))) * scale
                loss.backward()
                optimizer.step()
        results.append((model.state_dict(), optimizer.state_dict()["state"]))
    assert_same(results[1], results[0])
    assert held_bytes(optimizer)[1] == 0
    (warning,) = caplog.messages
    start = "the state of AdamW is not sharded, and is on replica 0 of 2 (cpu): a parameter of its"
    assert warning.startswith(start)


@pytest.mark.parametrize("inside", [False, True])
def test_the_report_has_the_state_of_every_replica(inside, sharded):
    strategy = sharded(2)
    with strategy.scope() if inside else contextlib.nullcontext():
        model = strategy.mirror(nn.Linear(63, 64))
        optimizer = adamw(model.parameters())
        loss_of(model, torch.ones(4, 63)).backward()
        optimizer.step()
        report = strategy.report()
    assert report.optimizer_state == "sharded"
    assert report.state_bytes == tuple(held_bytes(optimizer))
    assert "optimizer state: sharded, at most 0.016 MB on a replica, 1.00 times the mean" in str(
        report
    )
    assert "sharded over all devices" in str(mirror.plan(strategy, model=model))


def test_options_are_checked():
    with pytest.raises(ValueError, match="optimizer_state must be one of replicated, sharded"):
        mirror.MirroredStrategy(["cpu"], optimizer_state="split")
    with pytest.raises(
        TypeError, match=r"optimizer_state.*the parameter device has the state once"
    ):
        mirror.CentralStorageStrategy(["cpu"] * 2, optimizer_state="sharded")
    with pytest.raises(TypeError, match="optimizer_state"):
        mirror.OneDeviceStrategy("cpu", optimizer_state="sharded")
    with pytest.raises(TypeError, match=r"optimizer_state.*each server has the state of its own"):
        mirror.ParameterServerStrategy(optimizer_state="sharded")


class Counting(NaiveCommunicator):
    """Counts the bytes that each replica sends: by ring algorithms, which need the fewest."""

    concurrent = True

    def __init__(self, n):
        super().__init__(["cpu"] * n)
        self.sent, self.calls = 0.0, []

    def _count(self, name, tensors, rounds):
        n = len(tensors)
        self.calls.append(name)
        self.sent += rounds * (n - 1) / n * tensors[0].nbytes

    def all_reduce(self, tensors, op="sum", scale=1.0):
        self._count("all_reduce", tensors, 2)
        super().all_reduce(tensors, op, scale)

    def reduce_scatter(self, tensors, op="sum"):
        self._count("reduce_scatter", tensors, 1)
        super().reduce_scatter(tensors, op)

    def all_gather(self, tensors):
        self._count("all_gather", tensors, 1)
        super().all_gather(tensors)

    def broadcast(self, tensors, root=0):
        self._count("broadcast", tensors, 1)
        super().broadcast(tensors, root)


def step_of(strategy, way, model, optimizer, inside=lambda model: None):
    """Returns a function that makes one step in one of the three ways."""
    (x,) = batches((12,))
    (part,) = strategy.distribute_dataset([x])

    def step(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        inside(model)
        optimizer.step()

    def reduced():
        optimizer.zero_grad()
        strategy.reduce("mean", strategy.run(loss_of, args=(model, part))).backward()
        inside(model)
        optimizer.step()

    return {1: lambda: step(x), 2: reduced, 3: lambda: strategy.run(step, args=(part,))}[way]


def nothing(_):
    pass


def sent_in_a_step(n, way, state, pack, *, in_scope=True, inside=nothing, count=3, change=nothing):
    """Returns the bytes that a replica sends in the last step, and the collectives.

    Args:
        count: the number of steps; ``change`` is called with the optimizer before the last.
    """
    communicator = Counting(n)
    options = mirror.CommunicationOptions(bytes_per_pack=pack)
    with mirror.MirroredStrategy(
        ["cpu"] * n, communicator, communication_options=options, optimizer_state=state
    ) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 30))
            optimizer = adamw(model.parameters())
        with strategy.scope() if in_scope else contextlib.nullcontext():
            step = step_of(strategy, way, model, optimizer, inside)
            for i in range(count):
                if i == count - 1:
                    change(optimizer)
                communicator.sent, communicator.calls = 0.0, []
                step()
        return communicator.sent, communicator.calls


@pairwise(in_scope=[True, False], way=[1, 2, 3], n=[2, 3, 8], pack=[25 * 2**20, 1000])
def test_a_step_sends_as_many_bytes_as_with_replicated_state(in_scope, way, n, pack):
    replicated, _ = sent_in_a_step(n, way, "replicated", pack, in_scope=in_scope)
    sharded, calls = sent_in_a_step(n, way, "sharded", pack, in_scope=in_scope)
    num_elements = 6 * 50 + 50 + 50 * 30 + 30
    assert replicated == pytest.approx(2 * (n - 1) / n * 4 * num_elements, rel=0.01)
    alignment = 4 * n * len(calls)  # chunks of a bucket differ by one element at most
    assert sharded <= replicated + alignment
    assert set(calls) == {"reduce_scatter", "all_gather"}
    assert calls.count("all_gather") == 1


@pytest.mark.parametrize("way", [1, 2, 3])
def test_a_step_that_reads_the_gradients_sends_half_as_much_again(way):
    def clip(model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    replicated, _ = sent_in_a_step(3, way, "replicated", 2**20, inside=clip)
    sharded, calls = sent_in_a_step(3, way, "sharded", 2**20, inside=clip)
    assert sharded == pytest.approx(1.5 * replicated, rel=0.01)
    assert calls == ["reduce_scatter", "all_gather", "all_gather"]


def swap_parameters(optimizer):
    optimizer.param_groups[0]["params"].reverse()


@pytest.mark.parametrize(("count", "change", "most"), [(1, nothing, 1.5), (3, swap_parameters, 2)])
@pytest.mark.parametrize("way", [1, 3])
def test_the_first_step_of_parameter_groups_sends_at_most_twice_as_much(way, count, change, most):
    first, calls = sent_in_a_step(3, way, "sharded", 2**20, count=count, change=change)
    replicated, _ = sent_in_a_step(3, way, "replicated", 2**20)
    assert first <= 1.01 * most * replicated
    assert calls[-1] == "all_gather"


# Gradients that are scattered: sequences of operations, drawn from seeds, from the second step on.

OPERATIONS = (
    "backward",
    "backward",
    "backward",
    "step",
    "step",
    "zero",
    "zero to zeros",
    "zero of the module",
    "read",
    "read one",
    "scale one",
    "clip",
    "assign",
    "drop one",
    "half",
    "other step",
    "toggle",
)


class Operations:
    """Performs drawn operations on a model, in run or on one device; notes what it reads."""

    def __init__(self, make):
        self.model = make(net())
        first, last = self.model[0], self.model[2]
        self.optimizer = torch.optim.AdamW(
            [{"params": [first.weight, last.bias]}, {"params": [first.bias, last.weight]}],
            lr=0.05,
        )
        self.other = torch.optim.SGD([first.weight, last.weight], lr=0.1, momentum=0.9)
        self.notes = []

    def perform(self, operations, x):
        model, notes = self.model, []
        params = list(model.parameters())
        for operation in operations:
            if operation == "backward":
                loss_of(model, x).backward()
            elif operation == "half":  # some parameters have no gradient
                model[2](torch.tanh(model[0](x).detach())).square().mean().backward()
            elif operation == "step":
                self.optimizer.step()
            elif operation == "other step":
                self.other.step()
            elif operation == "zero":
                self.optimizer.zero_grad()
            elif operation == "zero to zeros":
                self.optimizer.zero_grad(set_to_none=False)
            elif operation == "zero of the module":
                model.zero_grad()
            elif operation == "read":
                notes.append([None if p.grad is None else p.grad.clone() for p in params])
            elif operation == "read one":
                notes.append(None if params[1].grad is None else params[1].grad.clone())
            elif operation == "scale one" and params[0].grad is not None:
                params[0].grad.mul_(0.5)
            elif operation == "clip":
                nn.utils.clip_grad_norm_(params, 0.1)
            elif operation == "assign":
                params[2].grad = torch.ones_like(params[2])
            elif operation == "drop one":
                params[3].grad = None
        return notes

    def toggle(self):
        bias = self.model[0].bias
        bias.requires_grad_(not bias.requires_grad)


def drawn(seed):
    """Returns lists of operations; each list is one run, or one stretch of a program."""
    draw = random.Random(seed)
    lists = [["backward", "step"]]
    for _ in range(draw.randint(2, 6)):
        lists.append([draw.choice(OPERATIONS) for _ in range(draw.randint(1, 6))])
    return [*lists, ["read"]]


@each_once(way=[1, 3], n=[2, 3], pack=[25 * 2**20, 64])
def test_gradients_are_those_of_one_device_whatever_is_done_with_them(way, n, pack, sharded):
    options = mirror.CommunicationOptions(bytes_per_pack=pack)
    strategy = sharded(n, communication_options=options)
    for seed in range(25):
        lists = drawn(seed)
        generator = torch.Generator().manual_seed(seed)
        data = [torch.randn(8, 6, generator=generator) for _ in lists]
        plain, mirrored = Operations(lambda module: module), Operations(strategy.mirror)
        for operations, x in zip(lists, data, strict=True):
            expected = plain.perform(operations, x)
            if way == 1:
                found = mirrored.perform(operations, x)
            else:
                (part,) = strategy.distribute_dataset([x])
                found = strategy.run(mirrored.perform, (operations, part))
                first, *others = strategy.local_results(found)
                for other in others:
                    assert_same(other, first, f"seed {seed}: {lists}")
                found = first
            assert_same(found, expected, f"seed {seed}: {lists}", 1e-4)
            for one in (plain, mirrored) if "toggle" in operations else ():
                one.toggle()
            strategy.check_replicas()
        tolerance = 1e-4  # Adam divides rounding by small numbers
        assert_same_training(
            mirrored.model, mirrored.optimizer, plain.model, plain.optimizer, tolerance
        )
        assert_same(mirrored.other.state_dict(), plain.other.state_dict(), "other", tolerance)


@pytest.mark.parametrize("way", [1, 3])
def test_a_replica_holds_its_part_of_the_gradients_until_one_is_read(way, sharded):
    strategy = sharded(3)
    model = strategy.mirror(net())
    step = step_of(strategy, way, model, adamw(model.parameters()))
    for _ in range(3):
        step()
    targets = [target for p in model.parameters() for target in p._mirrored.targets]
    assert [target.grad for target in targets] == [None] * 12
    plain = net()
    step_on_one = step_of_one(plain)
    for _ in range(3):
        step_on_one()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert all(target.grad is not None for target in targets)


def step_of_one(plain):
    optimizer = adamw(plain.parameters())
    (x,) = batches((12,))

    def step():
        optimizer.zero_grad()
        loss_of(plain, x).backward()
        optimizer.step()

    return step


def test_a_step_that_writes_into_gradients_leaves_those_of_one_device(sharded):
    """SGD does by lists, with nesterov; once with scattered gradients, once with read ones."""
    strategy, results = sharded(3), []
    for mirrored in (False, True):
        model = strategy.mirror(net()) if mirrored else net()
        options = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}
        optimizer = torch.optim.SGD(model.parameters(), **options)
        notes = []
        for i, x in enumerate(batches()):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            if i % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            notes.append([p.grad.clone() for p in model.parameters()])
            if mirrored:
                strategy.run(lambda model=model: [p.grad for p in model.parameters()])
                strategy.check_replicas()
        results.append((notes, model.state_dict()))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("way", [1, 3])
def test_accumulation_under_no_sync_scatters_the_sum_once(way, sharded):
    strategy, results = sharded(3), []
    for run_way in (0, way):
        model = strategy.mirror(net()) if run_way else net()
        optimizer = adamw(model.parameters())

        def add(x, model=model):
            (loss_of(model, x) / 2).backward()

        def call(x, run_way=run_way, add=add):
            if run_way == 3:
                (x,) = strategy.distribute_dataset([x])
                strategy.run(add, args=(x,))
            else:
                add(x)

        for x in batches():
            with strategy.no_sync() if run_way else contextlib.nullcontext():
                call(x)
            call(x)
            optimizer.step()
            optimizer.zero_grad()
        results.append((model.state_dict(), optimizer.state_dict()))
    assert_same(results[1], results[0])


def test_parameters_and_their_gradients_are_freed_with_the_model(sharded):
    strategy = sharded(2)
    model = strategy.mirror(net())
    optimizer = adamw(model.parameters())
    for _ in range(3):
        loss_of(model, batches()[0]).backward()
        optimizer.step()
    gone, scatter = weakref.ref(model[0].weight), strategy._group.gradients.scatter
    assert scatter.scattered
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert not scatter.scattered
    assert not scatter._records


@pytest.mark.parametrize("way", [1, 3])
def test_an_optimizer_made_anew_takes_over(way, sharded):
    strategy, results = sharded(2), []
    for run_way in (0, way):
        model = strategy.mirror(net()) if run_way else net()
        for x in batches():
            optimizer = adamw(model.parameters())
            if run_way:
                train(way, strategy, model, optimizer, [x, x, x], loss_of)
            else:
                train_loop(model, optimizer, [x, x, x], loss_of)
        results.append(model.state_dict())
    assert_same(results[1], results[0])


@pytest.mark.parametrize("way", [1, 2, 3])
def test_a_scaler_skips_the_step_on_all_replicas(way, sharded):
    strategy, results = sharded(2), []
    for run_way in (0, way):
        model = strategy.mirror(net()) if run_way else net()
        optimizer = adamw(model.parameters())
        kind = mirror.amp.GradScaler if run_way else torch.amp.GradScaler
        scaler = kind("cpu", init_scale=4.0, growth_interval=2)

        def update(loss, scaler=scaler, optimizer=optimizer):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        for i, x in enumerate(batches((8, 8, 8, 8, 8))):
            x[0, 0] = float("inf") if i == 2 else 0.0

            def forward(x, model=model):
                return loss_of(model, x)

            if run_way < 2:
                update(forward(x))
                continue
            (part,) = strategy.distribute_dataset([x])
            if run_way == 2:
                update(strategy.reduce("mean", strategy.run(forward, args=(part,))))
            else:
                strategy.run(lambda x, f=forward, u=update: u(f(x)), args=(part,))
        results.append((model.state_dict(), optimizer.state_dict(), scaler.state_dict()))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("way", [1, 2, 3])
def test_a_hook_of_a_gradient_sees_the_gradient_of_the_whole_batch(way, sharded):
    strategy, results = sharded(3), []
    for run_way in (0, way):
        seen = []
        model = strategy.mirror(net()) if run_way else net()
        optimizer = adamw(model.parameters())

        def hook(grad, seen=seen):
            seen.append(grad.clone())
            return grad * 0.5

        model[0].weight.register_hook(hook)
        if run_way:
            train(way, strategy, model, optimizer, batches(), loss_of)
        else:
            train_loop(model, optimizer, batches(), loss_of)
        results.append((seen, model.state_dict(), optimizer.state_dict()))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("pack", [25 * 2**20, 64])
@pytest.mark.parametrize("way", [1, 3])
def test_gradients_sent_in_another_dtype_are_rounded_as_with_replicated_state(way, pack):
    results = []
    for state in ("replicated", "sharded"):
        options = mirror.CommunicationOptions(bytes_per_pack=pack, wire_dtype=torch.bfloat16)
        with mirror.MirroredStrategy(
            ["cpu"] * 2, communication_options=options, optimizer_state=state
        ) as strategy:
            model = strategy.mirror(net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            train(way, strategy, model, optimizer, batches((8, 6, 4)), loss_of)
            results.append((model.state_dict(), optimizer.state_dict()))
    assert_same(results[1], results[0], tolerance=0.0)


@pytest.mark.parametrize("way", [1, 3])
def test_a_gradient_that_is_not_finite_is_refused_before_it_is_used(way, sharded):
    strategy = sharded(2, guards=mirror.Guards(finite_gradients=True))
    model = strategy.mirror(net())
    optimizer = adamw(model.parameters())
    train(way, strategy, model, optimizer, batches(), loss_of)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(mirror.GradientError, match="gradients must be finite"):
        train(way, strategy, model, optimizer, [torch.full((4, 6), float("nan"))], loss_of)
    assert_same(model.state_dict(), before, tolerance=0.0)
    train(way, strategy, model, optimizer, batches(), loss_of)


@pytest.mark.parametrize("way", [1, 3])
def test_an_optimizer_of_the_program_beside_a_sharded_one_sees_whole_gradients(way, sharded):
    """Two optimizers of the same parameters, one of which has no slices."""
    strategy, results = sharded(2), []
    for run_way in (0, way):
        model = strategy.mirror(net()) if run_way else net()
        one, other = adamw(model.parameters()), Plain(model.parameters())

        def step(x, model=model, one=one, other=other):
            one.zero_grad()
            loss_of(model, x).backward()
            one.step()
            other.step()

        for x in batches():
            if run_way == 3:
                (part,) = strategy.distribute_dataset([x])
                strategy.run(step, args=(part,))
            else:
                step(x)
        results.append((model.state_dict(), one.state_dict()))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("backend", ["host", "naive", "ring", "direct", "hierarchical"])
def test_every_backend_gives_the_bits_of_replicated_state(backend):
    results = []
    for state in ("replicated", "sharded"):
        with mirror.MirroredStrategy(["cpu"] * 4, backend, optimizer_state=state) as strategy:
            model = strategy.mirror(net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            train(3, strategy, model, optimizer, batches((8, 8, 4)), loss_of)
            results.append((model.state_dict(), optimizer.state_dict()))
    tolerance = 0.0 if backend in ("host", "naive", "direct") else 1e-6
    assert_same(results[1], results[0], tolerance=tolerance)


@pairwise(n=[2, 3], how=["tensor", "entry", "state_dict", "in run"], inside=[False, True])
def test_a_write_into_state_that_was_read_before_a_step_raises(n, how, inside, sharded):
    strategy = sharded(n)
    with strategy.scope():
        model = net()
        optimizer = adamw(model.parameters())

    def step():
        optimizer.zero_grad()
        loss_of(model, batches()[0]).backward()
        optimizer.step()

    with strategy.scope() if inside else contextlib.nullcontext():
        step()
        entry = optimizer.state[model[0].weight] if how == "entry" else {}
        if how in ("tensor", "entry"):
            held = optimizer.state[model[0].weight]["exp_avg"]
        elif how == "state_dict":
            held = optimizer.state_dict()["state"][0]["exp_avg"]
        else:
            found = []
            strategy.run(lambda: found.append(optimizer.state[model[0].weight]["exp_avg"]))
            held = found[-1]
        held.mul_(2)  # before the next step it counts
        step()
        step()  # no write: nothing is wrong
        if how == "entry":
            entry["exp_avg"] = torch.zeros(5, 6)
        else:
            held.zero_()
        with pytest.raises(mirror.StrategyError) as lost:
            step()
        assert "optimizer state 'exp_avg' of parameter '0.weight' was read before a step" in str(
            lost.value
        )
        step()
        strategy.check_replicas()
