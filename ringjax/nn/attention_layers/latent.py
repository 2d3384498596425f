"""Multi-head latent attention: the cache keeps one small vector per token.

Guarantees: keys and values of all heads are linear in a latent vector c of a
token, besides one rotated key that the heads share. Where keys travel c and
that key do, and are expanded on arrival; where they stay in a cache the same
linear maps are applied to the query and to the output instead, and attention is
to c itself: one kv head, whose value is part of its key.
With an index a query reads only the keys with the best index scores; a key of
the index is stored after each latent.
Cost: a cache of (latent + rotated) numbers per token and layer, not 2 N H; with
an index also its key, which absorbed attention multiplies by 0.
Ref:  DeepSeek-AI 2024, arXiv 2405.04434.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree, Shaped

from ringjax.kv.base import KV, IndexedLayer, LayerCache
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.query_reading import KeyReading
from ringjax.nn.attention_layers.attention import (
  LearnedTemperature,
  Temperature,
)
from ringjax.nn.attention_layers.key_index import KeyIndex, KeyIndexLayer
from ringjax.nn.joint_calls import JointLayer
from ringjax.nn.linear import Identity, Linear, RMSNorm
from ringjax.nn.param import param
from ringjax.nn.row_tiles import by_tile
from ringjax.nn.sharding_context import Attend, Extras
from ringjax.nn.tokens import Tokens
from ringjax.nn.weights.layer_array import LayerArray
from ringjax.ops.attention.cached.cached_choice import CachedChoice
from ringjax.ops.attention.cached.selection import KeySelection
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.attention.scores import Scores
from ringjax.ops.mask import Causal, Coords, Mask
from ringjax.ops.rope import Rope, Rotation
from ringjax.ops.softmax import wide_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
  """Multi-head latent attention of one layer.

  Attributes:
    heads: Number of heads, N.
    plain: Number of a head's dims that are not rotated.
    rope: Rotation of the other dims, whose keys the heads share; None: they
      are not rotated either.
    value: Size of a head of values.
    latent: Size of the latent vector of keys and values.
    query_latent: Size of the queries' own latent vector, None for none.
    scale: Factor on the logits.
    bias: Whether the maps into the latents and of the output have biases.
    eps: Epsilon of the norms of the latents.
    mask: Mask between queries and keys.
    unturned: Number of dims whose keys the heads share, without a rotation.
    index: Chooses the keys that are read; None: all.
    temperature: Scaling of the queries by position, or None.
    gated: Whether a sigmoid of the layer's input multiplies each head's output.
    gate_dims: Number of gates of a head: 1, or `value` for one of each dim.
    sinks: Whether each head has a learned score that takes part in the softmax.
    latent_scale: Factor on the normed latents of keys and values.
    group: Name that layers with the same latents share; None: no other layer
      reads this one's.
    reads: Whether the layer has no latents, but reads those of the last layer
      of its group before it that has some. An index is then one that it reads,
      too, of which those latents have the keys.
  """

  heads: int
  plain: int
  rope: Rope | None
  value: int
  latent: int
  query_latent: int | None
  scale: float
  bias: bool
  eps: float
  mask: Mask = Causal()
  unturned: int = 0
  index: KeyIndex | None = None
  temperature: Temperature | LearnedTemperature | None = None
  gated: bool = False
  gate_dims: int = 1
  sinks: bool = False
  latent_scale: float = 1.0
  group: str | None = None
  reads: bool = False

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """Rotations that a call needs tables for."""
    ropes = dict.fromkeys((self.rope, self.row_rope))
    return tuple(rope for rope in ropes if rope is not None)

  @property
  def row_rope(self) -> Rope | None:
    """Rotation of a cached row after its latent."""
    if self.rope is None or self.index is None:
      return self.rope
    return dataclasses.replace(self.rope, copies=2)

  @property
  def row(self) -> int:
    """Number of cached numbers per token."""
    index = 0 if self.index is None else self.index.dim
    return self.latent + self.shared + index

  @property
  def shared(self) -> int:
    """Number of dims of a key that all heads share."""
    return self.unturned if self.rope is None else self.rope.dims

  @property
  def pair_flops(self) -> int:
    """FLOPs per query and key where keys travel, in expanded form."""
    return 2 * self.heads * (self.plain + self.shared + self.value)

  @property
  def reach(self) -> int | None:
    """Number of tokens that a query looks back; None: all."""
    return self.mask.reach[0]

  def cache_shape(self, layers: int) -> LayerCacheSpec:
    """Shape of what `layers` of this kind keep for a token."""
    return LayerCacheSpec(
      layers,
      1,
      self.row,
      0,
      reading=KeyReading(
        groups=self.heads,
        scores=Scores(scale=self.scale),
        mask=self.mask,
        rope=self.row_rope,
        first=self.latent,
        most=None if self.index is None else self.index.count,
        index=None if self.index is None else self.latent + self.shared,
      ),
    )

  def build(self, rngs: nnx.Rngs, embed: int) -> LatentLayer:
    return LatentLayer(rngs, self, embed)


class LatentLayer(nnx.Module):
  """The module of `Latent`."""

  # Maps whose arrays it uses, in addition to or instead of calling them.
  ARRAYS = ("kv",)

  def __init__(self, rngs: nnx.Rngs, spec: Latent, embed: int):
    self.spec = spec
    n, c, turned = spec.heads, spec.latent, spec.shared
    norm = lambda size: RMSNorm(rngs, (size,), (None,), eps=spec.eps)
    size = spec.query_latent
    if size is None:
      self.q_down, self.q_norm = Identity(), Identity()
    else:
      self.q_down = Linear(
        rngs, (embed,), (size,), ("embed", None), bias=spec.bias
      )
      self.q_norm = norm(size)
    self.q = Linear(
      rngs,
      (embed if size is None else size,),
      (n, spec.plain + turned),
      ("embed" if size is None else None, "heads", None),
    )
    if not spec.reads:
      self.kv_down = Linear(
        rngs, (embed,), (c + turned,), ("embed", None), bias=spec.bias
      )
      self.kv_norm = norm(c)
    self.kv = Linear(
      rngs, (c,), (n, spec.plain + spec.value), (None, "heads", None)
    )
    self.o = Linear(
      rngs,
      (n, spec.value),
      (embed,),
      ("heads", None, "embed"),
      bias=spec.bias,
    )
    self.gate = self._gate(rngs, embed) if spec.gated else None
    self.sinks = param(rngs, (n,), ("heads",)) if spec.sinks else None
    self.temperature: Any = (
      None if spec.temperature is None else spec.temperature.build(rngs, n)
    )
    self.index = self._index(rngs, embed, size or embed)

  def _index(
    self, rngs: nnx.Rngs, embed: int, query: int
  ) -> KeyIndexLayer | None:
    """Index of the layer, with queries of `query` numbers; None without."""
    index, rope = self.spec.index, self.spec.rope
    if index is None or index.reads:
      return None
    return index.build(rngs, embed, query, rope)

  def _gate(self, rngs: nnx.Rngs, embed: int) -> Linear:
    """Map to the gates of the heads."""
    n, dims = self.spec.heads, self.spec.gate_dims
    assert dims in (1, self.spec.value)
    if dims == 1:
      return Linear(rngs, (embed,), (n,), ("embed", "heads"))
    return Linear(rngs, (embed,), (n, dims), ("embed", "heads", None))

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: LayerCache | JointLayer,
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], Any]:
    """[B, T, D] and the layer's cache with this call's latents."""
    if self.spec.reads:
      assert not isinstance(cache, JointLayer)
      q = attend.rows(lambda x: self.q(by_tile(self.q_norm, self.q_down(x))), x)
      out = self._read(q, tokens, cache, attend)
    else:
      q, row, index = attend.rows(self._maps, x)
      if isinstance(cache, JointLayer):
        assert self.spec.index is None
        out, cache = cache.by_call(
          functools.partial(self._mixed_rows, attend), (q, row)
        )
      else:
        out, cache = self._mixed(q, row, index, tokens, cache, attend)
    if self.gate is not None:
      out = by_tile(self._gated, out, attend.rows(self.gate, x))
    return attend.rows(self.o, out), cache

  def _gated(
    self, out: Float[Array, "B T ..."], gate: Float[Array, "B T ..."]
  ) -> Float[Array, "B T ..."]:
    """Output of the heads, in one axis or in two, times their gates."""
    of_heads = lambda x: x.reshape(*x.shape[:2], self.spec.heads, -1)
    gate = jax.nn.sigmoid(gate.astype(wide_dtype(gate.dtype)))
    heads = of_heads(out) * of_heads(gate).astype(out.dtype)
    return heads.reshape(out.shape)

  def _mixed_rows(
    self,
    attend: Attend,
    q: Float[Array, "B T I"],
    row: Float[Array, "B T Y"],
    tokens: Tokens,
    cache: LayerCache,
  ) -> tuple[Float[Array, "B T O"], LayerCache]:
    """`_mixed` of queries whose heads are in one axis."""
    heads = q.reshape(*q.shape[:2], self.spec.heads, -1)
    out, cache = self._mixed(heads, row, (), tokens, cache, attend)
    return out.reshape(*out.shape[:2], -1), cache

  def _mixed(
    self,
    q: Float[Array, "B T N H"],
    latent_and_shared: Float[Array, "B T Y"],
    index: tuple[Any, ...],
    tokens: Tokens,
    cache: LayerCache,
    attend: Attend,
    choice: CachedChoice | None = None,
  ) -> tuple[Float[Array, "B T N J"], LayerCache]:
    """Attention to the latents of a cache and of the call, and the new cache.

    Args:
      q: Queries before their rotation.
      latent_and_shared: Latents before their norm, and the shared keys.
      index: Queries, weights and keys of the index; () without.
      tokens: Coordinates and rotations of the call's tokens.
      cache: The layer's part of the cache.
      attend: Attention of the call.
      choice: Choice of keys whose index keeps its keys itself; None: that of
        `index`, if the layer has one.
    """
    spec = self.spec
    latent = self.kv_norm(latent_and_shared[..., : spec.latent])
    if spec.latent_scale != 1.0:
      latent = latent * jnp.asarray(spec.latent_scale, latent.dtype)
    parts = [latent, latent_and_shared[..., spec.latent :]]
    if spec.index is not None:
      if self.index is not None:
        index = self.index.scaled(index[0], tokens.pos), *index[1:]
      index = spec.index.exchange(index, tokens, latent.dtype)
      parts.append(index[2])
    row = jnp.concatenate(parts, -1)[:, None]
    rotation = tokens.rotation(spec.row_rope, first=spec.latent)
    cache = cache.append(row, row[..., :0], tokens.at, rotation)
    q = self._scaled(q, tokens)
    q_plain, unrotated = q[..., : spec.plain], q[..., spec.plain :]
    q_turned = tokens.rotate(spec.rope, unrotated)
    cache = cache.observe(
      lambda: self._row_queries(q_plain, q_turned),
      lambda: self._row_queries(q_plain, unrotated),
    )
    selection = choice
    if spec.index is not None:
      selection = self._selection(index, tokens)
      if isinstance(cache, IndexedLayer):
        cache = cache.chosen_by(selection)
    queries = q_plain, q_turned
    return self._attended(queries, tokens, cache, attend, selection), cache

  def _read(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    cache: LayerCache,
    attend: Attend,
  ) -> Float[Array, "B T N J"]:
    """Attention to the latents of another layer, which it has appended.

    Args:
      q: Queries before their rotation.
      tokens: Coordinates and rotations of the call's tokens.
      cache: Part of the cache of the layer that has the latents.
      attend: Attention of the call.
    """
    spec, selection = self.spec, None
    q = self._scaled(q, tokens)
    q_plain, q_turned = q[..., : spec.plain], q[..., spec.plain :]
    if spec.index is not None:
      index = spec.index.exchange((), tokens, q.dtype)
      selection = self._selection(index, tokens)
    queries = q_plain, tokens.rotate(spec.rope, q_turned)
    return self._attended(queries, tokens, cache, attend, selection)

  def _scaled(
    self, q: Float[Array, "B T N H"], tokens: Tokens
  ) -> Float[Array, "B T N H"]:
    """Queries times factors of their positions, if the layer has any."""
    return q if self.temperature is None else self.temperature(q, tokens.pos)

  def _selection(self, index: tuple[Any, ...], tokens: Tokens) -> KeySelection:
    """Choice of keys by the queries, weights and keys of an index."""
    spec = self.spec
    assert spec.index is not None
    return KeySelection(
      q=tokens.rotate(spec.rope, index[0]),
      weights=index[1],
      count=spec.index.count,
      first=spec.latent + spec.shared,
    )

  def _attended(
    self,
    queries: tuple[Float[Array, "B T N P"], Float[Array, "B T N R"]],
    tokens: Tokens,
    cache: LayerCache,
    attend: Attend,
    selection: CachedChoice | None,
  ) -> Float[Array, "B T N J"]:
    """Attention of queries, plain dims and rotated ones, to latents."""
    spec = self.spec
    q_plain, q_turned = queries
    extras = Extras(
      scale=spec.scale,
      selection=selection,
      sinks=None if self.sinks is None else self.sinks[...],
    )
    if attend.resident:
      return self._absorbed(q_plain, q_turned, tokens, cache, attend, extras)
    q = jnp.concatenate([q_plain, q_turned], -1)
    # From the cache: a codec may have changed the latents.
    assert cache.fresh is not None
    row = cache.fresh.k[:, 0]
    end = spec.latent + spec.shared
    latent, unrotated = row[..., : spec.latent], row[..., spec.latent : end]
    if isinstance(selection, KeySelection):
      selection = dataclasses.replace(selection, keys=row[..., end:])
      extras = dataclasses.replace(extras, selection=selection)
    unrotated = unrotated[:, :, None]
    return self._expanded(q, latent, unrotated, tokens, attend, extras)

  def _maps(self, x: Float[Array, "B T D"]) -> tuple[Any, ...]:
    """Queries, latents, and the index's queries, weights and keys."""
    latent = by_tile(self.q_norm, self.q_down(x))
    q, down = self.q(latent), self.kv_down(x)
    if self.index is None:
      return q, down, ()
    return q, down, (*self.index.queries(x, latent), self.index.keys(x))

  def _expanded(
    self,
    q: jax.Array,
    latent: jax.Array,
    turned: jax.Array,
    tokens: Tokens,
    attend: Any,
    extras: Extras,
  ) -> jax.Array:
    spec = self.spec
    if getattr(attend, "takes_rows", False):
      rows = jnp.concatenate([latent, turned[:, :, 0]], -1)[:, None]
      keys = DerivedKeys(fresh=KV(rows, rows[..., :0], tokens.at))
      extras = dataclasses.replace(extras, up=self.kv.weight[...])
      return attend(q, tokens, keys, spec.mask, extras)
    kv = attend.rows(self.kv, latent)
    shared = jnp.broadcast_to(
      turned, (*turned.shape[:2], spec.heads, turned.shape[3])
    )
    k = jnp.concatenate([kv[..., : spec.plain], shared], -1)
    derived = DerivedKeys(
      fresh=KV(
        jnp.swapaxes(k, 1, 2),
        jnp.swapaxes(kv[..., spec.plain :], 1, 2),
        tokens.at,
      )
    )
    return attend(q, tokens, derived, spec.mask, extras)

  def _up_projection(self) -> Float[Array, "C N Y"]:
    """Map from latents to the keys and values of all heads."""
    weight = self.kv.weight.get_value()
    return weight.array() if isinstance(weight, LayerArray) else weight

  def _to_latent(self, q: jax.Array) -> jax.Array:
    """Map queries of plain keys to queries of latents, [B, T, N, C]."""
    weight = self._up_projection()[..., : self.spec.plain]
    return jnp.einsum(
      "btnh,cnh->btnc", q, weight, preferred_element_type=q.dtype
    )

  def _row_queries(self, q_plain: jax.Array, q_turned: jax.Array) -> jax.Array:
    """Queries of a cached row, zero for the index's keys."""
    q = jnp.concatenate([self._to_latent(q_plain), q_turned], -1)
    num_padding = self.spec.row - q.shape[-1]
    return jnp.pad(q, [(0, 0)] * 3 + [(0, num_padding)]) if num_padding else q

  def _absorbed(
    self,
    q_plain: jax.Array,
    q_turned: jax.Array,
    tokens: Tokens,
    cache: LayerCache,
    attend: Any,
    extras: Extras,
  ) -> jax.Array:
    spec = self.spec
    out_of = self._up_projection()[..., spec.plain :]
    # A value is the first part of its key: weighing whole keys and slicing
    # the sum avoids a copy of all keys.
    views = cache.views(apart=tokens.tree is not None)
    keys = DerivedKeys(key_views=tuple(view.keys_alone() for view in views))
    q = self._row_queries(q_plain, q_turned)
    attended = attend(q, tokens, keys, spec.mask, extras)[..., : spec.latent]
    return jnp.einsum(
      "btnc,cnj->btnj", attended, out_of, preferred_element_type=attended.dtype
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DerivedKeys:
  """Keys and values derived from those of the call, or of its cache."""

  fresh: KV | None = None
  key_views: tuple[KVView, ...] = ()
  slots: PyTree = ()

  def append(
    self,
    k: Shaped[Array, "B K T H"],
    v: Shaped[Array, "B K T J"],
    at: Coords,
    rotation: Rotation,
  ) -> DerivedKeys:
    raise AssertionError("keys that are derived are not appended to")

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> DerivedKeys:
    raise AssertionError("keys that are derived are not observed")

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    del apart
    return self.key_views
