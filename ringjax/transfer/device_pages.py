"""Pages that lie in arrays on devices, and how they are sent as arrays.

Guarantees: a reader puts each number where the publisher had it, or raises
`HostileMessageError`: pieces that overlap, leave gaps or lie elsewhere are
refused before anything is pulled.
Cost: pages that are a whole array are sent as they are; others, and parts of
pages, are cut on their devices first, by a program for each shape. An array
over several devices goes as one piece of each, copies of a piece once.
Memory: the cut pieces of a read on the publisher's devices; on the host, for
readers that want bytes, all pages of an array from its first read on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from ringjax.checks import integer
from ringjax.errors import InputTypeError, OptionError, RingjaxError
from ringjax.transfer.description import PageLayout
from ringjax.transfer.wire import MOST_MESSAGE, as_json

# Of each axis first and end.
Box = tuple[tuple[int, int], ...]
# Devices that a page's array may be spread over.
_MOST_BOXES = 1 << 10
# Beyond these an array each costs more than their bytes do.
_MOST_PIECES = 1 << 13


class PiecesError(RingjaxError, RuntimeError):
  """A read in more pieces than are sent as arrays."""


@dataclasses.dataclass(frozen=True, eq=False)
class PageBatch:
  """Pages side by side in arrays on devices.

  Attributes:
    leaves: for each leaf of a layout an array of its shape, with one more axis,
      of the pages. They must not be donated or deleted while a page is offered.
    axis: where this one is.
  """

  leaves: tuple[Shaped[Array, " ..."], ...]
  axis: int = 0

  def __post_init__(self) -> None:
    object.__setattr__(self, "leaves", tuple(self.leaves))
    for x in self.leaves:
      if not isinstance(x, jax.Array):
        raise InputTypeError(
          "leaves", type(x).__name__, "arrays of JAX", "publish it as it is"
        )
    ranks = [x.ndim for x in self.leaves]
    integer("axis", self.axis, least=0, most=min(ranks, default=0) - 1)
    counts = {x.shape[self.axis] for x in self.leaves}
    if len(counts) != 1:
      raise OptionError(
        "leaves",
        f"{[x.shape for x in self.leaves]} with pages at axis {self.axis}",
        "as many pages in each",
        "pass the axis of the pages",
      )
    if not all(x.is_fully_addressable for x in self.leaves):
      raise OptionError(
        "leaves",
        "arrays over several processes",
        "arrays of this process",
        "publish what each process has (PageLeaf.first)",
      )

  def __len__(self) -> int:
    return self.leaves[0].shape[self.axis]

  def __getitem__(self, row: int) -> DevicePage:
    """The page of a row."""
    integer("row", row, least=0, most=len(self) - 1)
    return DevicePage(self, row)

  @functools.cached_property
  def nbytes(self) -> int:
    """Bytes on all devices together, of all pages and copies."""
    shards = [
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in self.leaves
    ]
    devices = [len(x.sharding.device_set) for x in self.leaves]
    return sum(n * k for n, k in zip(shards, devices, strict=True))

  @functools.cached_property
  def on_host(self) -> tuple[np.ndarray, ...]:
    """Of each leaf [pages, ...], in the host's memory."""
    moved = [np.moveaxis(x, self.axis, 0) for x in jax.device_get(self.leaves)]
    return tuple(np.ascontiguousarray(x) for x in moved)

  def check(self, page: int, row: int, layout: PageLayout) -> None:
    """Raises unless it has a row, and its pages are of a layout."""
    integer(f"row of page {page}", row, least=0, most=len(self) - 1)
    at = self.axis
    mine = [
      (x.dtype.name, (*x.shape[:at], *x.shape[at + 1 :])) for x in self.leaves
    ]
    wanted = [(leaf.dtype, leaf.shape) for leaf in layout.leaves]
    if mine != wanted:
      raise OptionError(
        f"page {page}",
        f"arrays of {mine} in a page",
        f"{wanted}",
        "pass the layout's leaves, in its order, and the axis of the pages",
      )


class DevicePage(NamedTuple):
  """One page of a batch."""

  batch: PageBatch
  row: int

  @property
  def gone(self) -> bool:
    """Whether its arrays are not there any more."""
    return any(x.is_deleted() for x in self.batch.leaves)


