"""The notebooks in examples/ run in a live kernel, also with a lost worker."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))
(NOTEBOOK,) = (path for path in NOTEBOOKS if path.stem == "notebook")


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The notebook after all its cells have run."""
    for name in ("nbclient", "ipykernel", "matplotlib", "sklearn"):
        pytest.importorskip(name)
    from tests.scripts.keep_outputs import run

    with pytest.MonkeyPatch.context() as patch:
        # What the kernel writes of its own, and that no one's settings count.
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        return run(NOTEBOOK, tmp_path_factory.mktemp("work"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_outputs_are_kept_and_name_no_machine(path):
    text = path.read_text()
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert len(text) < 150_000
    assert not re.search(r"/(home|root|tmp|work|mnt|Users)/|ipykernel_", text)
    outputs = [output for cell in code for output in cell["outputs"]]
    assert "stderr" not in [output.get("name") for output in outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_the_outputs_kept_are_those_of_these_cells(notebook):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    kept = [kinds(cell["outputs"]) for cell in cells if cell["cell_type"] == "code"]
    now = [kinds(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    assert now == kept, "run: python -m tests.scripts.keep_outputs examples/notebook.ipynb"


def kinds(outputs):
    """Returns what a cell shows; what it prints without numbers, which other machines round."""
    found = []
    for output in outputs:
        if output.get("name") != "stderr":
            text = "".join(output.get("text", ""))
            shown = sorted(output.get("data", {}))
            found.append((output["output_type"], shown, re.sub(r"\d+\.\d+", "", text)))
    return found


@pytest.mark.slow
def test_only_the_cell_that_is_stopped_raises(notebook):
    raised = [output.ename for output in _outputs(notebook) if output.output_type == "error"]
    assert raised == ["KeyboardInterrupt"]


@pytest.mark.slow
def test_training_goes_on_where_it_was_interrupted(notebook):
    text = _stdout(notebook)
    assert "60 steps are done" in text
    assert "all 4 parameters are equal on all replicas" in text
    assert "150 steps are done" in text
    assert "150 steps without an interruption: the same bits" in text


@pytest.mark.slow
def test_the_loss_is_plotted_at_the_end_and_while_it_trains(notebook):
    # The second one is drawn several times, each in the place of the one before.
    shown = [o.data for o in _outputs(notebook) if o.output_type == "display_data"]
    assert ["image/png" in data for data in shown] == [True, True]


@pytest.mark.slow
def test_no_cell_warns(notebook):
    texts = [o.text for o in _outputs(notebook) if o.get("name") == "stderr"]
    # What matplotlib says the first time it is used on a slow machine.
    assert [text for text in texts if "building the font cache" not in text] == []


def _outputs(notebook):
    return [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


def _stdout(notebook):
    return "".join(o.text for o in _outputs(notebook) if o.get("name") == "stdout")


CLUSTER_NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook_cluster.ipynb"


def executed(tmp_path, monkeypatch, engine):
    """Returns the notebook after all its cells have run, and how often it was redrawn."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    for name in ("ipykernel", "matplotlib", "sklearn", "cloudpickle"):
        pytest.importorskip(name)
    drawn = []

    class Client(nbclient.NotebookClient):
        def process_message(self, msg, cell, index):
            if msg["msg_type"] == "update_display_data":
                drawn.append(index)
            return super().process_message(msg, cell, index)

    notebook = nbformat.read(CLUSTER_NOTEBOOK, as_version=4)
    # What the kernel writes of its own, and that no one's settings count.
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("ENGINE", engine)
    where = {"metadata": {"path": str(tmp_path)}}
    Client(notebook, timeout=240, kernel_name="python3", resources=where).execute()
    return notebook, len(drawn)


def said_and_drawn(cells):
    """Returns what the cells of a notebook have printed, and the types of their pictures."""
    outputs = [o for cell in cells if cell["cell_type"] == "code" for o in cell["outputs"]]
    text = "".join("".join(o["text"]) for o in outputs if o.get("name") == "stdout")
    return text, [o["output_type"] for o in outputs if "image/png" in o.get("data", {})]


def assert_trained(cells):
    text, pictures = said_and_drawn(cells)
    assert "150 steps are done\n" in text
    assert "301 steps are done, 1 of them twice begun" in text
    assert "301 updates were counted" in text
    assert float(re.search(r"test accuracy: ([\d.]+)%", text)[1]) > 75
    assert pictures == ["display_data"]


def test_what_it_shows_is_what_it_gave():
    assert_trained(json.loads(CLUSTER_NOTEBOOK.read_text())["cells"])
    assert CLUSTER_NOTEBOOK.stat().st_size < 50_000


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", "ray"])
def test_the_notebook_trains_and_survives_the_loss_of_a_worker(tmp_path, monkeypatch, engine):
    if engine == "ray":
        pytest.importorskip("ray")
    notebook, num_drawn = executed(tmp_path, monkeypatch, engine)
    assert_trained(notebook.cells)
    assert num_drawn == 6  # every 50 steps, while they come
