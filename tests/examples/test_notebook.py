"""The notebook in examples/ trains, is interrupted, goes on, and plots, in a live kernel."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The notebook after all its cells have run."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    for name in ("ipykernel", "matplotlib", "sklearn"):
        pytest.importorskip(name)
    executed = nbformat.read(NOTEBOOK, as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        # What the kernel writes of its own, and that no one's settings count.
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        client = nbclient.NotebookClient(
            executed,
            timeout=180,
            kernel_name="python3",
            resources={"metadata": {"path": str(tmp_path_factory.mktemp("work"))}},
        )
        client.execute()
    return executed


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)


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
def test_the_loss_is_plotted(notebook):
    shown = [o.data for o in _outputs(notebook) if o.output_type == "display_data"]
    assert ["image/png" in data for data in shown] == [True]


@pytest.mark.slow
def test_no_cell_warns(notebook):
    texts = [o.text for o in _outputs(notebook) if o.get("name") == "stderr"]
    # What matplotlib says the first time it is used on a slow machine.
    assert [text for text in texts if "building the font cache" not in text] == []


def _outputs(notebook):
    return [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


def _stdout(notebook):
    return "".join(o.text for o in _outputs(notebook) if o.get("name") == "stdout")
