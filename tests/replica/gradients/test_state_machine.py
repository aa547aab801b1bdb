"""Random sequences of what a program does with gradients, beside plain PyTorch on one device.

A rule is a short program: its actions are done one after the other without a look, so that
gradients are reduced where the program has them reduced; then all is compared.
"""

import copy

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

import mirror
from tests.pairs import EXHAUSTIVE
from tests.replica.gradients.world import (
    Net,
    Use,
    World,
    actions,
    change,
    seeds,
    sizes,
    uses,
)

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
        deadline=None,
        database=None,
        phases=[Phase.generate],  # shrinking takes minutes
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


def test_gradients_of_random_programs_are_those_of_one_device():
    run_state_machine_as_test(GradientMachine, settings=bounded(60))


@pytest.mark.slow
@pytest.mark.parametrize("num_programs", [150, pytest.param(400, marks=EXHAUSTIVE)])
def test_gradients_of_many_random_programs_are_those_of_one_device(num_programs):
    run_state_machine_as_test(GradientMachine, settings=bounded(num_programs))
