"""mirror init: ten scripts in the styles of public ones, before and after on three replicas."""

import contextlib
import io
import re
import runpy
import stat
import subprocess
from pathlib import Path

import pytest
import torch

import mirror
from mirror import MirroredStrategy
from mirror.cli import main
from mirror.train.conversion.conversion import convert

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
ROOT = Path(__file__).parents[3]
DEVICES = ["cpu"] * 3
PLAIN = """\
import torch

net = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(2, 2)).sum().backward()
"""


def convert_text(tmp_path, text, devices=None):
    path = tmp_path / "train.py"
    path.write_bytes(text.encode())
    return convert(path, devices)


def added(conversion):
    """Returns the lines that are new; the others are as they were."""
    before, new = io.StringIO(conversion.before, newline="").readlines(), []
    for line in io.StringIO(conversion.after, newline="").readlines():
        if before and line == before[0]:
            before.pop(0)
        else:
            new.append(line.strip())
    assert before == []
    return new


@pytest.fixture
def printed():
    """Runs a script in float64 and returns what it prints: words, and numbers."""
    dtype = torch.get_default_dtype()

    def run(path):
        torch.set_default_dtype(torch.float64)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path(str(path), run_name="__main__")
        words = output.getvalue().split()
        is_number = re.compile(r"-?\d+\.\d+$").match
        return [float(word) if is_number(word) else word for word in words]

    yield run
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_converted_script_prints_what_the_plain_one_prints(path, printed, tmp_path, monkeypatch):
    converted = tmp_path / path.name
    converted.write_text(convert(path, DEVICES).after)
    made = []

    def make(devices):
        made.append(MirroredStrategy(devices))
        return made[-1]

    monkeypatch.setattr(mirror, "MirroredStrategy", make)
    plain, mirrored = printed(path), printed(converted)
    (strategy,) = made
    assert strategy.num_replicas_in_sync == 3
    assert sum(isinstance(word, float) for word in plain) > 3
    assert [w for w in mirrored if isinstance(w, str)] == [w for w in plain if isinstance(w, str)]
    assert mirrored == pytest.approx(plain, abs=3e-9)


def test_one_model_needs_two_lines_and_two_need_four():
    lines = {path.stem: added(convert(path)) for path in SCRIPTS}
    strategy = "mirror.MirroredStrategy()"
    sync = "mirror.nn.convert_sync_batchnorm"
    expected = {
        "dcgan": [
            f"strategy = {strategy}",
            *(f"{sync}(netD)", "strategy.mirror(netD)"),
            *(f"{sync}(netG)", "strategy.mirror(netG)"),
        ],
        "fine_tuning": [f"{strategy}.mirror(net)"],
        "image_net": [f"{sync}(model)", f"{strategy}.mirror(model)"],
        "language_model": [f"{strategy}.mirror(model)"],
        "mnist": [f"{strategy}.mirror(model)"],
        "regression": [f"{strategy}.mirror(fc)"],
        "siamese": [f"{strategy}.mirror(network)"],
        "time_sequence": [f"{strategy}.mirror(seq)"],
        "trainer_class": [f"{strategy}.mirror(self.model)"],
        "vae": [f"{strategy}.mirror(model)"],
    }
    assert lines == {name: ["import mirror", *more] for name, more in expected.items()}


@pytest.mark.parametrize(
    "text",
    [
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("import torch\n", '"""Says\n\x0cthis."""\nimport torch  # and\x0c so\n'),
        "# -*- coding: latin-1 -*-\n# \u00e9\n" + PLAIN,
        "\ufeff" + PLAIN,
        PLAIN.rstrip("\n"),
    ],
    ids=["crlf", "form-feeds", "latin-1", "bom", "no-end"],
)
def test_no_byte_of_the_script_is_touched(text, tmp_path):
    path = tmp_path / "train.py"
    content = text.encode("latin-1" if "latin-1" in text else "utf-8")
    path.write_bytes(content)
    path.chmod(0o750)
    link = tmp_path / "link.py"
    link.symlink_to(path)
    assert main(["init", str(link)]) == 0
    assert path.read_bytes() == content
    assert main(["init", "--write", str(link)]) == 0
    lines = path.read_bytes().splitlines(keepends=True)
    new = [line for line in lines if b"mirror" in line]
    assert b"".join(line for line in lines if line not in new) == content
    assert new[1].strip() == b"mirror.MirroredStrategy().mirror(net)"
    assert (link.is_symlink(), stat.S_IMODE(path.stat().st_mode)) == (True, 0o750)
    assert sorted(tmp_path.iterdir()) == [link, path]
    compile(path.read_bytes(), "train.py", "exec")


@pytest.mark.parametrize(
    ("before", "where"),
    [
        ("net = torch.compile(net)\nopt = SGD(net.parameters())\n", 0),
        ("count(net.parameters())\nps = list(net.parameters())\nopt = SGD(ps)\n", 1),
        ("if a:\n    opt = SGD(net.parameters())\nelse:\n    opt = Adam(net.parameters())\n", 0),
        ("if a:\n    pass\nelif b:\n    o = SGD(net.parameters())\nelif c:\n"
         "    o = Adam(net.parameters())\n", 0),
        ("if a:\n    net = A()\n    o = SGD(net.parameters())\nelse:\n    net = B()\n"
         "    o = SGD(net.parameters())\n", 2),
        ("x = 1\nopt = getattr(torch.optim, 'SGD')(net.parameters())\n", 1),
        ("for i in x:\n    net = A()\n    opt = SGD(\n        net.parameters()\n    )\n", 2),
    ],
)  # fmt: skip
def test_the_model_is_mirrored_before_its_optimizer(before, where, tmp_path):
    conversion = convert_text(tmp_path, f"{before}net(1).backward()\n")
    lines = [line for line in conversion.after.splitlines() if line != "import mirror"]
    assert lines[where].strip() == "mirror.MirroredStrategy().mirror(net)"
    assert set(added(conversion)) == {"import mirror", lines[where].strip()}


def test_the_diff_is_one_that_patch_takes(tmp_path):
    conversion = convert_text(tmp_path, PLAIN, ["cpu", "cpu"])
    assert 'mirror.MirroredStrategy(["cpu", "cpu"]).mirror(net)' in conversion.diff()
    command = ["git", "apply", "-"]
    subprocess.run(command, cwd=tmp_path, input=conversion.diff(), text=True, check=True)
    assert (tmp_path / "train.py").read_text() == conversion.after


def test_the_page_shows_what_is_added(tmp_path):
    (block,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs/init.md").read_text(), re.DOTALL)
    lines = block.splitlines(keepends=True)
    before = "".join(line[1:] or line for line in lines if line[0] != "+")
    after = "".join(line[1:] or line for line in lines)
    assert convert_text(tmp_path, before).after == after
