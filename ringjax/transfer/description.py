"""Description of published pages: their identity, and what their bytes mean.

Guarantees: a ticket and a layout are plain JSON whose every number is checked
when it is read, never pickle; invalid values raise `OptionError`. A part
of a page (some heads, some tokens) is a range of each named axis.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ringjax.checks import integer, number
from ringjax.errors import OptionError
from ringjax.json_text import json_text
from ringjax.transfer.protocol import PageKey

# Ranges (first, end) of named axes: {"head": (2, 4)}.
Ranges = Mapping[str, tuple[int, int]]

DTYPES = (
  *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
  *("int64", "uint64", "float16", "float32", "float64"),
  *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
)
MOST_PAGES = 1 << 20
_MOST_TEXT = 256
_MOST_AXES = 16
_MOST_LEAVES = 256
_MOST_BYTES = 1 << 40
_INCARNATIONS = 1 << 63
_REMEDY = "use what Publisher.publish returned"


def dtype_of(name: str) -> np.dtype:
  """NumPy dtype of one of `DTYPES`."""
  return np.dtype(getattr(ml_dtypes, name, name))


@dataclasses.dataclass(frozen=True)
class PageLeaf:
  """One array of a page.

  Attributes:
    name: Name such as "k" or "scale".
    dtype: One of `DTYPES`.
    shape: Shape of the array in one page.
    axes: Name of each axis: ("layer", "token", "head", "dim").
    first: Start of the array in a larger one, axis by axis; a publisher
      that has heads 4 to 8 states 4 there. Default: zeros.
    codec: Encoding of the numbers, as text; only compared.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  axes: tuple[str, ...]
  first: tuple[int, ...] = ()
  codec: str = ""

  def __post_init__(self) -> None:
    _text("leaf.name", self.name)
    _text("leaf.codec", self.codec, empty=True)
    if self.dtype not in DTYPES:
      raise OptionError(
        "leaf.dtype", repr(self.dtype), f"one of {DTYPES}", "cast the pages"
      )
    if not self.first:
      object.__setattr__(self, "first", (0,) * len(self.shape))
    ranks = {len(self.shape), len(self.axes), len(self.first)}
    if len(ranks) != 1 or not 1 <= len(self.shape) <= _MOST_AXES:
      raise OptionError(
        "leaf.axes",
        f"{self.axes} for the shape {self.shape} from {self.first}",
        f"1 to {_MOST_AXES} axes, a name and a number for each",
        "name each axis of the page",
      )
    for size, first in zip(self.shape, self.first, strict=True):
      integer("leaf.shape", size, least=1, most=_MOST_BYTES)
      integer("leaf.first", first, least=0, most=_MOST_BYTES)
    for axis in self.axes:
      _text("leaf.axes", axis)
    if len(set(self.axes)) != len(self.axes):
      raise OptionError(
        "leaf.axes", self.axes, "a name once", "name each axis differently"
      )
    integer("leaf bytes", self.nbytes, least=1, most=_MOST_BYTES)

  @property
  def nbytes(self) -> int:
    """Bytes of the array in one page."""
    return math.prod(self.shape) * dtype_of(self.dtype).itemsize

  def part(self, ranges: Ranges) -> tuple[slice, ...] | None:
    """Slices of the wanted part in this leaf, or None if it has none of it.

    Args:
      ranges: Ranges of the larger array, by axis; other axes are wanted whole.
    """
    slices = []
    for axis, size, first in zip(
      self.axes, self.shape, self.first, strict=True
    ):
      begin, end = ranges.get(axis, (first, first + size))
      begin, end = max(begin - first, 0), min(end - first, size)
      if begin >= end:
        return None
      slices.append(slice(begin, end))
    return tuple(slices)


@dataclasses.dataclass(frozen=True)
class PageLayout:
  """The arrays of a page, one after the other.

  Attributes:
    leaves: Leaves in the order of their bytes.
  """

  leaves: tuple[PageLeaf, ...]

  def __post_init__(self) -> None:
    names = [leaf.name for leaf in self.leaves]
    if not 1 <= len(names) <= _MOST_LEAVES or len(set(names)) < len(names):
      raise OptionError(
        "layout.leaves",
        names,
        f"1 to {_MOST_LEAVES} leaves of different names",
        "rename the leaves",
      )

  @property
  def nbytes(self) -> int:
    """Bytes of a page."""
    return sum(leaf.nbytes for leaf in self.leaves)

  @classmethod
  def of(
    cls, name: str, dtype: str, shape: tuple[int, ...], axes: str
  ) -> PageLayout:
    """Make the layout of pages with one array.

    Args:
      name: Name of the array.
      dtype: One of `DTYPES`.
      shape: Shape of the array in a page.
      axes: Names of its axes, separated by blanks.
    """
    return cls((PageLeaf(name, dtype, shape, tuple(axes.split())),))


