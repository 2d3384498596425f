"""Lists the scripts: python -m launch."""

from __future__ import annotations

import ast
from pathlib import Path

SCRIPTS = (
  "chat",
  "fetch",
  "generate",
  "serve",
  "train",
  "evaluate",
  "plan",
  "prefill",
  "beside",
  "instances",
  "convert",
  "tokenize",
  "calibrate",
  "bench",
)


def listing() -> str:
  """Each script's command and the first line of its docstring."""
  lines = ["Scripts; each prints its flags with --help:", ""]
  for name in SCRIPTS:
    # Parsed and not imported: some scripts set up JAX when imported.
    source = Path(__file__).with_name(f"{name}.py").read_text("utf-8")
    first = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]
    lines.append(f"  python -m launch.{name:10}{first}")
  return "\n".join(lines)


if __name__ == "__main__":
  print(listing())
