"""``mirror run``: a script sees what it sees under ``python``, and trains on all replicas."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.pairs import quick_of

COMMAND = "import os, sys; os.chdir({folder!r}); from mirror.cli import main; sys.exit(main())"
TRAINS = """
import sys
import torch, torch.nn.functional as F
import mirror

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = F.mse_loss(model(torch.ones(5, 4)), torch.zeros(5, 2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(type(mirror.get_strategy()).__name__, mirror.get_strategy().num_replicas_in_sync)
print(mirror.is_mirrored(model), round(loss.item(), 5))
"""


@pytest.fixture
def run(script_pool, tmp_path):
    """Returns a function that runs ``mirror run`` in a folder with the given files."""

    def run_files(files, *words):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(textwrap.dedent(text))
        return script_pool.run(COMMAND.format(folder=str(tmp_path)), "run", *words)

    return run_files


SEES = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0],
    "folder": os.getcwd(), "is_main": sys.modules["__main__"].__dict__ is globals(),
    "package": __package__, "doc": __doc__}))
"""


def test_a_script_sees_its_arguments_folder_and_main_module(run, tmp_path):
    done = run({"sub/train.py": SEES}, "--replicas", "2", "sub/train.py", "--lr", "3", "-m", "x")
    assert (done.returncode, done.stderr) == (0, "")
    path = str(tmp_path / "sub" / "train.py")
    seen = json.loads(done.stdout)
    expected = subprocess.run(
        [sys.executable, "sub/train.py", "--lr", "3", "-m", "x"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        check=True,
    )
    assert seen == json.loads(expected.stdout)
    assert (seen["file"], seen["argv"]) == (path, ["sub/train.py", "--lr", "3", "-m", "x"])


@pytest.mark.parametrize("name", ["package.train", "package"])
def test_a_module_imports_relatively_and_sees_its_package(name, run, tmp_path):
    files = {
        "package/__init__.py": "",
        "package/other.py": "number = 7",
        "package/train.py": "from .other import number\nassert number == 7\n" + SEES,
        "package/__main__.py": "from .other import number\n" + SEES,
    }
    done = run(files, "-m", name, "--steps", "3")
    expected = subprocess.run(
        [sys.executable, "-m", name, "--steps", "3"], cwd=tmp_path, capture_output=True, check=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads(expected.stdout)


@pytest.mark.parametrize(
    ("text", "code", "error"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("raise SystemExit", 0, ""),
        ("import os; os._exit(4)", 4, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, None),
        ("import argparse; argparse.ArgumentParser().parse_args()", 2, None),
    ],
)
def test_a_script_ends_as_under_python(text, code, error, run):
    arguments = ["--no-such"] if "argparse" in text else []
    done = run({"train.py": text}, "train.py", *arguments)
    assert done.returncode == code
    assert error is None or done.stderr == error


def test_a_traceback_begins_with_the_script(run, tmp_path):
    text = "import model\n\n\ndef train():\n    model.fail()\n\n\ntrain()\n"
    files = {"train.py": text, "model.py": "def fail():\n    return 1 / 0\n"}
    done = run(files, "train.py")
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()
        == [
            "Traceback (most recent call last):",
            f'  File "{tmp_path}/train.py", line 8, in <module>',
            "    train()",
            f'  File "{tmp_path}/train.py", line 5, in train',
            "    model.fail()",
            f'  File "{tmp_path}/model.py", line 2, in fail',
            "    return 1 / 0",
            "           ~~^~~",
            "ZeroDivisionError: division by zero",
        ][: len(done.stderr.splitlines())]
        or "~" not in done.stderr
    )  # Python 3.10 has no carets


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["there.py"], 2, "can't open file '{}/there.py': there is no such file"),
        (["-m", "there"], 2, "No module named there"),
        (["-m", "package"], 2, "No module named package.__main__; 'package' is a package"),
        (["package"], 2, "can't find '__main__' module in 'package'"),
        (["syntax.py"], 1, "SyntaxError: "),
        (["binary.py"], 1, "SyntaxError: "),
        ([], 2, "the following arguments are required: SCRIPT"),
        (["-m"], 2, "the following arguments are required: SCRIPT"),
        (["--devices", "cuda:99", "syntax.py"], 1, "'cuda:99' does not exist"),
        (["--strategy", "one-device", "--replicas", "2", "syntax.py"], 1, "needs one device"),
        (["--trace", "/no/such/trace.json", "syntax.py"], 1, "trace.json"),
    ],
)
def test_what_cannot_be_run_is_one_clear_error(words, code, error, run, tmp_path):
    files = {"package/__init__.py": "", "syntax.py": "x = (", "binary.py": "\0\1"}
    done = run(files, *words)
    assert done.returncode == code
    assert error.format(tmp_path) in done.stderr
    assert "mirror/tools" not in done.stderr


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "MirroredStrategy 1"),
        (["--replicas", "2"], "MirroredStrategy 2"),
        (["--devices", "cpu,cpu,cpu"], "MirroredStrategy 3"),
        (["--strategy", "one-device"], "OneDeviceStrategy 1"),
        (["--strategy", "central-storage", "--replicas", "2"], "CentralStorageStrategy 2"),
        (["--replicas", "2", "--schedule", "lockstep", "--backend", "host"], "MirroredStrategy 2"),
    ],
)
def test_a_script_trains_on_the_strategy_that_the_options_name(words, name, run):
    done = run({"train.py": TRAINS}, *words, "train.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == name
    is_mirrored, loss = done.stdout.splitlines()[1].split()
    assert is_mirrored == str(True)
    assert float(loss) == pytest.approx(0.0164, abs=1e-5)


def test_a_trace_and_a_report_are_written_when_the_script_ends(run, tmp_path):
    done = run({"train.py": TRAINS}, "--replicas=2", "--trace=t.json", "--report", "train.py")
    assert done.returncode == 0
    assert "step" in done.stderr
    assert "optimizer" in (tmp_path / "t.json").read_text()


def test_batch_norm_can_use_the_whole_batch(run):
    text = """
        import sys, torch
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm1d(3)
        print(norm(torch.randn(7, 3)).detach().sum(1).tolist(), type(norm).__name__)
    """
    one = run({"train.py": text}, "train.py")
    two = run({}, "--replicas", "2", "--sync-batch-norm", "train.py")
    assert two.stderr == ""
    assert two.stdout.split("]")[1] == one.stdout.split("]")[1]
    expected, actual = (json.loads(done.stdout.split("]")[0] + "]") for done in (one, two))
    assert actual == pytest.approx(expected, abs=1e-6)
    parts = run({}, "--replicas", "2", "train.py")
    assert json.loads(parts.stdout.split("]")[0] + "]") != pytest.approx(expected, abs=1e-3)
    assert parts.stderr.startswith("BatchNorm1d(3) normalises with mean and variance of its")


PROCESSES = """
    import dataclasses, multiprocessing, pickle, sys
    import torch
    from torch.utils.data import DataLoader, Dataset
    import mirror

    @dataclasses.dataclass
    class Config:
        rate: float = 0.5

    class Rows(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, i):
            return i, mirror.has_strategy(), __name__

    def work(config):
        return config.rate, mirror.has_strategy()

    if __name__ == "__main__":
        kind = sys.argv[1]
        assert mirror.has_strategy()
        config = pickle.loads(pickle.dumps(Config(0.25)))
        assert type(config) is Config and Config.__module__ == "__main__"
        with multiprocessing.get_context(kind).Pool(1) as pool:
            print(pool.map(work, [config]))
        loader = DataLoader(Rows(), 2, num_workers=1, multiprocessing_context=kind)
        print([batch[0].tolist() for batch in loader], [batch[1].tolist() for batch in loader][0])
"""


@pytest.mark.parametrize("kind", quick_of(["fork", "spawn", "forkserver"], ["fork", "spawn"]))
def test_processes_of_the_script_do_not_run_the_strategy_again(kind, run):
    done = run({"train.py": PROCESSES}, "--replicas", "2", "train.py", kind)
    assert done.returncode == 0, done.stderr
    config, batches = done.stdout.splitlines()
    if kind == "fork":  # a fork has the parent's objects, which it does not use
        assert config.startswith("[(0.25")
        assert batches.startswith("[[0, 1], [2, 3]]")
    else:
        assert config == "[(0.25, False)]"
        assert batches == "[[0, 1], [2, 3]] [False, False]"


@pytest.mark.slow
def test_signals_from_outside_end_a_script_as_under_python(tmp_path):
    (tmp_path / "train.py").write_text("import time\nprint('on', flush=True)\ntime.sleep(100)\n")
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(
            [sys.executable, "-m", "mirror", "run", "train.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        ) as process:
            assert process.stdout.readline() == "on\n"
            process.send_signal(number)
            begun = time.monotonic()
            error = process.communicate()[1]
            assert time.monotonic() - begun < 60
        assert process.returncode == -number
        assert ("KeyboardInterrupt" in error) == (number == signal.SIGINT)


DRAWS = """
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x = torch.randn(21, 4)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8, shuffle=True)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
"""


@pytest.mark.slow
def test_a_script_on_two_workers_of_torchrun_draws_and_trains_as_on_one_device(run, tmp_path):
    one = run({"train.py": DRAWS}, "train.py")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--redirects", "1", "--log-dir", "logs"),
            *("-m", "mirror", "run", "train.py"),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = float(one.stdout.split()[1])
    # torchrun's workers write unbuffered, in pieces: into a shared pipe these would be mixed.
    outputs = [file.read_text() for file in tmp_path.glob("logs/**/stdout.log")]
    losses = [float(output.split()[1]) for output in outputs]
    assert losses == [pytest.approx(expected, abs=1e-5)] * 2
