"""Placement of documents on the shards of a ring, token by token.

Guarantees: every token has one slot, once; a document is on `degree` shards
that are neighbours, in a row that does not run over the ring's end; whatever
adds up to no more than the slots has a placement. Shapes depend on shards and
slots alone, so that batches of all mixtures of lengths run the same program:
what differs between them is data.

A document on one shard needs no key of another. One on d shards needs keys
from d - 1 shards away, and as all shards take part in each hop, the document
on the most shards decides how many hops there are:

  run      each shard has consecutive tokens. Keys come from behind only,
           d - 1 hops; the last shard has up to twice the mean of pairs.
  stripe   shard m of d has tokens m, m + d, m + 2d, ... Causal work is equal in
           each hop (as in Brandon et al. 2023, arXiv 2311.09431); keys come
           from either side, 2 (d - 1) hops or once around, what is less.

ringjax/data/assignment.py chooses how many shards a document is on, and which.

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
from ringjax.data.assignment import (
  Assignment,
  Cost,
  RingSlots,
  assign,
  assign_degrees,
  members,
)
from ringjax.data.packing import (
  BestFit,
  Counts,
  DocumentPiece,
  Documents,
  PackedBatch,
  as_lengths,
  fill,
)
from ringjax.errors import DataError, OptionError, ShapeError
from ringjax.ops.attention.ring import cut_hops

SPREADS = ("stripe", "run")
_COST = Cost()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
  """The slot of each token of N documents on R shards of t slots.

  Attention wants `positions` and `segment_ids` with `layout=Contiguous()`:
  shard r has slots r * t to (r + 1) * t - 1.

  Attributes:
    shards: R.
    local_length: t.
    index: int32 [R * t], the token in each slot, counted through all documents
      in their order; -1 in an empty slot.
    slots: int32 [tokens], the slot of each token.
    positions: int32 [R * t], in the document; 0 in an empty slot.
    segment_ids: int32 [R * t], the document's number, from 1; 0 is empty.
    degree: int32 [N], shards of each document; 0 of one without tokens.
    reach: the most shards that a key is away from its query.
    hops: (from behind, from ahead), the hops that causal attention in all
      documents needs, as `rj.Ring` counts them.
    work: int64 [R], pairs of a query and a key that it sees.
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
    most = int(self.work.max())
    return float(self.work.mean() / most) if most else 1.0

  def apply(
    self,
    x: Shaped[np.ndarray, " ..."],
    *,
    axis: int = 0,
    empty: int | float | bool = 0,
  ) -> np.ndarray:
    """Moves the values of tokens into their slots.

    Args:
      x: an array of NumPy with an `axis` of all tokens, documents in their
        order.
      axis: that axis.
      empty: the value of empty slots.

    Returns:
      The same with R * t slots along `axis`.

    Raises:
      ShapeError: the axis does not have as many entries as there are tokens.
    """
    x = np.asarray(x)
    axis = _axis(x, axis, len(self.slots), "a token each")
    shape = (*x.shape[:axis], len(self.index), *x.shape[axis + 1 :])
    made = np.full(shape, empty, x.dtype)
    made[(slice(None),) * axis + (self.slots,)] = x
    return made

  def restore(
    self, y: Shaped[Array | np.ndarray, " ..."], *, axis: int = 0
  ) -> Any:
    """Moves the values of slots back into the order of the documents.

    Args:
      y: an array of NumPy or JAX with an `axis` of R * t slots.
      axis: that axis.

    Returns:
      The same with an entry for each token along `axis`.

    Raises:
      ShapeError: the axis does not have as many entries as there are slots.
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
    lengths: [N], tokens of each document.
    shards: R, devices along the sequence's axis.
    local_length: t, slots of each.
    spread: of `SPREADS`, how a document is spread over several shards.
    cost: by which degrees are chosen and shards are filled.
    degree: shards of each document, an int or [N]; default: chosen. A document
      of fewer tokens is on a shard for each. Documents whose degree is given
      are split evenly, or refused.

  Returns:
    The placement; the same for the same arguments.

  Raises:
    OptionError: an argument is out of range.
    DataError: there are fewer slots than tokens, or the degrees that are given
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
  found, left = assign_degrees(sizes, degrees, ring, exact=True)
  if found is None:
    raise DataError(
      "degree",
      f"degrees that leave no room for {left} tokens of a document",
      "degrees whose even parts fit",
      f"{left} slots are missing side by side: leave degree out, or raise "
      "local_length",
    )
  return _placement(sizes, found, ring)


# ---------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------


def place_rows(
  batch: PackedBatch, *, shards: int, **options: Any
) -> PackedBatch:
  """Places the documents of each row of a batch on the shards.

  Labels were shifted before, so each is still the one that follows its token.

  Args:
    batch: arrays [B, T] in true order, as `fill` and `Loader` return them.
    shards: R; T is a multiple of it.
    **options: `spread`, `cost` and `degree` of `place`; one degree for all
      documents.

  Returns:
    The same, each token in its slot: for a ring whose layout is `Contiguous()`
    and that gets positions and segments.

  Raises:
    ShapeError: rows that the shards do not divide, or not in true order.
    DataError: see `place`.
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
  # Empty slots take what is behind the row: a zero.
  order = np.full((rows, length), length, np.int64)
  for row, segments in enumerate(batch.segments):
    real = np.flatnonzero(segments)
    own = segments[real]
    first = np.flatnonzero(np.diff(own, prepend=0))
    steps = np.delete(np.diff(batch.positions[row, real], prepend=0), first)
    if len(np.unique(own[first])) < len(first) or (steps != 1).any():
      raise ShapeError(
        "segments",
        f"row {row}, a document of it in pieces or out of order",
        "rows in true order, each document in one piece",
        "place rows once, and before a layout permutes them",
      )
    sizes, local_length = np.diff(first, append=len(own)), length // shards
    found = place(sizes, shards=shards, local_length=local_length, **options)
    order[row, found.slots] = real
  behind = lambda x: np.concatenate([x, np.zeros_like(x[:, :1])], axis=1)
  return PackedBatch(
    *(np.take_along_axis(behind(x), order, axis=1) for x in batch)
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
    lengths: [N], tokens of each document; those without any are in no row.
    shards: R.
    local_length: t; a row holds R * t tokens.
    rows: B, rows of each batch; the last batch may have some without a piece.
    cut: cuts documents that are longer than a row, instead of refusing them.
    buffer: documents that are packed together.

  Returns:
    Batches, each of B rows of pieces, for `fill`; every token is in one.

  Raises:
    OptionError: an argument is out of range.
    DataError: a document is longer than a row.
  """
  positive_int("shards", shards)
  positive_int("rows", rows)
  sizes = as_lengths(lengths, local_length)
  length = shards * local_length
  long = np.flatnonzero(sizes > length)
  if long.size and not cut:
    raise DataError(
      "lengths",
      f"{int(sizes[long[0]])} tokens in document {int(long[0])}",
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
  """A batch of documents to train on, each token in its slot.

  Args:
    tokens: the ids of each document, [n].
    weights: of each of its tokens as a label, [n], or None for 1.
    shards: R.
    local_length: t.
    rows: B.
    **options: as in `place_rows`.

  Returns:
    Arrays [B, R * t]; segments count documents in each row.

  Raises:
    OptionError: an argument is out of range.
    DataError: tokens that are no ids, or more than `rows` rows hold.
  """
  documents = Documents(tokens, weights)
  batches = plan_batches(
    documents.lengths, shards=shards, local_length=local_length, rows=rows
  )
  length = shards * local_length
  if len(batches) > 1:
    rest = itertools.chain.from_iterable(itertools.chain(*batches[1:]))
    left = sum(piece.stop - piece.start for piece in rest)
    raise DataError(
      "tokens",
      f"{int(documents.lengths.sum())} in {len(documents)} documents",
      f"what {rows} rows of {length} slots hold",
      f"{left} slots are missing: pass more rows, or see plan_batches",
    )
  pieces = batches[0] if batches else [[] for _ in range(rows)]
  filled = fill(pieces, length, documents.read)
  return place_rows(filled, shards=shards, **options)


# ---------------------------------------------------------------------------
# Arrays
# ---------------------------------------------------------------------------


def _placement(
  sizes: np.ndarray, found: Assignment, ring: RingSlots
) -> Placement:
  """The arrays of an assignment."""
  total = int(sizes.sum())
  ends = np.cumsum(sizes)
  starts = ends - sizes
  # Small numbers sort by their digits, in linear time.
  small = np.min_scalar_type(ring.shards)
  shard = np.repeat(found.first.astype(small), sizes)
  degree = np.minimum(sizes, 1).astype(np.int32)
  needed = np.zeros(ring.shards, bool)
  for i, counts in found.groups.items():
    member = members(counts, ring.spread)
    shard[starts[i] : ends[i]] += member.astype(small)
    degree[i] = len(counts)
    _mark_needed(needed, member, len(counts))
  # On a shard tokens keep their order: blocks of them span few positions.
  order = np.argsort(shard, kind="stable")
  counts = np.bincount(shard, minlength=ring.shards)
  skipped = ring.local_length * np.arange(ring.shards) - np.cumsum(counts)
  slots = np.zeros(total, np.int32)
  slots[order] = np.arange(total) + np.repeat(skipped + counts, counts)
  position = np.arange(total, dtype=np.int32)
  position -= np.repeat(starts.astype(np.int32), sizes)
  document = np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)

  def in_slots(x: np.ndarray, empty: int) -> np.ndarray:
    made = np.full(ring.shards * ring.local_length, empty, np.int32)
    made[slots] = x
    return made

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
    reach=found.reach,
    hops=cut_hops(needed),
    work=work.astype(np.int64),
  )


def _mark_needed(needed: np.ndarray, member: np.ndarray, degree: int) -> None:
  """Marks, bool [R], how many shards behind a query a key is that it sees."""
  number = np.arange(degree)
  behind = number[:, None] - number
  if needed[behind[behind != 0]].all():
    return
  first = np.unique(member, return_index=True)[1]
  last = len(member) - 1 - np.unique(member[::-1], return_index=True)[1]
  # A shard ahead is behind by the rest of the ring: a negative index.
  needed[behind[(first <= last[:, None]) & (behind != 0)]] = True


def _given(degree: Any, sizes: np.ndarray, ring: RingSlots) -> np.ndarray:
  """Degrees as asked, int64 [N]."""
  found = np.asarray(degree)
  if not sizes.size and not found.size:
    return sizes
  if (
    found.dtype.kind not in "iu"
    or found.shape not in ((), sizes.shape)
    or (found.size and not 1 <= found.min() <= found.max() <= ring.shards)
  ):
    raise OptionError(
      "degree",
      str(degree),
      f"an int from 1 to {ring.shards}, or {len(sizes)} of them",
      "pass degrees in that range, or leave degree out",
    )
  found = np.minimum(found.astype(np.int64), sizes)
  tight = np.flatnonzero(found * ring.local_length < sizes)
  if tight.size:
    i = int(tight[0])
    raise DataError(
      "degree",
      f"{int(found[i])} for document {i} of {int(sizes[i])} tokens",
      f"{-(-int(sizes[i]) // ring.local_length)} or more",
      f"{int(sizes[i] - found[i] * ring.local_length)} slots are missing: "
      "pass that degree, or leave degree out",
    )
  return found


def _axis(x: Any, axis: int, size: int, wanted: str) -> int:
  """The axis, from the front."""
  shape = np.shape(x)
  if not -len(shape) <= axis < len(shape) or shape[axis] != size:
    raise ShapeError(
      "axis",
      f"{axis} of shape {shape}",
      f"one of {size}, {wanted}",
      "pass the dimension that runs over the sequence",
    )
  return axis % len(shape)
