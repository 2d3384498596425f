"""Attention for Flax's multi-head modules, `attention_fn=rj.flax_attention`.

Guarantees: the result of `rj.dot_product_attention`; an argument that can't be
followed is refused by name, and none is ignored.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from ringjax.errors import OptionError
from ringjax.ops.attention.api import dot_product_attention


def flax_attention(
  query: Float[Array, "*B T N H"],
  key: Float[Array, "*B S N H"],
  value: Float[Array, "*B S N J"],
  bias: Float[Array, " ..."] | None = None,
  mask: Bool[Array, " ..."] | Float[Array, " ..."] | None = None,
  *,
  broadcast_dropout: bool = False,
  dropout_rng: Array | None = None,
  dropout_rate: float = 0.0,
  deterministic: bool = False,
  dtype: DTypeLike | None = None,
  precision: object = None,
  module: object = None,
  is_causal: bool = False,
  **options: Any,
) -> Float[Array, "*B T N J"]:
  """Attend as `flax.nnx.MultiHeadAttention` and Linen's ask their functions to.

  Pass it as `attention_fn=rj.flax_attention`, or with options of
  `rj.dot_product_attention` (Linen passes on no others than it knows):
  `attention_fn=functools.partial(rj.flax_attention, axis="seq")`. A mask array
  is [T, S] large; Flax's `is_causal`, or `is_causal=True` in the partial, costs
  none.

  Args:
    query: Queries, [..., T, N, H].
    key: Keys, [..., S, N, H].
    value: Values, [..., S, N, J].
    bias: Bias added to the scaled logits, broadcastable to [..., N, T, S].
    mask: Nonzero where a query sees a key, broadcastable to [..., N, T, S].
    broadcast_dropout: Whether examples and heads drop the same pairs; only
      False can be followed while dropout is on.
    dropout_rng: Key of the dropout's random numbers.
    dropout_rate: Share of the attention weights that is dropped.
    deterministic: Whether dropout is off.
    dtype: Dtype of the computation; default: the operands'.
    precision: Precision of the products; only None can be followed.
    module: Module that asks for the attention weights; they are never an
      array here, so only None can be followed.
    is_causal: Whether a query sees only keys at or before its position.
    options: Further arguments of `rj.dot_product_attention`.

  Returns:
    Attention output, [..., T, N, J].

  Raises:
    OptionError: If an argument can't be followed.
  """
  active = dropout_rate > 0 and not deterministic
  for name, value_given, refused, remedy in (
    ("broadcast_dropout", broadcast_dropout, active and broadcast_dropout,
     "pass broadcast_dropout=False to the module"),
    ("dropout_rng", dropout_rng, active and dropout_rng is None,
     "pass rngs or dropout_rng to the module, or deterministic=True"),
    ("precision", precision, precision is not None,
     "set jax_default_matmul_precision instead"),
    ("module", type(module).__name__, module is not None,
     "call the module without sow_weights"),
  ):  # fmt: skip
    if refused:
      raise OptionError(
        name, f"{value_given!r}", "one that ringjax follows", remedy
      )
  if dtype is not None:
    query, key, value = (x.astype(dtype) for x in (query, key, value))
  if mask is not None and mask.dtype != np.bool_:
    mask = mask != 0
  if active and dropout_rng is not None:
    seed = jax.random.bits(dropout_rng, dtype=jnp.uint32)
    options["dropout_rate"] = float(dropout_rate)
    options["dropout_seed"] = jax.lax.bitcast_convert_type(seed, jnp.int32)
  return dot_product_attention(
    query, key, value, bias, mask, is_causal=is_causal, **options
  )
