"""A long document that is found on any machine: Python's own library.

Guarantees: the same Python gives the same text. Files come in a fixed order,
whole and as they are, each below a line with its name; what is cut off is cut
off behind a line. The order begins with the tenth of the files that the model
in `ringjax.models.tiny` has not seen in training.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform
import sysconfig
import zlib
from collections.abc import Callable, Iterable

from ringjax.errors import PromptError

_HEADING = "# ==== {name} ====\n"
# Folders beside the library's own, and its tests, which not all systems have.
_SKIP = frozenset(
  ("site-packages", "dist-packages", "test", "tests", "idle_test")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
  """A text and where it comes from.

  Attributes:
    text: the text.
    files: how many files it is made of; the last one may be cut.
    source: whose files they are, in words.
  """

  text: str
  files: int
  source: str


def standard_library(characters: int) -> Document:
  """The beginning of the standard library's sources.

  Args:
    characters: how many are wanted; up to a line fewer come.

  Raises:
    PromptError: there are not so many.
  """
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  parts, size, files = [], 0, 0
  for name in _names(root):
    if size >= characters:
      break
    text = (root / name).read_text(encoding="utf-8", errors="replace")
    parts.append(_HEADING.format(name=name) + text.rstrip("\n") + "\n\n")
    size += len(parts[-1])
    files += 1
  if characters < 1 or size < characters:
    raise PromptError(
      "characters",
      characters,
      f"1 to {size:,}, what the library of this Python has",
      "pass a document of your own",
    )
  text = "".join(parts)[:characters]
  return Document(
    text=text[: text.rfind("\n") + 1] or text,
    files=files,
    source=f"the standard library of Python {platform.python_version()}",
  )


def library(*, held_out: bool) -> list[str]:
  """The library's files, whole, by name: nine of ten, or those held out."""
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  return [
    (root / name).read_text(encoding="utf-8", errors="replace")
    for name in _names(root)
    if _is_unseen(name) == held_out
  ]


def fit(
  tokens: int, count: Callable[[str], int], *, slack: float = 0.02
) -> Document:
  """A document of at most so many tokens, and little less.

  Args:
    tokens: how many.
    count: how many tokens a text is.
    slack: the part of `tokens` that may be missing.

  Raises:
    PromptError: there is not so much text.
  """
  sample = standard_library(min(4 * tokens, 100_000))
  each = len(sample.text) / max(1, count(sample.text))
  document = sample
  for _ in range(6):
    document = standard_library(max(1, int(tokens * each)))
    have = count(document.text)
    if (1 - slack) * tokens <= have <= tokens:
      break
    # A little less than what would be right, so that it ends below.
    aim = tokens * (1 - slack / 4)
    each *= aim / max(1, have)
  while count(document.text) > tokens:
    document = standard_library(max(1, len(document.text) * 9 // 10))
  return document


def hide(text: str, needle: str, depth: float) -> str:
  """The text with a line hidden in it.

  Args:
    text: lines.
    needle: one or more lines, with their ends.
    depth: 0 hides it before the first line, 1 behind the last.

  Raises:
    PromptError: `depth` is not in [0, 1].
  """
  return hide_all(text, [(depth, needle)])


def hide_all(text: str, needles: Iterable[tuple[float, str]]) -> str:
  """The text with lines hidden in it, each at its depth of the text alone.

  Args:
    text: lines.
    needles: depths and lines, as `hide` has them. Of those that come to the
      same place the first stays first.

  Raises:
    PromptError: a depth is not in [0, 1].
  """
  places = []
  for depth, needle in needles:
    if not 0 <= depth <= 1:
      raise PromptError(
        "depth", depth, "a number from 0 to 1", "pass 0.5 for the middle"
      )
    at = round(depth * len(text))
    if at < len(text):
      at = text.rfind("\n", 0, at) + 1
    places.append((at, needle))
  parts, last = [], 0
  for at, needle in sorted(places, key=lambda place: place[0]):
    parts.append(text[last:at])
    # Behind the last line, which may have no end.
    if at == len(text) > last and not text.endswith("\n"):
      parts.append("\n")
    parts.append(needle)
    last = at
  return "".join([*parts, text[last:]])


def _names(root: pathlib.Path) -> list[str]:
  names = []
  for folder, inner, files in os.walk(root):
    # Not entered: beside a library there may be tens of thousands of files.
    inner[:] = [name for name in inner if name not in _SKIP]
    place = pathlib.Path(folder).relative_to(root)
    names += [
      (place / name).as_posix()
      for name in files
      if name.endswith(".py") and (root / place / name).is_file()
    ]
  return sorted(names, key=lambda name: (not _is_unseen(name), name))


def _is_unseen(name: str) -> bool:
  """Whether a file was kept from the training of `ringjax.models.tiny`."""
  return zlib.crc32(name.encode("utf-8")) % 10 == 0
