"""mirror init: what it does not convert is refused, with the line, the reason and a remedy."""

import re
from pathlib import Path

import pytest

from mirror.cli import main
from mirror.train.conversion import refusals
from mirror.train.conversion.conversion import ConversionError, convert

DOCS = Path(__file__).parents[3] / "docs"
SOUND = "net = Net()\nopt = SGD(net.parameters())\nnet(1).backward()\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import mirror\n" + SOUND, "line 1 imports mirror: it uses mirror already"),
        ("\nimport torch.distributed as dist\n" + SOUND, "line 2 .* docs/from-ddp.md"),
        ("from torch import distributed\n" + SOUND, "line 1 .* docs/from-ddp.md"),
        ("from accelerate import Accelerator\n" + SOUND, "docs/from-accelerate-and-fabric.md"),
        ("import pytorch_lightning as pl\n" + SOUND, "docs/frameworks.md"),
        ("from transformers import Trainer\n" + SOUND, "docs/frameworks.md"),
        ("net = nn.DataParallel(net)\n" + SOUND, "line 1 calls DataParallel: .*dataparallel.md"),
        ("DistributedDataParallel(net)\n" + SOUND, "docs/from-ddp.md"),
        ("net = torch.jit.script(net)\n" + SOUND, "leave the model as it is"),
        ("rnn = nn.LSTM(3, 4)\n" + SOUND, "line 1 makes an nn.LSTM without batch_first=True"),
        ("t = nn.Transformer(3, batch_first=False)\n" + SOUND, "nn.Transformer without"),
        ("mirror = 1\n" + SOUND, "a variable of its own called mirror; rename"),
        ("net = Net()\nopt = SGD(net.parameters())\n", r"nothing in it calls backward\(\)"),
        ("net = Net()\nnet(1).backward()\n", "no optimizer is made .*docs/init.md"),
        ("opt = SGD(make().parameters())\nloss.backward()\n", "give that model a name before"),
        ("opt = SGD(nets[0].parameters())\nloss.backward()\n", "give that model a name before"),
        ("class N:\n  def f(self):\n    self.o = SGD(self.parameters())\nl.backward()\n",
         "line 3 makes an optimizer inside the model"),
        ("x = 1; opt = SGD(net.parameters())\nl.backward()\n", "line 1 has several statements"),
        ("def f(a):\n  SGD(a.parameters())\ndef g(b):\n  SGD(b.parameters())\nl.backward()",
         "several models in several functions"),
        ("net = = 1\n", "is no program of this Python: .*line 1"),
        ("net = '\0'\n", "is no program of this Python"),
    ],
)  # fmt: skip
def test_what_lines_cannot_convert_is_refused_and_left_alone(text, message, tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(ConversionError, match=message):
        convert(path)
    assert main(["init", "--write", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"mirror: {path} is no")
    assert path.read_text() == text


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["init", str(tmp_path / "gone.py")]) == 1
    assert "gone.py cannot be read: No such file" in capsys.readouterr().err


def test_every_page_that_is_named_is_there():
    texts = (*refusals._MODULES.values(), *refusals._NAMES.values())
    pages = {page for text in texts for page in re.findall(r"docs/(\S+\.md)", text)}
    assert len(pages) > 3
    assert [page for page in pages if not (DOCS / page).exists()] == []


@pytest.mark.parametrize(
    "text",
    [
        "from torch.utils import data\nfrom mirrors import x\n",
        "rnn = nn.LSTM(3, 4, batch_first=True)\n",
        "rnn = nn.GRU(3, 4, **options)\n",
        "class Trainer: pass\nTrainer()\n",
        "cell = nn.LSTMCell(3, 4)\n",
    ],
)
def test_what_only_looks_alike_is_converted(text, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(text + SOUND)
    assert "mirror(net)" in convert(path).after


def test_labels_without_a_device_are_noted(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(SOUND)
    assert main(["init", str(path)]) == 0
    assert "note: nothing is moved to a device" in capsys.readouterr().err
    path.write_text(SOUND + "y = y.to(device)\n")
    assert main(["init", str(path)]) == 0
    assert capsys.readouterr().err == ""
