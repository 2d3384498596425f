"""Sums over a layer's tokens of what its router computed, for training.

Guarantees: sums are over tokens that are no padding, of each row apart, and
the same on every mesh; a token is counted once, wherever it is.
Cost: one reduction over an array [B, T, E] that the router has anyway.
Memory: [B, E] a layer.

Losses of balance are functions of these sums, so that layers return them and
need not know which losses a training has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ringjax.nn.sums.sum_record import SumRecord


@runtime_checkable
class Router(Protocol):
  """A rule that turns logits into weights and choices of experts."""

  def likelihoods(self, logits: Float[Array, "*n E"]) -> Float[Array, "*n E"]:
    """Routing probabilities of each token, which sum to one."""
    ...


class RouterSums(NamedTuple):
  """Sums over the tokens of each row in one layer, float32.

  With a leading axis they are those of several layers.

  Fields:
    load: Number of tokens that each expert computes, [B, E].
    favoured: Number of tokens among whose k likeliest experts each one is,
      [B, E]. It differs from `load` where an offset changes the ranking; a
      router of groups without an offset ranks within its chosen groups.
    likelihood: Sum of the routing probabilities of each expert, [B, E].
    squares: Sum of the squared logsumexp of the logits, [B].
  """

  load: Float[Array, "*L B E"]
  favoured: Float[Array, "*L B E"]
  likelihood: Float[Array, "*L B E"]
  squares: Float[Array, "*L B"]

  def joined(self, join_rows: Callable[[Array], Array]) -> RouterSums:
    """Sums of all rows, from those of groups of rows, [L, M, b, ...] each.

    Args:
      join_rows: Function that joins the rows of groups, to [L, B, ...].
    """
    return RouterSums(*map(join_rows, self))


class RouterRecord(SumRecord[RouterSums]):
  """Receives the routing of one layer while it is traced."""

  def add(
    self,
    router: Router,
    logits: Float[Array, "B T E"],
    chosen: Int[Array, "B T k"],
    *,
    offset: bool,
  ) -> None:
    """Sum a layer's routing.

    Args:
      router: Rule of the layer.
      logits: Logits of the experts, float32.
      chosen: Experts of each token.
      offset: Whether an offset changed the ranking of the experts.
    """
    logits = logits.astype(jnp.float32)
    real = jnp.broadcast_to(self.real, logits.shape[:2])
    likelihoods = router.likelihoods(logits)
    load = _counts(chosen, real, logits.shape[-1])
    favoured = load
    if offset:
      likeliest = lax.top_k(lax.stop_gradient(likelihoods), chosen.shape[-1])[1]
      favoured = _counts(likeliest, real, logits.shape[-1])
    weight = real.astype(jnp.float32)
    squares = jnp.square(jax.nn.logsumexp(logits, -1))
    self._add(
      RouterSums(
        load,
        favoured,
        jnp.sum(likelihoods * weight[..., None], 1),
        jnp.sum(squares * weight, 1),
      )
    )


def _counts(
  chosen: Int[Array, "B T k"], real: Bool[Array, "B T"], experts: int
) -> Float[Array, "B E"]:
  """Number of real tokens that have each expert among their choices."""
  # A comparison and not a scatter: the compiler fuses it with the sum, and
  # sums over shards of the tokens without gathering them.
  numbers = jnp.arange(experts, dtype=chosen.dtype)[None, None, None]
  is_chosen = (chosen[..., None] == numbers) & real[..., None, None]
  return jnp.sum(is_chosen, (1, 2), dtype=jnp.int32).astype(jnp.float32)
