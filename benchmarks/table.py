"""What a row of the table of systems is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Figures = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Step:
  """A command that makes what others read: a calibration, a trained model.

  Attributes:
    command: The command, as a shell takes it.
    makes: What is there once it has ended well, relative to the repository.
  """

  command: str
  makes: str


@dataclasses.dataclass(frozen=True)
class Run:
  """A command that prints a JSON object.

  Attributes:
    command: The command, as a shell takes it.
    pick: Takes the figures of interest, as JSON values, out of the object.
    before: What has to be made first, in order.
    file: Where the command writes the object, relative to the repository; "":
      to stdout.
  """

  command: str
  pick: Callable[[Any], Figures]
  before: tuple[Step, ...] = ()
  file: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A system.

  Attributes:
    name: Short name, of the command line.
    system: The system's own name.
    paper: arXiv number, or conference and year.
    claim: What the paper says of it, in a sentence.
    published: The paper's figures.
    runs: Commands that show it here.
    says: Makes a sentence of the runs' figures, in their order.
    unless: Why no real model can show it; "" where runs do.
  """

  name: str
  system: str
  paper: str
  claim: str
  published: str
  runs: tuple[Run, ...] = ()
  says: Callable[..., str] = lambda *_: ""
  unless: str = ""
