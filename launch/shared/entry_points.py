"""The installed commands: ringjax-generate is python -m launch.generate."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
  """Runs the script that the command is named after.

  Scripts set up JAX as they start as `__main__`, so it is started the same way.
  """
  name = Path(sys.argv[0]).stem.removeprefix("ringjax-")
  runpy.run_module(f"launch.{name}", run_name="__main__", alter_sys=True)
