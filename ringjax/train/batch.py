"""Rows of tokens on their way to the devices, permuted by the layout, once.

Law: a token's label, weight, position and segment lie where the token lies;
labels were shifted before, so no shard asks a neighbour for one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.errors import ShapeError, message
from ringjax.nn.spread import Spread


class Batch(NamedTuple):
  """What a step learns from, in the layout's order.

  Fields:
    tokens: int32 [A, B, T]; A micro-batches follow each other in a step.
    labels: int32 [A, B, T], what follows each token.
    weights: float32 [A, B, T], of each label's loss.
    positions: int32 [A, B, T] in each document; None: those of the row.
    segments: int32 [A, B, T], documents, 0 is padding; None: one a row.
  """

  tokens: Any
  labels: Any
  weights: Any
  positions: Any = None
  segments: Any = None


def whole_rows(tokens: Any) -> Batch:
  """The batch of rows [B, T + 1] that are one document each, not placed yet."""
  tokens = np.asarray(tokens, np.int32)
  if tokens.ndim != 2 or tokens.shape[1] < 2:
    raise ShapeError(
      message(
        "tokens",
        f"shape {tokens.shape}",
        "[B, T + 1], two tokens or more",
        "keep the token behind the last one that is read",
      )
    )
  weights = np.ones((tokens.shape[0], tokens.shape[1] - 1), np.float32)
  return Batch(tokens[:, :-1], tokens[:, 1:], weights)


def place(rows: Any, spread: Spread, accumulate: int = 1) -> Batch:
  """Puts rows [B, T] of NumPy, in true order, where a step wants them.

  Args:
    rows: with the fields of `Batch`; each process gives the same ones, whole,
      and keeps what its devices need.
    spread: the mesh, the axis and the layout.
    accumulate: A; rows are dealt to micro-batches one after another.

  Raises:
    ShapeError: rows that A, the batch's axes or the shards do not divide.
  """
  count, length = np.shape(rows.tokens)
  unit = 2 * spread.size if spread.size > 1 else 1
  if count % accumulate or length % unit:
    raise ShapeError(
      message(
        "rows",
        f"{count} of {length} tokens",
        f"a multiple of {accumulate} rows, of {unit} tokens",
        "change the batch, the length or the mesh",
      )
    )
  each = count // accumulate
  axes = spread.batch_axes(each)
  if spread.mesh is not None:
    ways = spread.data_size
    if ways > 1 and not axes:
      raise ShapeError(
        message(
          "rows",
          f"{each} in a micro-batch",
          f"a multiple of the {ways} devices of the batch's axes",
          "raise the batch, or lower the number of micro-batches",
        )
      )

  def put(x: Any) -> Any:
    if x is None:
      return None
    x = spread.layout.permute(np.asarray(x), shards=spread.size)
    x = x.reshape(accumulate, each, length)
    if spread.mesh is None:
      return jax.device_put(x)
    sharding = NamedSharding(spread.mesh, P(None, axes or None, spread.axis))
    return jax.make_array_from_callback(
      x.shape, sharding, lambda index: x[index]
    )

  return Batch(*(put(getattr(rows, name)) for name in Batch._fields))
