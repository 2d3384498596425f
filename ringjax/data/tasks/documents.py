"""A long document that every machine has: the standard library of Python.

Guarantees: the same Python gives the same text. Files come in a fixed order,
whole and unchanged, each after a line with its name; the text is cut after a
line. The order begins with the tenth of the files that the model in
`ringjax.models.tiny` was not trained on.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform
import sysconfig
import zlib
from collections.abc import Callable, Iterable

from ringjax.checks import number
from ringjax.errors import PromptError

_HEADING = "# ==== {name} ====\n"
# Folders of other packages, and the library's tests, which some systems lack.
_SKIP = frozenset(
  ("site-packages", "dist-packages", "test", "tests", "idle_test")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
  """A text and its source.

  Attributes:
    text: Text of the document.
    files: Number of files that it is made of; the last one may be cut.
    source: Phrase that says where it is from.
  """

  text: str
  files: int
  source: str


def standard_library(characters: int) -> Document:
  """The beginning of the standard library's sources.

  Args:
    characters: Wanted number of characters; the text may be a line shorter.

  Raises:
    PromptError: If the library has fewer.
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
  """The library's files, by name: nine of ten, or the ones held out."""
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  return [
    (root / name).read_text(encoding="utf-8", errors="replace")
    for name in _names(root)
    if _is_unseen(name) == held_out
  ]


def fit(
  tokens: int, count: Callable[[str], int], *, slack: float = 0.02
) -> Document:
  """The longest document of at most `tokens` tokens, up to a slack.

  Args:
    tokens: Largest number of tokens.
    count: Function that returns the number of tokens of a text.
    slack: Fraction of `tokens` that may be missing.

  Raises:
    PromptError: If the library has less text.
  """
  sample = standard_library(min(4 * tokens, 100_000))
  characters_per_token = len(sample.text) / max(1, count(sample.text))
  document = sample
  for _ in range(6):
    document = standard_library(max(1, int(tokens * characters_per_token)))
    num_tokens = count(document.text)
    if (1 - slack) * tokens <= num_tokens <= tokens:
      break
    # A little less than the estimate, to end below the limit.
    wanted = tokens * (1 - slack / 4)
    characters_per_token *= wanted / max(1, num_tokens)
  while count(document.text) > tokens:
    document = standard_library(max(1, len(document.text) * 9 // 10))
  return document


def hide(text: str, needle: str, depth: float) -> str:
  """The text with a line hidden in it.

  Args:
    text: Text of lines.
    needle: One or more lines, with their newlines.
    depth: 0 hides it before the first line, 1 after the last.

  Raises:
    PromptError: If `depth` is not in [0, 1].
  """
  return hide_all(text, [(depth, needle)])


def hide_all(text: str, needles: Iterable[tuple[float, str]]) -> str:
  """The text with several lines hidden in it, as by `hide`.

  Args:
    text: Text of lines.
    needles: Depths and lines. Lines at one place keep their order.

  Raises:
    PromptError: If a depth is not in [0, 1].
  """
  places = []
  for depth, needle in needles:
    number("depth", depth, least=0, most=1, error=PromptError)
    at = round(depth * len(text))
    if at < len(text):
      at = text.rfind("\n", 0, at) + 1
    places.append((at, needle))
  parts, last = [], 0
  for at, needle in sorted(places, key=lambda place: place[0]):
    parts.append(text[last:at])
    # After the last line, which may have no newline.
    if at == len(text) > last and not text.endswith("\n"):
      parts.append("\n")
    parts.append(needle)
    last = at
  return "".join([*parts, text[last:]])


def _names(root: pathlib.Path) -> list[str]:
  names = []
  for folder, inner, files in os.walk(root):
    # Not entered: other packages may have tens of thousands of files.
    inner[:] = [name for name in inner if name not in _SKIP]
    place = pathlib.Path(folder).relative_to(root)
    names += [
      (place / name).as_posix()
      for name in files
      if name.endswith(".py") and (root / place / name).is_file()
    ]
  return sorted(names, key=lambda name: (not _is_unseen(name), name))


def _is_unseen(name: str) -> bool:
  """Whether `ringjax.models.tiny` was not trained on a file."""
  return zlib.crc32(name.encode("utf-8")) % 10 == 0
