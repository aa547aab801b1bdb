"""The notebook that drives a cluster: it trains, loses a worker, and goes on, in a live kernel."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook_cluster.ipynb"


def executed(tmp_path, monkeypatch, engine):
    """Returns the notebook after all its cells have run, and how often it was drawn anew."""
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

    notebook = nbformat.read(NOTEBOOK, as_version=4)
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
    assert_trained(json.loads(NOTEBOOK.read_text())["cells"])
    assert NOTEBOOK.stat().st_size < 50_000


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", "ray"])
def test_the_notebook_trains_and_survives_the_loss_of_a_worker(tmp_path, monkeypatch, engine):
    if engine == "ray":
        pytest.importorskip("ray")
    notebook, num_drawn = executed(tmp_path, monkeypatch, engine)
    assert_trained(notebook.cells)
    assert num_drawn == 6  # every 50 steps, while they come
