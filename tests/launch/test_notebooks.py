"""The notebooks in colab/ run from top to bottom, and hold no outputs."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import nbclient
import nbformat
import pytest

from tests.launch.conftest import ROOT, environment

NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
# What makes a notebook quick enough for a test.
QUICK = {
  r"CONTEXT = [\d_]+": "CONTEXT = 1_024",
  r"DOCUMENTS, SIZE = \d+, \d+": "DOCUMENTS, SIZE = 4, 200",
  r"trials = \d+": "trials = 1",
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
  # Only the first cell installs anything.
  assert ["%pip" in source(cell) for cell in code] == [
    True,
    *[False] * (len(code) - 1),
  ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_installs_what_is_missing(path, tmp_path):
  """With a pip that writes down what it is asked for."""
  cells = json.loads(path.read_text())["cells"]
  first = next(source(c) for c in cells if c["cell_type"] == "code")
  cell = tmp_path / "cell.ipy"
  asked = tmp_path / "asked"
  (tmp_path / "pip.py").write_text(
    "import json, sys\n"
    f"open({str(asked)!r}, 'w').write(json.dumps(sys.argv[1:]))\n"
  )

  def run(before: str) -> None:
    cell.write_text(before + first)
    done = subprocess.run(
      [sys.executable, "-m", "IPython", "--no-banner", str(cell)],
      cwd=tmp_path,
      env={
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
        "IPYTHONDIR": str(tmp_path / "ipython"),
      },
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr

  run("")
  assert not asked.exists()
  # Python takes a module that is None for one that is not there.
  run("import sys\nsys.modules['ringjax'] = None\n")
  assert json.loads(asked.read_text()) == [
    "install",
    "-q",
    "ringjax[plot] @ git+https://github.com/ringjax/ringjax",
  ]


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
  text = "".join(source(cell) for cell in notebook.cells)
  # The model's answer is the number that was hidden.
  assert printed.count("48213") >= (2 if "prefill=method" in text else 1)
