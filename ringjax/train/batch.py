"""Batches on devices: rows of tokens, permuted by the layout once.

Guarantees: a token's label, weight, position and segment are on the shard of
the token; labels were shifted before, so no shard needs one of a neighbour.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from ringjax.data.batches.packing import PackedBatch
from ringjax.errors import DataError, ShapeError
from ringjax.nn.sharding_context import ShardingContext
from ringjax.ops.loss import IGNORE_INDEX
from ringjax.typing import ArrayLeaf

# Fields of packed rows, in the order of `Batch`.
BY_TOKEN = ("tokens", "labels", "weights", "positions", "segments")


class Chunks(NamedTuple):
  """Contexts of rows, which an encoder reads.

  Fields:
    tokens: Chunks in their order, int32 [A, B, k, C].
    segments: 0 for padding and masked tokens, int32 [A, B, k, C].
  """

  tokens: Int[ArrayLeaf, "A B k C"]
  segments: Int[ArrayLeaf, "A B k C"]


class Batch(NamedTuple):
  """The rows of a step, in the layout's order.

  Fields:
    tokens: Token ids, int32 [A, B, T]; A micro-batches follow each other.
    labels: Ids of the next tokens, int32 [A, B, T].
    weights: Weight of each label's loss, float32 [A, B, T].
    positions: Positions in each document, int32 [A, B, T]; None: in the row.
    segments: Documents, 0 is padding, int32 [A, B, T]; None: one per row.
    context: Chunks that an encoder reads for each row, or None.
    whole: Rows of context and these tokens together, for a teacher, or None.
    lag: Lag of a draft's view of its target's keys, int32 [A, B, 1], or None.
    order: Index of each token in its document, int32 [A, B, T], where
      positions are moved; None: they are these indices.
    inputs: Further numbers of tokens that a loss after pre-training reads, by
      their names, float32 [A, B, T] each; or None.
  """

  tokens: Int[ArrayLeaf, "A B T"]
  labels: Int[ArrayLeaf, "A B T"]
  weights: Float[ArrayLeaf, "A B T"]
  positions: Int[ArrayLeaf, "A B T"] | None = None
  segments: Int[ArrayLeaf, "A B T"] | None = None
  context: Chunks | None = None
  whole: Batch | None = None
  lag: Int[ArrayLeaf, "A B 1"] | None = None
  order: Int[ArrayLeaf, "A B T"] | None = None
  inputs: dict[str, Float[ArrayLeaf, "A B T"]] | None = None


def whole_rows(tokens: Int[np.ndarray, "B T"]) -> Batch:
  """Batch of rows [B, T + 1] that are one document each, not placed yet."""
  ids: Any = np.asarray(tokens, np.int32)
  if ids.ndim != 2 or ids.shape[1] < 2:
    raise ShapeError(
      "tokens",
      f"shape {ids.shape}",
      "[B, T + 1], two tokens or more",
      "keep the token after the last one that is read",
    )
  weights: Any = np.ones((ids.shape[0], ids.shape[1] - 1), np.float32)
  return Batch(ids[:, :-1], ids[:, 1:], weights)


def check(
  count: int, length: int, attend: ShardingContext, accumulate: int = 1
) -> None:
  """Checks that a mesh divides the rows of a step.

  Args:
    count: Rows of a step, B.
    length: Tokens of each row, T.
    attend: Sharding context, with mesh, axis and layout.
    accumulate: Micro-batches of a step, A.

  Raises:
    ShapeError: If A, the batch's axes or the shards do not divide the rows.
  """
  unit = 2 * attend.size if attend.size > 1 else 1
  if count % accumulate or length % unit:
    raise ShapeError(
      "rows",
      f"{count} of {length} tokens",
      f"a number that {accumulate} divides, of a length that {unit} divides",
      f"pass a batch of {-(-count // accumulate) * accumulate} and a length of "
      f"{-(-length // unit) * unit}, or another mesh",
    )
  rows_each, parts = count // accumulate, attend.data_size
  if parts > 1 and not attend.batch_axes(rows_each):
    raise ShapeError(
      "rows",
      f"{rows_each} in a micro-batch",
      f"a multiple of the {parts} devices of the batch's axes",
      f"pass a batch of {accumulate * parts}, or fewer micro-batches",
    )


def check_ids(rows: PackedBatch | Batch, vocab: int | None = None) -> None:
  """Checks that tokens and labels [B, T] are ids of a model.

  Args:
    rows: Rows of NumPy arrays.
    vocab: Vocabulary size, V; None: ids need only be 0 or more.

  Raises:
    DataError: See `place`.
  """
  for name in ("tokens", "labels"):
    ids = np.asarray(getattr(rows, name))
    wrong = ids < 0
    if vocab is not None:
      wrong |= ids >= vocab
    if name == "labels":
      wrong &= ids != IGNORE_INDEX
    if wrong.any():
      at = tuple(int(i) for i in np.argwhere(wrong)[0])
      id_range = "from 0 on" if vocab is None else f"from 0 to {vocab - 1}"
      or_ignored = (
        f", or {IGNORE_INDEX} for no label" if name == "labels" else ""
      )
      raise DataError(
        name,
        f"{int(ids[at])} at {[*at]}, and {int(wrong.sum()) - 1} more",
        f"ids {id_range}{or_ignored}",
        "make them with the tokenizer of this model",
      )


class ProcessShare(NamedTuple):
  """A process's share of each batch: part `host` of `hosts` equal ones."""

  host: int = 0
  hosts: int = 1


