"""Placement of documents on the shards of a ring, token by token.

Guarantees: every token has one slot, once; a document is on `degree` shards
that are neighbours, in a row that does not run over the ring's end; documents
of at most as many tokens as slots have a placement. Shapes depend on shards and
slots alone, so that batches of all mixtures of lengths run the same program:
they differ in data only.

A document on one shard needs no key of another. One on d shards needs keys
from d - 1 shards away, and as all shards take part in each hop, the document
on the most shards decides how many hops there are:

  run      each shard has consecutive tokens. Keys come from earlier ones
           only, d - 1 hops; the last shard has up to twice the mean of pairs.
  stripe   shard m of d has tokens m, m + d, m + 2d, ... Causal work is equal in
           each hop (as in Brandon et al. 2023, arXiv 2311.09431); keys come
           from either side, 2 (d - 1) hops or once around, the smaller of both.

ringjax/data/batches/assignment.py chooses the shards of each document.

Cost: O(N log N) of N documents and O(tokens): 10^5 documents in 0.2 s if they
      have 2 million tokens, in some seconds if they have 30 million.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Array, Shaped

from ringjax.checks import one_of, positive_int
from ringjax.data.batches.assignment import (
  Assignment,
  Cost,
  RingSlots,
  assign,
  assign_degrees,
  members,
)
from ringjax.data.batches.packing import (
  BestFit,
  Counts,
  DocumentPiece,
  Documents,
  PackedBatch,
  as_lengths,
  fill,
)
from ringjax.errors import DataError, OptionError, ShapeError
from ringjax.ops.attention.strategies.ring import cut_hops

SPREADS = ("stripe", "run")
_COST = Cost()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
  """The slot of each token of N documents on R shards of t slots.

  Attention takes `positions` and `segment_ids` with `layout=Contiguous()`:
  shard r has slots r * t to (r + 1) * t - 1.

  Attributes:
    shards: Number of shards, R.
    local_length: Slots of each shard, t.
    index: Token in each slot, int32 [R * t], counted through all documents
      in their order; -1 in an empty slot.
    slots: Slot of each token, int32 [tokens].
    positions: Position in the document, int32 [R * t]; 0 in an empty slot.
    segment_ids: Number of the document, from 1, int32 [R * t]; 0 is empty.
    degree: Shards of each document, int32 [N]; 0 for one without tokens.
    reach: Largest number of shards from a query to a key that it sees.
    hops: (from earlier, from later shards), the hops that causal attention in
      all documents needs, as `rj.Ring` counts them.
    work: Pairs of a query and a key that it sees, int64 [R].
  """

  shards: int
  local_length: int
  index: np.ndarray
  slots: np.ndarray
  positions: np.ndarray
  segment_ids: np.ndarray
  degree: np.ndarray
  reach: int
  hops: tuple[int, int]
  work: np.ndarray

  @property
  def balance(self) -> float:
    """Mean of the shards' work over the largest; 1 is balanced."""
    largest = int(self.work.max())
    return float(self.work.mean() / largest) if largest else 1.0

  def apply(
    self,
    x: Shaped[np.ndarray, " ..."],
    *,
    axis: int = 0,
    empty: int | float | bool = 0,
  ) -> Shaped[np.ndarray, " ..."]:
    """Moves the values of tokens into their slots.

    Args:
      x: NumPy array with an `axis` of all tokens, documents in their order.
      axis: Axis of the tokens in `x`.
      empty: Value of empty slots.

    Returns:
      The array with R * t slots along `axis`.

    Raises:
      ShapeError: If the axis does not have as many entries as there are
        tokens.
    """
    x = np.asarray(x)
    axis = _axis(x, axis, len(self.slots), "a token each")
    shape = (*x.shape[:axis], len(self.index), *x.shape[axis + 1 :])
    slots = np.full(shape, empty, x.dtype)
    slots[(slice(None),) * axis + (self.slots,)] = x
    return slots

  def restore(
    self, y: Shaped[Array | np.ndarray, " ..."], *, axis: int = 0
  ) -> Any:
    """Moves the values of slots back into the order of the documents.

    Args:
      y: NumPy or JAX array with an `axis` of R * t slots.
      axis: Axis of the slots in `y`.

    Returns:
      The array with an entry for each token along `axis`.

    Raises:
      ShapeError: If the axis does not have as many entries as there are
        slots.
    """
    axis = _axis(y, axis, len(self.index), "a slot each")
    return y[(slice(None),) * axis + (self.slots,)]


