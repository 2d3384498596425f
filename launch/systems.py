"""Finds a paper's system in this package, by the paper's name.

  python -m launch systems
      Each system, what is here of it, and its how-to page.
  python -m launch systems kivi
      One system in full: the paper, modules, public names, the shortest
      commands, tests, and what is not here. Several names may be given.

Names are compared without case, blanks and punctuation; other names of a system
are known too ("attention sinks"), and so are arXiv numbers.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence

from .shared.entry_points import command_text
from .shared.systems_table import SYSTEMS, System

_WIDTH = 100
# Columns of the table: name and text; the rest is for the page.
_NAME, _TEXT = 18, 53


def folded(name: str) -> str:
  """Letters and digits of a name, in lower case."""
  return re.sub(r"[^a-z0-9]", "", name.lower())


def keys(system: System) -> set[str]:
  """Folded names of a system."""
  return {folded(x) for x in (system.name, *system.also, system.paper)}


def named(name: str) -> list[System]:
  """Systems with that name, or else those of whose names it is a part."""
  key = folded(name)
  if not key:
    return []
  exact = [system for system in SYSTEMS if key in keys(system)]
  return exact or [
    system for system in SYSTEMS if any(key in x for x in keys(system))
  ]


def nearest(name: str) -> list[str]:
  """Names of the systems whose names are nearest to an unknown one."""
  by_key = {key: system.name for system in SYSTEMS for key in keys(system)}
  close = difflib.get_close_matches(folded(name), by_key, n=5, cutoff=0.4)
  return list(dict.fromkeys(by_key[key] for key in close))[:3]


def table() -> Iterator[str]:
  """Lines of the table of all systems."""
  yield f"{'system':{_NAME}}  {'what is here':{_TEXT}}  how-to page"
  for system in SYSTEMS:
    names = textwrap.wrap(system.name, _NAME)
    texts = textwrap.wrap(system.does, _TEXT)
    yield ""
    for n in range(max(len(names), len(texts))):
      name = names[n] if n < len(names) else ""
      text = texts[n] if n < len(texts) else ""
      page = system.page.removeprefix("docs/") if n == 0 else ""
      yield f"{name:{_NAME}}  {text:{_TEXT}}  {page}".rstrip()


def described(system: System) -> Iterator[str]:
  """Lines of one system in full."""
  yield f"{system.name} ({system.link})"
  yield from textwrap.wrap(system.does, _WIDTH)
  yield ""
  for title, entries in (
    ("modules", system.modules),
    ("names", system.names),
    ("how-to page", (system.page,)),
    ("tests", system.tests),
    ("not here", textwrap.wrap(system.absent, _WIDTH - 13)),
  ):
    for n, entry in enumerate(entries):
      yield f"{'' if n else title:13}{entry}"
  # A line each, however long: they are copied.
  yield "commands"
  yield from (f"  {command}" for command in system.commands)


def main(argv: Sequence[str]) -> int:
  """Prints the table, or the systems that are named.

  Args:
    argv: Names; none for the table.

  Returns:
    Exit status: 2 if a name is unknown.
  """
  if {"--help", "-h"} & set(argv):
    print(command_text(__doc__ or ""))
    return 0
  if not argv:
    return _show([*table(), "", "One in full: python -m launch systems NAME"])
  chosen: list[System] = []
  for name in argv:
    systems = named(name)
    if not systems:
      names = ", ".join(nearest(name))
      wanted = f"nearest: {names}" if names else "none is near"
      print(
        f"systems: got {name!r}, which is the name of no system; {wanted}; "
        "python -m launch systems lists all",
        file=sys.stderr,
      )
      return 2
    chosen += [system for system in systems if system not in chosen]
  return _show(["\n\n".join("\n".join(described(x)) for x in chosen)])


def _show(lines: Sequence[str]) -> int:
  """Prints lines, as many as a reader such as `| head` takes."""
  try:
    print(command_text("\n".join(lines)), flush=True)
  except BrokenPipeError:
    # Python flushes stdout once more as it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
