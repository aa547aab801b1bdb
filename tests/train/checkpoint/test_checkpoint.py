"""Checkpoint: a resumed run ends as an uninterrupted one, on any number of replicas."""

import copy
import itertools
import os
import random

import numpy as np
import pytest
import torch
from torch import nn

import mirror
from mirror.cli import main
from tests.pairs import each_once
from tests.train.checkpoint.training import Training, same


@pytest.fixture
def training():
    """Gives ``training(n)``, closed after the test."""
    made = []

    def make(*args, **kwargs):
        made.append(Training(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@each_once(wait=[True, False], n=[0, 1, 2, 3])
def test_a_run_that_is_resumed_ends_with_the_same_bits(training, tmp_path, n, wait):
    whole = training(n)
    whole.train()
    stopped = training(n)
    assert not stopped.train(stop_at=5)
    stopped.checkpoint.save(tmp_path / "c", wait=wait)
    stopped.train(stop_at=8)  # what comes later is not in it
    stopped.checkpoint.wait()
    resumed = training(n, seed=7)
    resumed.train(stop_at=2)
    assert resumed.checkpoint.restore(tmp_path / "c") == {"progress": resumed.progress}
    assert resumed.train()
    assert same(resumed.bits(), whole.bits())


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_four_replicas_are_restored_into_any_number(training, tmp_path, n):
    saved = training(4)
    saved.train(stop_at=9)
    saved.checkpoint.save(tmp_path / "c")
    first, second = (training(n, seed=seed) for seed in (5, 6))
    for one in (first, second):
        one.checkpoint.restore(tmp_path / "c")
        assert same(one.bits(), saved.bits())
        if n:
            one.strategy.check_replicas()
        one.train()
    assert same(first.bits(), second.bits())  # reproducible, with the streams that N has
    assert first.progress["losses"][:9] == saved.progress["losses"]


def test_replicas_that_were_there_before_draw_what_they_would_have_drawn(make_strategy, tmp_path):
    def draws(n):
        return make_strategy(n).run(lambda: torch.rand(3)).values

    checkpoint = mirror.Checkpoint()
    checkpoint.save(tmp_path / "c")
    drawn = draws(3)
    for n in (2, 4):
        checkpoint.restore(tmp_path / "c")
        for mine, others in zip(draws(n), drawn, strict=False):
            assert torch.equal(mine, others)


def test_the_global_generators_go_on(tmp_path):
    def draws():
        return torch.rand(2).tolist(), random.random(), random.gauss(0, 1), np.random.rand()

    own = torch.Generator(), random.Random(), np.random.default_rng(), np.random.RandomState()

    def own_draws():
        a, b, c, d = own
        return torch.rand(2, generator=a).tolist(), b.random(), c.random(), d.rand()

    checkpoint = mirror.Checkpoint(a=own[0], b=own[1], c=own[2], d=own[3])
    random.gauss(0, 1)  # of which Python keeps a second one
    checkpoint.save(tmp_path / "c")
    drawn = draws(), own_draws()
    checkpoint.restore(tmp_path / "c")
    assert (draws(), own_draws()) == drawn


def test_plain_values_come_back_and_are_changed_in_place(tmp_path):
    held = {"d": {"a": (1, 2)}, "l": [1], "array": np.zeros(3), "t": torch.zeros(2), "s": {1}}
    checkpoint = mirror.Checkpoint(step=1, name="x", none=None, big=2**100, **held)
    checkpoint.objects["step"] = 7
    saved = copy.deepcopy(checkpoint.objects)
    checkpoint.save(tmp_path / "c")
    held["d"].clear()
    held["l"].append(5)
    held["s"].add(9)
    held["array"] += 1
    held["t"] += 1
    checkpoint.objects["step"] = 0
    values = checkpoint.restore(tmp_path / "c")
    assert values.keys() == saved.keys() == checkpoint.objects.keys()
    for name, value in saved.items():
        assert np.all(np.asarray(values[name] == value))
        assert checkpoint.objects[name] is values[name]
    assert all(values[name] is value for name, value in held.items())


def test_what_cannot_be_changed_in_place_is_replaced(tmp_path):
    mirror.Checkpoint(a=np.zeros(3), b=[1], c=torch.zeros(2)).save(tmp_path / "c")
    frozen = np.ones(3)
    frozen.flags.writeable = False
    checkpoint = mirror.Checkpoint(a=frozen, b=None, c=torch.zeros(5))
    checkpoint.restore(tmp_path / "c")
    assert checkpoint.objects["a"].tolist() == [0, 0, 0]
    assert checkpoint.objects["b"] == [1]
    assert checkpoint.objects["c"].shape == (2,)


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path, make_strategy):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(100, 100, bias=False)
            self.second = nn.Linear(100, 100, bias=False)
            self.second.weight = self.first.weight

    saved = make_strategy(2).mirror(Tied())
    mirror.Checkpoint(model=saved).save(tmp_path / "c")
    (data,) = (tmp_path / "c").glob("*.safetensors")
    assert data.stat().st_size < 4 * 10_000 + 20_000  # the generators need 15_000
    plain = Tied()
    mirror.Checkpoint(model=plain).restore(tmp_path / "c")
    assert plain.first.weight is plain.second.weight
    assert torch.equal(plain.first.weight, saved.first.weight)


@pytest.mark.parametrize("how", ["mean", "sum", "first", "none"])
def test_buffers_of_every_aggregation(tmp_path, make_strategy, how):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.seen += x.sum(0)
            return x

    def counted(n):
        strategy = make_strategy(n)
        model = strategy.mirror(Counts())
        mirror.set_aggregation(model, "seen", how)
        return strategy, model

    strategy, model = counted(2)
    x = mirror.PerReplica((torch.ones(1, 2), torch.full((1, 2), 3.0)))
    strategy.run(model, args=(x,))
    mirror.Checkpoint(model=model).save(tmp_path / "c")
    expected = {"mean": 2.0, "sum": 4.0, "first": 1.0, "none": 1.0}[how]
    _, other = counted(3)
    mirror.Checkpoint(model=other).restore(tmp_path / "c")
    assert other.state_dict()["seen"].tolist() == [expected] * 2


# Refused, and nothing is changed


def net(*sizes):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def adam(model):
    return torch.optim.Adam(model.parameters())


class Bad:
    """Restores itself, but for what it refuses."""

    def __init__(self, refuses=None):
        self.refuses = refuses

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        if self.refuses:
            raise self.refuses


MODEL = net(2, 3)
REFUSED = {
    "a name more": ({"model": net(2, 3), "x": 1}, "lacks 'x'"),
    "a name less": ({}, "has 'model'"),
    "another kind": (
        {"model": adam(net(2, 3))},
        "'model' was saved as a module, and is an optimizer",
    ),
    "another shape": ({"model": net(2, 4)}, r"'0.weight' of 'model' is a float32.*\(4, 2\)"),
    "another dtype": ({"model": net(2, 3).double()}, "'0.(weight|bias)' of 'model' is a float64"),
    "a layer more": ({"model": net(2, 3, 4)}, "no '1.(weight|bias)' of 'model'"),
    "a layer less": ({"model": nn.Sequential()}, "'model' has no '0.(weight|bias)'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_another_object_is_refused_and_named(tmp_path, what):
    mirror.Checkpoint(model=MODEL).save(tmp_path / "c")
    objects, message = REFUSED[what]
    before = {k: copy.deepcopy(o) for k, o in objects.items()}
    state = torch.get_rng_state()
    torch.manual_seed(5)
    seeded = torch.get_rng_state()
    with pytest.raises(mirror.CheckpointError, match=message):
        mirror.Checkpoint(**objects).restore(tmp_path / "c")
    assert torch.equal(torch.get_rng_state(), seeded)
    torch.set_rng_state(state)
    for name, obj in objects.items():
        if isinstance(obj, nn.Module):
            pairs = zip(obj.parameters(), before[name].parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


def test_another_optimizer_or_schedule_is_refused(tmp_path):
    def sgd(*groups):
        return torch.optim.SGD([{"params": list(net(2, 3).parameters())[:n]} for n in groups], 0.1)

    mirror.Checkpoint(opt=sgd(1, 1)).save(tmp_path / "c")
    with pytest.raises(mirror.CheckpointError, match=r"'opt' have \[1, 2\] parameters.*\[1, 1\]"):
        mirror.Checkpoint(opt=sgd(1, 2)).restore(tmp_path / "c")
    with pytest.raises(mirror.CheckpointError, match="that was a SGD, this is a Adam"):
        mirror.Checkpoint(opt=adam(net(2, 3))).restore(tmp_path / "c")


@each_once(
    error=[
        pytest.param(value, id=repr(value)) for value in [ValueError("no"), KeyboardInterrupt()]
    ],
    n=[0, 2],
)
def test_what_was_restored_before_another_refuses_is_brought_back(training, tmp_path, n, error):
    other = training(n)
    other.train(stop_at=3)
    mirror.Checkpoint(**other.checkpoint.objects, zbad=Bad()).save(tmp_path / "c")
    run = training(n)
    run.train(stop_at=6)
    objects = run.checkpoint.objects
    before = run.bits()
    kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else mirror.CheckpointError
    with pytest.raises(kind):
        mirror.Checkpoint(**objects, zbad=Bad(error)).restore(tmp_path / "c")
    assert same(run.bits(), before)
    run.train()
    whole = training(n)
    whole.train()
    assert same(run.bits(), whole.bits())


def test_what_is_no_object_of_a_checkpoint_is_refused():
    class Half:
        def state_dict(self):
            return {}

    for obj, word in ((nn.Linear, "class"), (Half(), "only one of the two")):
        with pytest.raises(mirror.CheckpointError, match="'x' is") as caught:
            mirror.Checkpoint(x=obj)
        assert word in str(caught.value) or "type" in str(caught.value)


def test_a_module_without_shapes_is_refused(tmp_path):
    with pytest.raises(mirror.CheckpointError, match=r"'0.weight' of 'm' has no shape yet"):
        mirror.Checkpoint(m=nn.Sequential(nn.LazyLinear(2))).save(tmp_path / "c")


def test_what_cannot_be_written_leaves_the_older_checkpoint(tmp_path):
    checkpoint = mirror.Checkpoint(x=1)
    checkpoint.save(tmp_path / "c")
    checkpoint.objects["x"] = {"deep": [object()]}
    with pytest.raises(mirror.CheckpointError, match=r"'x.deep.0' is a builtins.object"):
        checkpoint.save(tmp_path / "c")
    assert mirror.Checkpoint(x=0).restore(tmp_path / "c") == {"x": 1}


@pytest.mark.parametrize("make", ["file", "directory", "inside a file"])
def test_what_is_not_ours_is_not_replaced(tmp_path, make):
    path = tmp_path / "c"
    if make == "directory":
        path.mkdir()
        (path / "thesis.txt").write_text("mine")
    else:
        path.write_text("mine")
        path = path if make == "file" else path / "c"
    with pytest.raises(mirror.CheckpointError):
        mirror.Checkpoint(x=1).save(path)
    assert [p.read_text() for p in tmp_path.rglob("*") if p.is_file()] == ["mine"]


def test_an_empty_directory_may_be_there_already(tmp_path):
    mirror.Checkpoint(x=1).save(tmp_path)
    assert mirror.Checkpoint(x=0).restore(tmp_path) == {"x": 1}


def test_a_missing_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, word in (("nothing", "does not exist"), ("empty", "is no checkpoint")):
        with pytest.raises(mirror.CheckpointError, match=word):
            mirror.Checkpoint(x=0).restore(tmp_path / name)


def test_inside_run_is_refused(make_strategy, tmp_path):
    checkpoint = mirror.Checkpoint(x=1)

    def merging():
        mirror.get_replica_context().merge_call(lambda _: checkpoint.save(tmp_path / "c"))

    for step in (lambda: checkpoint.restore(tmp_path / "c"), merging):
        with pytest.raises(mirror.StrategyError, match="called inside run"):
            make_strategy(2).run(step)


def test_a_checkpoint_restored_in_inference_mode_can_be_trained(training, tmp_path):
    saved = training(2, make_optimizer=adam_of)
    saved.train(stop_at=2)
    saved.checkpoint.save(tmp_path / "c")
    resumed = training(2, make_optimizer=adam_of)
    with torch.inference_mode():
        resumed.checkpoint.restore(tmp_path / "c")
    assert resumed.train()


def adam_of(parameters):
    return torch.optim.Adam(parameters)


# mirror checkpoint: show, verify, and export for plain torch


@pytest.fixture
def saved(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].tied = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    checkpoint = mirror.Checkpoint(model=model, optimizer=optimizer, epoch=3)
    mirror.CheckpointManager(checkpoint, tmp_path / "run").save(12)
    return tmp_path / "run", model, optimizer


@pytest.mark.parametrize("where", ["directory", "checkpoint"])
@pytest.mark.parametrize("verify", [[], ["--verify"]])
def test_show_prints_names_shapes_and_aliases(saved, capsys, where, verify):
    directory = saved[0]
    path = directory if where == "directory" else directory / "step-000000012"
    assert main(["checkpoint", "show", str(path), *verify]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(directory / "step-000000012")
    assert "step 12" in lines
    assert "model: module, Sequential" in lines
    rows = {line.split()[0]: line.split()[1:] for line in lines if "model." in line}
    assert rows["model.0.weight"] == ["float32", "3x2", "24", "bytes"]
    assert rows["model.0.tied"] == ["float32", "3x2", "the", "same", "as", "model.0.weight"]
    assert rows["model.1.num_batches_tracked"] == ["int64", "one", "8", "bytes"]
    assert ("every byte is as it was written" in lines) is bool(verify)


def test_damage_is_an_error_on_the_command_line(saved, capsys):
    (data,) = (saved[0] / "step-000000012").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert main(["checkpoint", "show", str(saved[0])]) == 0
    assert main(["checkpoint", "show", str(saved[0]), "--verify"]) == 1
    assert "checksum differs" in capsys.readouterr().err
    assert main(["checkpoint", "show", str(saved[0] / "absent")]) == 1


def test_an_exported_file_loads_in_plain_torch(saved, tmp_path, capsys):
    directory, model, optimizer = saved
    out = tmp_path / "out.pt"
    assert main(["checkpoint", "export", str(directory), str(out)]) == 0
    states = torch.load(out)  # weights only, as it is the default
    assert states["epoch"] == 3
    fresh = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    fresh[0].tied = fresh[0].weight
    fresh.load_state_dict(states["model"])
    assert torch.equal(fresh[0].weight, model[0].weight)
    other = torch.optim.Adam(fresh.parameters())
    other.load_state_dict(states["optimizer"])
    assert other.state_dict()["state"][0]["exp_avg"].equal(
        optimizer.state_dict()["state"][0]["exp_avg"]
    )
    size = os.path.getsize(out)
    assert main(["checkpoint", "export", str(directory), str(out)]) == 1  # it is there
    assert os.path.getsize(out) == size
    assert "is there already" in capsys.readouterr().err
