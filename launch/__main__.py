"""Lists the scripts: python -m launch; python -m launch NAME runs one."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from .shared.entry_points import command_text, run_script

# Scripts that the list begins with; the others follow by name.
_ORDER = (
  "doctor",
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
  "systems",
)


def scripts() -> tuple[str, ...]:
  """Names of the scripts: files of this folder that are run as programs."""
  names = {
    path.stem
    for path in Path(__file__).parent.glob("[!_]*.py")
    if '\nif __name__ == "__main__":' in path.read_text("utf-8")
  }
  first = [name for name in _ORDER if name in names]
  return (*first, *sorted(names - {*first}))


def listing() -> str:
  """Each script's command and the first line of its docstring."""
  lines = ["Scripts; each prints its flags with --help:", ""]
  for name in scripts():
    # Parsed and not imported: some scripts set up JAX when imported.
    source = Path(__file__).with_name(f"{name}.py").read_text("utf-8")
    first = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]
    lines.append(f"  python -m launch.{name:10}{first}")
  return "\n".join(lines)


def main() -> int:
  """Runs the script that is named first, or lists all."""
  names = sys.argv[1:2]
  if not names or names[0] in ("--help", "-h"):
    print(command_text(listing()))
    return 0
  if names[0] not in scripts():
    print(
      f"launch: got {names[0]!r}, which is no script; "
      + command_text("python -m launch lists them"),
      file=sys.stderr,
    )
    return 2
  del sys.argv[1]
  # Scripts set up JAX as they start as `__main__`.
  run_script(names[0])
  return 0


if __name__ == "__main__":
  sys.exit(main())
