"""One test per bug that was found and fixed; the first comment of each tells its story."""

import copy
import gc
import threading
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror.concurrency import pace
from tests.oracle import assert_same, finishes

ONES = torch.ones(4, 1)


def ones_layer(in_features=1):
    layer = nn.Linear(in_features, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def mirrored_layer(strategy, in_features=1):
    with strategy.scope():
        return ones_layer(in_features)


def sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def in_run(strategy, step, batch, *args):
    """One batch, split over the replicas: ``step(part, *args)`` on each."""
    (distributed,) = strategy.distribute_dataset([batch])
    return strategy.run(step, args=(distributed, *args))


def collect():
    # What only a finalizer lets go of is found by the next round.
    for _ in range(3):
        gc.collect()


# Values and identity of parameters and buffers


def test_data_of_a_parameter_assigned_in_run_keeps_training(make_strategy):
    # `layer.weight.data = t` in run moved the copy that forward reads, not the one the optimizer
    # steps: nothing trained any more, and no check saw it.
    def train(layer, each):
        optimizer = sgd(layer)

        def step(batch, first):
            if first:
                layer.weight.data = torch.full((1, 1), 2.0)
            optimizer.zero_grad()
            layer(batch).mean().backward()
            optimizer.step()

        for i in range(3):
            each(step, ONES, i == 0)

    plain = ones_layer()
    train(plain, lambda step, *args: step(*args))
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)
    train(layer, lambda step, *args: in_run(strategy, step, *args))
    assert_same(layer(ONES), plain(ONES))
    assert_same(layer.state_dict(), plain.state_dict())
    strategy.check_replicas()


@pytest.mark.parametrize("how", ["method", "attribute"])
def test_parameter_unfrozen_in_run_gets_its_gradient_reduced(make_strategy, how):
    # The copy got no arrival hook when `requires_grad` was set on it in run, so each replica
    # stepped with the gradient of its own part, or with none.
    def train(layer, each):
        optimizer = sgd(layer)

        def step(batch):
            if how == "method":
                layer.weight.requires_grad_(True)
            else:
                layer.weight.requires_grad = True
            layer(batch).mean().backward()
            optimizer.step()

        each(step, torch.tensor([[1.0], [5.0]]))

    plain = ones_layer()
    plain.weight.requires_grad_(False)
    train(plain, lambda step, batch: step(batch))
    strategy = make_strategy(2)
    with strategy.scope():
        layer = ones_layer()
        layer.weight.requires_grad_(False)
    train(layer, lambda step, batch: in_run(strategy, step, batch))
    assert layer.weight.requires_grad
    assert_same(layer.state_dict(), plain.state_dict())
    strategy.check_replicas()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_one_tensor_given_to_all_parameters_data_in_run_is_not_shared(make_strategy, n):
    # `p.data = t` with a t from outside left all replicas on t's storage: N updates per step.
    strategy = make_strategy(n)
    layer = mirrored_layer(strategy)
    optimizer = sgd(layer)
    start = torch.full((1, 1), 2.0)

    def step(batch):
        for p in layer.parameters():
            p.data = start
        optimizer.zero_grad()
        layer(batch).mean().backward()
        optimizer.step()

    in_run(strategy, step, ONES)
    assert_same(layer.weight.detach(), torch.full((1, 1), 1.9))
    strategy.check_replicas()