@dataclasses.dataclass(frozen=True)
class Ticket:
  """Everything a reader needs to pull pages; send it in any way.

  Attributes:
    incarnation: Incarnation of the publisher.
    number: Number of the ticket.
    readers: Number of readers that have to end before the release.
    lease_s: Seconds from publication after which no read begins.
    pages: Numbers and generations, in the order of the sequence.
    layout: Layout of each page.
    labels: Label of each page, see `Publisher.publish`.
  """

  incarnation: int
  number: int
  readers: int
  lease_s: float
  pages: tuple[PageKey, ...]
  layout: PageLayout
  labels: tuple[str, ...]

  def to_json(self) -> str:
    """Encode the ticket as JSON text."""
    return json_text(
      {
        "incarnation": self.incarnation,
        "number": self.number,
        "readers": self.readers,
        "lease_s": self.lease_s,
        "pages": keys_to_runs(self.pages),
        "leaves": [dataclasses.asdict(leaf) for leaf in self.layout.leaves],
        "labels": self.labels,
      }
    )

  @classmethod
  def from_json(cls, text: str) -> Ticket:
    """Decode a ticket from JSON text.

    Raises:
      OptionError: If it is not what `to_json` writes.
    """
    try:
      fields = json.loads(text)
      if not isinstance(fields, dict):
        raise ValueError("no object")
      pages = runs_to_keys(fields["pages"], MOST_PAGES)
      if not 1 <= len(fields["leaves"]) <= _MOST_LEAVES:
        raise ValueError("too many leaves")
      leaves = tuple(_leaf(leaf_fields) for leaf_fields in fields["leaves"])
      bounds = {"least": 0, "most": _INCARNATIONS}
      return cls(
        incarnation=integer("incarnation", fields["incarnation"], **bounds),
        number=integer("number", fields["number"], **bounds),
        readers=integer("readers", fields["readers"], least=1, most=1 << 20),
        lease_s=number("lease_s", fields["lease_s"], above=0),
        pages=pages,
        layout=PageLayout(leaves),
        labels=checked_labels(fields["labels"], len(pages)),
      )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
      if isinstance(error, OptionError):
        raise
      got = f"{type(error).__name__}: {error}"
      raise OptionError("ticket", got, "a ticket's JSON", _REMEDY) from None


def _leaf(fields: dict[str, Any]) -> PageLeaf:
  texts = [fields[name] for name in ("name", "dtype", "codec")]
  if not all(isinstance(text, str) for text in texts):
    raise ValueError("a leaf's texts are no texts")
  lists: dict[str, tuple[Any, ...]] = {}
  for name in ("shape", "axes", "first"):
    if not isinstance(fields[name], list) or len(fields[name]) > _MOST_AXES:
      raise ValueError(f"a leaf's {name} is no short list")
    lists[name] = tuple(fields[name])
  if not all(isinstance(axis, str) for axis in lists["axes"]):
    raise ValueError("a leaf's axes are no texts")
  for name in ("shape", "first"):
    for size in lists[name]:
      integer(f"leaf.{name}", size, least=0, most=_MOST_BYTES)
  return PageLeaf(
    name=texts[0],
    dtype=texts[1],
    shape=lists["shape"],
    axes=lists["axes"],
    first=lists["first"],
    codec=texts[2],
  )


def checked_labels(labels: Sequence[str], count: int) -> tuple[str, ...]:
  """Check labels of `count` pages, each a short text.

  Raises:
    OptionError: If they are not.
  """
  right_count = isinstance(labels, list | tuple) and len(labels) == count
  if not right_count or not all(
    isinstance(label, str) and len(label) <= _MOST_TEXT for label in labels
  ):
    raise OptionError(
      "labels",
      f"{len(labels)} of another kind or number",
      f"{count} texts of at most {_MOST_TEXT} characters",
      "pass one for each page, or none",
    )
  return tuple(labels)


def _text(name: str, value: str, *, empty: bool = False) -> None:
  if len(value) > _MOST_TEXT or not (value or empty):
    raise OptionError(
      name,
      f"{len(value)} characters",
      f"text of 1 to {_MOST_TEXT} characters",
      "shorten it",
    )


def keys_to_runs(pages: tuple[PageKey, ...]) -> list[list[int]]:
  """Encode pages as runs (first, count, generation)."""
  runs: list[list[int]] = []
  for page, generation in pages:
    last = runs[-1] if runs else [0, 0, -1]
    if last[2] == generation and last[0] + last[1] == page:
      last[1] += 1
    else:
      runs.append([page, 1, generation])
  return runs


def runs_to_keys(runs: object, most: int) -> tuple[PageKey, ...]:
  """Decode the pages of `keys_to_runs`, at most `most`.

  Raises:
    ValueError: If it is something else.
  """
  if not isinstance(runs, list) or len(runs) > most:
    raise ValueError("pages are no list of runs")
  keys: list[PageKey] = []
  for run in runs:
    is_triple = isinstance(run, list) and len(run) == 3
    if not is_triple or not all(type(number) is int for number in run):
      raise ValueError("a run of pages is not three integers")
    first, count, generation = run
    if not (0 <= first < 1 << 48 and 0 <= generation < 1 << 63):
      raise ValueError("a page's number is out of range")
    if not 1 <= count <= most - len(keys):
      raise ValueError("more pages than fit")
    keys += [(first + n, generation) for n in range(count)]
  if not keys:
    raise ValueError("no pages")
  return tuple(keys)