class PagePiece(NamedTuple):
  """A part of some pages that is one array.

  Fields:
    places: of its pages in the read, ascending.
    leaf: of the layout, by number.
    axis: of the pages in the array.
    box: of the leaf, what the array has.
  """

  places: tuple[int, ...]
  leaf: int
  axis: int
  box: Box

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the array."""
    sizes = [b - a for a, b in self.box]
    return *sizes[: self.axis], len(self.places), *sizes[self.axis :]


def cut_pages(
  pages: Sequence[DevicePage], cuts: Sequence[tuple[slice, ...] | None]
) -> tuple[list[PagePiece], list[Callable[[], Shaped[Array, " ..."]]]]:
  """The parts of some pages as arrays, each on one device.

  Args:
    pages: in the order of a read.
    cuts: of each leaf the part, None for nothing of it.

  Returns:
    What the pieces are, and of each what cuts it.

  Raises:
    PiecesError: too many.
  """
  batches: dict[int, tuple[PageBatch, dict[int, int]]] = {}
  for place, page in enumerate(pages):
    _, rows = batches.setdefault(id(page.batch), (page.batch, {}))
    rows[page.row] = place
  least = len(batches) * sum(cut is not None for cut in cuts)
  if least > _MOST_PIECES:
    raise PiecesError(f"{least} arrays of a read")
  pieces, arrays = [], []
  for batch, rows in batches.values():
    at = batch.axis
    for leaf, (whole, cut) in enumerate(zip(batch.leaves, cuts, strict=True)):
      if cut is None:
        continue
      wanted = [(c.start, c.stop) for c in cut]
      for index, x in _parts(whole):
        first, end = index[at]
        some = [n for n in rows if first <= n < end]
        there = (*index[:at], *index[at + 1 :])
        box = tuple(
          (max(a, c), min(b, d))
          for (a, b), (c, d) in zip(wanted, there, strict=True)
        )
        if not some or any(a >= b for a, b in box):
          continue
        local = [a - c for (a, _), (c, _) in zip(box, there, strict=True)]
        local.insert(at, 0)
        for part in _chunks(some, whole.shape[at]):
          places = tuple(rows[n] for n in part)
          pieces.append(PagePiece(places, leaf, at, box))
          local_rows = [n - first for n in part]
          arrays.append(
            functools.partial(_cut, x, local_rows, tuple(local), pieces[-1])
          )
  return pieces, arrays


def _parts(x: jax.Array) -> list[tuple[Box, jax.Array]]:
  """What each device has of an array, and where; copies once."""
  found: dict[Box, jax.Array] = {}
  for shard in x.addressable_shards:
    index = tuple(
      one.indices(size)[:2]
      for one, size in zip(shard.index, x.shape, strict=True)
    )
    found.setdefault(index, shard.data)
  return list(found.items())


def _chunks(rows: list[int], whole: int) -> list[list[int]]:
  """Rows in pieces of 1, 2, 4, ..., so that few programs cut them all."""
  if len(rows) == whole:
    return [rows]
  found, at = [], 0
  while at < len(rows):
    size = 1 << ((len(rows) - at).bit_length() - 1)
    found.append(rows[at : at + size])
    at += size
  return found


def _cut(
  x: jax.Array, rows: list[int], first: tuple[int, ...], piece: PagePiece
) -> jax.Array:
  if piece.shape == x.shape and rows == list(range(len(rows))):
    return x
  sizes = list(piece.shape)
  sizes[piece.axis] = x.shape[piece.axis]
  return _taken(x, np.asarray(rows, np.int32), first, piece.axis, tuple(sizes))


@functools.partial(jax.jit, static_argnums=(3, 4))
def _taken(
  x: jax.Array,
  rows: jax.Array,
  first: Sequence[Any],
  axis: int,
  sizes: tuple[int, ...],
) -> jax.Array:
  part = jax.lax.dynamic_slice(x, first, sizes)
  return jnp.take(part, rows, axis, mode="clip")


def pieces_to_json(pieces: Sequence[PagePiece]) -> list[Any]:
  """Pieces, for a message; the same places are there once.

  Raises:
    PiecesError: too many.
  """
  if len(pieces) > _MOST_PIECES:
    raise PiecesError(f"{len(pieces)} pieces of a read")
  found = [
    [places, [[x.leaf, x.axis, x.box] for x in some]]
    for places, some in itertools.groupby(pieces, lambda x: x.places)
  ]
  # As much is left for the pages, and the rest of the message.
  size = len(as_json({"": found}))
  if size > MOST_MESSAGE // 2:
    raise PiecesError(f"{size} bytes to name {len(pieces)} pieces")
  return found


def pieces_from_json(
  found: list[Any], count: int, cuts: Sequence[tuple[slice, ...] | None]
) -> list[PagePiece]:
  """The pieces of a message.

  Args:
    found: of `pieces_to_json`.
    count: pages of the read.
    cuts: of each leaf the part that was asked for.

  Raises:
    ValueError, TypeError: they are not that part of these pages, once.
  """
  pieces = []
  for places, some in _lists(found, 2):
    _integers(places, count)
    if places != sorted(set(places)):
      raise ValueError("places that do not rise")
    for leaf, axis, box in _lists(some, 3):
      _integers([leaf], len(cuts))
      cut = cuts[leaf]
      if cut is None or not isinstance(box, list) or len(box) != len(cut):
        raise ValueError("a piece of nothing that was asked for")
      _integers([axis], len(cut) + 1)
      for (a, b), c in zip(_lists(box, 2), cut, strict=True):
        _integers([a, b], c.stop + 1)
        if not c.start <= a < b:
          raise ValueError("a piece from elsewhere")
      pieces.append(
        PagePiece(tuple(places), leaf, axis, tuple((a, b) for a, b in box))
      )
  for leaf, cut in enumerate(cuts):
    if cut is not None:
      volume = math.prod(c.stop - c.start for c in cut)
      _check_once([x for x in pieces if x.leaf == leaf], count, volume)
  return pieces


def _check_once(pieces: list[PagePiece], count: int, volume: int) -> None:
  """Raises unless each number of each page is in one piece."""
  groups: dict[tuple[int, ...], list[Box]] = {}
  for x in pieces:
    groups.setdefault(x.places, []).append(x.box)
  if sorted(itertools.chain(*groups)) != list(range(count)):
    raise ValueError("pages that are missing, or there twice")
  for boxes in groups.values():
    if len(boxes) > _MOST_BOXES:
      raise ValueError(f"{len(boxes)} pieces of a page")
    size = sum(math.prod(b - a for a, b in box) for box in boxes)
    twice = any(
      all(a < d and c < b for (a, b), (c, d) in zip(x, y, strict=True))
      for x, y in itertools.combinations(boxes, 2)
    )
    if twice or size != volume:
      raise ValueError("pieces that overlap, or with gaps between them")


def _lists(found: Any, size: int) -> list[list[Any]]:
  fits = isinstance(found, list) and all(
    isinstance(x, list) and len(x) == size for x in found
  )
  if not fits:
    raise TypeError(f"no list of {size} each")
  return found


def _integers(found: Any, most: int) -> None:
  fits = isinstance(found, list) and all(type(x) is int for x in found)
  if not fits or not all(0 <= x < most for x in found):
    raise ValueError("no integers in their range")


def put_piece(
  rows: np.ndarray,
  piece: PagePiece,
  cut: tuple[slice, ...],
  array: Shaped[np.ndarray, " ..."],
) -> None:
  """Puts a piece where it belongs.

  Args:
    rows: the part of a leaf, [pages, ...].
    piece: what the array is.
    cut: the part of the leaf.
    array: of the piece's shape.
  """
  box = tuple(
    slice(a - c.start, b - c.start)
    for (a, b), c in zip(piece.box, cut, strict=True)
  )
  first, end = piece.places[0], piece.places[-1] + 1
  # With pages one behind the other memory is copied, not gathered.
  near = end - first == len(piece.places)
  places: Any = slice(first, end) if near else list(piece.places)
  rows[(places, *box)] = np.moveaxis(array, piece.axis, 0)
