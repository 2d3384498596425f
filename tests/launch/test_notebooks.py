"""The notebooks in colab/ run from top to bottom, and hold no outputs."""

from __future__ import annotations

import json
import pathlib
import re

import nbclient
import nbformat
import pytest

from tests.launch.conftest import ROOT, environment

NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
# What makes a notebook quick enough for a test.
QUICK = {
  r"CONTEXT = [\d_]+": "CONTEXT = 1_024",
}


def source(cell: dict) -> str:
  return "".join(cell["source"])


def test_there_are_notebooks():
  assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: pathlib.Path):
  cells = json.loads(path.read_text())["cells"]
  code = [cell for cell in cells if cell["cell_type"] == "code"]
  assert all(cell["outputs"] == [] for cell in code)
  assert all(cell["execution_count"] is None for cell in code)
  assert len({cell["id"] for cell in cells}) == len(cells)
  # pip belongs into the cell that tests leave out.
  for cell in code:
    tags = cell["metadata"].get("tags", [])
    assert ("pip" in source(cell)) == ("install" in tags)


@pytest.mark.parametrize(
  "path",
  [
    NOTEBOOKS[0],
    *(pytest.param(n, marks=pytest.mark.slow) for n in NOTEBOOKS[1:]),
  ],
  ids=lambda path: path.stem,
)
def test_runs(path: pathlib.Path, monkeypatch):
  notebook = nbformat.read(path, as_version=4)
  notebook.cells = [
    cell
    for cell in notebook.cells
    if "install" not in cell.metadata.get("tags", [])
  ]
  for cell in notebook.cells:
    for pattern, quick in QUICK.items():
      cell.source = re.sub(pattern, quick, cell.source)
  monkeypatch.setenv("MPLBACKEND", "agg")
  client = nbclient.NotebookClient(
    notebook,
    timeout=240,
    kernel_name="python3",
    resources={"metadata": {"path": str(path.parent)}},
  )
  with monkeypatch.context() as patched:
    for name, value in environment().items():
      patched.setenv(name, value)
    client.execute()
  printed = "".join(
    output.get("text", "")
    for cell in notebook.cells
    if cell.cell_type == "code"
    for output in cell.outputs
  )
  assert "striped" in printed
