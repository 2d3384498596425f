"""Pages in arrays on devices, and how they are sent as arrays.

Guarantees: a reader puts each number where the publisher had it, or raises
`HostileMessageError`: pieces that overlap, leave gaps or are out of bounds are
refused before anything is pulled.
Cost: pages that are a whole array are sent without a copy; others, and parts of
pages, are cut on their devices first, by a program for each shape. An array
over several devices is sent as one piece of each, replicated pieces once.
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
from ringjax.parallel.links.connection import as_json
from ringjax.transfer.description import PageLayout
from ringjax.transfer.wire import MOST_MESSAGE

# (first, end) of each axis.
Box = tuple[tuple[int, int], ...]
# Maximum number of devices that a page's array may be sharded over.
_MOST_BOXES = 1 << 10
# Beyond this number the overhead per array exceeds the cost of its bytes.
_MOST_PIECES = 1 << 13


class PiecesError(RingjaxError, RuntimeError):
  """A read would need more pieces than can be sent as arrays."""


@dataclasses.dataclass(frozen=True, eq=False)
class PageBatch:
  """Pages that are stacked in arrays on devices.

  Attributes:
    leaves: An array for each leaf of a layout, of its shape with one more axis
      for the pages. They must not be donated or deleted while a page is
      offered.
    axis: Index of the axis of the pages.
  """

  leaves: tuple[Shaped[Array, " ..."], ...]
  axis: int = 0

  def __post_init__(self) -> None:
    object.__setattr__(self, "leaves", tuple(self.leaves))
    for leaf in self.leaves:
      if not isinstance(leaf, jax.Array):
        raise InputTypeError(
          "leaves", type(leaf).__name__, "arrays of JAX", "publish it as it is"
        )
    ranks = [leaf.ndim for leaf in self.leaves]
    integer("axis", self.axis, least=0, most=min(ranks, default=0) - 1)
    counts = {leaf.shape[self.axis] for leaf in self.leaves}
    if len(counts) != 1:
      raise OptionError(
        "leaves",
        f"{[x.shape for x in self.leaves]} with pages at axis {self.axis}",
        "as many pages in each",
        "pass the axis of the pages",
      )
    if not all(leaf.is_fully_addressable for leaf in self.leaves):
      raise OptionError(
        "leaves",
        "arrays over several processes",
        "arrays of this process",
        "publish what each process has (PageLeaf.first)",
      )

  def __len__(self) -> int:
    return self.leaves[0].shape[self.axis]

  def __getitem__(self, row: int) -> DevicePage:
    """The page in a row."""
    integer("row", row, least=0, most=len(self) - 1)
    return DevicePage(self, row)

  @functools.cached_property
  def nbytes(self) -> int:
    """Bytes on all devices together, of all pages and replicas."""
    shards = [
      math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
      for leaf in self.leaves
    ]
    devices = [len(leaf.sharding.device_set) for leaf in self.leaves]
    return sum(n * k for n, k in zip(shards, devices, strict=True))

  @functools.cached_property
  def on_host(self) -> tuple[Shaped[np.ndarray, "P ..."], ...]:
    """Arrays [pages, ...] of each leaf, in the host's memory."""
    page_major = [
      np.moveaxis(leaf, self.axis, 0) for leaf in jax.device_get(self.leaves)
    ]
    return tuple(np.ascontiguousarray(leaf) for leaf in page_major)

  def check(self, page: int, row: int, layout: PageLayout) -> None:
    """Raise unless the batch has a row, and its pages have a layout."""
    integer(f"row of page {page}", row, least=0, most=len(self) - 1)
    axis = self.axis
    page_arrays = [
      (leaf.dtype.name, (*leaf.shape[:axis], *leaf.shape[axis + 1 :]))
      for leaf in self.leaves
    ]
    layout_arrays = [(leaf.dtype, leaf.shape) for leaf in layout.leaves]
    if page_arrays != layout_arrays:
      raise OptionError(
        f"page {page}",
        f"arrays of {page_arrays} in a page",
        f"{layout_arrays}",
        "pass the layout's leaves, in its order, and the axis of the pages",
      )


