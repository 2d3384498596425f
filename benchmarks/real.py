"""Shows each system on a real model, and writes a page of the results.

  python -m launch.fetch smollm2-135m && python -m launch.fetch gemma3-270m
  python -m benchmarks.real                    every row, hours on two cores
  python -m benchmarks.real --rows=kivi,h2o    some of them
  python -m benchmarks.real --list             their names
  python -m benchmarks.real --pages            only write the page again

A row (benchmarks/systems.py) is a paper's claim and commands of this package
that show it. The output of a command is in docs/systems.json as soon as it has
ended, so that a call that was killed resumes; --again runs commands again.
Models that are trained or calibrated first go to runs/, once. docs/systems.md
and its pictures are made from the JSON file, and docs/systems_map.md, which
says where each system is, from launch/shared/systems_table.py.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags

from benchmarks import pages
from benchmarks.systems import ROWS
from benchmarks.table import Run, Step

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "systems.json"


def define(values: flags.FlagValues) -> None:
  """Defines the flags."""
  options: dict[str, Any] = dict(flag_values=values)
  flags.DEFINE_list("rows", [], "Names of rows; default: all.", **options)
  flags.DEFINE_bool(
    "again", False, "Run commands that have a result.", **options
  )
  flags.DEFINE_bool("list", False, "Print the names of all rows.", **options)
  flags.DEFINE_bool(
    "pages", False, "Write the page, and run nothing.", **options
  )
  flags.DEFINE_bool(
    "plot", True, "Draw pictures (needs matplotlib).", **options
  )


class CommandError(Exception):
  """A command of a row failed, or printed no JSON."""


@dataclasses.dataclass
class Results:
  """Results of commands, in a file that is replaced atomically."""

  path: pathlib.Path

  def read(self) -> dict[str, Any]:
    """Results by command."""
    if not self.path.exists():
      return {}
    return json.loads(self.path.read_text("utf-8"))

  def add(self, command: str, result: dict[str, Any]) -> None:
    """Replaces the result of a command."""
    text = json.dumps(
      self.read() | {command: result}, indent=1, allow_nan=False
    )
    with tempfile.NamedTemporaryFile(
      "w", dir=self.path.parent, delete=False, encoding="utf-8"
    ) as file:
      file.write(text + "\n")
      file.flush()
      os.fsync(file.fileno())
    os.chmod(file.name, 0o644)
    os.replace(file.name, self.path)


def prepare(step: Step) -> None:
  """Runs a step, unless its output exists.

  Raises:
    CommandError: If the command fails or creates no output.
  """
  if (ROOT / step.makes).exists():
    return
  print(f"first: {step.command}", file=sys.stderr, flush=True)
  argv = [sys.executable, *shlex.split(step.command)[1:]]
  # Stdout is for this script's JSON alone.
  status = subprocess.call(argv, cwd=ROOT, stdout=sys.stderr)
  if status:
    raise CommandError(f"{step.command}: exit status {status}")
  if not (ROOT / step.makes).exists():
    raise CommandError(f"{step.command}: it made no {step.makes}")


def measured(run: Run) -> dict[str, Any]:
  """Runs a command; returns its figures, seconds and peak memory.

  Raises:
    CommandError: If the command fails or prints no JSON.
  """
  for step in run.before:
    prepare(step)
  argv = [sys.executable, *shlex.split(run.command)[1:]]
  start = time.monotonic()
  with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE) as process:
    assert process.stdout is not None
    output = process.stdout.read().decode("utf-8", "replace")
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
  if process.returncode:
    raise CommandError(f"{run.command}: exit status {process.returncode}")
  if run.file:
    output = (ROOT / run.file).read_text("utf-8")
  try:
    figures = run.pick(_last_object(output))
  except (ValueError, KeyError, IndexError, TypeError) as error:
    raise CommandError(
      f"{run.command}: {error!r} in what it printed: {output[-500:]!r}"
    ) from error
  return {
    "figures": figures,
    "seconds": round(time.monotonic() - start, 1),
    "peak_bytes": usage.ru_maxrss * 1024,
    "date": datetime.date.today().isoformat(),
    "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    "jax": importlib.metadata.version("jax"),
  }


def _last_object(output: str) -> Any:
  """Parses the JSON object that a command printed, in all or its last line."""
  text = output.strip()
  try:
    return json.loads(text)
  except json.JSONDecodeError:
    return json.loads(text.splitlines()[-1])


def main(argv: list[str]) -> int:
  """Runs rows and writes the page; see the module's docstring."""
  values = flags.FlagValues()
  define(values)
  try:
    unparsed = values(argv)[1:]
  except flags.Error as error:
    unparsed = [str(error)]
  if unparsed:
    print(f"{unparsed[0]}; flags:\n{values}", file=sys.stderr)
    return 2
  if values.list:
    for row in ROWS:
      print(f"{row.name:14} {row.system}")
    return 0
  names = [row.name for row in ROWS]
  if unknown := sorted(set(values.rows) - set(names)):
    print(f"--rows: got {unknown}, want some of {names}", file=sys.stderr)
    return 2
  results, failed = Results(RESULTS), []
  rows = [row for row in ROWS if not values.rows or row.name in values.rows]
  for row in () if values.pages else rows:
    for run in (*row.runs, *row.more):
      if run.command in results.read() and not values.again:
        continue
      print(f"{row.name}: {run.command}", file=sys.stderr, flush=True)
      try:
        results.add(run.command, measured(run))
      except CommandError as error:
        print(f"{row.name}: {error}", file=sys.stderr)
        failed.append(row.name)
        break
  pages.write(ROOT / "docs", results.read(), plot=values.plot)
  for row in rows:
    print(f"{row.name}: {pages.printed(row, results.read())}")
  if failed:
    print(f"failed: {', '.join(failed)}", file=sys.stderr)
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
