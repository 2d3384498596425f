"""The scripts: python -m launch lists them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_GUARD = '\nif __name__ == "__main__":'


def _hint(name: str) -> str | None:
  """Command that runs a module `python -m NAME` names; None for a script.

  The module may be a file that is no script, or a sub-command of one.
  """
  folder = Path(__file__).parent
  last = name.rsplit(".", 1)[-1]
  file = next(iter(sorted(folder.rglob(f"{last}.py"))), None)
  if file is not None:
    source = file.read_text("utf-8")
    if _GUARD in source:
      return None
    # The first line of a docstring names the sub-commands of a file.
    first = source.partition("\n")[0]
    part = re.match(r'"""The sub-commands? ([\w, ]+) of launch\.(\w+)', first)
    if part:
      commands = re.split(", | and ", part[1])
      return " or ".join(f"python -m launch.{part[2]} {x}" for x in commands)
  # Docstrings of scripts have a line for each sub-command.
  usages = [
    f"python -m launch.{script.stem} {last}"
    for script in sorted(folder.glob("*.py"))
    if re.search(
      rf"^  python -m launch\.{script.stem} {re.escape(last)}\b",
      script.read_text("utf-8"),
      re.M,
    )
  ]
  if usages:
    return " or ".join(usages)
  return None if file is None else "python -m launch"


def _refuse_library() -> None:
  """Exits with status 2 if `python -m launch.NAME` names no script."""
  # argv[0] is "-m" only while Python looks for the module, then it is a path.
  if sys.argv[:1] != ["-m"] or "-m" not in sys.orig_argv:
    return
  name = sys.orig_argv[sys.orig_argv.index("-m") + 1]
  hint = _hint(name) if name.startswith(f"{__name__}.") else None
  if hint is not None:
    # A checkout has the package as `launch`, the wheel as `ringjax.launch`.
    hint = hint.replace("python -m launch", f"python -m {__name__}")
    print(f"{name} is not a command; run {hint}", file=sys.stderr)
    sys.exit(2)


_refuse_library()