class DevicePage(NamedTuple):
  """One page of a batch."""

  batch: PageBatch
  row: int

  @property
  def gone(self) -> bool:
    """Whether its arrays were deleted or donated."""
    return any(leaf.is_deleted() for leaf in self.batch.leaves)


class PagePiece(NamedTuple):
  """A part of some pages that is sent as one array.

  Fields:
    places: Indices of its pages in the read, ascending.
    leaf: Index of the leaf in the layout.
    axis: Axis of the pages in the array.
    box: Ranges of the leaf that the array has.
  """

  places: tuple[int, ...]
  leaf: int
  axis: int
  box: Box

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the array."""
    sizes = [b - a for a, b in self.box]
    return *sizes[: self.axis], len(self.places), *sizes[self.axis :]


def cut_pages(
  pages: Sequence[DevicePage], cuts: Sequence[tuple[slice, ...] | None]
) -> tuple[list[PagePiece], list[Callable[[], Shaped[Array, " ..."]]]]:
  """Cut parts of some pages into arrays, each on one device.

  Args:
    pages: Pages in the order of a read.
    cuts: Part of each leaf, None for no part of it.

  Returns:
    The pieces, and for each a function that cuts its array.

  Raises:
    PiecesError: If there are too many.
  """
  batches: dict[int, tuple[PageBatch, dict[int, int]]] = {}
  for place, page in enumerate(pages):
    _, rows = batches.setdefault(id(page.batch), (page.batch, {}))
    rows[page.row] = place
  min_arrays = len(batches) * sum(cut is not None for cut in cuts)
  if min_arrays > _MOST_PIECES:
    raise PiecesError(f"{min_arrays} arrays of a read")
  pieces, arrays = [], []
  for batch, rows in batches.values():
    axis = batch.axis
    for leaf, (array, cut) in enumerate(zip(batch.leaves, cuts, strict=True)):
      if cut is None:
        continue
      wanted = [(c.start, c.stop) for c in cut]
      for index, shard in _parts(array):
        first, end = index[axis]
        rows_here = [n for n in rows if first <= n < end]
        shard_box = (*index[:axis], *index[axis + 1 :])
        box = tuple(
          (max(a, c), min(b, d))
          for (a, b), (c, d) in zip(wanted, shard_box, strict=True)
        )
        if not rows_here or any(a >= b for a, b in box):
          continue
        local = [a - c for (a, _), (c, _) in zip(box, shard_box, strict=True)]
        local.insert(axis, 0)
        for row_chunk in _chunks(rows_here, array.shape[axis]):
          places = tuple(rows[n] for n in row_chunk)
          pieces.append(PagePiece(places, leaf, axis, box))
          local_rows = [n - first for n in row_chunk]
          arrays.append(
            functools.partial(_cut, shard, local_rows, tuple(local), pieces[-1])
          )
  return pieces, arrays


def _parts(x: jax.Array) -> list[tuple[Box, jax.Array]]:
  """Each device's part of an array with its box; replicas once."""
  shards: dict[Box, jax.Array] = {}
  for shard in x.addressable_shards:
    index = tuple(
      axis_slice.indices(size)[:2]
      for axis_slice, size in zip(shard.index, x.shape, strict=True)
    )
    shards.setdefault(index, shard.data)
  return list(shards.items())


def _chunks(rows: list[int], num_rows: int) -> list[list[int]]:
  """Split rows into chunks of 1, 2, 4, ..., so that few programs suffice."""
  if len(rows) == num_rows:
    return [rows]
  chunks, start = [], 0
  while start < len(rows):
    size = 1 << ((len(rows) - start).bit_length() - 1)
    chunks.append(rows[start : start + size])
    start += size
  return chunks


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
  """Encode pieces for a message, with equal places stated once.

  Raises:
    PiecesError: If there are too many.
  """
  if len(pieces) > _MOST_PIECES:
    raise PiecesError(f"{len(pieces)} pieces of a read")
  grouped = [
    [places, [[x.leaf, x.axis, x.box] for x in group]]
    for places, group in itertools.groupby(pieces, lambda x: x.places)
  ]
  # The other half of the limit is for the pages and the rest of the message.
  size = len(as_json({"": grouped}))
  if size > MOST_MESSAGE // 2:
    raise PiecesError(f"{size} bytes to name {len(pieces)} pieces")
  return grouped


