"""Draws of a traced step: which operations draw, and what a saved state repeats."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mirror
from mirror.compiler.capture.functional_rng import FunctionalRng
from mirror.compiler.capture.trace_modes import refusal
from mirror.compiler.custom_ops import define_ops
from mirror.errors import CompileError
from tests.compiler.training import batches
from tests.pairs import each_once

aten = torch.ops.aten


class Called:
    """An operation that may be called with any arguments."""

    def __init__(self, operation):
        self._schema, self.overloadpacket = operation._schema, operation.overloadpacket

    def __call__(*args, **kwargs):  # "self" may be the name of an argument
        return "called"


def random_operations():
    """Returns the operations that torch marks as random, by name, if one may have no dropout."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = name.partition("::")
        packet, _, overload = name.partition(".")
        if namespace != "aten" or overload.endswith("out"):
            continue
        operation = getattr(getattr(aten, packet), overload or "default")
        takes = {argument.name for argument in operation._schema.arguments}
        if torch.Tag.nondeterministic_seeded in operation.tags and takes & {
            "dropout", "dropout_p", "training",
        }:  # fmt: skip
            found[name] = operation
    return found


OPERATIONS = random_operations()


def test_torch_has_kernels_of_attention_and_recurrent_layers():
    assert {
        "_cudnn_rnn",
        "_flash_attention_forward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_flash_attention",
        "rrelu_with_noise",
    } <= set(OPERATIONS)


def draw(operation, by_name=False, **options):
    """Returns the result of a call with these options, and ``None`` for what has no default."""
    args, kwargs = [], {}
    for argument in operation._schema.arguments:
        value = options.get(argument.name, argument.default_value)
        if by_name or argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    draws = FunctionalRng(torch.zeros((), dtype=torch.int64), refusal)
    return draws.draw(Called(operation), tuple(args), kwargs)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_call_without_dropout_draws_nothing(name, by_name):
    operation = OPERATIONS[name]
    draws_at = {"dropout": 0.1, "dropout_p": 0.1, "train": True, "training": True}
    with pytest.raises(CompileError, match="has no seeds for"):
        draw(operation, by_name, **draws_at)
    takes = {argument.name for argument in operation._schema.arguments}
    for option, value in (("dropout", 0.0), ("dropout_p", 0.0), ("train", False)):
        if option in takes:
            assert draw(operation, by_name, **{**draws_at, option: value}) == "called"
    if "training" in takes:
        assert draw(operation, by_name, **{**draws_at, "training": False}) == "called"


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_attention_of_gpus_and_its_backward_pass_are_told_by_their_dropout(p):
    # Fake tensors of GPUs need no GPU.
    with FakeTensorMode():
        q = torch.empty(2, 4, 16, 32, device="cuda")
        seed = torch.empty((), dtype=torch.int64, device="cuda")
        sums = torch.empty(2, 4, 16, device="cuda")
        draws = FunctionalRng(torch.zeros((), dtype=torch.int64), refusal)
        forward = (q, q, q, None, True, p)
        backward = (q, q, q, q, None, q, sums, seed, seed, p, [True, True, True, False])
        for operation, args in (
            (aten._scaled_dot_product_efficient_attention.default, forward),
            (aten._scaled_dot_product_efficient_attention_backward.default, backward),
        ):
            if p:
                with pytest.raises(CompileError, match="has no seeds for"):
                    draws.draw(operation, args, {})
            else:
                assert draws.draw(operation, args, {})[0].shape == q.shape


