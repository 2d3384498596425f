"""Findings of a check of a machine: a line each, with a status.

Guarantees: an error of a part becomes a finding of that part; the other parts
run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

from ringjax.bench import timing
from ringjax.parallel import memory

OK, WRONG, SLOW, SKIPPED = "OK", "WRONG", "SLOW", "SKIPPED"
STATUSES = (OK, WRONG, SLOW, SKIPPED)
_WIDTH = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """One line of the report.

  Attributes:
    part: Part of the check, one of `checkup.PARTS`.
    name: Name of what was looked at.
    status: One of `STATUSES`.
    text: Result, and what to do if it is not as it should be.
    figures: Numbers of the result, by name.
    common: Whether all processes must have the same text, as versions of JAX.
  """

  part: str
  name: str
  status: str
  text: str
  figures: dict[str, float] = dataclasses.field(default_factory=dict)
  common: bool = False

  def record(self) -> dict[str, Any]:
    """Plain values, from which `Finding(**record)` builds it again."""
    return dataclasses.asdict(self)


class Findings:
  """Findings in the order in which they were made.

  Args:
    begin: Function that is called with the name of each check before it runs.
  """

  def __init__(self, begin: Callable[[str], object] = lambda name: None):
    self.rows: list[Finding] = []
    self._begin = begin

  def add(
    self,
    part: str,
    name: str,
    status: str,
    text: str,
    *,
    common: bool = False,
    figures: Mapping[str, float] | None = None,
  ) -> None:
    """Adds a finding, see `Finding`."""
    # JSON has no infinities and no NaN.
    finite = {
      key: float(x)
      for key, x in (figures or {}).items()
      if abs(x) < float("inf")
    }
    self.rows.append(
      Finding(
        part=part,
        name=name,
        status=status,
        text=text,
        figures=finite,
        common=common,
      )
    )

  @contextlib.contextmanager
  def guarded(self, part: str, name: str) -> Generator[None]:
    """Runs a check, whose error becomes a finding.

    A check that the device has too little memory for, or that declines
    (`timing.Skipped`), is skipped.

    Args:
      part: Name of the part.
      name: Name of the check; "" for the rest of the part.
    """
    self._begin(f"{part}: {name}" if name else part)
    try:
      yield
    except Exception as error:
      skipped = isinstance(error, timing.Skipped) or memory.ran_out(error)
      status = SKIPPED if skipped else WRONG
      self.add(part, name or "this part", status, timing.reason(error))


def is_wrong(rows: Iterable[Finding]) -> bool:
  """Whether one of the findings is wrong; a slow one is not."""
  return any(row.status == WRONG for row in rows)


def table(rows: Iterable[Finding]) -> Iterator[str]:
  """Lines of the report, below a heading for each part."""
  rows = tuple(rows)
  name_width = min(36, max((len(row.name) for row in rows), default=0))
  status_width = max(map(len, STATUSES))
  indent = " " * (2 + status_width + 2 + name_width + 2)
  part = None
  for row in rows:
    if row.part != part:
      part = row.part
      yield f"{part}"
    lines = textwrap.wrap(
      row.text,
      max(20, _WIDTH - len(indent)),
      break_long_words=False,
      break_on_hyphens=False,
    ) or [""]
    head = f"  {row.status:{status_width}}  {row.name:{name_width}}  "
    if len(row.name) > name_width:
      yield head.rstrip()
      head = indent
    yield f"{head}{lines[0]}".rstrip()
    yield from (f"{indent}{line}" for line in lines[1:])
  counts = [
    f"{sum(row.status == status for row in rows)} {status}"
    for status in STATUSES
  ]
  yield ", ".join(counts)
