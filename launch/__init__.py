"""The scripts: python -m launch lists them."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def _refuse_library() -> None:
  """Exits with status 2 if `python -m launch.NAME` names no script."""
  # argv[0] is "-m" only while Python looks for the module, then it is a path.
  if sys.argv[:1] != ["-m"] or "-m" not in sys.orig_argv:
    return
  name = sys.orig_argv[sys.orig_argv.index("-m") + 1]
  if not name.startswith("launch."):
    return
  last = name.rsplit(".", 1)[-1]
  file = next(Path(__file__).parent.rglob(f"{last}.py"), None)
  if file is None:
    return
  source = file.read_text("utf-8")
  if '\nif __name__ == "__main__":' in source:
    return
  # The first line of a sub-command's docstring names its script.
  part = re.match(r'"""The sub-command (\w+) of launch\.(\w+)', source)
  right = f"launch.{part[2]} {part[1]}" if part else "launch"
  print(f"{name} is not a command; run python -m {right}", file=sys.stderr)
  sys.exit(2)


_refuse_library()