def pieces_from_json(
  found: list[Any], count: int, cuts: Sequence[tuple[slice, ...] | None]
) -> list[PagePiece]:
  """Decode and check the pieces of a message.

  Args:
    found: Value of `pieces_to_json`.
    count: Number of pages of the read.
    cuts: Part of each leaf that was asked for.

  Raises:
    ValueError, TypeError: If they are not exactly that part of these pages.
  """
  pieces = []
  for places, parts_json in _check_lists(found, 2):
    _check_integers(places, count)
    if places != sorted(set(places)):
      raise ValueError("places that do not rise")
    for leaf, axis, box in _check_lists(parts_json, 3):
      _check_integers([leaf], len(cuts))
      cut = cuts[leaf]
      if cut is None or not isinstance(box, list) or len(box) != len(cut):
        raise ValueError("a piece of nothing that was asked for")
      _check_integers([axis], len(cut) + 1)
      for (a, b), axis_slice in zip(_check_lists(box, 2), cut, strict=True):
        _check_integers([a, b], axis_slice.stop + 1)
        if not axis_slice.start <= a < b:
          raise ValueError("a piece from elsewhere")
      pieces.append(
        PagePiece(tuple(places), leaf, axis, tuple((a, b) for a, b in box))
      )
  for leaf, cut in enumerate(cuts):
    if cut is not None:
      volume = math.prod(
        axis_slice.stop - axis_slice.start for axis_slice in cut
      )
      _check_once(
        [piece for piece in pieces if piece.leaf == leaf], count, volume
      )
  return pieces


def _check_once(pieces: list[PagePiece], count: int, volume: int) -> None:
  """Raise unless each number of each page is in exactly one piece."""
  groups: dict[tuple[int, ...], list[Box]] = {}
  for piece in pieces:
    groups.setdefault(piece.places, []).append(piece.box)
  if sorted(itertools.chain(*groups)) != list(range(count)):
    raise ValueError("pages that are missing, or there twice")
  for boxes in groups.values():
    if len(boxes) > _MOST_BOXES:
      raise ValueError(f"{len(boxes)} pieces of a page")
    size = sum(math.prod(b - a for a, b in box) for box in boxes)
    overlaps = any(
      all(
        a < d and c < b
        for (a, b), (c, d) in zip(first_box, second_box, strict=True)
      )
      for first_box, second_box in itertools.combinations(boxes, 2)
    )
    if overlaps or size != volume:
      raise ValueError("pieces that overlap, or with gaps between them")


def _check_lists(values: list[list[Any]], size: int) -> list[list[Any]]:
  valid = isinstance(values, list) and all(
    isinstance(item, list) and len(item) == size for item in values
  )
  if not valid:
    raise TypeError(f"no list of {size} each")
  return values


def _check_integers(values: list[int], most: int) -> None:
  valid = isinstance(values, list) and all(
    type(number) is int for number in values
  )
  if not valid or not all(0 <= number < most for number in values):
    raise ValueError("no integers in their range")


def put_piece(
  rows: np.ndarray,
  piece: PagePiece,
  cut: tuple[slice, ...],
  array: Shaped[np.ndarray, " ..."],
) -> None:
  """Copy a piece's array into its place.

  Args:
    rows: Part of a leaf, [pages, ...].
    piece: Piece that the array is.
    cut: Slices of the part within the leaf.
    array: Array of the piece's shape.
  """
  box = tuple(
    slice(a - axis_slice.start, b - axis_slice.start)
    for (a, b), axis_slice in zip(piece.box, cut, strict=True)
  )
  first, end = piece.places[0], piece.places[-1] + 1
  # For consecutive pages a slice avoids a gather.
  consecutive = end - first == len(piece.places)
  places = slice(first, end) if consecutive else list(piece.places)
  rows[(places, *box)] = np.moveaxis(array, piece.axis, 0)
