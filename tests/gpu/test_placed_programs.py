"""Programs on replicas of several devices each, on simulated GPUs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mirror
from tests.gpu.fake import FakeGpus
from tests.gpu.programs import ROWS, A, B, C, D, Net, on_cpu


@pytest.fixture
def strategy():
    torch.manual_seed(0)
    with FakeGpus(4), mirror.MirroredStrategy(ROWS, "naive") as strategy:
        yield strategy


@pytest.fixture
def net(strategy):
    return strategy.mirror(Net())


def context():
    return mirror.get_replica_context()


def test_the_mesh_lists_replicas_and_positions(strategy):
    assert strategy.places == ((A, B), (C, D))
    assert strategy.devices == (A, C)
    assert repr(strategy) == (
        "MirroredStrategy([[cuda:0, cuda:1], [cuda:2, cuda:3]], backend='naive')"
    )
    seen = strategy.run(lambda: (str(context()), context().devices, context().device))
    assert "replica 1 of 2 (cuda:2, cuda:3)" in strategy.local_results(seen)[1][0]
    assert [own[1:] for own in strategy.local_results(seen)] == [((A, B), A), ((C, D), C)]


def test_outputs_come_and_inputs_go_at_their_position(strategy, net):
    seen = []

    class Looking(Net):
        def forward(self, x, y):
            seen.append((x.device, y.device))
            return {"x": x, "y": y * 2, "mean": y.mean(), "all": [x.sum(1)]}

    model, x, y = strategy.mirror(Looking()), torch.randn(5, 4), torch.randn(5, 2)
    out = model(x.to(A), y.to(B))
    assert sorted(seen[-2:], key=str) == [(A, B), (C, D)]
    assert seen[:-2] == [(A, B)]  # the comparison with one device
    assert [out[k].device for k in ("x", "y", "mean")] == [A, B, B]
    assert out["all"][0].device == A
    torch.testing.assert_close(out["y"].cpu(), 2 * y)
    torch.testing.assert_close(out["mean"].cpu(), y.mean())
    seen.clear()
    model(x, y)  # of the host: to the first
    assert sorted(seen, key=str) == [(A, A), (C, C)]
    assert net(x).device == B


def test_gathered_and_reduced_values_stay_at_their_position(strategy):
    def fn():
        r = context().replica_id_in_sync_group
        own = torch.full((2,), r + 1.0, device=B)
        total, mean = context().all_reduce("sum", own), context().all_reduce("mean", [own, own[0]])
        both = context().all_reduce("sum", {"a": torch.ones(1, device=A), "b": own, "n": 3})
        every = context().all_gather(own)
        places = [t.device for t in (own, total, mean[1], both["a"], both["b"], every)]
        assert places == [context().devices[k] for k in (1, 1, 1, 0, 1, 1)]
        assert total.tolist() == both["b"].tolist() == [3.0, 3.0]
        assert (both["a"].item(), both["n"].item(), mean[1].item()) == (2.0, 6.0, 1.5)
        assert every.tolist() == [1.0, 1.0, 2.0, 2.0]
        return own, own.sum()

    own, total = strategy.run(fn)
    reduced = [strategy.reduce("sum", total), strategy.reduce("max", own), strategy.gather(own)]
    assert [t.tolist() for t in reduced] == [6.0, [2.0, 2.0], [1.0, 1.0, 2.0, 2.0]]
    assert {t.device for t in reduced} == {B}


@pytest.mark.parametrize("way", ["call", "run"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_are_on_their_devices(strategy, way, reentrant):
    class Moving(nn.Linear):
        def forward(self, h):
            return super().forward(h.to("cuda:1"))

    class Recomputing(Net):
        def __init__(self):
            super().__init__()
            self.top = Moving(8, 2).to(B)

        def forward(self, x):
            h = checkpoint(self.bottom, x, use_reentrant=reentrant).relu()
            if way == "run":  # of what is recomputed outside run, modules alone are known
                return checkpoint(lambda h: self.top(h.to(B)), h, use_reentrant=reentrant)
            return checkpoint(self.top, h, use_reentrant=reentrant)

    model, x = strategy.mirror(Recomputing()), torch.randn(6, 4)
    plain = on_cpu(model)
    plain(x).square().mean().backward()

    def step(x):
        model(x.requires_grad_()).square().mean().backward()

    if way == "call":
        model(x.to(A).requires_grad_()).square().mean().backward()
    else:
        (batch,) = strategy.distribute_dataset([x])
        strategy.run(step, args=(batch,))
    for mine, p in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), p.grad)


def test_what_a_merge_names_is_what_it_says(strategy):
    def check_parts(strategy, t):
        assert [part.device for part in t.values] == [B, D]
        return [part.to("cuda:1").device for part in t.values] + [torch.ones(1, device=B).device]

    def fn():
        own = torch.ones(1, device=B)
        assert set(context().merge_call(check_parts, args=(own,))) == {B}
        return own.to(B).device

    assert strategy.local_results(strategy.run(fn)) == (B, D)


def test_every_way_to_name_a_device_is_renamed(strategy):
    def fn():
        x = torch.ones(2, device="cuda:1")
        with torch.device("cuda:1"):
            inside = torch.zeros(2)
        made = nn.Linear(2, 2, device="cuda:1").to("cuda:0").to(B).weight
        moved = [x.to(A), x.cuda(0), x.to("cuda:0"), x.to(device=A), torch.ones(1, device="cuda")]
        assert {t.device for t in (x, inside, made)} == {context().devices[1]}
        assert {t.device for t in moved} == {context().devices[0]}
        return x.to(x.device).device, x.to(context().devices[1]).device

    assert strategy.local_results(strategy.run(fn)) == ((B, B), (D, D))
    torch.set_default_device("cuda:1")
    try:
        seen = strategy.run(lambda: torch.zeros(1).device)
    finally:
        torch.set_default_device(None)
    assert strategy.local_results(seen) == (B, D)


def test_streams_of_random_numbers_differ_at_every_position(strategy):
    def draw():
        generators = [torch.cuda.default_generators[d.index] for d in context().devices]
        return [torch.rand(3, generator=g, device=g.device).tolist() for g in generators]

    first, second = strategy.local_results(strategy.run(draw))
    assert first[0] == first[1]  # as one program's on two devices that one seed has seeded
    assert second[0] == second[1] != first[0]


def test_attributes_and_lazy_layers_are_in_their_place(strategy):
    class Keeping(Net):
        def __init__(self):
            super().__init__()
            self.lazy = nn.LazyLinear(3, device=B)
            self.table = torch.ones(2, device=B)

        def forward(self, x):
            before = getattr(self, "kept", None)
            assert before is None or before.device == context().devices[1]
            h = super().forward(x) * self.table
            self.kept = h.detach()
            return self.lazy(h)

    model = strategy.mirror(Keeping())
    (batch,) = strategy.distribute_dataset([torch.randn(6, 4)])
    for _ in range(2):
        strategy.run(lambda x: model(x).sum().backward(), args=(batch,))
    assert (model.kept.device, model.kept.shape) == (B, (6, 2))
    assert model.lazy.weight.device == model.table.device == B
    seen = strategy.run(lambda: (model.lazy.weight.device, model.table.device))
    assert strategy.local_results(seen) == ((B, B), (D, D))


@pytest.mark.parametrize(
    ("act", "error", "what"),
    [
        (lambda s: s.mirror(Net(A, C)), mirror.DeviceError, "is on cuda:2; move it to one of"),
        (lambda s: s.mirror(Net()).top.to(A), mirror.StrategyError, "move it in __init__"),
        (lambda s: s.mirror(Net()).to("cpu"), mirror.StrategyError, "move it in __init__"),
        (lambda s: s.compile(lambda x: x), mirror.errors.CompileError, "of one device each"),
    ],
)
def test_what_has_no_place_is_refused(strategy, act, error, what):
    with pytest.raises(error, match=what):
        act(strategy)


def test_what_has_no_place_is_refused_of_one_replica_and_moves_to_the_first_from_the_host():
    with FakeGpus(3), mirror.MirroredStrategy([[A, B]], "naive") as strategy:
        with pytest.raises(mirror.DeviceError, match=r"'top.weight' is on cuda:2"):
            strategy.mirror(Net(A, C))
        net = strategy.mirror(Net("cpu", B))
        assert [p.device for p in net.parameters()] == [A, A, B, B]
        assert net(torch.randn(3, 4)).device == B


def test_layers_may_be_placed_in_the_scope_until_the_model_is_used(strategy):
    with strategy.scope():
        net = Net("cpu", "cpu")
        net.bottom.to(A)
        net.top.to(B)
        net.of_top = B
    out = net(torch.randn(4, 4))
    assert (out.device, net.top.to(B), net.half().top.bias.dtype) == (B, net.top, torch.float16)
    assert isinstance(copy.deepcopy(net).top.weight.device, torch.device)
    assert F.relu(out).device == B


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
