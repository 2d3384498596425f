"""Source lines of the operations of a compiled program.

Guarantees: file and line are those of the innermost frame of the traced
program, read from the tables at the head of its text, or from the operation's
line in the form of older compilers.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from ringjax.plan.compiler.hlo import HloInstruction

_FILE = re.compile(r'^(\d+) "([^"]*)"$', re.M)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.M)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)", re.M)
_STATED = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
# Folders of a path that are shown.
_PARTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceLines:
  """Tables of a program's text.

  Attributes:
    files: File names by number.
    locations: (file number, line) by number.
    frames: Location number by the number of a stack frame.
  """

  files: Mapping[str, str]
  locations: Mapping[str, tuple[str, str]]
  frames: Mapping[str, str]

  @classmethod
  def of(cls, text: str) -> SourceLines:
    """Read the tables of a program's text; they are empty if it has none."""
    section = lambda name, end: text.partition(f"\n{name}\n")[2].partition(end)[
      0
    ]
    return cls(
      files=dict(_FILE.findall(section("FileNames", "\nFunctionNames"))),
      locations={
        number: (file, line)
        for number, file, line in _LOCATION.findall(
          section("FileLocations", "\nStackFrames")
        )
      },
      frames=dict(_FRAME.findall(section("StackFrames", "\n\n"))),
    )

  def source(self, line: HloInstruction) -> str:
    """File and line that made an operation, or ""."""
    stated = _STATED.search(line.text)
    if stated:
      return _shown(stated[1], stated[2])
    frame = re.search(r"stack_frame_id=(\d+)", line.text)
    location = (
      self.locations.get(self.frames.get(frame[1], "")) if frame else None
    )
    if location is None:
      return ""
    return _shown(self.files.get(location[0], ""), location[1])


def _shown(file: str, line: str) -> str:
  parts = file.split(os.sep)
  return f"{os.sep.join(parts[-_PARTS:])}:{line}" if file else ""
