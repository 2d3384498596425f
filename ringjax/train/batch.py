"""Batches on devices: rows of tokens, permuted by the layout once.

Guarantees: a token's label, weight, position and segment are where the token
is; labels were shifted before, so no shard asks a neighbour for one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from ringjax.data.packing import PackedBatch
from ringjax.errors import DataError, ShapeError
from ringjax.nn.sharding_context import ShardingContext
from ringjax.ops.loss import IGNORE_INDEX
from ringjax.typing import ArrayLeaf

# Fields of packed rows, in the order of `Batch`.
BY_TOKEN = ("tokens", "labels", "weights", "positions", "segments")


class Chunks(NamedTuple):
  """The contexts of rows, that an encoder reads.

  Fields:
    tokens: int32 [A, B, k, C], chunks in their order.
    segments: int32 [A, B, k, C], 0 for padding and for what is masked.
  """

  tokens: Int[ArrayLeaf, "A B k C"]
  segments: Int[ArrayLeaf, "A B k C"]


class Batch(NamedTuple):
  """The rows of a step, in the layout's order.

  Fields:
    tokens: int32 [A, B, T]; A micro-batches follow each other in a step.
    labels: int32 [A, B, T], the token that follows.
    weights: float32 [A, B, T], of each label's loss.
    positions: int32 [A, B, T] in each document; None: those of the row.
    segments: int32 [A, B, T], documents, 0 is padding; None: one a row.
    context: what an encoder reads for each row, or None.
    whole: rows of context and these tokens together, for a teacher, or None.
    lag: int32 [A, B, 1], how far a draft's view of its target's keys is behind,
      or None.
  """

  tokens: Int[ArrayLeaf, "A B T"]
  labels: Int[ArrayLeaf, "A B T"]
  weights: Float[ArrayLeaf, "A B T"]
  positions: Int[ArrayLeaf, "A B T"] | None = None
  segments: Int[ArrayLeaf, "A B T"] | None = None
  context: Chunks | None = None
  whole: Batch | None = None
  lag: Int[ArrayLeaf, "A B 1"] | None = None


def whole_rows(tokens: Int[np.ndarray, "B T"]) -> Batch:
  """The batch of rows [B, T + 1] that are one document each, not placed yet."""
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
    count: B, rows of a step.
    length: T, tokens of each.
    attend: the mesh, the axis and the layout.
    accumulate: A, micro-batches of a step.

  Raises:
    ShapeError: A, the batch's axes or the shards do not divide the rows.
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
  each, parts = count // accumulate, attend.data_size
  if parts > 1 and not attend.batch_axes(each):
    raise ShapeError(
      "rows",
      f"{each} in a micro-batch",
      f"a multiple of the {parts} devices of the batch's axes",
      f"pass a batch of {accumulate * parts}, or fewer micro-batches",
    )


def check_ids(rows: PackedBatch | Batch, vocab: int | None = None) -> None:
  """Checks that tokens and labels [B, T] are ids of a model.

  Args:
    rows: of NumPy.
    vocab: V; None: ids are 0 or more.

  Raises:
    DataError: see `place`.
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
      most = "from 0 on" if vocab is None else f"from 0 to {vocab - 1}"
      none = f", or {IGNORE_INDEX} for no label" if name == "labels" else ""
      raise DataError(
        name,
        f"{int(ids[at])} at {[*at]}, and {int(wrong.sum()) - 1} more",
        f"ids {most}{none}",
        "make them with the tokenizer of this model",
      )


class ProcessShare(NamedTuple):
  """A process's share of each batch: part `host` of `hosts` equal ones."""

  host: int = 0
  hosts: int = 1


def share_of(
  attend: ShardingContext, process: int | None = None
) -> ProcessShare:
  """The rows of a batch that the devices of a process need.

  A part of its own if the batch's axes divide it by processes; all rows if a
  row is on devices of several.

  Args:
    attend: the mesh and its axes.
    process: its number; default: this one's.
  """
  parts = attend.data_size
  if attend.mesh is None or parts == 1:
    return ProcessShare()
  axes = attend.mesh.axis_names
  # The devices of each share of the batch, shares in their order.
  order = [axes.index(a) for a in attend.batch_axes(parts)]
  rest = [i for i in range(len(axes)) if i not in order]
  devices = attend.mesh.devices.transpose(*order, *rest).reshape(parts, -1)
  owners = np.vectorize(lambda d: d.process_index, otypes=[int])(devices)
  shares = {
    p: tuple(np.flatnonzero((owners == p).any(1)).tolist())
    for p in np.unique(owners).tolist()
  }
  mine = shares[jax.process_index() if process is None else process]
  size = len(mine)
  blocks = {tuple(range(i, i + size)) for i in range(0, parts, size)}
  if set(shares.values()) != blocks:
    return ProcessShare()
  return ProcessShare(mine[0] // size, parts // size)


_WHOLE = ProcessShare()


def place(
  rows: PackedBatch | Batch,
  attend: ShardingContext,
  accumulate: int = 1,
  part: ProcessShare = _WHOLE,
  vocab: int | None = None,
) -> Batch:
  """Moves rows [B / hosts, T] of NumPy, in true order, to the devices.

  Args:
    rows: with the fields of `Batch`, those of this process's part.
    attend: the mesh, the axis and the layout.
    accumulate: A; of A rows that follow each other each goes to another
      micro-batch.
    part: which rows these are, by `share_of`; by default all.
    vocab: V, of the model: ids are below it. None: it is not looked at.

  Raises:
    DataError: a token that is no id, or a label that is neither an id nor -100
      (`ops.loss.IGNORE_INDEX`, for tokens without a label).
    ShapeError: A, the batch's axes or the shards do not divide the rows.
  """
  count, length = np.shape(rows.tokens)
  check(count * part.hosts, length, attend, accumulate)
  check_ids(rows, vocab)
  here = count // accumulate
  each, first = here * part.hosts, here * part.host
  axes = attend.batch_axes(each)

  def put(x: np.ndarray, *, over: str | None = attend.axis) -> jax.Array:
    x = x.reshape(here, accumulate, *x.shape[1:]).swapaxes(0, 1)
    if attend.mesh is None:
      return jax.device_put(x)

    def shard(index: Any) -> np.ndarray:
      start, stop, _ = index[1].indices(each)
      return x[index[0], start - first : stop - first, *index[2:]]

    return jax.make_array_from_callback(
      (accumulate, each, *x.shape[2:]),
      NamedSharding(attend.mesh, P(None, axes or None, over)),
      shard,
    )

  def ordered(x: np.ndarray) -> jax.Array:
    # Uneven shards have slots that are empty.
    return put(attend.layout.permute(np.asarray(x), shards=attend.size))

  apart = functools.partial(put, over=None)
  return Batch(
    *jax.tree.map(ordered, tuple(getattr(rows, name) for name in BY_TOKEN)),
    context=jax.tree.map(apart, getattr(rows, "context", None)),
    whole=jax.tree.map(ordered, getattr(rows, "whole", None)),
    lag=jax.tree.map(apart, getattr(rows, "lag", None)),
  )