def place(
  lengths: Counts,
  *,
  shards: int,
  local_length: int,
  spread: str = "stripe",
  cost: Cost = _COST,
  degree: Counts | int | None = None,
) -> Placement:
  """Places documents on the shards of a ring.

  Args:
    lengths: Tokens of each document, [N].
    shards: Devices along the sequence's axis, R.
    local_length: Slots of each shard, t.
    spread: Spread of a document over several shards, one of `SPREADS`.
    cost: Cost model by which degrees are chosen and shards are filled.
    degree: Shards of each document, an int or [N]; default: chosen. A
      document of fewer tokens is on a shard for each. Documents whose degree
      is given are split evenly, or refused.

  Returns:
    The placement; the same for the same arguments.

  Raises:
    OptionError: If an argument is out of range.
    DataError: If there are fewer slots than tokens, or the given degrees
      leave no room.
  """
  positive_int("shards", shards)
  positive_int("local_length", local_length)
  sizes = as_lengths(lengths, local_length)
  one_of("spread", spread, SPREADS)
  missing = int(sizes.sum()) - shards * local_length
  if missing > 0:
    raise DataError(
      "lengths",
      f"{int(sizes.sum())} tokens in {len(sizes)} documents",
      f"at most {shards * local_length}, in {shards} shards of "
      f"{local_length} slots",
      f"{missing} slots are missing: leave documents out, or raise "
      "local_length",
    )
  ring = RingSlots(shards, local_length, spread, cost)
  if degree is None:
    return _placement(sizes, assign(sizes, ring), ring)
  degrees = _given(degree, sizes, ring)
  assignment, unplaced = assign_degrees(sizes, degrees, ring, exact=True)
  if assignment is None:
    raise DataError(
      "degree",
      f"degrees that leave no room for {unplaced} tokens of a document",
      "degrees whose even parts fit",
      f"{unplaced} slots are missing side by side: leave degree out, or raise "
      "local_length",
    )
  return _placement(sizes, assignment, ring)


# ---------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------


def place_rows(
  batch: PackedBatch, *, shards: int, **options: Any
) -> PackedBatch:
  """Places the documents of each row of a batch on the shards.

  Labels were shifted before, so each still follows its token in the text.

  Args:
    batch: Arrays [B, T] in token order, as `fill` and `Loader` return them.
    shards: Number of shards, R; T is a multiple of it.
    **options: `spread`, `cost` and `degree` of `place`; one degree for all
      documents.

  Returns:
    The batch with each token in its slot: for a ring whose layout is
    `Contiguous()` and that gets positions and segments.

  Raises:
    ShapeError: If the shards do not divide the rows, or rows are not in token
      order.
    DataError: See `place`.
  """
  positive_int("shards", shards)
  rows, length = batch.tokens.shape
  if length % shards:
    raise ShapeError(
      "batch",
      f"rows of {length} tokens on {shards} shards",
      f"a multiple of {shards} tokens",
      f"pass rows of {-(-length // shards) * shards} tokens",
    )
  # Empty slots index one element after the row, which is a zero.
  order = np.full((rows, length), length, np.int64)
  for row, segments in enumerate(batch.segments):
    filled = np.flatnonzero(segments)
    documents = segments[filled]
    first = np.flatnonzero(np.diff(documents, prepend=0))
    steps = np.delete(np.diff(batch.positions[row, filled], prepend=0), first)
    if len(np.unique(documents[first])) < len(first) or (steps != 1).any():
      raise ShapeError(
        "segments",
        f"row {row}, a document of it in pieces or out of order",
        "rows in true order, each document in one piece",
        "place rows once, and before a layout permutes them",
      )
    sizes, local_length = (
      np.diff(first, append=len(documents)),
      length // shards,
    )
    placement = place(
      sizes, shards=shards, local_length=local_length, **options
    )
    order[row, placement.slots] = filled
  with_zero = lambda x: np.concatenate([x, np.zeros_like(x[:, :1])], axis=1)
  return PackedBatch(
    *(np.take_along_axis(with_zero(x), order, axis=1) for x in batch)
  )


