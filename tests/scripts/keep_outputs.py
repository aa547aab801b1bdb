"""Runs the notebooks of examples/, and keeps what they show in them.

    python -m tests.scripts.keep_outputs examples/notebook.ipynb ...

What tells of this machine (paths in tracebacks, numbers of processes, times) is left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat


def run(path, folder, **settings):
    """Returns a notebook after all its cells have run, in a kernel that works in the folder."""
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=240,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
        **settings,
    )
    client.execute()
    return notebook


def clean_output(output):
    """Returns an output as it is kept; ``None``: it is not."""
    if output["output_type"] == "error":
        told = f"{output['ename']}: {output['evalue']}".rstrip(": ")
        return dict(output, traceback=[told])
    if output.get("name") == "stderr":
        return None
    output.get("transient", {}).clear()
    return dict(output)


def keep(path):
    """Runs a notebook, and writes its outputs into it; all else in it stays as it is."""
    with tempfile.TemporaryDirectory() as folder:
        executed = run(path, folder)
    notebook = json.loads(path.read_text())
    number = 0
    for cell, ran in zip(notebook["cells"], executed["cells"], strict=True):
        if cell["cell_type"] == "code":
            number += 1
            cell["execution_count"] = number
            found = [clean_output(output) for output in ran["outputs"]]
            cell["outputs"] = as_in_files([output for output in found if output is not None])
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def as_in_files(outputs):
    """Returns outputs with lists of lines as texts, of which differences are seen best."""
    cell = nbformat.v4.new_code_cell(outputs=[nbformat.from_dict(output) for output in outputs])
    whole = json.loads(nbformat.writes(nbformat.v4.new_notebook(cells=[cell])))
    return whole["cells"][0]["outputs"]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        keep(Path(name))
