"""Steps with layers on several GPUs per replica: gradients, optimizers, checkpoints."""

import copy

import pytest
import torch
from torch import nn

import mirror
from tests.gpu.fake import FakeGpus
from tests.gpu.placed import ROWS, A, B, Net, on_cpu


@pytest.fixture
def strategy():
    torch.manual_seed(0)
    with FakeGpus(4), mirror.MirroredStrategy(ROWS, "naive") as strategy:
        yield strategy


@pytest.fixture
def net(strategy):
    return strategy.mirror(Net())


def test_checkpoints_go_to_other_places_and_come_from_them(strategy, net, tmp_path):
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.randn(6, 4)
    net(x.to(A)).square().mean().backward()
    optimizer.step()
    mirror.Checkpoint(model=net, optimizer=optimizer).save(tmp_path / "c")
    wanted = [p.detach().cpu() for p in net.parameters()]
    state = copy.deepcopy(optimizer.state_dict())

    plain = Net("cpu", "cpu")
    with mirror.MirroredStrategy(["cpu"] * 3) as other:
        other.mirror(plain)
        own = torch.optim.Adam(plain.parameters())
        mirror.Checkpoint(model=plain, optimizer=own).restore(tmp_path / "c")
        torch.testing.assert_close([p.detach() for p in plain.parameters()], wanted)
        mirror.Checkpoint(model=plain, optimizer=own).save(tmp_path / "d")

    again = strategy.mirror(Net())
    own = torch.optim.Adam(again.parameters())
    mirror.Checkpoint(model=again, optimizer=own).restore(tmp_path / "d")
    torch.testing.assert_close([p.detach().cpu() for p in again.parameters()], wanted)
    devices = [s["exp_avg"].device for s in own.state.values()]
    assert devices == [p.device for p in again.parameters()] == [A, A, B, B]
    own.load_state_dict(state)
    again(x.to(A)).square().mean().backward()
    own.step()
    strategy.check_replicas()


def test_any_optimizer_steps_where_the_parameters_are(strategy, net):
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["n"] = state.get("n", torch.zeros(1, device=p.device)) + 1
                    with torch.no_grad():
                        p -= 0.1 * p.grad

    x, plain = torch.randn(6, 4), on_cpu(net)
    own = Own(net.parameters(), lr=0.1)
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
    (batch,) = strategy.distribute_dataset([x])

    def step(x):
        own.zero_grad()
        net(x).square().mean().backward()
        own.step()

    for _ in range(2):
        strategy.run(step, args=(batch,))
        of_plain.zero_grad()
        plain(x).square().mean().backward()
        of_plain.step()
    strategy.check_replicas()
    for mine, p in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), p.detach())
        assert own.state[mine]["n"].device == mine.device
    lbfgs = torch.optim.LBFGS(net.bottom.parameters(), max_iter=2)

    def closure():
        lbfgs.zero_grad()
        loss = net(x.to(A)).square().mean()
        loss.backward()
        return loss

    before = closure().item()
    lbfgs.step(closure)
    assert closure().item() < before
    strategy.check_replicas()


def test_guards_and_scaled_losses_look_at_all_positions():
    guards = mirror.Guards(finite_gradients=True, replicas_every=1)
    with FakeGpus(4), mirror.MirroredStrategy(ROWS, "naive", guards=guards) as strategy:
        net = strategy.mirror(Net())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = mirror.amp.GradScaler("cuda", init_scale=4.0)

        def step(x):
            optimizer.zero_grad()
            scaler.scale(net(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

        (batch,) = strategy.distribute_dataset([torch.randn(6, 4)])
        before = net.top.weight.detach().clone()
        strategy.run(step, args=(batch,))
        strategy.run(step, args=(batch,))
        assert not torch.equal(before, net.top.weight)
        (bad,) = strategy.distribute_dataset([torch.full((4, 4), torch.inf)])
        with pytest.raises(mirror.errors.GradientError):
            strategy.run(step, args=(bad,))


def test_gradients_of_all_kinds_are_reduced_where_they_lie(strategy):
    class Odd(Net):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 4, sparse=True).to(B)
            self.idle = nn.Parameter(torch.ones(2, device=B))

        def forward(self, x):
            rows = self.table((x[:, 0].to(B) > 0).long())
            return super().forward(x), rows

    model, x = strategy.mirror(Odd()), torch.randn(5, 4)
    hooked = []
    model.top.weight.register_hook(lambda grad: hooked.append(grad.device) or grad * 2)

    def step(x):
        out, rows = model(x)
        (out.square().mean() + rows.square().mean()).backward()

    (batch,) = strategy.distribute_dataset([x])
    strategy.run(step, args=(batch,))
    with strategy.no_sync():
        strategy.run(step, args=(batch,))
    strategy.run(step, args=(batch,))
    plain = on_cpu(nn.ModuleDict({"bottom": model.bottom, "top": model.top}))
    for _ in range(3):
        plain(x).square().mean().backward()
    torch.testing.assert_close(model.bottom.weight.grad.cpu(), plain.bottom.weight.grad)
    torch.testing.assert_close(model.top.weight.grad.cpu(), 2 * plain.top.weight.grad)
    assert set(hooked) == {B}
    assert model.idle.grad is None
    assert model.table.weight.grad.is_sparse
    (grad,) = torch.autograd.grad(model(x.to(A))[0].sum(), [model.top.bias])
    assert (grad.device, grad.tolist()) == (B, [5.0, 5.0])


def test_a_replica_that_sits_out_is_brought_along(strategy, net):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for size in (1, 3, 1):
        (batch,) = strategy.distribute_dataset([torch.randn(size, 4)])

        def step(x):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

        strategy.run(step, args=(batch,))
        strategy.check_replicas()