def plan_batches(
  lengths: Counts,
  *,
  shards: int,
  local_length: int,
  rows: int,
  cut: bool = False,
  buffer: int = 1 << 16,
) -> list[list[list[DocumentPiece]]]:
  """Groups documents into batches of rows that can be placed.

  Rows are packed by `BestFit`, the longest documents first: rows whose
  documents need many hops come into one batch, and hops are per batch.

  Args:
    lengths: Tokens of each document, [N]; empty ones are in no row.
    shards: Number of shards, R.
    local_length: Slots of a shard, t; a row holds R * t tokens.
    rows: Rows of each batch, B; the last batch may have empty rows.
    cut: Whether to cut documents that are longer than a row, not refuse them.
    buffer: Number of documents that are packed together.

  Returns:
    Batches, each of B rows of pieces, for `fill`; every token is in one.

  Raises:
    OptionError: If an argument is out of range.
    DataError: If a document is longer than a row.
  """
  positive_int("shards", shards)
  positive_int("rows", rows)
  sizes = as_lengths(lengths, local_length)
  length = shards * local_length
  too_long = np.flatnonzero(sizes > length)
  if too_long.size and not cut:
    raise DataError(
      "lengths",
      f"{int(sizes[too_long[0]])} tokens in document {int(too_long[0])}",
      f"at most {length}, in {shards} shards of {local_length} slots",
      "pass cut=True, or raise local_length",
    )
  plan = BestFit(buffer=buffer).plan(sizes, length)
  batches = [plan[i : i + rows] for i in range(0, len(plan), rows)]
  for batch in batches[-1:]:
    batch += [[] for _ in range(rows - len(batch))]
  return batches


def place_documents(
  tokens: Iterable[Any],
  weights: Iterable[Any] | None = None,
  *,
  shards: int,
  local_length: int,
  rows: int = 1,
  **options: Any,
) -> PackedBatch:
  """Makes a training batch of documents, with each token in its slot.

  Args:
    tokens: Ids of each document, [n].
    weights: Weights of each document's tokens as labels, [n], or None for 1.
    shards: Number of shards, R.
    local_length: Slots of a shard, t.
    rows: Number of rows, B.
    **options: Other options of `place_rows`.

  Returns:
    Arrays [B, R * t]; segments count documents in each row.

  Raises:
    OptionError: If an argument is out of range.
    DataError: If tokens are not ids, or more than `rows` rows hold.
  """
  documents = Documents(tokens, weights)
  batches = plan_batches(
    documents.lengths, shards=shards, local_length=local_length, rows=rows
  )
  length = shards * local_length
  if len(batches) > 1:
    overflow = itertools.chain.from_iterable(itertools.chain(*batches[1:]))
    missing = sum(piece.stop - piece.start for piece in overflow)
    raise DataError(
      "tokens",
      f"{int(documents.lengths.sum())} in {len(documents)} documents",
      f"what {rows} rows of {length} slots hold",
      f"{missing} slots are missing: pass more rows, or see plan_batches",
    )
  pieces = batches[0] if batches else [[] for _ in range(rows)]
  filled = fill(pieces, length, documents.read)
  return place_rows(filled, shards=shards, **options)


# ---------------------------------------------------------------------------
# Arrays
# ---------------------------------------------------------------------------