def share_of(
  attend: ShardingContext, process: int | None = None
) -> ProcessShare:
  """Share of a batch's rows that the devices of a process need.

  A separate part if the batch's axes divide it by processes; all rows if a
  row is on devices of several.

  Args:
    attend: Sharding context, with the mesh and its axes.
    process: Number of the process; default: this one's.
  """
  parts = attend.data_size
  if attend.mesh is None or parts == 1:
    return ProcessShare()
  axes = attend.mesh.axis_names
  # The devices of each share of the batch, shares in their order.
  order = [axes.index(a) for a in attend.batch_axes(parts)]
  other_axes = [i for i in range(len(axes)) if i not in order]
  devices = attend.mesh.devices.transpose(*order, *other_axes).reshape(
    parts, -1
  )
  owners = np.vectorize(lambda d: d.process_index, otypes=[int])(devices)
  shares = {
    p: tuple(np.flatnonzero((owners == p).any(1)).tolist())
    for p in np.unique(owners).tolist()
  }
  own_parts = shares[jax.process_index() if process is None else process]
  size = len(own_parts)
  blocks = {tuple(range(i, i + size)) for i in range(0, parts, size)}
  if set(shares.values()) != blocks:
    return ProcessShare()
  return ProcessShare(own_parts[0] // size, parts // size)


_WHOLE = ProcessShare()


def place(
  rows: PackedBatch | Batch,
  attend: ShardingContext,
  accumulate: int = 1,
  part: ProcessShare = _WHOLE,
  vocab: int | None = None,
) -> Batch:
  """Moves rows [B / hosts, T] of NumPy, in token order, to the devices.

  Args:
    rows: Rows of this process's part, with the fields of `Batch`.
    attend: Sharding context, with mesh, axis and layout.
    accumulate: Micro-batches, A; of A adjacent rows each goes to another
      micro-batch.
    part: Share of the batch that the rows are, by `share_of`; default: all.
    vocab: Vocabulary size of the model, V, to check ids. None: no upper bound.

  Raises:
    DataError: If a token is not an id, or a label is neither an id nor -100
      (`ops.loss.IGNORE_INDEX`, for tokens without a label).
    ShapeError: If A, the batch's axes or the shards do not divide the rows.
  """
  put = placer(np.shape(rows.tokens), attend, accumulate, part)
  check_ids(rows, vocab)
  ordered = functools.partial(put, in_order=True)
  return Batch(
    *jax.tree.map(ordered, tuple(getattr(rows, name) for name in BY_TOKEN)),
    context=jax.tree.map(put, getattr(rows, "context", None)),
    whole=jax.tree.map(ordered, getattr(rows, "whole", None)),
    lag=jax.tree.map(put, getattr(rows, "lag", None)),
    order=jax.tree.map(ordered, getattr(rows, "order", None)),
    inputs=jax.tree.map(ordered, getattr(rows, "inputs", None)),
  )


def placer(
  shape: Sequence[int],
  attend: ShardingContext,
  accumulate: int = 1,
  part: ProcessShare = _WHOLE,
) -> Callable[..., jax.Array]:
  """Function that moves arrays of rows [B / hosts, ...] to the devices.

  With `in_order` their second axis is that of the tokens, in token order, which
  the layout permutes and the mesh shards; else only rows are sharded. Results
  are [A, B / A, ...].

  Args:
    shape: Number of rows and of tokens of each, (B / hosts, T).
    attend: Sharding context, with mesh, axis and layout.
    accumulate: Micro-batches, A.
    part: Share of the batch that the rows are.

  Raises:
    ShapeError: If A, the batch's axes or the shards do not divide the rows.
  """
  count, length = shape
  check(count * part.hosts, length, attend, accumulate)
  rows_here = count // accumulate
  rows_each, first = rows_here * part.hosts, rows_here * part.host
  axes = attend.batch_axes(rows_each)

  def put(x: np.ndarray, *, in_order: bool = False) -> jax.Array:
    if in_order:
      # Shards of uneven layouts have empty slots.
      x = attend.layout.permute(np.asarray(x), shards=attend.size)
    x = x.reshape(rows_here, accumulate, *x.shape[1:]).swapaxes(0, 1)
    if attend.mesh is None:
      return jax.device_put(x)

    def shard(index: Any) -> np.ndarray:
      start, stop, _ = index[1].indices(rows_each)
      return x[index[0], start - first : stop - first, *index[2:]]

    return jax.make_array_from_callback(
      (accumulate, rows_each, *x.shape[2:]),
      NamedSharding(
        attend.mesh, P(None, axes or None, attend.axis if in_order else None)
      ),
      shard,
    )

  return put
