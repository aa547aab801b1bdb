"""The notebook in examples/ trains, is interrupted, goes on, and plots, in a live kernel."""

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
def test_the_outputs_are_kept_and_tell_of_no_machine(path):
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
