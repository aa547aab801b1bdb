"""The notebook that drives a cluster: it trains, loses a worker, and goes on, in a live kernel."""

import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook_cluster.ipynb"


def executed(tmp_path, monkeypatch, engine):
    """Returns the notebook after all its cells have run."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    for name in ("ipykernel", "matplotlib", "sklearn", "cloudpickle"):
        pytest.importorskip(name)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # What the kernel writes of its own, and that no one's settings count.
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("ENGINE", engine)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources=where
    ).execute()
    return notebook


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", "ray"])
def test_the_notebook_trains_and_survives_the_loss_of_a_worker(tmp_path, monkeypatch, engine):
    if engine == "ray":
        pytest.importorskip("ray")
    notebook = executed(tmp_path, monkeypatch, engine)
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    text = "".join(o.text for o in outputs if o.get("name") == "stdout")
    assert "150 steps are done\n" in text
    assert "301 steps are done, 1 of them twice begun" in text
    assert "301 updates were counted" in text
    assert float(re.search(r"test accuracy: ([\d.]+)%", text)[1]) > 75
    assert [o.output_type for o in outputs if "image/png" in o.get("data", {})] == ["display_data"]
