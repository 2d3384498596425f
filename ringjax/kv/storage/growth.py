"""Growth of a cache's memory: sizes, and arrays with more slots."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from ringjax.parallel.programs import bounded


class Growth(NamedTuple):
  """Growth policy of a cache's memory.

  Fields:
    step: Minimum number of slots to add.
    limit: Maximum number of tokens in a row.
  """

  step: int
  limit: int

  def size(self, tokens: int) -> int:
    """Capacity for `tokens` tokens, rounded up to one of few sizes.

    At most a ninth of the slots, or less than one step, stays unused.
    """
    step = self.step << max(0, tokens // (8 * self.step)).bit_length()
    return min(self.limit, -(-tokens // step) * step)


def widened_slots(
  x: Shaped[Array, " ..."], axis: int, more: int
) -> Shaped[Array, " ..."]:
  """Copy an array into a larger one and delete it, unless it is empty.

  Args:
    x: Array with slots.
    axis: Axis of the slots.
    more: Number of slots to add.
  """
  larger = _widened(x, axis, more) if x.size else x
  if larger is not x:
    x.delete()
  return larger


@bounded
@functools.partial(jax.jit, static_argnums=(1, 2))
def _widened(x: Shaped[Array, " ..."], axis: int, more: int) -> jax.Array:
  """Pad an axis at its end with zeros."""
  return jnp.pad(x, [(0, more * (n == axis)) for n in range(x.ndim)])
