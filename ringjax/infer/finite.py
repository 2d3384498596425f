"""Rows whose logits are not finite: marked in a program, raised on the host.

Guarantees: a row is marked if its largest logit is not finite: if one is NaN
or +inf, or all are -inf. Masks leave -inf next to finite logits, which is
legal. A marked row has `NOT_FINITE` in place of a token and ends; other rows
continue.
Cost: one reduction over the logits, which greedy choice needs anyway. The mark
reaches the host in place of the token.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ringjax.errors import NotFiniteLogitsError

# In place of the token of a row whose logits are not finite.
NOT_FINITE = -1

# Maximum number of rows that an error names.
_NAMED = 4


def finite_rows(logits: Float[Array, "*B V"]) -> Bool[Array, " *B"]:
  """Whether the largest logit of each row is finite."""
  return jnp.isfinite(jnp.max(logits, -1))


def or_not_finite(
  token: Int[Array, " *B"], logits: Float[Array, "*B V"]
) -> Int[Array, " *B"]:
  """Chosen tokens, with `NOT_FINITE` where the logits are not finite."""
  return jnp.where(finite_rows(logits), token, NOT_FINITE)


def not_finite_error(
  at: Mapping[int, int],
  dtype: DTypeLike,
  tokens: object = None,
  *,
  unit: str = "row",
  name: str = "logits",
) -> NotFiniteLogitsError:
  """Makes the error that names rows and positions.

  Args:
    at: Position of the token that could not be chosen, by row.
    dtype: The model's dtype.
    tokens: Result of the call, if there is one.
    unit: Noun for a row in the text, as "row" or "document".
    name: Name of the logits in the text.
  """
  rows = sorted(at)
  named = [f"{unit} {row} at position {at[row]}" for row in rows[:_NAMED]]
  if len(rows) > _NAMED:
    named.append(f"{len(rows) - _NAMED} more")
  return NotFiniteLogitsError(
    name,
    "NaN, infinity or nothing but -inf for " + ", ".join(named),
    "finite logits",
    remedy(dtype),
    rows=rows,
    positions=[at[row] for row in rows],
    tokens=tokens,
  )


def remedy(dtype: DTypeLike) -> str:
  """Returns the advice for logits that are not finite, by the model's dtype."""
  if np.dtype(dtype) == np.float16:
    return "load the model as float32 or bfloat16: float16 ends at 65,504"
  return "look for NaN and infinity in the weights and adapters"


class NotFiniteRows:
  """Rows whose logits were not finite, recorded while other rows continue.

  Attributes:
    at: Position of the token that could not be chosen, by row.
  """

  def __init__(self) -> None:
    self.at: dict[int, int] = {}

  def note(
    self,
    tokens: Int[np.ndarray, " B"],
    pos: Int[np.ndarray, " B"],
    live: Bool[np.ndarray, " B"],
  ) -> Bool[np.ndarray, " B"]:
    """Records the marked rows among `live` ones; returns their mask, bool [B].

    Args:
      tokens: Chosen tokens or `NOT_FINITE`, int [B].
      pos: Positions of these tokens, int [B].
      live: Mask of rows that have not ended, bool [B].
    """
    marked = live & (tokens == NOT_FINITE)
    if marked.any():
      for row in np.flatnonzero(marked):
        self.at[int(row)] = int(pos[row])
    return marked

  def check(
    self, dtype: DTypeLike, tokens: object, *, name: str = "logits"
  ) -> None:
    """Raises an error if a row was recorded.

    Args:
      dtype: The model's dtype.
      tokens: Result of the call, carried by the error.
      name: Name of the logits in the text.

    Raises:
      NotFiniteLogitsError: If a row was recorded.
    """
    if self.at:
      raise not_finite_error(self.at, dtype, tokens, name=name)
