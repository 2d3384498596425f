"""Runs notebooks as they are, and stores what their cells show.

    python colab/run.py colab/01_generate.ipynb ...

A notebook is written when all of its cells have run. Stored is what cells
print (not what is logged), without paths of this machine, and pictures as PNG
of at most 60 kB. It needs `pip install "ringjax[notebooks]"`.
"""

from __future__ import annotations

import base64
import hashlib
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
  """Cuts absolute paths down to their last parts."""
  return MACHINE.sub("", text)


def small_picture(png: str) -> str:
  """Encodes a PNG anew, in base64, with a palette of few colours.

  Raises:
    ValueError: it has more than PICTURE_BYTES nevertheless.
  """
  picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
  encoded = io.BytesIO()
  picture.quantize(COLOURS).save(encoded, "PNG", optimize=True)
  if encoded.tell() > PICTURE_BYTES:
    raise ValueError(
      f"a picture has {encoded.tell():,} bytes, expected at most "
      f"{PICTURE_BYTES:,}: draw a smaller figure"
    )
  return base64.b64encode(encoded.getvalue()).decode()


def outputs(messages: list[dict], number: int) -> list[dict]:
  """Picks what is stored of a cell's outputs, with its texts in one piece.

  Args:
    messages: Outputs as the kernel sent them.
    number: Place of the cell among those with code, from 1.
  """
  shown: list[dict] = []
  for message in messages:
    kind = message["output_type"]
    if kind == "stream":
      if message["name"] == "stderr":
        continue
      text = without_paths(message["text"])
      if shown and shown[-1]["output_type"] == "stream":
        text = "".join(shown.pop()["text"]) + text
      text = text.splitlines(keepends=True)
      shown.append({"name": "stdout", "output_type": "stream", "text": text})
      continue
    data = message["data"]
    # A picture's text is the address of an object.
    if "image/png" in data:
      data = {"image/png": small_picture(data["image/png"])}
    else:
      data = {name: without_paths(text) for name, text in data.items()}
    output = {"data": data, "metadata": {}, "output_type": kind}
    if kind == "execute_result":
      output["execution_count"] = number
    shown.append(output)
  return shown


def code_sha256(notebook: dict) -> str:
  """Computes a digest of the code, which tells whether outputs are of it."""
  code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
  texts = ["".join(cell["source"]) for cell in code]
  return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def execute(path: pathlib.Path) -> dict:
  """Runs all cells of a notebook; they have their outputs then."""
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
  """Runs notebooks one after another."""
  paths_there = os.environ.get("PYTHONPATH", "")
  both = filter(None, [str(ROOT), paths_there])
  os.environ["PYTHONPATH"] = os.pathsep.join(both)
  for path in map(pathlib.Path, paths):
    source = json.loads(path.read_text())
    ran = execute(path)
    code = lambda book: (c for c in book["cells"] if c["cell_type"] == "code")
    pairs = zip(code(source), code(ran), strict=True)
    for number, (cell, done) in enumerate(pairs, 1):
      cell["execution_count"] = number
      cell["outputs"] = outputs(done["outputs"], number)
    source["metadata"]["ringjax"] = {"code_sha256": code_sha256(source)}
    path.write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n")
    print(f"{path.name}: {number} cells")


if __name__ == "__main__":
  main(sys.argv[1:])