@pytest.mark.parametrize("n", [1, 2, 4])
def test_state_written_in_run_is_kept_for_parameters_that_had_none(make_strategy, n):
    # `optimizer.state[p]` inside run gave a dict of nobody, and what was written there was lost.
    strategy = make_strategy(n)
    layer = strategy.mirror(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(batch):
        layer(batch).mean().backward()
        optimizer.step()
        state = optimizer.state[layer.weight]
        state["steps"] = state.get("steps", 0) + 1
        optimizer.state.setdefault(layer.bias, {})["sum"] = layer.bias.detach().clone()
        return optimizer.state[layer.weight]["steps"]

    for _ in range(3):
        in_run(strategy, step, ONES)
    strategy.check_replicas()
    assert optimizer.state[layer.weight] == {"steps": 3}
    assert_same(optimizer.state_dict()["state"][1]["sum"], layer.bias.detach())


@pytest.mark.parametrize("n", [1, 2, 4])
def test_sharpness_aware_step_in_run_restores_weights_of_its_own(make_strategy, n):
    # SAM restores `p.data = state[p]["old"]`: replicas that shared it took N steps at once.
    class SAM(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            self.base = torch.optim.SGD(self.param_groups, lr=0.1)
            self.param_groups = self.base.param_groups

        @torch.no_grad()
        def climb(self):
            for p in self.param_groups[0]["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * 0.05)
            self.zero_grad()

        @torch.no_grad()
        def descend(self):
            for p in self.param_groups[0]["params"]:
                p.data = self.state[p]["old"]
            self.base.step()
            self.zero_grad()

    def train(layer, each):
        optimizer = SAM(layer.parameters())

        def step(batch):
            layer(batch).pow(2).mean().backward()
            optimizer.climb()
            layer(batch).pow(2).mean().backward()
            optimizer.descend()

        for _ in range(2):
            each(step, torch.arange(8.0).view(4, 2) / 4)

    plain = ones_layer(2)
    train(plain, lambda step, batch: step(batch))
    strategy = make_strategy(n)
    layer = mirrored_layer(strategy, 2)
    train(layer, lambda step, batch: in_run(strategy, step, batch))
    assert_same(layer.state_dict(), plain.state_dict())
    strategy.check_replicas()


def test_one_tensor_assigned_to_a_buffer_in_run_is_not_shared(make_strategy):
    # The replicas' buffers became one tensor, so every in-place update counted N times.
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, start):
            self.count = start
            mirror.get_replica_context().all_reduce("sum", 1.0)  # all have it now
            self.count.add_(1)

    strategy = make_strategy(3)
    with strategy.scope():
        counter = Counter()
    start = torch.full((1,), 5.0)
    strategy.run(counter, args=(start,))
    assert counter.count.item() == 6.0


def test_float16_buffers_are_averaged_without_overflow(make_strategy):
    # The sum of four values of 30000 is beyond float16: their mean was inf.
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.full((1,), 30000.0, dtype=torch.float16))

        def forward(self, x):
            self.shift.add_(32 * x.mean().half())
            return x

    strategy = make_strategy(4)
    with strategy.scope():
        module = Shift()
    module(torch.arange(4.0).view(4, 1))
    assert module.shift.item() == 30048.0


def test_module_first_called_in_inference_mode_can_train(make_strategy):
    # A sanity validation mirrored the module into inference tensors: the first step raised.
    def train(layer):
        with torch.inference_mode():
            layer(ONES)
        layer(ONES).mean().backward()
        sgd(layer).step()

    plain = ones_layer()
    train(plain)
    strategy = make_strategy(2)
    with strategy.scope():
        layer = ones_layer()
        train(layer)
    assert_same(layer.state_dict(), plain.state_dict())
    strategy.check_replicas()


# Optimizers


@pytest.mark.parametrize("way", ["groups", "model"])
def test_step_post_hook_writes_to_all_replicas(make_strategy, way):
    # A hook that clamps weights after the step saw the first replica's only.
    def train(layer):
        nn.init.constant_(layer.weight, -1.0)
        optimizer = sgd(layer)

        @torch.no_grad()
        def clamp(optimizer, args, kwargs):
            groups = optimizer.param_groups[0]["params"]
            for p in groups if way == "groups" else layer.parameters():
                p.clamp_(min=0.0)

        optimizer.register_step_post_hook(clamp)
        layer(ONES).sum().backward()
        optimizer.step()
        return layer(ONES)

    strategy = make_strategy(2)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()


def test_step_pre_hook_changes_gradients_of_all_replicas(make_strategy):
    # A hook that clips came after the other replicas had stepped with unclipped gradients.
    def train(layer):
        optimizer = sgd(layer)

        def clip(optimizer, args, kwargs):
            nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)

        optimizer.register_step_pre_hook(clip)
        layer(ONES).sum().backward()
        optimizer.step()
        return layer(ONES)

    strategy = make_strategy(2)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()


