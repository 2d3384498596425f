"""Latents between shards: rows of latent attention travel, not heads' keys.

Guarantees: the result is that of attention to the keys and values of all heads,
forward and backward. A row of a token is its latent c and the key dims that
the heads share, r; head n has the key [c . up_k[n], r] and the value
c . up_v[n], where up = [up_k, up_v] is the up-projection. Rows are what a
strategy sends and what arrives; the gradient of a row is summed over the heads
of a shard before it travels.
Cost: a hop sends C + R numbers a token, not N (H + J); at arrival either

  UpProjected   2 C N (P + J) FLOPs a token of the block, three times as many
                backward: a block is projected again, as its rows arrive again
  Absorbed      none; products of queries with rows, 4 N (C + R) FLOPs a pair
                and not 2 N (H + J), for queries that the caller has projected

Memory: the heads' keys and values of the current block.
Ref: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.2.

Both are local algorithms around another one, so that each strategy that sends
keys can send rows, at all of its levels and in all wire formats.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.ops.attention.blockwise import (
  Gradients,
  Local,
  QGradients,
  Residuals,
)
from ringjax.ops.attention.scores import ScoreArgs
from ringjax.ops.softmax import Partial


def up_project(
  rows: Float[Array, "B S X"], up: Float[Array, "C N Y"], plain: int
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N J"]]:
  """Compute the keys and values of all heads from rows.

  Args:
    rows: Latents, and then the key dims that the heads share.
    up: Up-projection to the heads' other key dims and to their values.
    plain: Number of key dims of a head that are not shared, P.
  """
  size, heads = up.shape[:2]
  latent, shared = rows[..., :size], rows[..., None, size:]
  kv = jnp.einsum("bsc,cnh->bsnh", latent, up, preferred_element_type=up.dtype)
  shared = jnp.broadcast_to(shared, (*rows.shape[:2], heads, shared.shape[-1]))
  k = jnp.concatenate([kv[..., :plain], shared], -1)
  return k, kv[..., plain:]


@dataclasses.dataclass(frozen=True)
class RowAlgorithm:
  """Base class of local algorithms whose keys are rows, without values.

  Attributes:
    local: Algorithm that attends to what is made from the rows.
  """

  local: Any

  @property
  def axes(self) -> tuple[str, ...]:
    return self.local.axes

  @property
  def differentiable(self) -> bool:
    return self.local.differentiable

  @property
  def interpret(self) -> bool:
    """Whether a kernel runs in the interpreter of Pallas."""
    return getattr(self.local, "interpret", False)

  def span(self, keys: int) -> int:
    """Number of keys that a call sees whose operands hold `keys`."""
    return self.local.span(keys)


@dataclasses.dataclass(frozen=True)
class UpProjected(RowAlgorithm):
  """Attention to the keys and values that rows are projected to.

  The operands' keys are rows, [B, 1, S, C + R], and their values have no
  numbers; queries are those of N kv heads, [B, N, 1, T, H].
  """

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold the keys of these rows into `carry`."""
    return self.local.forward(*_projected(x, args), carry)

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Add the gradients of these rows to `carry`, (dq, dterms)."""
    dq, dterms = carry
    up, dup = args.terms.up, dterms.up
    assert up is not None and dup is not None
    carry = dq, dterms._replace(up=None)
    grads = self.local.backward(*_projected(x, args), residuals, carry)
    plain = _plain_dims(x, up)
    dshared = jnp.sum(grads.k[..., plain:], 1, keepdims=True)
    dkv = jnp.concatenate([grads.k[..., :plain], grads.v], -1)
    # Products of the operands' dtype, as those of other weights' gradients.
    dkv, sum_dtype = dkv.astype(up.dtype), grads.k.dtype
    latent = x.k[:, 0, :, : up.shape[0]]
    dlatent = jnp.einsum(
      "bnsh,cnh->bsc", dkv, up, preferred_element_type=sum_dtype
    )
    dup += jnp.einsum(
      "bsc,bnsh->cnh", latent, dkv, preferred_element_type=sum_dtype
    )
    return Gradients(
      grads.q,
      jnp.concatenate([dlatent[:, None], dshared], -1),
      jnp.zeros_like(x.v, sum_dtype),
      grads.terms._replace(up=dup),
    )


@dataclasses.dataclass(frozen=True)
class Absorbed(RowAlgorithm):
  """Attention to rows themselves, each the key and the value of all heads.

  The operands' keys are rows, [B, 1, S, C + R], and their values have no
  numbers; queries are [B, 1, N, T, C + R]. The first C numbers of an output
  are the weighted latents.
  """

  def forward(self, x: Local, args: ScoreArgs, carry: Partial) -> Partial:
    """Fold these rows into `carry`."""
    return self.local.forward(x._replace(v=x.k), args, carry)

  def backward(
    self, x: Local, args: ScoreArgs, residuals: Residuals, carry: QGradients
  ) -> Gradients:
    """Add the gradients of these rows to `carry`, (dq, dterms)."""
    grads = self.local.backward(x._replace(v=x.k), args, residuals, carry)
    return grads._replace(
      k=grads.k + grads.v, v=jnp.zeros_like(x.v, grads.v.dtype)
    )


def _plain_dims(x: Local, up: jax.Array) -> int:
  """Number of key dims of a head that are not shared, P."""
  return x.q.shape[-1] - (x.k.shape[-1] - up.shape[0])


def _projected(x: Local, args: ScoreArgs) -> tuple[Local, ScoreArgs]:
  """Operands with the keys and values of all heads."""
  up = args.terms.up
  assert up is not None
  k, v = up_project(x.k[:, 0], up, _plain_dims(x, up))
  args = args._replace(terms=args.terms._replace(up=None))
  return Local(x.q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)), args
