"""Runs the parts of the check of a machine, in one process or several.

Guarantees: each part adds findings, even if it fails; after it the processes
have the same findings, those of process 0 and a line for each finding of
another process that differs.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
from jax.sharding import Mesh

from ringjax.bench import timing
from ringjax.bench.doctor import (
  inventory,
  kernel_checks,
  model_steps,
  rates,
  settings,
)
from ringjax.bench.doctor.findings import OK, WRONG, Finding, Findings, is_wrong
from ringjax.checks import one_of
from ringjax.errors import PeerError
from ringjax.parallel import joint_outcome

PARTS = (
  inventory.PART,
  kernel_checks.PART,
  rates.PART,
  model_steps.PART,
  settings.PART,
)
QUICK = (kernel_checks.PART,)


def check_up(
  mesh: Mesh,
  parts: Sequence[str] = PARTS,
  *,
  interpret: bool = False,
  begin: Callable[[str], object] = lambda name: None,
  stream: TextIO | io.TextIOBase | None = None,
) -> list[Finding]:
  """Checks this machine; all processes call it alike.

  Args:
    mesh: Mesh of all processes' devices.
    parts: Names of parts, of `PARTS`; they run in the order of `PARTS`.
    interpret: Whether to run kernels of other platforms by Pallas' interpreter.
    begin: Function that is called with the name of each check before it runs.
    stream: Stream for the progress of measurements; default stderr.

  Returns:
    Findings, the same in all processes.

  Raises:
    OptionError: If a part is unknown.
  """
  chosen = {one_of("parts", part, PARTS) for part in parts}
  device = jax.local_devices()[0]
  measured = rates.DeviceRates(device, stream)
  findings = Findings(begin)
  runs: dict[str, Callable[[], None]] = {
    inventory.PART: lambda: inventory.check(findings, device, mesh),
    kernel_checks.PART: lambda: kernel_checks.check(
      findings, device, interpret=interpret
    ),
    rates.PART: lambda: rates.check(findings, measured, mesh),
    model_steps.PART: lambda: model_steps.check(findings, measured),
    settings.PART: lambda: settings.check(findings, device),
  }
  for part in PARTS:
    if part in chosen:
      with findings.guarded(part, ""):
        runs[part]()
  return together(findings.rows, joint_outcome.processes_of(mesh))


def together(rows: list[Finding], ranks: tuple[int, ...]) -> list[Finding]:
  """Combines the findings of all processes.

  Args:
    rows: Findings of this process.
    ranks: Ranks of the processes, see `joint_outcome.processes_of`.
  """
  try:
    records = joint_outcome.exchanged([row.record() for row in rows], ranks)
  except PeerError as error:
    lost = Finding(
      part=inventory.PART,
      name="processes",
      status=WRONG,
      text=timing.reason(error),
    )
    return [*rows, lost]
  of_processes = [[Finding(**x) for x in of_one] for of_one in records]
  return combined(of_processes)


def combined(of_processes: Sequence[Sequence[Finding]]) -> list[Finding]:
  """Findings of process 0, and of the others those that differ.

  A finding differs if its status does, or its text where that is common to all
  processes, as versions of JAX are: then it is wrong.
  """
  key = lambda row: (row.part, row.name)
  first = list(of_processes[0])
  first_rows = {key(row): row for row in first}
  merged = list(first)
  for rank, rows in enumerate(of_processes[1:], 1):
    for row in rows:
      reference = first_rows.get(key(row))
      texts_differ = (
        reference is not None and row.common and row.text != reference.text
      )
      same_status = reference is not None and row.status == reference.status
      if same_status and not texts_differ:
        continue
      status, text = row.status, row.text
      if texts_differ and status == OK:
        status, text = WRONG, f"{text}; must be that of process 0"
      differing = Finding(
        part=row.part,
        name=f"process {rank}: {row.name}",
        status=status,
        text=text,
        figures=row.figures,
      )
      last = max(
        (n for n, x in enumerate(merged) if x.part == row.part),
        default=len(merged) - 1,
      )
      merged.insert(last + 1, differing)
    absent = set(first_rows) - {key(row) for row in rows}
    merged += [
      Finding(
        part=part,
        name=f"process {rank}: {name}",
        status=WRONG,
        text="no such finding",
      )
      for part, name in sorted(absent)
    ]
  order = {part: n for n, part in enumerate(PARTS)}
  return sorted(merged, key=lambda row: order[row.part])


def record(rows: Sequence[Finding], command: str) -> dict[str, Any]:
  """Findings and environment, for a file.

  Args:
    rows: Findings.
    command: Command that made them.
  """
  return {
    **timing.environment(command),
    "processes": jax.process_count(),
    "wrong": is_wrong(rows),
    "findings": [row.record() for row in rows],
  }
