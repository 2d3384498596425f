"""Documents of all lengths as rows of one length.

Guarantees: every token of every document is in exactly one row, once. A row
is a list of pieces, each a run of one document's tokens; no piece is longer
than a row, and the rest of a row is padding. A plan of rows is made from
lengths alone, so that any row can be read at any time and no row needs another.

Arrays of a row:

  labels      the token that follows in the same document, also where a cut put
              it into another row. After a document's last token: 0.
  weights     weight of that label in the loss: the document's, else 1; 0 where
              there is no label, and on padding.
  positions   from 0 in each piece. A piece of a cut document starts at 0, too:
              the tokens before it are in other rows, so it cannot see them.
  segments    1, 2, ... in a row; 0 is padding.

So a token is predicted exactly once unless it begins a document. All arrays are
in token order; placing them on devices permutes them.

  Cut       pieces end where rows end. No padding but in the last row; documents
            are cut.
  BestFit   only documents longer than a row are cut. Best-fit decreasing in a
            window of documents, Ding et al. 2024 (arXiv 2404.10830), "Fewer
            Truncations Improve Language Modeling".

Cost: either plans a million documents in about a second.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from ringjax.checks import positive_int
from ringjax.errors import DataError, OptionError

# Reads tokens `start` to `stop` of a document, fewer at its end; their weights
# as labels, if they are not all 1; and, of a document of several segments, the
# segments, from 1 on. Such a document is never cut.
Read = Callable[
  [int, int, int],
  tuple[np.ndarray, np.ndarray | None]
  | tuple[np.ndarray, np.ndarray | None, np.ndarray],
]

# Number of tokens of each document.
Counts = Int[np.ndarray, " _"] | Sequence[int | np.integer]


class PackedBatch(NamedTuple):
  """Rows to train on, each array [B, T] in token order.

  Attributes:
    tokens: Token ids, int32; 0 on padding.
    labels: Ids of the next tokens, int32; 0 where there is no label.
    weights: Weight of each label in the loss, float32.
    positions: Positions from 0 in each piece, int32.
    segments: Document numbers from 1 in each row, int32; 0 on padding.
  """

  tokens: np.ndarray
  labels: np.ndarray
  weights: np.ndarray
  positions: np.ndarray
  segments: np.ndarray


class DocumentPiece(NamedTuple):
  """Tokens `start` to `stop` of a document."""

  document: int
  start: int
  stop: int


class PackingPlan(Sequence[list[DocumentPiece]]):
  """Pieces of each row.

  Args:
    pieces: Rows of `DocumentPiece`, int64 [P, 3], those of a row adjacent.
    first: Index of each row's first piece, int64 [rows + 1].
    length: Tokens that a row holds.

  Attributes:
    length: Tokens that a row holds.
    tokens: Number of tokens of all rows together.
  """

  def __init__(
    self,
    pieces: Int[np.ndarray, "P 3"],
    first: Int[np.ndarray, " F"],
    length: int,
  ):
    self._pieces = pieces
    self._first = first
    self.length = length
    self.tokens = int((pieces[:, 2] - pieces[:, 1]).sum())

  def __len__(self) -> int:
    return len(self._first) - 1

  def __getitem__(self, row: int | np.integer | slice) -> Any:
    if isinstance(row, slice):
      return [self[i] for i in range(*row.indices(len(self)))]
    at = range(len(self))[row]
    row_pieces = self._pieces[self._first[at] : self._first[at + 1]]
    return [DocumentPiece(*piece) for piece in row_pieces.tolist()]

  @property
  def waste(self) -> float:
    """Fraction of all positions that is padding."""
    return 1 - self.tokens / max(1, len(self) * self.length)


@runtime_checkable
class Packer(Protocol):
  """Interface of packers, which plan rows of documents."""

  def plan(self, lengths: Counts, length: int) -> PackingPlan:
    """Plans the rows of documents.

    Args:
      lengths: Tokens of each document, [N]; empty ones are in no row.
      length: Tokens that a row holds.

    Raises:
      OptionError: If `lengths` are not counts, or `length` is not positive.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
  """Documents in their order, cut wherever a row is full."""

  def plan(self, lengths: Counts, length: int) -> PackingPlan:
    """Plans the rows of documents, in their order; see `Packer.plan`."""
    sizes = as_lengths(lengths, length)
    ends = np.cumsum(sizes)
    total = int(sizes.sum())
    edges = np.unique(np.concatenate([ends, np.arange(0, total, length), [0]]))
    begin, end = edges[:-1], edges[1:]
    document = np.searchsorted(ends, begin, side="right")
    document_start = (ends - sizes)[document]
    pieces = np.stack(
      [document, begin - document_start, end - document_start], axis=1
    )
    rows = np.arange(-(-total // length) + 1)
    return PackingPlan(pieces, np.searchsorted(begin // length, rows), length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestFit:
  """Whole documents, each in the row whose room it fills best.

  Documents longer than a row are cut into rows first; the remainder of one goes
  where it fits. The longest of a window are packed first, so that a row's
  pieces come from long to short.

  Attributes:
    buffer: Documents that are packed together. More waste less.
  """

  buffer: int = 1 << 16

  def __post_init__(self) -> None:
    positive_int("buffer", self.buffer)

  def plan(self, lengths: Counts, length: int) -> PackingPlan:
    """Plans the rows of documents; see `Packer.plan`."""
    sizes = as_lengths(lengths, length)
    all_pieces, all_rows, rows = [np.zeros((0, 3), np.int64)], [], 0
    for start in range(0, len(sizes), self.buffer):
      pieces = _cut_long(sizes[start : start + self.buffer], length)
      size = pieces[:, 2] - pieces[:, 1]
      pieces[:, 0] += start
      order = np.argsort(-size, kind="stable")
      chosen, used = _best_fit(size[order].tolist(), length)
      all_pieces.append(pieces[order])
      all_rows.append(np.asarray(chosen, np.int64) + rows)
      rows += used
    row_of = np.concatenate([np.zeros(0, np.int64), *all_rows])
    order = np.argsort(row_of, kind="stable")
    first = np.searchsorted(row_of[order], np.arange(rows + 1))
    return PackingPlan(np.concatenate(all_pieces)[order], first, length)


def _cut_long(sizes: np.ndarray, length: int) -> np.ndarray:
  """Pieces [P, 3] of at most `length` tokens."""
  counts = -(-sizes // length)
  document = np.repeat(np.arange(len(sizes)), counts)
  number = np.arange(len(document)) - np.repeat(
    np.cumsum(counts) - counts, counts
  )
  start = number * length
  stop = np.minimum(start + length, sizes[document])
  return np.stack([document, start, stop], axis=1).astype(np.int64)


def _best_fit(sizes: list[int], length: int) -> tuple[list[int], int]:
  """Row of each piece, and the number of rows; the longest come first."""
  # Rows by the room they have left, and those rooms in order.
  by_room: dict[int, list[int]] = {}
  rooms: list[int] = []
  chosen, used = [], 0
  for size in sizes:
    at = bisect.bisect_left(rooms, size)
    if at == len(rooms):
      row, room = used, length
      used += 1
    else:
      room = rooms[at]
      row = by_room[room].pop()
      if not by_room[room]:
        del by_room[room], rooms[at]
    chosen.append(row)
    room_left = room - size
    if room_left in by_room:
      by_room[room_left].append(row)
    elif room_left:
      by_room[room_left] = [row]
      bisect.insort(rooms, room_left)
  return chosen, used


class Documents:
  """Documents in memory, with weights of their labels or without.

  Args:
    tokens: Ids of each document, [n].
    weights: Weights of each document's tokens as labels, [n], or None for 1.
      A document's first token is never a label.

  Attributes:
    lengths: Tokens of each document, int64 [N].
    fingerprint: Digest of all tokens and weights.

  Raises:
    DataError: If tokens are not ids, or weights of another length.
  """

  def __init__(
    self, tokens: Iterable[Any], weights: Iterable[Any] | None = None
  ):
    self._tokens = [
      as_document(f"tokens[{i}]", t) for i, t in enumerate(tokens)
    ]
    self._weights: list[np.ndarray] | None = None
    if weights is not None:
      self._weights = [np.asarray(w, np.float32) for w in weights]
      ours = [len(t) for t in self._tokens]
      theirs = [w.size for w in self._weights]
      if ours != theirs:
        raise DataError(
          "weights",
          f"{len(theirs)} rows, of {theirs[:5]} ... values",
          f"{len(ours)} rows, of {ours[:5]} ...",
          "give each token of a document a weight",
        )
    self.lengths = np.array([len(t) for t in self._tokens], np.int64)
    hashed = hashlib.sha256(self.lengths.tobytes())
    for row in (*self._tokens, *(self._weights or ())):
      hashed.update(row.tobytes())
    self.fingerprint = hashed.hexdigest()[:16]

  def __len__(self) -> int:
    return len(self._tokens)

  def read(
    self, document: int, start: int, stop: int
  ) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"] | None]:
    """Tokens `start` to `stop` of a document, or fewer, and their weights."""
    weights = None
    if self._weights is not None:
      weights = self._weights[document][start:stop]
    return self._tokens[document][start:stop], weights


def fill(
  rows: Sequence[Sequence[DocumentPiece]],
  length: int,
  read: Read,
  first: int = 1,
) -> PackedBatch:
  """Fills the arrays of rows.

  Args:
    rows: Pieces of each row, as in a plan.
    length: Tokens that a row holds, T.
    read: Function that returns a document's tokens. It is asked for one more
      than a piece has, the label of its last, unless the document ends there.
      Segments of a document are numbered on, as documents are.
    first: Segment of a row's first piece.

  Returns:
    Arrays [B, T].

  Raises:
    DataError: If a document is shorter than the plan says, or a row longer.
  """
  shape = (len(rows), length)
  tokens, labels, positions, segments = (
    np.zeros(shape, np.int32) for _ in range(4)
  )
  weights = np.zeros(shape, np.float32)
  for b, row in enumerate(rows):
    at, number = 0, first
    for document, start, stop in row:
      count = stop - start
      if at + count > length:
        raise DataError(
          "rows",
          f"row {b} of {sum(p.stop - p.start for p in row)} tokens",
          f"at most {length}",
          "plan for the length that is filled",
        )
      ids, label_weights, *optional_segments = read(document, start, stop + 1)
      if not count <= len(ids) <= count + 1:
        raise DataError(
          "read",
          f"{len(ids)} tokens of document {document} from {start} on",
          f"{count} or one more",
          "make a new plan: the documents are not those of this one",
        )
      slots, num_labels = slice(at, at + count), len(ids) - 1
      tokens[b, slots] = ids[:count]
      labels[b, at : at + num_labels] = ids[1:]
      weights[b, at : at + num_labels] = (
        1.0 if label_weights is None else label_weights[1:]
      )
      positions[b, slots] = np.arange(count)
      segments[b, slots] = number
      if optional_segments:
        parts = optional_segments[0]
        if start or len(ids) > count:
          raise DataError(
            "packer",
            f"tokens {start} to {stop} of document {document}, which has "
            f"{int(parts.max())} segments",
            "whole documents: a cut would part its segments",
            "pass packer=BestFit(), and rows as long as the longest document",
          )
        begins = np.flatnonzero(np.diff(parts, prepend=parts[0] - 1))
        part = np.cumsum(np.diff(parts, prepend=parts[0]) != 0)
        positions[b, slots] -= begins[part]
        segments[b, slots] += part
        # The last token of a segment has no label.
        ends = at + begins[1:] - 1
        labels[b, ends], weights[b, ends] = 0, 0.0
        number += int(part[-1])
      number += 1
      at += count
  return PackedBatch(tokens, labels, weights, positions, segments)


def as_document(name: str, ids: object) -> Int[np.ndarray, " n"]:
  """Ids of a document, int32 [n], or a DataError with its name."""
  array = np.asarray(ids)
  if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
    raise DataError(
      name,
      f"{array.dtype} of shape {array.shape}",
      "a row of integer ids",
      "encode the text first",
    )
  if array.size and not 0 <= int(array.min()) <= int(array.max()) < 2**31:
    raise DataError(
      name,
      f"ids from {array.min()} to {array.max()}",
      f"ids from 0 to {2**31 - 1}",
      "remove negative numbers and those above",
    )
  return array.astype(np.int32)


def as_lengths(lengths: Counts, length: int) -> Int[np.ndarray, " N"]:
  """Lengths of documents, int64 [N], for rows of `length`, or OptionError."""
  positive_int("length", length)
  array = np.asarray(lengths)
  if array.size == 0:
    return np.zeros(0, np.int64)
  if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0:
    raise OptionError(
      "lengths",
      f"{array.dtype} of shape {array.shape}, from {array.min()} on",
      "a row of counts from 0 on",
      "pass how many tokens each document has",
    )
  return array.astype(np.int64)
