"""Replicas that share a device step once; what everybody sees is as if each had stepped."""

import copy
import pickle

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same, assert_same_training, in_run, train, train_loop

SIZE = 6


class Counting(torch.optim.SGD):
    """A class of the user's own, which would choke on groups without parameters."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.sizes = []

    def step(self, closure=None):
        sizes = [len(group["params"]) for group in self.param_groups]
        assert all(sizes), "no parameters"
        self.sizes.append(sizes)
        return super().step(closure)


def net():
    return nn.Sequential(nn.Linear(SIZE, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(model, batch):
    return (model(batch) - 1).square().mean()


def batches(count=4, size=7):
    return [torch.randn(size, SIZE) for _ in range(count)]


def pair(strategy, make_optimizer):
    """``(model, optimizer)`` on one device, and the same mirrored."""
    plain = net()
    model = strategy.mirror(copy.deepcopy(plain))
    return (plain, make_optimizer(plain.parameters())), (model, make_optimizer(model.parameters()))


def step_in_run(strategy, model, optimizer, batch):
    def step(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    in_run(strategy, step, batch)


def plain_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def adam(params):
    return torch.optim.Adam(params, lr=0.05)


def momentum(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.fixture(params=["lockstep", "staggered"])
def strategy(request, make_strategy):
    return make_strategy(3, schedule=request.param)


# Whose step


@pytest.mark.parametrize("way", [1, 2, 3])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        adam,
        momentum,
        lambda params: torch.optim.Adam(params, lr=0.05, foreach=True, amsgrad=True),
        lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
        lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
        lambda params: torch.optim.ASGD(params, lr=0.05, t0=1),
        lambda params: torch.optim.Rprop(params, lr=0.05),
        lambda params: torch.optim.Adafactor(params, lr=0.05),
        lambda params: Counting(params, lr=0.1, momentum=0.9),
    ],
    ids=["adam", "momentum", "amsgrad", "fused", "rmsprop", "asgd", "rprop", "adafactor", "own"],
)
def test_any_optimizer_is_that_of_one_device(strategy, way, make_optimizer):
    (plain, plain_optimizer), (model, optimizer) = pair(strategy, make_optimizer)
    data = batches()
    losses = train(way, strategy, model, optimizer, data, loss_of)
    assert_same(losses, train_loop(plain, plain_optimizer, data, loss_of))
    assert_same_training(model, optimizer, plain, plain_optimizer)


def test_a_class_of_the_users_counts_every_step_once(strategy):
    _, (model, optimizer) = pair(strategy, lambda params: Counting(params, lr=0.1))
    for i in range(3):
        step_in_run(strategy, model, optimizer, torch.randn(6, SIZE))
        assert optimizer.sizes == [[4]] * (i + 1)
        strategy.check_replicas()


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_of_the_users_see_the_parameters_of_every_step(strategy, kind):
    _, (model, optimizer) = pair(strategy, adam)
    seen = []

    def hook(optimizer, args, kwargs):
        seen.append([p.shape for p in optimizer.param_groups[0]["params"]])

    getattr(optimizer, f"register_step_{kind}_hook")(hook)
    shapes = [p.shape for p in model.parameters()]
    step_in_run(strategy, model, optimizer, torch.randn(6, SIZE))
    assert seen == [shapes] * 3
    strategy.check_replicas()
    loss_of(model, torch.randn(6, SIZE)).backward()
    optimizer.step()
    assert seen == [shapes] * 4  # outside run there is one step
    strategy.check_replicas()


def test_two_optimizers_and_two_steps_in_one_run(strategy):
    # As a GAN does, with another optimizer of one model's last layer on top.
    (plain_g, plain_og), (g, og) = pair(strategy, adam)
    (plain_d, plain_od), (d, od) = pair(strategy, momentum)

    def step(x, g, d, og, od):
        for _ in range(2):
            od.zero_grad()
            (loss_of(d, x) + d(x + g(x).detach()).mean()).backward()
            od.step()
            og.zero_grad()
            d(x + g(x)).square().mean().backward()
            og.step()

    for batch in batches(3):
        in_run(strategy, lambda x: step(x, g, d, og, od), batch)
        step(batch, plain_g, plain_d, plain_og, plain_od)
        strategy.check_replicas()
    assert_same_training(g, og, plain_g, plain_og)
    assert_same_training(d, od, plain_d, plain_od)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_step_that_raises_leaves_the_optimizer_and_the_replicas_as_they_were(strategy, where):
    (plain, plain_optimizer), (model, optimizer) = pair(strategy, adam)
    batch = torch.randn(6, SIZE)
    for _ in range(2):
        plain_step(plain, plain_optimizer, batch)
        step_in_run(strategy, model, optimizer, batch)
        optimizer.param_groups[0]["betas"] = None
        with pytest.raises(TypeError):
            if where == "inside":
                step_in_run(strategy, model, optimizer, batch)
            else:
                plain_step(model, optimizer, batch)
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        assert [len(group["params"]) for group in optimizer.param_groups] == [4]
        strategy.check_replicas()
        assert_same_training(model, optimizer, plain, plain_optimizer)


# State


def test_code_in_run_reads_and_writes_the_state_of_its_replica(strategy):
    (plain, plain_optimizer), (model, optimizer) = pair(strategy, momentum)

    def step(x, model, optimizer):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        buffers = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        for buffer in buffers:
            buffer.mul_(0.5)
        return [buffer.clone() for buffer in buffers]

    for batch in batches(3):
        buffers = in_run(strategy, lambda x: step(x, model, optimizer), batch)
        expected = step(batch, plain, plain_optimizer)
        for replica in strategy.local_results(buffers):
            assert_same(replica, expected)
        strategy.check_replicas()
        assert_same_training(model, optimizer, plain, plain_optimizer)


def test_state_made_to_differ_in_run_is_found(strategy):
    _, (model, optimizer) = pair(strategy, momentum)
    step_in_run(strategy, model, optimizer, torch.randn(6, SIZE))

    def differ():
        r = mirror.get_replica_context().replica_id_in_sync_group
        optimizer.state[model[0].weight]["momentum_buffer"].add_(float(r == 1))

    strategy.run(differ)
    message = "momentum_buffer.*'0.weight'.*replica 1 of 3"
    with pytest.raises(mirror.ReplicaMismatchError, match=message):
        strategy.check_replicas()


def test_parameters_made_to_differ_in_run_are_found(strategy):
    _, (model, optimizer) = pair(strategy, momentum)

    def differ(x):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        if mirror.get_replica_context().replica_id_in_sync_group == 2:
            with torch.no_grad():
                model[2].bias.add_(1)

    in_run(strategy, differ, torch.randn(6, SIZE))
    with pytest.raises(mirror.ReplicaMismatchError, match=r"'2.bias'.*replica 2 of 3"):
        strategy.check_replicas()


@pytest.mark.parametrize("way", [1, 3])
def test_state_changed_or_loaded_between_steps_is_used(strategy, way):
    (plain, plain_optimizer), (model, optimizer) = pair(strategy, adam)

    def steps(count):
        data = batches(count)
        train_loop(plain, plain_optimizer, data, loss_of)
        train(way, strategy, model, optimizer, data, loss_of)

    steps(2)
    saved = copy.deepcopy(plain_optimizer.state_dict())
    assert_same(optimizer.state_dict(), saved)
    steps(2)
    optimizer.load_state_dict(saved)
    plain_optimizer.load_state_dict(copy.deepcopy(saved))
    steps(1)
    assert_same_training(model, optimizer, plain, plain_optimizer)
    for m, o in ((plain, plain_optimizer), (model, optimizer)):
        o.state[m[0].weight]["exp_avg"].zero_()
        del o.state[m[2].weight]
    steps(2)
    assert_same_training(model, optimizer, plain, plain_optimizer)


# Groups


@pytest.mark.parametrize("way", [1, 2, 3])
def test_groups_and_options_changed_between_steps_are_used(strategy, way):
    plain = net()
    model = strategy.mirror(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(m[0].parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]

    def steps():
        data = batches(2)
        train_loop(plain, optimizers[0], data, loss_of)
        train(way, strategy, model, optimizers[1], data, loss_of)
        assert_same_training(model, optimizers[1], plain, optimizers[0])

    steps()
    for m, optimizer in zip((plain, model), optimizers, strict=True):
        optimizer.add_param_group({"params": list(m[2].parameters()), "lr": 0.3})
    steps()
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.01
        del optimizer.state[optimizer.param_groups[1]["params"].pop()]
    steps()


def test_code_in_run_sees_the_groups_between_steps(strategy):
    _, (model, optimizer) = pair(strategy, adam)
    weight = model[0].weight

    def step(x):
        for _ in range(3):
            assert [len(group["params"]) for group in optimizer.param_groups] == [4]
            assert optimizer.param_groups[0]["params"][0] is weight
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()

    in_run(strategy, step, torch.randn(6, SIZE))


@pytest.mark.parametrize("way", [1, 2, 3])
def test_schedulers_set_the_rate_of_the_one_step(strategy, way):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)

    (plain, plain_optimizer), (model, optimizer) = pair(strategy, adam)
    data = batches(6)
    train_loop(plain, plain_optimizer, data, loss_of, scheduler=schedule(plain_optimizer))
    train(way, strategy, model, optimizer, data, loss_of, scheduler=schedule(optimizer))
    assert_same_training(model, optimizer, plain, plain_optimizer)


# Other kinds of steps


def test_lbfgs_steps_with_its_closure(strategy):
    def lbfgs(params):
        return torch.optim.LBFGS(params, lr=0.3, max_iter=4)

    (plain, plain_optimizer), (model, optimizer) = pair(strategy, lbfgs)
    data = batches(3)
    train(1, strategy, model, optimizer, data, loss_of)
    train_loop(plain, plain_optimizer, data, loss_of)
    assert_same(model.state_dict(), plain.state_dict(), tolerance=1e-4)


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_scaler_skips_the_step_of_all(strategy, where):
    (plain, plain_optimizer), (model, optimizer) = pair(strategy, adam)
    scaler = mirror.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    plain_scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def step(x, model, optimizer, scaler):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()

    for i, batch in enumerate(batches(5)):
        if i == 2:
            batch[-1] = torch.inf
        step(batch, plain, plain_optimizer, plain_scaler)
        if where == "inside":
            in_run(strategy, lambda x: step(x, model, optimizer, scaler), batch)
        else:
            step(batch, model, optimizer, scaler)
        strategy.check_replicas()
        assert scaler.get_scale() == plain_scaler.get_scale()
    assert_same_training(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize("size", [7, 2, 1])
def test_replicas_that_sit_out_take_the_step_over(strategy, size):
    (plain, plain_optimizer), (model, optimizer) = pair(strategy, adam)
    for batch in batches(3, size):
        plain_step(plain, plain_optimizer, batch)
        step_in_run(strategy, model, optimizer, batch)
        strategy.check_replicas()
    assert_same_training(model, optimizer, plain, plain_optimizer)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("way", [1, 3])
def test_copies_of_model_and_optimizer_train_on_one_device(strategy, make_copy, way):
    (plain, plain_optimizer), (model, optimizer) = pair(strategy, adam)
    data = batches(2)
    train(way, strategy, model, optimizer, data, loss_of)
    train_loop(plain, plain_optimizer, data, loss_of)
    copied, copied_optimizer = make_copy((model, optimizer))
    assert not any(map(mirror.is_mirrored, (copied, copied_optimizer, *copied.parameters())))
    train_loop(copied, copied_optimizer, data, loss_of)
    train_loop(plain, plain_optimizer, data, loss_of)
    assert_same_training(copied, copied_optimizer, plain, plain_optimizer)
    train(way, strategy, model, optimizer, data, loss_of)
    assert_same_training(model, optimizer, plain, plain_optimizer)
