"""Checks a machine: what it has, whether kernels are right, how fast it is.

  python -m launch.doctor
      A line for each check: OK, WRONG, SLOW or SKIPPED, and why. It is the
      first command on a new machine, and takes a minute or two on a CPU.
  python -m launch.doctor --quick
      The attention kernels alone, against float64.
  python -m launch.doctor --json=doctor.json
      The findings as a file too, to send with a report.
  python -m launch.doctor --distributed
      On every host of a pod: links between hosts too, and a line for each
      process that differs.

A kernel that is wrong is left out by its name: RINGJAX_OFF=decode_pool_tpu.
Exit status: 1 if something is wrong; slow is no error.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TextIO

import jax
from absl import flags

from ringjax.bench import timing
from ringjax.bench.doctor import checkup
from ringjax.bench.doctor.findings import is_wrong, table
from ringjax.checks import one_of
from ringjax.errors import OptionError

from .shared import common, console
from .shared.flag_helpers import FlagHelper

NAME = "doctor"
_MEMORY = "pass fewer --parts, or end other programs on the device"


def define(values: flags.FlagValues) -> None:
  """Defines the flags of this script."""
  new = FlagHelper(values)
  new.texts(
    "parts",
    None,
    f"Parts to run, of {', '.join(checkup.PARTS)}; default: all.",
  )
  new.boolean("quick", False, f"The same as --parts={','.join(checkup.QUICK)}.")
  new.output("json", None, "File for the findings.")
  new.boolean(
    "interpret",
    False,
    "Check the Pallas kernels of other platforms too, by Pallas' interpreter, "
    "which is slow.",
  )
  common.define(values)


def run(
  values: flags.FlagValues,
  *,
  stdout: TextIO | None = None,
  stderr: TextIO | None = None,
) -> int:
  """Checks the machine; returns the exit status."""
  stdout = sys.stdout if stdout is None else stdout
  screen = console.Screen(NAME, stderr)
  with console.Run(screen, _MEMORY) as run:
    parts = _parts(values)
    common.start(values, single=True)
    mesh = common.mesh(values.mesh)
    first = jax.process_index() == 0
    screen.quiet = not first
    run.doing = "checking"
    rows = checkup.check_up(
      mesh,
      parts,
      interpret=values.interpret,
      begin=screen.begin,
      # The screen shows the progress.
      stream=io.StringIO(),
    )
    screen.end()
    # A full disk must not cost the findings.
    if first:
      print("\n".join(table(rows)), file=stdout, flush=True)
    run.doing = "writing"
    if first and values.json is not None:
      record = checkup.record(rows, f"python -m launch.{NAME}")
      timing.write_json(values.json, record)
  if run.status:
    return run.status
  return int(is_wrong(rows))


def _parts(values: flags.FlagValues) -> tuple[str, ...]:
  """Names of the parts to run.

  Raises:
    OptionError: If a name is unknown, or flags do not go together.
  """
  if values.parts is None:
    return checkup.QUICK if values.quick else checkup.PARTS
  if values.interpret and "kernels" not in values.parts:
    raise OptionError(
      "--interpret",
      f"it with --parts={','.join(values.parts)}",
      "the part kernels, which it is about",
      "add kernels to --parts, or leave --interpret out",
    )
  if values.quick:
    raise OptionError(
      "--quick", "it with --parts", "one of them", "leave one of them out"
    )
  if not values.parts:
    raise OptionError(
      "--parts",
      "no name",
      "one or more",
      f"pass e.g. --parts={checkup.QUICK[0]}",
    )
  return tuple(one_of("--parts", part, checkup.PARTS) for part in values.parts)


def main(argv: Sequence[str]) -> int:
  """Runs the command line."""
  common.refuse_rest(argv)
  # Libraries of the processes print to stdout too.
  return run(flags.FLAGS, stdout=console.own_stdout())


if __name__ == "__main__":
  define(flags.FLAGS)
  common.launch(NAME, main)