class NoisySGD(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_(-0.1 * p.grad + torch.randn_like(p))


def test_optimizer_that_draws_noise_draws_it_once(make_strategy):
    # Every replica drew its own noise, and their weights went apart at the first step.
    def train(layer):
        optimizer = NoisySGD(layer.parameters())
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            layer(ONES).mean().backward()
            optimizer.step()
        return layer.state_dict()

    strategy = make_strategy(3)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()


def test_optimizer_that_draws_noise_is_refused_in_run(make_strategy):
    # In run, too, every replica drew its own noise; there each steps alone, so it cannot work.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)
    optimizer = NoisySGD(layer.parameters())

    def step(batch):
        layer(batch).mean().backward()
        optimizer.step()

    with pytest.raises(mirror.StrategyError, match="random numbers"):
        in_run(strategy, step, ONES)


def test_closure_that_raises_leaves_the_optimizer_as_it_was(make_strategy):
    # The next step without a closure ended as one with a closure: the groups kept one replica's
    # ordinary parameters for ever, and no later step did anything.
    def fail():
        raise ValueError("no loss")

    def train(layer):
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="no loss"):
            optimizer.step(fail)
        for _ in range(2):
            optimizer.zero_grad()
            layer(ONES).sum().backward()
            optimizer.step()
        assert optimizer.param_groups[0]["params"][0] is layer.weight
        return layer.state_dict()

    strategy = make_strategy(2)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()


def test_collective_inside_a_step_is_refused(make_strategy):
    # The merge took the optimizer back in mid-step: Adam began anew in each step, in silence.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)
    optimizer = torch.optim.Adam(layer.parameters())

    def count(optimizer, args, kwargs):
        mirror.get_replica_context().all_reduce("sum", torch.ones(()))

    optimizer.register_step_pre_hook(count)

    def step(batch):
        layer(batch).mean().backward()
        optimizer.step()

    with pytest.raises(mirror.StrategyError, match=r"inside optimizer\.step"):
        in_run(strategy, step, ONES)


