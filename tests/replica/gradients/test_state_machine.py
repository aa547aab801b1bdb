"""Random sequences of what a program does with gradients, beside plain PyTorch on one device.

A rule is a short program: its actions are done one after the other without a look, so that
gradients are reduced where the program has them reduced; then all is compared.
"""

import copy
import functools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from torch import nn

import mirror
from tests.pairs import EXHAUSTIVE

WIDTH, NUM_LAYERS, NUM_WORDS = 3, 4, 5


class Net(nn.Module):
    """A chain of layers that can be left out, over an embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.extra = None

    def forward(self, x, use):
        words = x[:, 0].abs().mul(7).long() % NUM_WORDS
        if use.words:
            x = x + self.embedding(words)
        if use.table:  # a dense gradient of what has a sparse one otherwise
            x = x + self.embedding.weight.mean(0)
        if self.extra is not None:
            x = x * self.extra
        for i, layer in enumerate(self.layers):
            if i not in use.skip:
                x = layer(x).tanh()
        return x


class Use:
    """What a forward pass uses; not a structure that a split call would walk."""

    def __init__(self, skip=(), words=False, table=False):
        self.skip, self.words, self.table = frozenset(skip), words, table

    def __repr__(self):
        return f"Use({sorted(self.skip)}, words={self.words}, table={self.table})"


def clamp(grad):
    return grad * 0.5 if grad.is_sparse else grad.clamp(-0.05, 0.05)


class World:
    """A model in training; ``strategy`` is ``None`` for the plain one."""

    def __init__(self, model, strategy):
        self.model, self.strategy = model, strategy
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.handles = []
        self.captured = []  # what torch.autograd.grad has returned

    def parameter(self, i):
        parameters = list(self.model.parameters())
        return parameters[i % len(parameters)]

    def do(self, action, batch=None):
        name, *args = action
        getattr(self, name)(*args, **({"batch": batch} if name == "repeat_backward" else {}))

    # Passes

    def loss(self, batch, use):
        return self.model(batch, use).square().mean()

    def repeat_backward(self, use, times, batch):
        """A backward pass in the current context; its graph may have several."""
        loss = self.loss(batch, use)
        for i in range(times if loss.requires_grad else 0):
            loss.backward(retain_graph=i + 1 < times)

    def backward(self, way, size, seed, use, times):
        batch = data(size, seed)
        if self.strategy is None or way == 1:
            self.repeat_backward(use, times, batch)
            return
        (part,) = self.strategy.distribute_dataset([batch])
        if way == 3:
            self.strategy.run(self.repeat_backward, args=(use, times, part))
            return
        losses = self.strategy.run(self.loss, args=(part, use))
        if self.model_requires_grad(losses):
            loss = self.strategy.reduce("mean", losses)
            for i in range(times):
                loss.backward(retain_graph=i + 1 < times)

    def capture(self, size, seed, use):
        loss = self.loss(data(size, seed), use)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if loss.requires_grad and trained:
            self.captured.append(torch.autograd.grad(loss, trained, allow_unused=True))

    def model_requires_grad(self, losses):
        return any(loss.requires_grad for loss in self.strategy.local_results(losses))

    def run(self, size, seed, actions):
        """Actions inside ``run``, by every replica that has a part of the batch."""
        batch = data(size, seed)

        def step(part):
            for action in actions:
                self.do(action, part)

        if self.strategy is None:
            step(batch)
        else:
            (part,) = self.strategy.distribute_dataset([batch])
            self.strategy.run(step, args=(part,))

    def no_sync(self, actions):
        if self.strategy is None:
            for action in actions:
                self.do(action)
            return
        with self.strategy.no_sync():
            for action in actions:
                self.do(action)

    # Gradients

    def step(self):
        self.optimizer.step()

    def zero_grad(self, of, set_to_none):
        (self.optimizer if of == "optimizer" else self.model).zero_grad(set_to_none=set_to_none)

    def drop(self, i):
        self.parameter(i).grad = None

    def drop_all(self):
        for parameter in self.model.parameters():
            parameter.grad = None

    def put(self, i):
        parameter = self.parameter(i)
        parameter.grad = torch.full_like(parameter, 0.25)

    def scale(self, i):
        grad = self.parameter(i).grad
        if grad is not None:
            grad.mul_(0.5)

    def clip(self):
        dense = [p for p in self.model.parameters() if p.grad is not None and not p.grad.is_sparse]
        if dense:
            torch.nn.utils.clip_grad_norm_(dense, 0.1)

    def hook(self, i):
        parameter = self.parameter(i)
        if parameter.requires_grad:
            self.handles.append(parameter.register_hook(clamp))

    def unhook(self):
        if self.handles:
            self.handles.pop(0).remove()

    # Parameters

    def freeze(self, i):
        self.parameter(i).requires_grad_(False)

    def unfreeze(self, i):
        self.parameter(i).requires_grad = True

    def freeze_all_but(self, i):
        self.model.requires_grad_(False)
        self.parameter(i).requires_grad_(True)

    def unfreeze_all(self):
        self.model.requires_grad_(True)

    def replace_parameter(self, i):
        if len(self.model.layers):
            layer = self.model.layers[i % len(self.model.layers)]
            layer.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.3))
            self.optimize_all()

    def replace_layer(self, i):
        if len(self.model.layers):
            self.model.layers[i % len(self.model.layers)] = self.new_layer()
            self.optimize_all()

    def add_layer(self):
        if len(self.model.layers) < NUM_LAYERS + 1:
            self.model.layers.append(self.new_layer())
            self.optimize_all()

    def remove_layer(self, i):
        if len(self.model.layers) > 1:
            del self.model.layers[i % len(self.model.layers)]
            self.optimize_all()

    def toggle_extra(self):
        self.model.extra = (
            None if self.model.extra is not None else nn.Parameter(torch.full((WIDTH,), 0.7))
        )
        self.optimize_all()

    def new_layer(self):
        layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            layer.weight.copy_(torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) / 10)
            layer.bias.fill_(0.1)
        return layer

    def optimize_all(self):
        self.optimizer.param_groups[0]["params"] = list(self.model.parameters())


@functools.cache
def data(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)


def one(name, *args):
    return st.tuples(st.just(name), *args)


usual = st.just(Use())
uses = usual | st.builds(
    Use,
    st.sets(st.integers(0, NUM_LAYERS), max_size=2),
    words=st.booleans(),
    table=st.booleans(),
)
# A parameter: any, or (more often than by chance) one with a gradient that comes last.
which = st.integers(0, 11) | st.integers(0, 2)
sizes, seeds = st.sampled_from([8, 7, 5, 3, 1]), st.integers(0, 3)
times = st.sampled_from([1, 1, 1, 2])
backward = one("backward", st.sampled_from([1, 2, 3]), sizes, seeds, uses, times)
capture = one("capture", sizes, seeds, uses)
change = (
    one("drop", which)
    | one("put", which)
    | one("drop_all")
    | one("freeze", which)
    | one("unfreeze", which)
)
look = (
    one("step")
    | one("clip")
    | one("scale", which)
    | one("zero_grad", st.sampled_from(["optimizer", "model"]), st.booleans())
)
repeat_backward = one("repeat_backward", uses, times)
inside = one(
    "run", sizes, seeds, st.lists(repeat_backward | change | look, min_size=1, max_size=5)
)
deferred_inside = one(
    "run", sizes, seeds, st.lists(repeat_backward | change, min_size=1, max_size=3)
)
no_sync = one("no_sync", st.lists(backward | deferred_inside | change, min_size=1, max_size=4))
surgery = (
    one("replace_parameter", which)
    | one("replace_layer", which)
    | one("add_layer")
    | one("remove_layer", which)
    | one("toggle_extra")
    | one("freeze_all_but", which)
    | one("unfreeze_all")
    | one("hook", which)
    | one("unhook")
)
actions = backward | backward | capture | inside | no_sync | change | look | surgery


PACKS = (0, 64, 200, 2**20, 25 * 2**20)  # a weight of 9 doubles is 72 bytes, a bias 24


class GradientMachine(RuleBasedStateMachine):
    """One program for a mirrored net and for a plain one."""

    @initialize(
        num_replicas=st.sampled_from([2, 3, 4, 1]),
        bytes_per_pack=st.sampled_from(PACKS),
        schedule=st.sampled_from(["lockstep", "staggered"]),
        way=st.sampled_from([1, 2, 3]),
        num_steps=st.integers(0, 4),
    )
    def start(self, num_replicas, bytes_per_pack, schedule, way, num_steps):
        torch.manual_seed(0)
        plain = Net().double()
        self.strategy = mirror.MirroredStrategy(
            ["cpu"] * num_replicas,
            communication_options=mirror.CommunicationOptions(bytes_per_pack=bytes_per_pack),
            schedule=schedule,
        )
        model = self.strategy.mirror(copy.deepcopy(plain))
        self.worlds = World(plain, None), World(model, self.strategy)
        for i in range(num_steps):  # the order of the gradients is learnt
            self.do([("zero_grad", "model", True), ("backward", way, 8, i, Use(), 1), ("step",)])

    def do(self, program):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            for world in self.worlds:
                for action in program:
                    world.do(action)
        finally:
            torch.set_default_dtype(default)

    @rule(way=st.sampled_from([1, 2, 3]), size=sizes, seed=seeds, use=uses, between=change)
    def training_step(self, way, size, seed, use, between):
        self.do(
            [
                ("zero_grad", "optimizer", True),
                ("backward", way, size, seed, use, 1),
                between,
                ("step",),
            ]
        )

    @rule(program=st.lists(actions, min_size=1, max_size=5))
    def program(self, program):
        self.do(program)

    @invariant()
    def replicas_equal_one_device(self):
        if not hasattr(self, "worlds"):
            return
        plain, mirrored = (world.model for world in self.worlds)
        others = dict(mirrored.named_parameters())
        assert list(others) == [name for name, _ in plain.named_parameters()]
        for name, parameter in plain.named_parameters():
            other = others[name]
            assert other.requires_grad == parameter.requires_grad, name
            same(f"{name}.grad", other.grad, parameter.grad)
            same(name, other.detach(), parameter.detach())
        for expected, actual in zip(*(world.captured for world in self.worlds), strict=True):
            for grad, other in zip(expected, actual, strict=True):
                same("captured", other, grad)
        self.strategy.check_replicas()
        first, *rest = self.strategy.local_results(
            self.strategy.run(lambda: [p.grad for p in mirrored.parameters()])
        )
        for grads in rest:
            for a, b in zip(first, grads, strict=True):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a.to_dense(), b.to_dense())

    def teardown(self):
        if hasattr(self, "strategy"):
            self.strategy.close()


def same(name, actual, expected):
    assert (actual is None) == (expected is None), f"{name} is {actual}, not {expected}"
    if expected is not None:
        assert actual.is_sparse == expected.is_sparse, name
        torch.testing.assert_close(
            actual.to_dense(),
            expected.to_dense(),
            rtol=1e-8,
            atol=1e-10,
            msg=lambda text: f"{name}: {text}",
        )


def bounded(max_examples):
    return settings(
        max_examples=max_examples,
        stateful_step_count=5,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # shrinking takes minutes
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


def test_gradients_of_random_programs_are_those_of_one_device():
    run_state_machine_as_test(GradientMachine, settings=bounded(40))


@pytest.mark.slow
@pytest.mark.parametrize("num_programs", [150, pytest.param(400, marks=EXHAUSTIVE)])
def test_gradients_of_many_random_programs_are_those_of_one_device(num_programs):
    run_state_machine_as_test(GradientMachine, settings=bounded(num_programs))
