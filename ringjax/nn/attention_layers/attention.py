"""Attention layers: projections around the attention of the call."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ringjax.kv.base import LayerCache
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.query_reading import KeyReading
from ringjax.nn.joint_calls import JointLayer
from ringjax.nn.linear import Identity, LayerNorm, Linear, Norm, RMSNorm
from ringjax.nn.param import param
from ringjax.nn.row_tiles import by_tile, by_token
from ringjax.nn.sharding_context import Attend, Extras
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.cached.cached_choice import CachedChoice
from ringjax.ops.attention.scores import Scores
from ringjax.ops.mask import Causal, Mask
from ringjax.ops.rope import Rope
from ringjax.ops.softmax import wide_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperature:
  """Queries scale with their position: 1 + scale ln(1 + floor((p + c) / n)).

  Attributes:
    scale: Factor of the logarithm.
    floor: n, number of positions of a step.
    counted: Position of the first token, c.
  """

  scale: float
  floor: float
  counted: int = 1

  def __call__(
    self, q: Float[Array, "B T N H"], pos: Int[Array, "#B T"]
  ) -> Float[Array, "B T N H"]:
    place = pos.astype(jnp.float32) + self.counted
    steps = jnp.floor(place / jnp.float32(self.floor))
    factor = jnp.log1p(steps) * jnp.float32(self.scale) + 1
    return (q.astype(jnp.float32) * factor[:, :, None, None]).astype(q.dtype)

  def build(self, rngs: nnx.Rngs, heads: int) -> Temperature:
    """Return itself, as it has no parameters."""
    del rngs, heads
    return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedTemperature:
  """Queries scale with their position p: scale ln(p + 1) + bias, for each head.

  Both numbers are learned.
  """

  def build(
    self, rngs: nnx.Rngs, heads: int, axis: str | None = "heads"
  ) -> LearnedTemperatureLayer:
    """Make the module, for heads of a logical axis."""
    return LearnedTemperatureLayer(rngs, heads, axis)


class LearnedTemperatureLayer(nnx.Module):
  """The module of `LearnedTemperature`."""

  def __init__(self, rngs: nnx.Rngs, heads: int, axis: str | None):
    self.scale = param(rngs, (heads,), (axis,), value=0.0)
    self.bias = param(rngs, (heads,), (axis,), value=1.0)

  def __call__(
    self, q: Float[Array, "B T N H"], pos: Int[Array, "#B T"]
  ) -> Float[Array, "B T N H"]:
    """Scale queries by their positions."""
    dtype = wide_dtype(q.dtype)
    steps = jnp.log1p(pos.astype(dtype))[:, :, None]
    scale, bias = (
      x[...].astype(dtype)[None, None] for x in (self.scale, self.bias)
    )
    factor = scale * steps + bias
    return (q.astype(dtype) * factor[..., None]).astype(q.dtype)


def alibi_slopes(heads: int) -> tuple[float, ...]:
  """Slopes of Press et al. 2021, arXiv 2108.12409, for any number of heads."""
  power = 1 << (heads.bit_length() - 1)
  slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
  further = [
    2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)
  ]
  return tuple(slopes + further)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
  """Grouped-query attention of one layer.

  Attributes:
    heads: Number of query heads, N.
    kv_heads: Number of key heads, K.
    head_dim: Size of a head of queries and keys, H.
    value_dim: Size of a head of values, J; None for H.
    value_scale: Factor on the values.
    mask: Mask between queries and keys.
    rope: Rotation; None for a layer without positions.
    scale: Factor on the logits; default H**-0.5.
    bias: Whether the query, key and value projections have biases.
    out_bias: Whether the output projection has a bias.
    soft_cap: Soft cap of the logits.
    qk_norm: Norm of queries and keys, None for none.
    qk_norm_whole: Whether it is over all heads together, not over each.
    qk_norm_late: Whether it is after the rotation instead of before it.
    qk_norm_per_head: Whether it has a weight for each head (LayerNorm).
    clip: Bound to which values, and queries and keys before their rotation, are
      clipped; not with a late norm.
    temperature: Scaling of the queries by position.
    sinks: Whether each head has a learned score that takes part in the softmax.
    alibi: Slopes of the heads, or None.
    gated: Whether the output is multiplied by the sigmoid of a projection.
    value_norm: Norm of each head's values, None for none.
    out_norm: Norm of each head's output, without a weight; None for none.
    one_map: Whether the keys' projection, before its norm, is used as values.
    group: Name of layers that share the keys and values of the first of them;
      None: the layer has its own.
    reads: Whether it has no keys, but reads those of its group.
  """

  heads: int
  kv_heads: int
  head_dim: int
  value_dim: int | None = None
  value_scale: float = 1.0
  mask: Mask = Causal()
  rope: Rope | None = None
  scale: float | None = None
  bias: bool = False
  out_bias: bool = False
  soft_cap: float | None = None
  qk_norm: Norm | None = None
  qk_norm_whole: bool = False
  qk_norm_late: bool = False
  qk_norm_per_head: bool = False
  clip: float | None = None
  temperature: Temperature | None = None
  sinks: bool = False
  alibi: tuple[float, ...] | None = None
  gated: bool = False
  value_norm: Norm | None = None
  out_norm: Norm | None = None
  one_map: bool = False
  group: str | None = None
  reads: bool = False

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """Rotations that a call needs tables for."""
    return () if self.rope is None else (self.rope,)

  @property
  def pair_flops(self) -> int:
    """FLOPs per query and key, in the products with keys and with values."""
    return 2 * self.heads * (self.head_dim + self.value)

  @property
  def value(self) -> int:
    """J, the size of a head of values."""
    return self.head_dim if self.value_dim is None else self.value_dim

  @property
  def logit_scale(self) -> float:
    """Factor on the logits."""
    return self.head_dim**-0.5 if self.scale is None else self.scale

  @property
  def reach(self) -> int | None:
    """Number of tokens that a query looks back; None: all."""
    return self.mask.reach[0]

  def cache_shape(self, layers: int) -> LayerCacheSpec:
    """Shape of what `layers` of this kind keep for a token."""
    return LayerCacheSpec(
      layers,
      self.kv_heads,
      self.head_dim,
      self.value,
      self.mask.reach[0],
      KeyReading(
        groups=self.heads // self.kv_heads,
        scores=Scores(scale=self.logit_scale, soft_cap=self.soft_cap),
        mask=self.mask,
        slopes=self.alibi,
        rope=self.rope,
        late=self.qk_norm_late and self.qk_norm is not None,
      ),
    )

  def build(self, rngs: nnx.Rngs, embed: int) -> GroupedQuery:
    return GroupedQuery(rngs, self, embed)


def head_norm(
  rngs: nnx.Rngs, spec: Attention, heads: int
) -> Identity | LayerNorm | RMSNorm:
  """Make the norm of queries or keys [..., heads, H] of a layer, if any."""
  if spec.qk_norm is None:
    return Identity()
  joint, per_head = spec.qk_norm_whole, spec.qk_norm_per_head
  dims = (heads, spec.head_dim) if joint or per_head else (spec.head_dim,)
  return spec.qk_norm.build(rngs, *dims, together=joint)


class GroupedQuery(nnx.Module):
  """The module of `Attention`; its output may have another width than x."""

  def __init__(
    self, rngs: nnx.Rngs, spec: Attention, embed: int, out: int | None = None
  ):
    out = embed if out is None else out
    n, k, h, j = spec.heads, spec.kv_heads, spec.head_dim, spec.value
    self.spec = spec
    into = lambda heads, dim, name, bias: Linear(
      rngs, (embed,), (heads, dim), ("embed", name, None), bias=bias
    )
    self.q = into(n, h, "heads", spec.bias)
    if not spec.reads:
      self.k = into(k, h, "kv_heads", spec.bias)
      self.v = None if spec.one_map else into(k, j, "kv_heads", spec.bias)
      self.k_norm = head_norm(rngs, spec, k)
      value_norm = spec.value_norm
      self.v_norm = (
        Identity() if value_norm is None else value_norm.build(rngs, j)
      )
    self.o = Linear(
      rngs, (n, j), (out,), ("heads", None, "embed"), bias=spec.out_bias
    )
    self.gate = into(n, j, "heads", False) if spec.gated else None
    self.q_norm = head_norm(rngs, spec, n)
    out_norm = spec.out_norm
    self.out_norm = Identity() if out_norm is None else out_norm.build(rngs, j)
    self.sinks = param(rngs, (n,), ("heads",)) if spec.sinks else None

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: LayerCache | JointLayer,
    attend: Attend,
  ) -> tuple[Float[Array, "B T _"], Any]:
    """[B, T, D] and the layer's cache with this call's keys."""
    spec = self.spec
    if spec.reads:
      assert not isinstance(cache, JointLayer)
      q = tokens.rotate(spec.rope, self.q_norm(attend.rows(self.q, x)))
      return self._projected(
        x, self._seen(q, tokens, cache, attend), attend
      ), cache
    q, k, v = attend.rows(self._maps, x)
    if isinstance(cache, JointLayer):
      mix = functools.partial(self._mixed_rows, attend)
      out, cache = cache.by_call(mix, (q, k, v))
    else:
      out, cache = self._mixed(q, k, v, tokens, cache, attend)
    return self._projected(x, out, attend), cache

  def _mixed_rows(
    self,
    attend: Attend,
    q: Float[Array, "B T I"],
    k: Float[Array, "B T Y"],
    v: Float[Array, "B T Z"],
    tokens: Tokens,
    cache: LayerCache,
  ) -> tuple[Float[Array, "B T O"], LayerCache]:
    """`_mixed` of projections whose heads are in one axis."""
    heads = lambda x, dim: x.reshape(*x.shape[:2], -1, dim)
    dim, value = self.spec.head_dim, self.spec.value
    projections = heads(q, dim), heads(k, dim), heads(v, value)
    out, cache = self._mixed(*projections, tokens, cache, attend)
    return out.reshape(*out.shape[:2], -1), cache

  def _mixed(
    self,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K J"],
    tokens: Tokens,
    cache: LayerCache,
    attend: Attend,
    selection: CachedChoice | None = None,
  ) -> tuple[Float[Array, "B T N J"], LayerCache]:
    """Attention to the keys of a cache and of the call, and the new cache.

    With a `selection` to those of them that it chooses.
    """
    q, cache = self._appended(q, k, v, tokens, cache)
    return self._seen(q, tokens, cache, attend, selection), cache

  def _appended(
    self,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K J"],
    tokens: Tokens,
    cache: LayerCache,
  ) -> tuple[Float[Array, "B T N H"], LayerCache]:
    """Rotated queries, and the cache with the keys and values of the call."""
    spec = self.spec
    v = by_token(self.v_norm, v)
    if spec.value_scale != 1.0:
      v = v * jnp.asarray(spec.value_scale, v.dtype)
    norm_late = spec.qk_norm_late and spec.qk_norm is not None
    if not norm_late:
      k = self._clipped(by_token(self.k_norm, k))
    unrotated_q, q = self._rotated(q, tokens)
    cache = cache.append(
      jnp.swapaxes(k, 1, 2),
      jnp.swapaxes(self._clipped(v), 1, 2),
      tokens.at,
      tokens.rotation(spec.rope, after=self.k_norm if norm_late else None),
    )
    return q, cache.observe(lambda: q, lambda: unrotated_q)

  def _rotated(
    self, q: Float[Array, "B T N H"], tokens: Tokens
  ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N H"]]:
    """Queries before their rotation, and after it."""
    spec = self.spec
    if spec.qk_norm_late and spec.qk_norm is not None:
      unrotated, q = q, by_token(self.q_norm, tokens.rotate(spec.rope, q))
    else:
      unrotated = self._clipped(by_token(self.q_norm, q))
      q = tokens.rotate(spec.rope, unrotated)
    if spec.temperature is not None:
      q = spec.temperature(q, tokens.pos)
    return unrotated, q

  def queries(
    self, x: Float[Array, "B T D"], tokens: Tokens
  ) -> Float[Array, "B T N H"]:
    """Rotated queries of an input."""
    return self._rotated(self.q(x), tokens)[1]

  def _maps(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array]:
    """Project to queries, keys and values."""
    k = self.k(x)
    return self.q(x), k, k if self.v is None else self.v(x)

  def _seen(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    cache: LayerCache,
    attend: Attend,
    selection: CachedChoice | None = None,
  ) -> Float[Array, "B T N J"]:
    """Attention of queries to the keys that a cache now has."""
    spec = self.spec
    extras = Extras(
      scale=spec.logit_scale,
      soft_cap=spec.soft_cap,
      sinks=None if self.sinks is None else self.sinks[...],
      slopes=(
        None if spec.alibi is None else jnp.asarray(spec.alibi, jnp.float32)
      ),
      selection=selection,
    )
    out = attend(q, tokens, cache, spec.mask, extras)
    return by_token(self.out_norm, out)

  def _projected(
    self,
    x: Float[Array, "B T D"],
    out: Float[Array, "B T ..."],
    attend: Attend,
  ) -> Float[Array, "B T _"]:
    """[B, T, D] of the attention of all heads."""
    if self.gate is not None:
      gated = lambda out, gate: out * jax.nn.sigmoid(gate)
      out = by_tile(gated, out, attend.rows(self.gate, x))
    return attend.summed(self.o, out)

  def _clipped(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    clip = self.spec.clip
    return x if clip is None else jnp.clip(x, -clip, clip)