def test_optimizer_over_two_strategies_is_refused(make_strategy):
    # The gradients of the second strategy's model were never reduced, its weights never moved.
    layers = [mirrored_layer(make_strategy(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    sum(layer(ONES).sum() for layer in layers).backward()
    with pytest.raises(mirror.StrategyError, match="two strategies"):
        optimizer.step()


def test_state_that_a_step_replaces_is_the_optimizers_state(make_strategy):
    # Only new entries were noticed, so optimizer.state stayed that of the first step, and a look
    # at state_dict() between steps set the training back to it.
    class Growing(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                k = self.state[p].get("k", 0) + 1
                self.state[p] = {"k": k}
                p.sub_(k)

    def train(layer):
        optimizer = Growing(layer.parameters())
        for _ in range(3):
            layer(ONES).sum().backward()
            optimizer.step()
            state = optimizer.state_dict()["state"]
        return state, layer.state_dict()

    strategy = make_strategy(2)
    assert_same(train(mirrored_layer(strategy)), train(ones_layer()))
    strategy.check_replicas()


def test_optimizer_made_in_run_over_one_replicas_parameter_is_refused(make_strategy):
    # `SGD([layer.weight])` in run holds one replica's copy: one replica trained, the others not.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)

    def step(batch):
        optimizer = torch.optim.SGD([layer.weight], lr=0.1)
        layer(batch).mean().backward()
        optimizer.step()

    with pytest.raises(mirror.StrategyError, match="made inside"):
        in_run(strategy, step, ONES)
    strategy.check_replicas()


# Gradients and weights


def test_weights_set_between_forward_and_backward_count_in_collectives(make_strategy):
    # A replica read the others' weights in its own turn, before they had set theirs.
    def gradient(is_before):
        strategy = make_strategy(2)
        layer = mirrored_layer(strategy)

        def step(batch):
            context = mirror.get_replica_context()
            weight = 1.0 if context.replica_id_in_sync_group == 0 else 9.0
            if is_before:
                context.weight = weight
            y = layer(batch)
            total = context.all_reduce("sum", y.pow(2).sum())
            if not is_before:
                context.weight = weight
            (y.mean() * total).backward()

        in_run(strategy, step, torch.arange(1.0, 5.0).view(4, 1))
        return layer.weight.grad

    # Weighted mean of y: (1.5 + 9 * 3.5) / 10 = 3.3; total 30; each is of degree 1 and 2 in w.
    assert_same(gradient(is_before=False), torch.tensor([[3 * 3.3 * 30]]))
    assert_same(gradient(is_before=True), torch.tensor([[3 * 3.3 * 30]]))


@pytest.mark.parametrize("is_batch_first", [True, False])
def test_values_of_a_run_without_batch_do_not_set_gradient_weights(make_strategy, is_batch_first):
    # The first PerReplica argument gave the weights: a hidden state from an earlier run counted
    # as (1, 1) and won over the batch's (2, 1).
    x = torch.arange(6.0).view(3, 2)
    plain = ones_layer(2)
    plain(x).mean().backward()
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy, 2)
    hidden = strategy.run(lambda: torch.zeros(1))

    def step(*args):
        batch, state = args if is_batch_first else args[::-1]
        (layer(batch) + state).mean().backward()

    (batch,) = strategy.distribute_dataset([x])
    strategy.run(step, args=(batch, hidden) if is_batch_first else (hidden, batch))
    assert_same(layer.weight.grad, plain.weight.grad)


def test_part_of_weight_zero_counts_nothing_even_where_it_is_nan(make_strategy):
    # The mean over no tokens is NaN, and 0 * NaN made the whole gradient and loss NaN.
    x, labels = torch.eye(4), torch.tensor([0, 1, -100, -100])

    def loss_of(layer, x, labels):
        loss = F.cross_entropy(layer(x), labels)
        loss.backward()
        return loss.detach()

    def make():
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    plain = make()
    expected = loss_of(plain, x, labels)
    strategy = make_strategy(2)
    with strategy.scope():
        layer = make()

    def step(batch):
        mirror.get_replica_context().weight = float((batch[1] != -100).sum())
        return loss_of(layer, *batch)

    losses = in_run(strategy, step, (x, labels))
    assert_same(strategy.reduce("mean", losses), expected)
    assert_same(layer.weight.grad, plain.weight.grad)


def test_graph_built_before_the_first_call_keeps_its_gradient(make_strategy):
    # A penalty made before the model is mirrored ends in the parameter itself, and its gradient
    # vanished in silence.
    def gradient():
        layer = ones_layer(2)
        penalty = layer.weight.pow(2).sum()
        (layer(torch.ones(2, 2)).mean() + penalty).backward()
        return layer.weight.grad

    expected = gradient()
    with make_strategy(2).scope():
        assert_same(gradient(), expected)


@pytest.mark.parametrize("change", ["zero_grad", "clip"])
def test_gradient_changed_in_place_under_no_sync_is_refused(make_strategy, change):
    # With several parts gathered, .grad is a fresh sum: zeroing or clipping it changed nothing.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)
    optimizer = sgd(layer)

    def backward(batch):
        layer(batch).sum().backward()

    def backward_and_change(batch):
        backward(batch)
        if change == "zero_grad":
            optimizer.zero_grad(set_to_none=False)
        else:
            nn.utils.clip_grad_value_(layer.parameters(), 0.5)

    with strategy.no_sync():
        in_run(strategy, backward, ONES)
        with pytest.raises(mirror.StrategyError, match="in place under no_sync"):
            in_run(strategy, backward_and_change, ONES)


# Runs, merges and contexts


def test_merge_call_brings_idle_replicas_along(make_strategy):
    # A replica without a part of the batch kept the weights from before the others' step.
    strategy = make_strategy(3)
    layer = mirrored_layer(strategy)
    optimizer = sgd(layer, lr=2.0)

    def evaluate(strategy):
        return layer(torch.ones(3, 1)).detach().flatten().tolist()

    def step(batch):
        layer(batch).mean().backward()
        optimizer.step()
        return mirror.get_replica_context().merge_call(evaluate)

    outputs = in_run(strategy, step, torch.ones(2, 1))
    assert strategy.local_results(outputs)[0] == [-1.0, -1.0, -1.0]
    strategy.check_replicas()


def test_merge_call_that_raises_leaves_replicas_alike(make_strategy):
    # What the function wrote before it raised reached the first replica only.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)

    @torch.no_grad()
    def write_and_fail(strategy):
        layer.weight.add_(1)
        raise ValueError("after writing")

    def step():
        with pytest.raises(ValueError, match="after writing"):
            mirror.get_replica_context().merge_call(write_and_fail)
        return layer(torch.ones(1, 1)).item()

    assert strategy.local_results(strategy.run(step)) == (2.0, 2.0)
    strategy.check_replicas()


def test_merge_call_may_take_longer_than_the_timeout_while_its_runs_move(make_strategy):
    # An evaluation in merge_call was cut off: the outer run saw none of its inner runs move.
    options = mirror.CommunicationOptions(timeout_seconds=0.75)
    strategy = make_strategy(2, communication_options=options)

    def evaluate(strategy):
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            strategy.run(lambda: None)
        return 1

    results = strategy.run(lambda: mirror.get_replica_context().merge_call(evaluate))
    assert strategy.local_results(results) == (1, 1)


def test_submodules_of_an_unsplit_call_do_not_split(make_strategy):
    # A call without a tensor runs whole, but each inner module split its input again: attention
    # over the first dimension gave wrong outputs.
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(2))

        def forward(self, x):
            return torch.softmax(x @ self.weight @ x.T, -1) @ x

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()

        def forward(self, n):
            return self.attention(torch.arange(2.0 * n).view(n, 2) / 4)

    with make_strategy(2).scope():
        model = Generator()
    assert_same(model(4), Generator()(4))


def test_check_replicas_and_mirror_are_refused_in_run(make_strategy):
    # A check in run reduced the gradients of half a step, each replica's with share 1.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)

    def step(batch):
        layer(batch).mean().backward()
        for call in (strategy.check_replicas, lambda: strategy.mirror(ones_layer())):
            with pytest.raises(mirror.StrategyError, match="inside run"):
                call()

    in_run(strategy, step, torch.tensor([[1.0], [2.0], [6.0]]))
    assert_same(layer.weight.grad, torch.tensor([[3.0]]))


@pytest.mark.parametrize("place", ["run", "merge_call"])
def test_close_is_refused_in_run(make_strategy, place):
    # It ended the threads under the run: KeyError: 0, or a hang.
    strategy = make_strategy(3)

    def step():
        with pytest.raises(mirror.StrategyError, match="inside run"):
            if place == "run":
                strategy.close()
            else:
                mirror.get_replica_context().merge_call(lambda strategy: strategy.close())
        return 1

    assert strategy.local_results(strategy.run(step)) == (1, 1, 1)


def test_replica_context_is_refused_after_its_run(make_strategy):
    # A context kept from a run reduced over itself alone: the sum of one value.
    strategy = make_strategy(2)
    kept = strategy.local_results(strategy.run(mirror.get_replica_context))
    with pytest.raises(mirror.StrategyError, match="a run that has ended"):
        kept[0].all_reduce("sum", 1.0)
    with pytest.raises(mirror.StrategyError, match="a run that has ended"):
        kept[0].merge_call(lambda strategy: None)


@pytest.mark.parametrize("other", [(1.0,), [1.0], {"x": 1.0}])
@pytest.mark.parametrize("leaf", [torch.ones(2), 1.0, "a"])
def test_a_leaf_beside_a_structure_is_an_error(make_strategy, leaf, other):
    # Where the first replica's part was a leaf, the others' structures passed for leaves.
    strategy = make_strategy(2)

    def mixed():
        return leaf if mirror.get_replica_context().replica_id_in_sync_group == 0 else other

    with pytest.raises(mirror.StructureError, match="there; return the same structure"):
        strategy.run(mixed)
    with pytest.raises(mirror.StructureError, match=f"a {type(other).__name__} there"):
        strategy.distribute_values_from_function(
            lambda context: (leaf, other)[context.replica_id_in_sync_group]
        )
    batches = strategy.distribute_dataset_from_function(lambda context: [[leaf], [other]])
    with pytest.raises(mirror.BatchError, match="must have one structure"):
        list(batches)


def test_another_thread_cannot_read_gradients_during_run(make_strategy):
    # A logging thread that looked at .grad reduced half a step: 7.5 for a mean of 3.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)
    errors = []

    def log():
        try:
            layer.weight.grad
        except mirror.StrategyError as error:
            errors.append(str(error))

    def step(batch):
        layer(batch).mean().backward()
        thread = threading.Thread(target=log)
        thread.start()
        thread.join()

    in_run(strategy, step, torch.tensor([[1.0], [2.0], [6.0]]))
    assert_same(layer.weight.grad, torch.tensor([[3.0]]))
    assert len(errors) == 2
    assert all("another thread" in error for error in errors)


# Lifetime


@pytest.mark.parametrize("failure", ["hook", "closure"])
def test_step_that_raised_keeps_nothing_alive(failure):
    # The frame of the failed step stayed referenced: model, optimizer and copies for ever.
    def fail(*args):
        raise ValueError("out of memory")

    def make():
        strategy = mirror.MirroredStrategy(["cpu"] * 3)
        layer = mirrored_layer(strategy)
        optimizer = torch.optim.Adam(layer.parameters())
        layer(ONES).sum().backward()
        try:
            if failure == "hook":
                optimizer.register_step_pre_hook(fail)
                optimizer.step()
            else:
                optimizer.step(fail)
        except ValueError:
            pass
        return [weakref.ref(thing) for thing in (strategy, layer, optimizer)]

    alive = make()
    collect()
    assert [ref() for ref in alive] == [None, None, None]


def test_gradients_that_nobody_looked_at_keep_nothing_alive():
    # The list of arrived gradients and the copies' hooks held one another where the collector
    # cannot see: strategy, copies and threads stayed after the last use.
    def make():
        strategy = mirror.MirroredStrategy(["cpu"] * 3)
        layer = mirrored_layer(strategy)
        layer(ONES).sum().backward()
        return weakref.ref(strategy), weakref.ref(layer)

    alive = make()
    collect()
    assert [ref() for ref in alive] == [None, None]


def test_closed_strategy_says_how_to_keep_the_model(make_strategy):
    # distribute_values_from_function still worked, and the error was no help with the model.
    strategy = make_strategy(2)
    layer = mirrored_layer(strategy)
    layer(ONES)
    strategy.close()
    with pytest.raises(mirror.StrategyError, match=r"copy\.deepcopy\(model\)"):
        strategy.distribute_values_from_function(lambda context: 1)
    assert_same(copy.deepcopy(layer)(ONES), ONES)


# Values


@pytest.mark.parametrize(
    "use",
    [
        lambda loss: f"{loss:.3f}",
        lambda loss: loss == 0,
        lambda loss: loss != torch.ones(()),
        lambda loss: divmod(loss, 2),
        lambda loss: divmod(2, loss),
    ],
)
def test_per_replica_values_refuse_numbers_business_with_advice(make_strategy, use):
    # Formatting a loss spoke of "PerReplica.__format__", and `loss == 0` was False in silence.
    strategy = make_strategy(2)
    loss = strategy.run(lambda: torch.ones(()))
    with pytest.raises(TypeError, match="holds one value per replica"):
        use(loss)
    assert loss == loss
    assert loss != "loss"
    assert loss in {loss}
    assert f"{loss}" == repr(loss)


def test_reduce_of_nothing_says_so(make_strategy):
    # "reduce() of empty iterable with no initial value" came from the standard library.
    strategy = make_strategy(2)
    with pytest.raises(ValueError, match="without parts"):
        strategy.reduce("max", mirror.PerReplica([]))
    with pytest.raises(ValueError, match="no elements"):
        strategy.reduce("max", strategy.run(lambda: torch.zeros(0)), axis=0)


# Threads


def test_replica_zero_sits_out_after_all_have_run():
    # The first one that takes part ran in the caller's thread, and waited there at the gate where
    # the thread it had from the run before waited, too: one of the two was woken.
    parts = [mirror.values.ABSENT, torch.ones(1), torch.ones(1)]

    def step(x):
        for _ in range(3):
            x = mirror.get_replica_context().all_reduce("sum", x)
        return x

    def use():
        with mirror.MirroredStrategy(["cpu"] * 3) as strategy:
            for _ in range(3):
                strategy.run(step, args=(mirror.PerReplica([torch.ones(1)] * 3),))
                result = strategy.run(step, args=(mirror.PerReplica(parts),))
                assert strategy.local_results(result) == (8, 8)
            assert sum("mirror" in t.name for t in threading.enumerate()) == 2

    _, error, _ = finishes(use)
    assert error is None


def test_strategies_in_threads_of_their_own_keep_their_times_apart(make_strategy):
    # The spans of the cross-replica context went to the strategy that ran last, whichever thread
    # they came from, and two threads popped from one list: `optimizer.step()` raised IndexError.
    def begin(strategy):
        layer = mirrored_layer(strategy)
        return sgd(layer), layer(ONES).mean()

    def end(optimizer, loss):
        loss.backward()
        optimizer.step()

    here, there = make_strategy(2), make_strategy(2)
    begun = begin(here)
    _, error, _ = finishes(lambda: end(*begin(there)))
    assert error is None
    end(*begun)
    assert [here.report().num_steps, there.report().num_steps] == [1, 1]


# Optimizers and their state


def test_a_subclass_that_steps_its_base_takes_one_step_of_the_report(make_strategy):
    # The steps of the base on every replica, inside the one that was called, ended a step each.
    class Subclass(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([torch.ones(1)])  # torch puts its hooks around the base's step now
    strategy = make_strategy(3)
    layer = mirrored_layer(strategy)
    optimizer = Subclass(layer.parameters(), lr=0.1)
    for i in range(3):
        layer(ONES).mean().backward()
        optimizer.step()
        assert strategy.report().num_steps == i + 1


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_replicas_on_one_device_keep_one_state(make_strategy, where):
    # Outside run every step copied the state to all replicas, which nobody used.
    strategy = make_strategy(3)
    layer = mirrored_layer(strategy, in_features=37)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)

    def step(batch):
        layer(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        batch = torch.ones(3, 37)
        step(batch) if where == "outside" else in_run(strategy, step, batch)
    collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    assert sum(t.shape == (1, 37) for t in tensors) == 2  # the two moments


@pytest.mark.parametrize("schedule", ["lockstep", "staggered"])
def test_state_changed_in_run_is_the_same_on_all_replicas(make_strategy, schedule):
    # A replica's state was copied from the first one's when the replica looked at it: after the
    # first one had changed its own, so that the others changed it twice.
    strategy = make_strategy(3, schedule=schedule)
    layer = mirrored_layer(strategy)
    optimizer = sgd(layer, momentum=0.9)
    layer(ONES).mean().backward()
    optimizer.step()

    def halve():
        buffer = optimizer.state[layer.weight]["momentum_buffer"]
        buffer.mul_(0.5)
        return buffer.clone()

    for expected in (0.5, 0.25):
        halved = strategy.run(halve)
        assert strategy.local_results(halved) == (expected,) * 3
        strategy.check_replicas()
        assert optimizer.state[layer.weight]["momentum_buffer"] == expected


def test_backward_after_close_starts_no_thread(make_strategy):
    # A bucket that was complete after `close` started the thread that `close` had ended anew.
    strategy = make_strategy(
        2, communication_options=mirror.CommunicationOptions(bytes_per_pack=0)
    )
    model = strategy.mirror(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    loss = model(torch.ones(4, 2)).mean()
    loss.backward(retain_graph=True)
    model.zero_grad()
    strategy.close()
    loss.backward()
    assert not any("mirror side" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_gradient_passed_to_backward_on_all_replicas_is_not_shared(make_strategy, reduction):
    # Autograd makes a view of what `backward` was given the gradient of a parameter: replicas
    # given one tensor weighed and summed it in place, over each other, since a reduction of
    # gradients no longer looks at where they lie.
    strategy = make_strategy(2, gradient_reduction=reduction)
    layer = mirrored_layer(strategy, in_features=3)
    given = torch.ones(3)

    def step():
        context = mirror.get_replica_context()
        context.weight = 1 + context.replica_id_in_sync_group
        layer.weight.view(-1).backward(given)

    strategy.run(step)
    assert torch.equal(given, torch.ones(3))
    assert_same(layer.weight.grad, torch.full((1, 3), 2.0 if reduction == "sum" else 1.0))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_replicas_that_run_at_once_use_their_own_weights(
    make_strategy, monkeypatch, kind
):
    # In every call an RNN makes a list of its weights, an attribute of the module that replicas
    # share, and reads it a moment later: what another replica had put there in between.
    monkeypatch.setattr(pace, "LONG_SECONDS", -1.0)  # all start at once
    monkeypatch.setattr(pace, "LOOKS", 1)
    both_have_made_theirs = threading.Barrier(2, timeout=10)

    class Met(kind):
        def _init_flat_weights(self):
            super()._init_flat_weights()
            if mirror.has_strategy():
                both_have_made_theirs.wait()

    plain = Met(3, 2, batch_first=True)
    strategy = make_strategy(2, schedule="staggered")
    strategy.run(lambda: None)
    layer = strategy.mirror(copy.deepcopy(plain))

    def grads(x, layer=layer):
        return torch.autograd.grad(layer(x)[0].sum(), list(layer.parameters()))

    x = torch.randn(4, 5, 3)
    own, error, _ = finishes(lambda: strategy.local_results(in_run(strategy, grads, x)))
    assert error is None
    assert_same(list(own), [grads(part, plain) for part in x.chunk(2)])
