"""Scripts by their name: installed commands, child processes, messages.

A checkout has the scripts as `launch`; the wheel has them as `ringjax.launch`,
because a top-level `launch` may be another project's.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

# Package of the scripts, by the name that it was imported with.
PACKAGE = __name__.removesuffix(".shared.entry_points")


def main() -> None:
  """Runs the script that the command is named after: ringjax-generate.

  Scripts set up JAX as they start as `__main__`, so it is started the same way.
  """
  run_script(Path(sys.argv[0]).stem.removeprefix("ringjax-"))


def run_script(name: str) -> None:
  """Runs a script in this process, as `python -m` does."""
  runpy.run_module(f"{PACKAGE}.{name}", run_name="__main__", alter_sys=True)


def script_command(name: str) -> list[str]:
  """First words of the command of a process that runs a script."""
  return [sys.executable, "-m", f"{PACKAGE}.{name}"]


def script_environment() -> dict[str, str]:
  """Environment in which a process finds the modules that this one finds."""
  path = os.pathsep.join(path or os.getcwd() for path in sys.path)
  return {**os.environ, "PYTHONPATH": path}


def command_text(text: str) -> str:
  """Text with the commands `python -m launch...` as they work here."""
  return text.replace("python -m launch", f"python -m {PACKAGE}")