class Recomputed(nn.Module):
    """Two weights of which dropout keeps some: computed again in the backward pass or not."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(400), torch.ones(400)])
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for weight in self.weights:
            x = checkpoint(self.dropped, x, weight, use_reentrant=self.use_reentrant)
        return x

    def dropped(self, x, weight):
        return F.dropout(x * weight, 0.25)


@each_once(use_reentrant=[False, True], num_replicas=[1, 2, 3])
def test_a_checkpointed_layer_drops_the_same_elements_when_it_is_computed_again(
    use_reentrant, num_replicas
):
    strategy = mirror.MirroredStrategy(["cpu"] * num_replicas)
    with strategy.scope():
        model = Recomputed(use_reentrant)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def step(x):
        optimizer.zero_grad()
        outputs = model(x.requires_grad_())
        outputs.sum().backward()
        optimizer.step()
        return outputs.detach()

    compiled = strategy.compile(step, mode="trace")
    seen = []
    for _ in range(4):
        x = torch.ones(2, 400)
        outputs = strategy.local_results(
            compiled(mirror.PerReplica([x.clone() for _ in range(num_replicas)]))
        )
        # The outputs are linear in each weight, which is 1.
        expected = torch.stack(outputs).mean(0).sum(0)
        for weight in model.weights:
            torch.testing.assert_close(weight.grad, expected)
        seen += outputs[:2]
    assert compiled.num_traces == 1
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))


def test_a_restored_state_repeats_draws_and_others_go_on():
    strategy = mirror.MirroredStrategy(["cpu"] * 2)

    def step(x):
        first = torch.rand(3)
        state = torch.get_rng_state()
        second = torch.rand(3)
        with torch.random.fork_rng():
            third = torch.rand(3)
        torch.set_rng_state(state)
        return torch.stack([first, second, third, torch.rand(3), torch.rand(3)])

    compiled = strategy.compile(step, mode="trace")
    before = None
    for (x, _), _ in zip(strategy.distribute_dataset(batches([8, 8, 8])), range(3), strict=True):
        for drawn in strategy.local_results(compiled(x)):
            first, second, third, fourth, fifth = drawn
            assert torch.equal(second, fourth)
            assert torch.equal(third, fifth)
            assert not torch.equal(first, second)
            assert not torch.equal(second, third)
            assert before is None or not torch.equal(before, drawn)
            before = drawn
    assert compiled.num_traces == 1
    strategy.close()


def test_states_of_gpus_are_followed_too(monkeypatch):
    def set_rng_state(state, device="cuda"):
        raise AssertionError("a trace changes no generator")

    for module in (torch.cuda, torch.cuda.random):
        monkeypatch.setattr(module, "get_rng_state", lambda device="cuda": torch.zeros(16))
        monkeypatch.setattr(module, "set_rng_state", set_rng_state)
    define_ops()
    draws = FunctionalRng(torch.zeros((), dtype=torch.int64), refusal)

    def draw():
        return draws.draw(aten.rand.default, ([3],), {})

    with draws.following_states(lambda: True):
        state = torch.cuda.get_rng_state(0)
        first = draw()
        torch.cuda.set_rng_state(state, 0)
        assert torch.equal(draw(), first)
        assert not torch.equal(draw(), first)
        with pytest.raises(CompileError, match="sets a generator"):
            torch.cuda.set_rng_state(state.clone())
    assert torch.cuda.set_rng_state is set_rng_state
    assert draws.count == 2


OUTSIDE = torch.get_rng_state()


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("manual_seed", lambda: torch.manual_seed(0)),
        ("seed", lambda: torch.seed()),
        ("manual_seed", lambda: torch.cuda.manual_seed(0)),
        ("manual_seed_all", lambda: torch.cuda.manual_seed_all(0)),
        ("set_rng_state", lambda: torch.set_rng_state(OUTSIDE)),
    ],
)
def test_a_step_that_sets_a_generator_is_refused(name, sets):
    def step(x):
        with torch.random.fork_rng():
            if torch.compiler.is_compiling():  # which a trace is
                sets()
            return torch.rand(3)

    with mirror.MirroredStrategy(["cpu"] * 2) as strategy:
        compiled = strategy.compile(step, mode="trace")
        (first, _), (second, _) = strategy.distribute_dataset(batches([8, 8]))
        compiled(first)
        with pytest.raises(
            CompileError, match=rf"random\.{name} sets a generator.*before the step"
        ):
            compiled(second)