def _placement(
  sizes: np.ndarray, assignment: Assignment, ring: RingSlots
) -> Placement:
  """Turns an assignment into the arrays of a placement."""
  total = int(sizes.sum())
  ends = np.cumsum(sizes)
  starts = ends - sizes
  # Small integers sort by radix, in linear time.
  small = np.min_scalar_type(ring.shards)
  shard = np.repeat(assignment.first.astype(small), sizes)
  degree = np.minimum(sizes, 1).astype(np.int32)
  needed = np.zeros(ring.shards, bool)
  for i, counts in assignment.groups.items():
    member = members(counts, ring.spread)
    shard[starts[i] : ends[i]] += member.astype(small)
    degree[i] = len(counts)
    _mark_needed(needed, member, len(counts))
  # Tokens keep their order on a shard, so blocks of them span few positions.
  order = np.argsort(shard, kind="stable")
  counts = np.bincount(shard, minlength=ring.shards)
  skipped = ring.local_length * np.arange(ring.shards) - np.cumsum(counts)
  slots = np.zeros(total, np.int32)
  slots[order] = np.arange(total) + np.repeat(skipped + counts, counts)
  position = np.arange(total, dtype=np.int32)
  position -= np.repeat(starts.astype(np.int32), sizes)
  document = np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)

  def in_slots(x: np.ndarray, empty: int) -> np.ndarray:
    slot_values = np.full(ring.shards * ring.local_length, empty, np.int32)
    slot_values[slots] = x
    return slot_values

  work = np.zeros(ring.shards)
  if total:
    # Exact: far below 2^53 pairs.
    work = np.bincount(shard, position + 1.0, ring.shards)
  return Placement(
    shards=ring.shards,
    local_length=ring.local_length,
    index=in_slots(np.arange(total), -1),
    slots=slots,
    positions=in_slots(position, 0),
    segment_ids=in_slots(document, 0),
    degree=degree,
    reach=assignment.reach,
    hops=cut_hops(needed),
    work=work.astype(np.int64),
  )


def _mark_needed(needed: np.ndarray, member: np.ndarray, degree: int) -> None:
  """Marks, bool [R], how many shards before a query's the keys it sees are."""
  number = np.arange(degree)
  distance = number[:, None] - number
  if needed[distance[distance != 0]].all():
    return
  first = np.unique(member, return_index=True)[1]
  last = len(member) - 1 - np.unique(member[::-1], return_index=True)[1]
  # A later shard is the rest of the ring before it: a negative index.
  needed[distance[(first <= last[:, None]) & (distance != 0)]] = True


def _given(degree: Any, sizes: np.ndarray, ring: RingSlots) -> np.ndarray:
  """Checks the degrees that the caller gave, int64 [N]."""
  degrees = np.asarray(degree)
  if not sizes.size and not degrees.size:
    return sizes
  if (
    degrees.dtype.kind not in "iu"
    or degrees.shape not in ((), sizes.shape)
    or (degrees.size and not 1 <= degrees.min() <= degrees.max() <= ring.shards)
  ):
    raise OptionError(
      "degree",
      str(degree),
      f"an int from 1 to {ring.shards}, or {len(sizes)} of them",
      "pass degrees in that range, or leave degree out",
    )
  degrees = np.minimum(degrees.astype(np.int64), sizes)
  too_few = np.flatnonzero(degrees * ring.local_length < sizes)
  if too_few.size:
    i = int(too_few[0])
    raise DataError(
      "degree",
      f"{int(degrees[i])} for document {i} of {int(sizes[i])} tokens",
      f"{-(-int(sizes[i]) // ring.local_length)} or more",
      f"{int(sizes[i] - degrees[i] * ring.local_length)} slots are missing: "
      "pass that degree, or leave degree out",
    )
  return degrees


def _axis(x: Any, axis: int, size: int, wanted: str) -> int:
  """The checked axis, as a non-negative index."""
  shape = np.shape(x)
  if not -len(shape) <= axis < len(shape) or shape[axis] != size:
    raise ShapeError(
      "axis",
      f"{axis} of shape {shape}",
      f"one of {size}, {wanted}",
      "pass the dimension that runs over the sequence",
    )
  return axis % len(shape)
