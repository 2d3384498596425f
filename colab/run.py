"""Runs notebooks as they are, and stores what their cells show.

    python colab/run.py colab/01_generate.ipynb ...

A notebook is written when all of its cells have run. Stored is what cells
print (not what is logged), without paths of this machine, and pictures as PNG
of at most 60 kB. It needs `pip install "ringjax[notebooks]"`.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pathlib
import re
import sys

import nbclient
import nbformat
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parents[1]
PICTURE_BYTES = 60_000
COLOURS, DPI = 64, 80
# What begins as a path of a machine does, up to its last part.
MACHINE = re.compile(r"(?<![\w.:/])/(?:\w[\w.+-]*/)+(?=[\w.+-])")


def without_paths(text: str) -> str:
  """A text whose absolute paths are their last parts."""
  return MACHINE.sub("", text)


def small_picture(png: str) -> str:
  """A PNG in base64 with a palette of few colours in place of all.

  Raises:
    ValueError: it has more than PICTURE_BYTES nevertheless.
  """
  picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
  made = io.BytesIO()
  picture.quantize(COLOURS).save(made, "PNG", optimize=True)
  if made.tell() > PICTURE_BYTES:
    raise ValueError(
      f"a picture has {made.tell():,} bytes, expected at most "
      f"{PICTURE_BYTES:,}: draw a smaller figure"
    )
  return base64.b64encode(made.getvalue()).decode()


def outputs(given: list[dict], number: int) -> list[dict]:
  """What is stored of a cell's outputs; texts of a stream are one of them.

  Args:
    given: as the kernel sent them.
    number: of the cell among those with code, from 1.
  """
  kept: list[dict] = []
  for one in given:
    if one["output_type"] == "stream":
      if one["name"] == "stderr":
        continue
      text = without_paths(one["text"])
      if kept and kept[-1]["output_type"] == "stream":
        text = "".join(kept.pop()["text"]) + text
      text = text.splitlines(keepends=True)
      kept.append({"name": "stdout", "output_type": "stream", "text": text})
      continue
    data = one["data"]
    # A picture's text is the address of an object.
    if "image/png" in data:
      data = {"image/png": small_picture(data["image/png"])}
    else:
      data = {kind: without_paths(text) for kind, text in data.items()}
    made = {"data": data, "metadata": {}, "output_type": one["output_type"]}
    if one["output_type"] == "execute_result":
      made["execution_count"] = number
    kept.append(made)
  return kept


def execute(path: pathlib.Path) -> dict:
  """A notebook with the outputs of all of its cells."""
  notebook = nbformat.read(path, as_version=4)
  style = "%matplotlib inline\nimport matplotlib\n"
  style += f"matplotlib.rcParams['figure.dpi'] = {DPI}"
  notebook.cells.insert(0, nbformat.v4.new_code_cell(style))
  client = nbclient.NotebookClient(
    notebook,
    timeout=None,
    kernel_name="python3",
    resources={"metadata": {"path": str(path.parent)}},
  )
  client.execute()
  del notebook.cells[0]
  return notebook


def main(paths: list[str]) -> None:
  """Runs the notebooks one after another."""
  before = os.environ.get("PYTHONPATH", "")
  os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
  for path in map(pathlib.Path, paths):
    source = json.loads(path.read_text())
    ran = execute(path)
    code = lambda book: (c for c in book["cells"] if c["cell_type"] == "code")
    pairs = zip(code(source), code(ran), strict=True)
    for number, (cell, other) in enumerate(pairs, 1):
      cell["execution_count"] = number
      cell["outputs"] = outputs(other["outputs"], number)
    path.write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n")
    print(f"{path.name}: {number} cells")


if __name__ == "__main__":
  main(sys.argv[1:])
