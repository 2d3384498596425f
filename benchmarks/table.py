"""Rows of the table of systems, and their commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Figures = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Step:
  """A command whose output others read: a calibration or a trained model.

  Attributes:
    command: Command line, as for a shell.
    makes: Path that exists after it succeeds, relative to the repository.
  """

  command: str
  makes: str


@dataclasses.dataclass(frozen=True)
class Run:
  """A command that prints a JSON object.

  Attributes:
    command: Command line, as for a shell.
    pick: Function that takes the figures of interest, as JSON values, from the
      object.
    before: Steps that have to run first, in order.
    file: Path to which the command writes the object, relative to the
      repository; "" for stdout.
  """

  command: str
  pick: Callable[[Any], Figures]
  before: tuple[Step, ...] = ()
  file: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A system of a paper, as a row of the table.

  Attributes:
    name: Short name for the command line.
    system: Name of the system.
    paper: arXiv number, or conference and year.
    claim: Claim of the paper, in a sentence.
    published: Figures of the paper.
    runs: Commands that show it here.
    more: Commands that add to it.
    says: Function that makes a sentence of the figures of `runs` and `more`, in
      order; those of `more` are None until they have run.
    unless: Reason why no real model can show it; "" if runs do.
  """

  name: str
  system: str
  paper: str
  claim: str
  published: str
  runs: tuple[Run, ...] = ()
  more: tuple[Run, ...] = ()
  says: Callable[..., str] = lambda *_: ""
  unless: str = ""
