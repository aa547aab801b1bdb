"""``mirror checkpoint``: show, verify, and export for plain torch."""

import os

import pytest
import torch
from torch import nn

import mirror
from mirror.cli import main


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
def test_show_tells_names_shapes_and_aliases(saved, capsys, where, verify):
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
