"""TPUStrategy for users: with the extra [tpu], and the error without it."""

import copy
import importlib.util
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirror
from mirror import cli
from mirror.errors import StrategyError
from mirror.integrations import tpu
from mirror_tpu import torchax_library


def test_without_its_distribution_the_name_is_there_and_says_how_to_install_it(
    monkeypatch, tmp_path
):
    # As in a wheel: no extras/tpu beside mirror/.
    file = tmp_path / "site-packages" / "mirror" / "integrations" / "tpu.py"
    file.parent.mkdir(parents=True)
    shutil.copy(tpu.__file__, file)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    spec = importlib.util.spec_from_file_location("tpu_of_a_wheel", file)
    wheels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheels)
    said = r"not installed: mirror-strategy-tpu; pip install 'mirror-strategy\[tpu\]'"
    assert re.fullmatch(said, wheels.unavailable_reason())
    for devices in ((), (["cpu"] * 4,)):
        with pytest.raises(ModuleNotFoundError, match=rf"mirror\.TPUStrategy needs .*; {said}"):
            wheels.TPUStrategy(*devices)
    with pytest.raises(TypeError, match="takes no 'tpu_cluster_resolver'"):
        wheels.TPUStrategy(tpu_cluster_resolver=None)


def test_a_checkout_has_it_without_installing_it():
    program = "import mirror; print(mirror.TPUStrategy.__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "mirror_tpu.strategy\n", done.stderr


def test_without_the_extra_it_says_how_to_install_it(monkeypatch, capsys):
    reason = "not installed: torchax; pip install 'mirror-strategy[tpu]'"
    for module in (torchax_library, tpu):
        monkeypatch.setattr(module, "unavailable_reason", lambda: reason)
    monkeypatch.setattr(torchax_library, "_version", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"mirror\.TPUStrategy needs torchax and jax"):
        mirror.TPUStrategy()
    assert cli.main(["doctor", "--devices", "cpu"]) == 0
    said = "".join(capsys.readouterr().out.split())  # it wraps lines
    assert f"TPUTPUStrategy,experimental,cannotbemade:{''.join(reason.split())}" in said


def test_with_the_extra_the_doctor_says_that_it_was_never_run_on_a_tpu(monkeypatch, capsys):
    monkeypatch.setattr(tpu, "unavailable_reason", lambda: None)
    assert cli.main(["doctor", "--devices", "cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "TPUStrategy, experimental and never run on a TPU, can be made: torchax 0" in said


@pytest.mark.slow
def test_its_members(tpus):
    assert tpus.num_replicas_in_sync == 4
    assert tpus.devices == (torch.device("cpu"),) * 4
    assert tpus.backend == "xla"
    assert "CPU" in repr(tpus).upper()
    with tpus.scope():
        assert mirror.get_strategy() is tpus
        with tpus.scope():
            pass
        assert mirror.in_cross_replica_context()
        other = mirror.OneDeviceStrategy("cpu").scope()
        with pytest.raises(StrategyError, match="another strategy"), other:
            pass
    values = tpus.distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
    assert tpus.local_results(values) == (0, 1, 2, 3)
    with pytest.raises(StrategyError, match="no compile; run compiles"):
        tpus.compile(print)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tpus.nothing
    with pytest.raises(TypeError, match=r"mirror takes a torch\.nn\.Module"):
        tpus.mirror(3)
    with pytest.raises(TypeError, match="can be neither"):
        copy.copy(tpus)


@pytest.mark.slow
def test_a_closed_one_is_refused(four):
    with four() as strategy:
        strategy.close()
    for use in (strategy.scope().__enter__, lambda: strategy.run(print)):
        with pytest.raises(StrategyError, match="closed"):
            use()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 2))


def trained(strategy, num_steps, path=None, restore=None):
    """Trains a model; the same on all strategies."""
    with strategy.scope():
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-4)
    checkpoint = mirror.Checkpoint(model=model, optimizer=optimizer, step=3)
    if restore is not None:
        assert checkpoint.restore(restore)["step"] == 3

    def step(x, y):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    draws = torch.Generator().manual_seed(5)
    data = [
        (torch.randn(32, 4, generator=draws), torch.randn(32, 2, generator=draws))
        for _ in range(num_steps)
    ]
    for batch in strategy.distribute_dataset(data):
        strategy.run(step, args=batch)
    if path is not None:
        checkpoint.save(path)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("from_tpu", [True, False])
def test_checkpoints_are_read_by_other_strategies_and_the_reverse(
    from_tpu, four, make_strategy, tmp_path
):
    with four() as tpus:
        first, second = tpus, make_strategy(4)
        if not from_tpu:
            first, second = second, first
        saved = trained(first, 2, path=tmp_path / "there")
        there = trained(second, 0, restore=tmp_path / "there")
        assert all(torch.equal(there[name], value) for name, value in saved.items())
        ends = [trained(s, 2, restore=tmp_path / "there") for s in (first, second)]
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-4, atol=1e-5)
    assert not torch.equal(ends[0]["0.weight"], saved["0.weight"])


@pytest.mark.slow
def test_what_is_written_between_runs_is_seen_by_the_next(tpus):
    model = tpus.mirror(nn.Linear(1, 1, bias=False))

    def step(x):
        with torch.no_grad():
            return model(x).sum()

    for value in (1.0, 4.0):
        model.weight.data.fill_(value)
        assert tpus.run(step, args=(torch.ones(2, 1),)).values[3] == 2 * value
    assert tpus.check_replicas() == 1


@pytest.mark.slow
def test_a_preempted_training_is_saved_between_steps(tpus):
    from mirror.execution.lifecycle import step_ends

    with tpus.scope():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ended = []

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    def listener():
        ended.append(True)

    step_ends.listeners.append(listener)
    try:
        tpus.run(step, args=(torch.ones(4, 4),))
        tpus.run(lambda x: model(x), args=(torch.ones(4, 4),))
    finally:
        step_ends.listeners.remove(listener)
    assert ended == [True]
