"""Parallel backward passes together with hooks, errors and other features, as on one device."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.base.timeline import BACKWARD, CROSS
from tests.oracle import assert_same, finishes
from tests.replica.gradients.at_once import (
    Watched,
    assert_equal_bits,
    batch_of,
    grads_of,
    loss_of,
    mirrored,
    small,
)

pytestmark = pytest.mark.usefixtures("eager", "one_thread")


# Hooks


def test_hooks_of_outputs_run_once_with_the_whole_gradient(make_eager, make_strategy):
    def seen_by(strategy):
        model, seen = mirrored(strategy), []
        x, y = torch.linspace(-1, 1, 60).view(10, 6), torch.arange(10) % 3
        joined = model(x)
        joined.retain_grad()
        joined.register_hook(lambda grad: seen.append(grad.clone()))
        joined.register_hook(lambda grad: grad * 2)
        F.cross_entropy(joined, y).backward()
        seen.append(joined.grad)

        (parts,) = strategy.distribute_dataset([x])
        outputs = strategy.run(lambda part: model(part), args=(parts,))
        own = {}
        for r, output in enumerate(strategy.local_results(outputs)):
            output.retain_grad()
            output.register_hook(lambda grad, r=r: own.setdefault(r, []).append(grad.clone()))
            output.register_hook(lambda grad: grad * 2)
        strategy.reduce("mean", outputs, axis=0).square().sum().backward()
        for r, output in enumerate(strategy.local_results(outputs)):
            seen += [*own[r], output.grad]
        return model, seen

    single, expected = seen_by(make_strategy(2))
    model, seen = seen_by(make_eager(2))
    assert len(seen) == len(expected) == 6
    assert all(map(torch.equal, seen, expected))
    assert_equal_bits(grads_of(model), grads_of(single))
    assert len(set(model.threads)) == 2


def test_parameter_hooks_see_the_reduced_gradient_once(make_eager):
    strategy, plain = make_eager(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    seen = []
    for m in (model, plain):
        m.head.weight.register_hook(lambda grad: (seen.append(grad.clone()), grad * 3)[1])
    x, y = batch_of()
    for m in (model, plain):
        F.cross_entropy(m(x), y).backward()
    assert len(seen) == 2
    assert_same(seen[0], seen[1])
    assert_same(grads_of(model), grads_of(plain))


def test_module_hooks_see_each_replicas_gradient(make_eager):
    strategy, plain = make_eager(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    x, y = batch_of()
    sizes = []
    model.head.register_full_backward_hook(lambda m, _, grads: sizes.append(len(grads[0])))
    for m in (model, plain):
        F.cross_entropy(m(x), y).backward()
    assert sizes == [5, 5]
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.parametrize("n", [2, 4])
def test_hooks_that_look_at_gradients_leave_them_whole(n, make_eager):
    class Looking(Watched):
        def record_thread(self, grad):
            super().record_thread(grad)
            looked.append(self.head.weight.grad)

    torch.manual_seed(0)
    plain = Looking(nn.Linear(6, 5), nn.Tanh())
    looked = []
    plain(torch.zeros(2, 6))
    strategy = make_eager(n)
    model = strategy.mirror(copy.deepcopy(plain))
    for _ in range(3):
        x, y = batch_of()
        looked.clear()
        for m in (model, plain):
            m.threads.clear()
            F.cross_entropy(m(x), y).backward()
        assert model.ran_at_once()
        assert len(looked) == n + 1
        assert_same(grads_of(model), grads_of(plain))


def test_hooks_that_drop_gradients_wait_for_the_others(make_eager):
    class Dropping(Watched):
        def record_thread(self, grad):
            super().record_thread(grad)
            self.head.weight.grad = None

    torch.manual_seed(0)
    model = Dropping(nn.Linear(6, 5), nn.Tanh())
    model(torch.zeros(2, 6))
    strategy = make_eager(2)
    strategy.mirror(model)
    x, y = batch_of()
    F.cross_entropy(model(x), y).backward()
    # Each hook comes after its replica's gradient of the head.
    assert model.head.weight.grad is None
    assert model.body[0].weight.grad is not None


def test_hooks_may_start_a_run(make_eager):
    strategy = make_eager(2)
    totals = []

    class Running(Watched):
        def record_thread(self, grad):
            super().record_thread(grad)
            add = lambda: mirror.get_replica_context().all_reduce("sum", torch.ones(()))  # noqa: E731
            totals.append(strategy.run(add).values[0])

    torch.manual_seed(0)
    plain = small()
    model = Running(nn.Linear(6, 5), nn.Tanh())
    model(torch.zeros(2, 6))
    model.load_state_dict(plain.state_dict())
    model.threads.clear()
    totals.clear()
    strategy.mirror(model)
    x, y = batch_of()
    for m in (model, plain):
        F.cross_entropy(m(x), y).backward()
    assert model.ran_at_once()
    assert totals == [2, 2]
    assert_same(grads_of(model), grads_of(plain))


def test_another_thread_cannot_start_a_run_meanwhile(make_eager):
    strategy, plain = make_eager(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    errors, record_thread = [], model.record_thread

    def start(grad):
        record_thread(grad)
        errors.append(finishes(lambda: strategy.run(lambda: None))[1])

    model.record_thread = start
    x, y = batch_of()
    for m in (model, plain):
        F.cross_entropy(m(x), y).backward()
    assert model.ran_at_once()
    assert [type(error) for error in errors] == [mirror.StrategyError] * 2
    assert "another thread while strategy.run, or backward, is going on" in str(errors[0])
    assert_same(grads_of(model), grads_of(plain))


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_replicas_pass_reaches_the_caller(failing, make_eager):
    strategy, plain = make_eager(2), small()
    model = strategy.mirror(copy.deepcopy(plain))

    class Broken(Exception):
        pass

    def forward(part):
        out = model(part)
        if mirror.get_replica_context().replica_id_in_sync_group == failing:

            def fail(grad):
                raise Broken("bad luck")

            out.register_hook(fail)
        return out.square().mean()

    x, y = batch_of()
    (parts,) = strategy.distribute_dataset([x])
    with pytest.raises(Broken, match="bad luck") as caught:
        strategy.reduce("mean", strategy.run(forward, args=(parts,))).backward()
    assert caught.value.__notes__ == [f"in replica {failing} of 2 (cpu)"]
    model.zero_grad()
    model.threads.clear()
    for m in (model, plain):
        F.cross_entropy(m(x), y).backward()
    assert model.ran_at_once()
    assert_same(grads_of(model), grads_of(plain))


# Beside other features


def test_no_sync_adds_up_passes_at_once(make_eager):
    strategy, plain = make_eager(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    batches = [batch_of(size) for size in (10, 7, 10)]
    with strategy.no_sync():
        for batch in batches[:2]:
            loss_of(strategy, model, batch, 1).backward()
            assert model.ran_at_once()
    loss_of(strategy, model, batches[2], 2).backward()
    for x, y in batches:
        F.cross_entropy(plain(x), y).backward()
    assert_same(grads_of(model), grads_of(plain))
    strategy.check_replicas()


def test_scaled_losses_step_and_skip_as_on_one_device(make_eager):
    strategy, plain = make_eager(2), small()
    model = strategy.mirror(copy.deepcopy(plain))
    batches = [batch_of() for _ in range(3)]
    batches[1][0][7] = torch.inf  # the second replica's
    for m in (model, plain):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        scaler = mirror.amp.GradScaler("cpu", init_scale=8.0)
        for x, y in batches:
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(m(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0
    assert len(set(model.threads)) == 2
    assert_same(model.state_dict(), plain.state_dict())


def test_a_pass_over_a_forward_under_autocast_is_split(make_eager, make_strategy):
    grads = []
    for strategy in (make_strategy(2, schedule="auto"), make_eager(2)):
        model = mirrored(strategy)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(
                model(torch.linspace(-1, 1, 60).view(10, 6)), torch.arange(10) % 3
            )
        loss.backward()
        assert model.ran_at_once() == bool(grads)
        grads.append(grads_of(model))
    assert_equal_bits(*grads)


def test_compiled_models_go_backward_in_one_thread(make_eager):
    strategy, plain = make_eager(2), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model = strategy.mirror(copy.deepcopy(plain))
    call = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        x, y = batch_of()
        F.cross_entropy(call(x), y).backward()
        F.cross_entropy(plain(x), y).backward()
    assert_same(grads_of(model), grads_of(plain))


def test_strategies_in_one_loss_run_as_one_pass(make_eager):
    plain = small()
    models = [make_eager(2).mirror(copy.deepcopy(plain)) for _ in range(2)]
    x, y = batch_of()
    sum(F.cross_entropy(model(x), y) for model in models).backward()
    F.cross_entropy(plain(x), y).backward()
    for model in models:
        assert set(model.threads) == {threading.get_ident()}
        assert_same(grads_of(model), grads_of(plain))


def test_the_caller_keeps_its_threads_and_modes(make_eager):
    strategy = make_eager(2)
    model = mirrored(strategy)
    torch.set_num_threads(6)
    seen = []
    model.record_thread = lambda grad: seen.append(
        (torch.get_num_threads(), mirror.has_strategy())
    )
    loss = loss_of(strategy, model, batch_of(), 1)
    with strategy.scope(), torch.no_grad():
        loss.backward()
        assert not torch.is_grad_enabled()
    assert torch.get_num_threads() == 6
    assert seen == [(3, True), (3, True)]


def test_the_time_of_a_pass_is_on_the_replicas_lanes(make_eager):
    strategy = make_eager(2)
    model = mirrored(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(strategy, model, batch_of(), 1).backward()
        assert model.ran_at_once()
        optimizer.step()
    whole, sums = strategy._group.replicas.timeline.steps[-1]
    for lane in (0, 1, CROSS):
        assert 0 < sums[lane][BACKWARD] < whole
    assert strategy.report().backward < whole
