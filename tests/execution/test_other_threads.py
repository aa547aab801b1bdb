"""What a thread of the user's does beside a run: refused where it needs all replicas, or right."""

import threading

import pytest
import torch
from torch import nn

import mirror
from tests.oracle import assert_same

KINDS = {
    "mirrored": lambda: mirror.MirroredStrategy(["cpu"] * 2),
    "central storage": lambda: mirror.CentralStorageStrategy(["cpu"] * 2),
}


class Net(nn.Module):
    """Its gradient is the input, its buffer nobody's but the caller's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x):
        return x * self.weight


class World:
    """A strategy whose first replica waits, before or after its backward pass, for another thread.

    Attributes:
        outputs: of a call from before the run, whose graph is still there.
    """

    def __init__(self, kind):
        self.strategy = KINDS[kind]()
        self.model = self.strategy.mirror(Net())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.outputs = self.model(torch.ones(2, 1))

    def run_beside(self, act, when):
        """Returns what ``act`` raised in another thread, which has done its part in a run."""
        raised = []

        def other():
            try:
                act(self)
            except mirror.StrategyError as error:
                raised.append(error)

        def meanwhile(now):
            if now == when and mirror.get_replica_context().replica_id_in_sync_group == 0:
                thread = threading.Thread(target=other)
                thread.start()
                thread.join(60)
                assert not thread.is_alive()

        def step(x):
            meanwhile("before")
            self.model(x).mean().backward()
            meanwhile("after")

        self.strategy.run(
            step, args=(mirror.PerReplica([torch.tensor([[1.0]]), torch.tensor([[3.0]])]),)
        )
        return raised

    def on_replicas(self, read):
        """Returns what each replica reads."""
        return self.strategy.local_results(self.strategy.run(lambda: read(self.model).clone()))


def call_whole(world):
    world.model(None)


def enter_no_sync(world):
    with world.strategy.no_sync():
        pass


def set_gradient(world):
    world.model.weight.grad = torch.ones(1)


REFUSED = {
    "a run": lambda world: world.strategy.run(lambda: 1),
    "a split call": lambda world: world.model(torch.ones(2, 1)),
    "a whole call": call_whole,
    "backward": lambda world: world.model.weight.square().sum().backward(),
    "backward of a split call": lambda world: world.outputs.sum().backward(),
    "backward into it": lambda world: world.model.weight.sum().backward(
        inputs=[world.model.weight]
    ),
    "reading a gradient": lambda world: world.model.weight.grad,
    "setting a gradient": set_gradient,
    "clearing gradients": lambda world: world.model.zero_grad(),
    "the optimizer clearing them": lambda world: world.optimizer.zero_grad(),
    "a hook": lambda world: world.model.weight.register_hook(torch.clone),
    "a step": lambda world: world.optimizer.step(),
    "a step with a closure": lambda world: world.optimizer.step(lambda: 1.0),
    "no_sync": enter_no_sync,
    "a comparison": lambda world: world.strategy.check_replicas(),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_needs_all_replicas_is_refused_beside_a_run(kind, name, when):
    # A step, no_sync or a comparison reduced half of the gradients, as they were: 2.5 for a mean
    # of 2. One that was set, and what a pass brought, was taken for a share of the run's.
    world = World(kind)
    for _ in range(2):
        world.model.weight.grad = None
        raised = world.run_beside(REFUSED[name], when)
        assert_same(world.model.weight.grad, torch.tensor([2.0]))
        assert world.model.weight.item() == 1
        assert ["another thread" in str(error) for error in raised] == [True]
    world.strategy.close()


def test_reduced_gradients_are_not_cleared_beside_a_run():
    # With nothing to reduce they were gone at once, of all replicas.
    world = World("mirrored")
    world.outputs.sum().backward()
    world.optimizer.step()  # from now on its zero_grad asks once for all parameters
    for owner in (world.model, world.optimizer):
        (error,) = world.run_beside(lambda _, owner=owner: owner.zero_grad(), "before")
        assert "another thread" in str(error)
    assert world.model.weight.grad.item() == 6
    world.strategy.close()


def write(tensor):
    with torch.no_grad():
        tensor.fill_(5.0)


CHANGES = {
    "in place": lambda world: write(world.model.weight),
    "past autograd": lambda world: world.model.weight.data.fill_(5.0),
    "other data": lambda world: setattr(world.model.weight, "data", torch.full((1,), 5.0)),
    "loaded": lambda world: world.model.load_state_dict(
        {"weight": torch.full((1,), 5.0), "shift": torch.zeros(1)}
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_is_changed_beside_a_run_is_equal_on_all_replicas(kind, name, when):
    # The first replica alone had it, for good: it was taken for a step of the run's own.
    world = World(kind)
    assert world.run_beside(CHANGES[name], when) == []
    assert world.model.weight.item() == 5
    assert world.on_replicas(lambda model: model.weight) == (5, 5)
    assert_same(world.model.weight.grad, torch.tensor([2.0]))
    world.strategy.close()


def test_a_parameter_that_is_read_beside_a_run_keeps_its_steps():
    world = World("mirrored")
    world.run_beside(lambda world: world.model.weight.sum(), "after")
    world.optimizer.step()
    assert world.on_replicas(lambda model: model.weight) == (-1, -1)
    world.strategy.close()


@pytest.mark.parametrize("training", [True, False])
def test_a_buffer_that_is_changed_beside_a_run_keeps_that(training):
    # What the replicas had, and had not touched, was written over it.
    world = World("mirrored")
    world.model.train(training)
    assert world.run_beside(lambda world: world.model.shift.fill_(5.0), "after") == []
    assert world.model.shift.item() == 5
    assert world.on_replicas(lambda model: model.shift) == (5, 5)
    world.strategy.close()


def test_other_models_are_trained_beside_a_run():
    world, other = World("mirrored"), World("mirrored")
    plain = nn.Linear(1, 1)

    def train(_):
        plain(torch.ones(2, 1)).sum().backward()
        other.outputs.sum().backward()
        other.optimizer.step()

    assert world.run_beside(train, "after") == []
    assert plain.weight.grad.item() == 2
    assert other.model.weight.item() == -1
    assert_same(world.model.weight.grad, torch.tensor([2.0]))
    for one in (world, other):
        one.strategy.close()
