"""python -m launch: a line for each script."""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_lists_every_script_with_its_purpose():
  done = subprocess.run(
    [sys.executable, "-m", "launch"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  rows = {}
  for line in done.stdout.splitlines():
    if line.startswith("  python -m launch."):
      name, purpose = line.split("launch.", 1)[1].split(maxsplit=1)
      rows[name] = purpose
  started = {
    path.stem
    for path in (ROOT / "launch").glob("*.py")
    if '\nif __name__ == "__main__":' in path.read_text("utf-8")
  }
  assert set(rows) == started - {"__main__"}
  assert all(purpose.endswith(".") for purpose in rows.values())
