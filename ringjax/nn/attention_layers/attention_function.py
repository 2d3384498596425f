"""A dense attention function of the caller, over the keys of a cache.

Guarantees: the function gets a layer's keys and values as plain arrays, a row's
tokens one after another in the order of its slots, and zeros in empty slots; it
needs no pages, tables or shards. Each query has a key that it may see: those of
padding see all, and their results are not used.
Cost: keys and values are sliced from the cache in each call, a copy of what the
function reads unless XLA fuses it.
Memory: that copy, a mask of B T S bools, and what the function makes.
Ref: Prabhu et al. 2024, vAttention, arXiv 2405.04437.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ringjax.errors import InputTypeError, OptionError, ShapeError
from ringjax.kv.state import StateShape
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.attention_layers.attention_and_state import AttentionAndState
from ringjax.nn.block import Layer
from ringjax.nn.sharding_context import CachedAttention, Extras
from ringjax.ops.attention.cached.pooled import PooledView
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.mask import Coords, Mask, visible

# f(query [B, T, N, H], key [B, S, K, H], value [B, S, K, J], mask=bool
# [B, 1, T, S], scale=float) -> [B, T, N, J], as `jax.nn.dot_product_attention`.
DenseFunction = Callable[..., Any]


def check_function(function: object, layers: tuple[Layer, ...]) -> None:
  """Check that a function is callable, and can compute the layers' scores.

  Raises:
    InputTypeError: If it is not callable.
    OptionError: If scores of layers depend on more than queries, keys, a mask
      and a scale, or their keys have no heads.
  """
  if not callable(function):
    raise InputTypeError(
      "attention_fn",
      type(function).__name__,
      "a function of query, key, value, mask= and scale=",
      "pass jax.nn.dot_product_attention, for instance",
    )
  for layer in layers:
    mixer = layer.attention
    if isinstance(mixer, AttentionAndState):
      mixer = mixer.attention
    if type(mixer) is Attention:
      refused = [
        name
        for name in ("soft_cap", "sinks", "alibi")
        if getattr(mixer, name) not in (None, False)
      ]
    elif isinstance(mixer.cache_shape(1), StateShape):
      refused = []
    else:
      refused = [type(mixer).__name__]
    if layer.cross is not None:
      refused.append("cross-attention")
    if refused:
      raise OptionError(
        "attention_fn",
        f"a function for layers with {', '.join(refused)}",
        "layers whose scores are scaled products of queries and keys",
        "leave attention_fn out",
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FunctionAttention(CachedAttention):
  """Keys stay in the cache, and a function of the caller reads them.

  Attributes:
    function: Attention function, see `DenseFunction`.
    reach: Number of tokens that the function gets of each contiguous row of a
      pool, a multiple of its page; 0 for other caches.
    stride: Number of pages of a row of the pool, where row n of the call is
      row n there; None where tables say in which page each row begins.
  """

  takes_classes = False

  function: DenseFunction
  reach: int = 0
  stride: int | None = None

  def visit(
    self,
    q: Float[Array, "B T N H"],
    views: tuple[KVView, ...],
    at: Coords,
    mask: Mask,
    extras: Extras,
  ) -> Float[Array, "B T N J"]:
    single_view = len(views) == 1 and views[0].mask is None
    terms = extras.soft_cap, extras.sinks, extras.slopes, extras.selection
    if not single_view or any(x is not None for x in terms):
      raise OptionError(
        "attention_fn",
        "a function for keys in several arrays, or for scores with more terms",
        "one array of keys, whose scores are scaled products",
        "leave attention_fn out, or drafts, contexts and the cache's policy",
      )
    (view,) = views
    if isinstance(view, PooledView):
      view = self._row(view)
    size = view.shape[2]
    k, v = view.tile(0, size)
    broadcast = lambda c: Coords(*(jnp.broadcast_to(x, (q.shape[0], x.shape[1]))
                               for x in c))  # fmt: skip
    queries, keys = broadcast(at), broadcast(view.at)
    allowed = visible(mask, queries[:, :, None], keys[:, None])
    allowed |= ~jnp.any(allowed, 2, keepdims=True)
    real = keys.seg > 0
    out = self.function(
      q,
      _plain(k, real, q),
      _plain(v, real, q),
      mask=allowed[:, None],
      scale=extras.scale,
    )
    want = (*q.shape[:3], v.shape[-1])
    if getattr(out, "shape", None) != want:
      raise ShapeError(
        "attention_fn",
        f"a result of shape {getattr(out, 'shape', type(out).__name__)}",
        f"{list(want)}, an array for each query's heads",
        "return the weighted sums of values, as "
        "jax.nn.dot_product_attention does",
      )
    return out.astype(q.dtype)

  def _row(self, view: PooledView) -> PooledView:
    """Rows of a pool up to the reach: each page follows the one before it."""
    pages = self.reach // view.page
    if self.stride is None:
      first = jnp.maximum(view.table[:, 0], 0)
    else:
      first = jnp.arange(view.table.shape[0], dtype=jnp.int32) * self.stride
    table = first[:, None] + jnp.arange(pages, dtype=jnp.int32)[None]
    at = Coords(*(x[:, : self.reach] for x in view.at))
    return dataclasses.replace(view, table=table, at=at, shared=None)


def _plain(
  x: Float[Array, "B K S X"], real: Bool[Array, "B S"], q: Array
) -> Float[Array, "B S K X"]:
  """Keys or values in the function's layout, with zeros in empty slots."""
  x = jnp.where(real[:, None, :, None], x, 0)
  return jnp.swapaxes(x, 1, 2).astype(q.dtype)
