"""Attention to near keys, and to compressed keys of everything before.

Guarantees: one kv head, whose key is its value, too. A query sees the keys of a
window, and entries, one for each m tokens, of the windows that have ended: all
of them, or those with the best scores of an index. One softmax is over both and
a learned sink of each head. Rotated dims are the last ones of a head; those of
the output are rotated back by the query's position, so that a value counts by
its distance. Equal results for a whole sequence, for chunks through a cache,
and token by token; for one device and for shards.
Training: an index of entries learns from `rj.index_loss` alone, by the mass on
each entry of the layer's whole attention, with its window and its sinks.
Cost: of T tokens T (W + S / m) pairs, or T (W + k) with an index of k entries
and its products of S / m keys.
Memory: W keys of a row, S / m entries, and the tokens of a window.
Ref:  DeepSeek-AI 2026, DeepSeek-V4, section 2.3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from ringjax.errors import OptionError
from ringjax.kv.base import KV, LayerCache, StateCache
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.query_reading import KeyReading
from ringjax.kv.storage.entry_slots import CompressedLayer, CompressedShape
from ringjax.nn.attention_layers.latent import DerivedKeys
from ringjax.nn.linear import Linear, RMSNorm
from ringjax.nn.param import param
from ringjax.nn.recurrent_layers.delta import Recurrent, over_tokens
from ringjax.nn.sharding_context import (
  Attend,
  CachedAttention,
  ContextParallel,
  Extras,
)
from ringjax.nn.sums.choice_sums import ChoiceRecord
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.cached.selection import KeySelection
from ringjax.ops.attention.scores import Scores
from ringjax.ops.attention.sparse.compressed_keys import (
  Entries,
  Pooling,
  Projections,
  TokenInputs,
  compress,
)
from ringjax.ops.mask import Causal, Mask, SameSegment, Window
from ringjax.ops.norm import rms_norm
from ringjax.ops.recurrent.conv import Tail
from ringjax.ops.rope import Rope
from ringjax.ops.softmax import Partial, add_sink, finalize, merge, wide_dtype

# Function of the log-sum-exp of a layer's attention, [B, T, N].
RecordChoice = Callable[[Array], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryIndex:
  """Index of the entries: a query reads those with the best scores.

  Attributes:
    heads: Number of its query heads, I.
    dim: Size of its keys, which are entries of a separate compressor.
    count: Maximum number of entries that a query reads.
  """

  heads: int
  dim: int
  count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearKeys:
  """Keys of the window, one head whose values are its keys.

  Attributes:
    heads: Number of query heads.
    dim: Size of a key.
    window: Number of tokens that a query sees, itself included.
    rope: Rotation of the last dims.
    scale: Factor on the logits.
  """

  heads: int
  dim: int
  window: int
  rope: Rope
  scale: float

  kv_heads = 1

  @property
  def mask(self) -> Mask:
    """Mask between queries and keys."""
    return Causal() & Window(self.window)

  @property
  def first(self) -> int:
    """Number of dims before those that are rotated."""
    return self.dim - self.rope.dims

  def cache_shape(self, layers: int) -> LayerCacheSpec:
    """Shape of what `layers` of this kind keep for a token."""
    return LayerCacheSpec(
      layers,
      1,
      self.dim,
      0,
      self.mask.reach[0],
      KeyReading(
        groups=self.heads,
        scores=Scores(scale=self.scale),
        mask=self.mask,
        rope=self.rope,
        first=self.first,
      ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression(Recurrent):
  """Entries of a layer: one for each m tokens.

  Attributes:
    rate: Number of tokens of a window, m.
    overlap: Whether an entry has the tokens of the window before, too.
    dim: Size of an entry, that of a key.
    index: Chooses the entries that are read; None: all.
  """

  rate: int
  overlap: bool
  dim: int
  index: EntryIndex | None = None

  @property
  def dims(self) -> tuple[int, ...]:
    """Sizes of the entries of each compressor: keys, and keys of the index."""
    return (self.dim,) if self.index is None else (self.dim, self.index.dim)

  def cache_shape(self, layers: int) -> CompressedShape:
    """Shape of the entries that `layers` of this kind keep."""
    return CompressedShape.of(layers, self.rate, self.overlap, self.dims)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedAttention:
  """Attention of one layer to near and to compressed keys.

  Attributes:
    keys: Keys of the window.
    compression: Entries; None for a layer of the window alone.
    query_latent: Size of the queries' latent vector.
    groups: Number of groups of heads, each of which has a map to a latent
      vector of the output.
    out_latent: Size of that vector.
    eps: Epsilon of the norms.
  """

  keys: NearKeys
  compression: Compression | None
  query_latent: int
  groups: int
  out_latent: int
  eps: float

  @property
  def heads(self) -> int:
    """Number of query heads."""
    return self.keys.heads

  @property
  def parts(self) -> tuple[NearKeys | Compression, ...]:
    """Parts that each keep something in a cache."""
    if self.compression is None:
      return (self.keys,)
    return self.keys, self.compression

  @property
  def reversed_rope(self) -> Rope:
    """Rotation of the output, back by the query's position."""
    return dataclasses.replace(self.keys.rope, reverse=True)

  @property
  def ropes(self) -> tuple[Rope, ...]:
    """Rotations that a call needs tables for."""
    return self.keys.rope, self.reversed_rope

  @property
  def pair_flops(self) -> int:
    """FLOPs per query and key."""
    return 4 * self.heads * self.keys.dim

  @property
  def reach(self) -> int | None:
    """Number of tokens that a query looks back; None: all, by entries."""
    return self.keys.mask.reach[0] if self.compression is None else None

  def build(self, rngs: nnx.Rngs, embed: int) -> CompressedAttentionLayer:
    return CompressedAttentionLayer(rngs, self, embed)


class Compressor(nnx.Module):
  """Maps of tokens to values and gates, and weights that pool them."""

  def __init__(
    self, rngs: nnx.Rngs, spec: Compression, dim: int, embed: int, eps: float
  ):
    width = (1 + spec.overlap) * dim
    into = lambda: Linear(rngs, (embed,), (width,), ("embed", None))
    self.value, self.gate = into(), into()
    self.bias = param(rngs, (spec.rate, width), (None, None), wide=True)
    self.norm = RMSNorm(rngs, (dim,), (None,), eps=eps)

  def __call__(self, x: Float[Array, "B T D"]) -> Projections:
    """Values and gates of tokens."""
    return Projections(self.value(x), self.gate(x))

  @property
  def pooling(self) -> Pooling:
    """Weights that pool the tokens of a window."""
    norm = self.norm.weight
    assert norm is not None
    return Pooling(self.bias[...], norm[...])


class CompressedAttentionLayer(nnx.Module):
  """The module of `CompressedAttention`."""

  # Maps whose arrays it uses, instead of calling them.
  ARRAYS = ("o_down",)

  def __init__(self, rngs: nnx.Rngs, spec: CompressedAttention, embed: int):
    self.spec = spec
    n, h = spec.heads, spec.keys.dim
    norm = lambda size: RMSNorm(rngs, (size,), (None,), eps=spec.eps)
    latent, groups = spec.query_latent, spec.groups
    self.q_down = Linear(rngs, (embed,), (latent,), ("embed", None))
    self.q_norm = norm(latent)
    self.q = Linear(rngs, (latent,), (n, h), (None, "heads", None))
    self.kv = Linear(rngs, (embed,), (h,), ("embed", None))
    self.kv_norm = norm(h)
    self.sinks = param(rngs, (n,), ("heads",), wide=True)
    self.o_down = Linear(
      rngs,
      (n // groups, h),
      (groups, spec.out_latent),
      (None, None, "heads", None),
    )
    self.o = Linear(
      rngs,
      (groups, spec.out_latent),
      (embed,),
      ("heads", None, "embed"),
    )
    compression = spec.compression
    index = None if compression is None else compression.index
    build = lambda dim: (
      None
      if compression is None or dim is None
      else Compressor(rngs, compression, dim, embed, spec.eps)
    )
    self.compressor = build(h)
    self.index_compressor = build(None if index is None else index.dim)
    self.index_q = (
      None
      if index is None
      else Linear(rngs, (latent,), (index.heads, index.dim), (None, None, None))
    )
    self.index_weights = (
      None
      if index is None
      else Linear(rngs, (embed,), (index.heads,), ("embed", None))
    )

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: LayerCache | tuple[LayerCache, StateCache],
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], Any]:
    """[B, T, D] and the layer's caches: of keys, and of entries if it has."""
    _check(attend, tokens)
    spec = self.spec
    q, kv, index = attend.rows(self._maps, x)
    q = self._rotated(q, tokens, spec.keys.rope)
    caches: Any = cache
    keys: Any = cache
    stored_entries: Any = None
    if spec.compression is not None:
      keys, stored_entries = caches
    partial, keys = self._near(q, kv, tokens, keys, attend)
    caches, record_choice = keys, None
    if spec.compression is not None:
      projections, index_q, weights = index
      new_entries, entries = self._compressed(
        projections, tokens, stored_entries, attend, q.dtype
      )
      selection = None
      if spec.compression.index is not None:
        selection = KeySelection(
          q=self._rotated(index_q, tokens, spec.keys.rope),
          weights=weights,
          count=spec.compression.index.count,
          first=spec.keys.dim,
        )
      entry_partial, record_choice = self._far(
        q, new_entries, tokens, entries, selection, attend
      )
      partial, caches = merge(partial, entry_partial), (keys, entries)
    out, lse = finalize(add_sink(partial, self.sinks[...][None, None]))
    if record_choice is not None:
      record_choice(lse)
    out = self._rotated(out.astype(q.dtype), tokens, spec.reversed_rope)
    return attend.summed(self._out, out), caches

  def _maps(self, x: Float[Array, "B T D"]) -> tuple[Any, ...]:
    """Queries, near keys, and inputs of entries and of the index."""
    spec = self.spec
    latent = self.q_norm(self.q_down(x))
    q = rms_norm(self.q(latent), None, spec.eps)
    kv = self.kv_norm(self.kv(x))
    if self.compressor is None:
      return q, kv, ()
    projections = [self.compressor(x)]
    index_q = weights = None
    if self.index_compressor is not None:
      assert self.index_q is not None and self.index_weights is not None
      # The index learns from its own loss, and nothing else does.
      x, latent = lax.stop_gradient((x, latent))
      projections.append(self.index_compressor(x))
      index_q = self.index_q(latent)
      scale = (index_q.shape[-2] * index_q.shape[-1]) ** -0.5
      weights = self.index_weights(x)
      weights = weights.astype(wide_dtype(x.dtype)) * scale
    return q, kv, (tuple(projections), index_q, weights)

  def _rotated(
    self, x: Float[Array, "B T N H"], tokens: Tokens, rope: Rope
  ) -> Float[Array, "B T N H"]:
    """Rotate the last dims."""
    first = x.shape[-1] - rope.dims
    turned = tokens.rotate(rope, x[..., first:])
    return jnp.concatenate([x[..., :first], turned], -1)

  def _near(
    self,
    q: Float[Array, "B T N H"],
    kv: Float[Array, "B T H"],
    tokens: Tokens,
    cache: LayerCache,
    attend: Attend,
  ) -> tuple[Partial, LayerCache]:
    """Partial of the keys of the window."""
    window_keys = self.spec.keys
    row = kv[:, None]
    rotation = tokens.rotation(window_keys.rope, first=window_keys.first)
    cache = cache.append(row, row[..., :0], tokens.at, rotation)
    cache = cache.observe(lambda: q, lambda: q)
    if attend.resident:
      views = tuple(view.keys_alone() for view in cache.views())
      keys = DerivedKeys(key_views=views)
    else:
      # From the cache: a codec may have changed the keys.
      assert cache.fresh is not None
      fresh = cache.fresh
      keys = DerivedKeys(fresh=KV(fresh.k, fresh.k, fresh.at))
    call: Any = attend
    extras = Extras(scale=window_keys.scale, residual=True)
    return Partial.of(*call(q, tokens, keys, window_keys.mask, extras)), cache

  def _compressed(
    self,
    projections: tuple[Projections, ...],
    tokens: Tokens,
    cache: StateCache,
    attend: Attend,
    dtype: Any,
  ) -> tuple[KV, StateCache]:
    """Entries of a call's windows, rotated, and the cache with them."""
    compression = self.spec.compression
    assert compression is not None and self.compressor is not None
    call_shape = projections[0].value.shape[:2]
    pos, seg = (jnp.broadcast_to(x, call_shape) for x in tokens.at)
    shape = compression.cache_shape(1)
    tail = shape.empty(call_shape[0], dtype).tail
    stored = isinstance(cache, CompressedLayer)
    if stored and attend.resident:
      tail = cache.recall_tail(tail)
    compressors = [self.compressor]
    if self.index_compressor is not None:
      compressors.append(self.index_compressor)
    make = functools.partial(
      _compress, rate=compression.rate, eps=self.spec.eps
    )
    entries, tail = over_tokens(
      make,
      tuple(x.pooling for x in compressors),
      TokenInputs(projections, pos, seg),
      tail,
      attend,
      per_token=False,
    )
    keys = self._rotated_entries(entries, tokens)
    keys = jnp.concatenate(keys, -1)
    if stored:
      cache = cache.appended(keys, entries.at, tail, sees=attend.resident)
    k = keys[:, None]
    return KV(k, k, entries.at), cache

  def _rotated_entries(
    self, entries: Entries, tokens: Tokens
  ) -> list[Float[Array, "B n E"]]:
    """Entries rotated by the positions at which their windows begin."""
    compression, rope = self.spec.compression, self.spec.keys.rope
    assert compression is not None
    begin = jnp.maximum(entries.at.pos - (compression.rate - 1), 0)
    tables = rope.tables(begin, tokens.length)
    rotated = []
    for keys in entries.keys:
      first = keys.shape[-1] - rope.dims
      turned = rope.rotate(keys[:, :, None, first:], tables)[:, :, 0]
      rotated.append(jnp.concatenate([keys[..., :first], turned], -1))
    return rotated

  def _far(
    self,
    q: Float[Array, "B T N H"],
    new_entries: KV,
    tokens: Tokens,
    cache: StateCache,
    selection: KeySelection | None,
    attend: Attend,
  ) -> tuple[Partial, RecordChoice | None]:
    """Partial of the entries that queries see.

    In training also what records how they were chosen, of the log-sum-exp of
    the layer's attention.
    """
    window_keys = self.spec.keys
    call: Any = attend
    mask = Causal()
    if tokens.segmented:
      mask = mask & attend.segments
    extras = Extras(scale=window_keys.scale, selection=selection, residual=True)
    if attend.resident:
      assert isinstance(cache, CompressedLayer)
      # Queries do not meet the keys of the index.
      width = new_entries.k.shape[-1] - window_keys.dim
      q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, width)))
      choice = lax.stop_gradient(selection)
      extras = dataclasses.replace(extras, selection=choice)
      out, lse = call.visit(q, (cache.view(),), tokens.at, mask, extras)
      return Partial.of(out[..., : window_keys.dim], lse), None
    if selection is not None:
      index_keys = new_entries.k[:, 0, :, window_keys.dim :]
      selection = dataclasses.replace(selection, keys=index_keys)
      extras = dataclasses.replace(extras, selection=selection)
    k = new_entries.k[..., : window_keys.dim]
    between = q, tokens.at, KV(k, k, new_entries.at), mask, extras
    record = None if selection is None else tokens.record_of(ChoiceRecord)
    if record is None:
      return Partial.of(*call.between(*between)), None
    out, record_choice = call.recorded_between(*between, record)
    return Partial.of(*out), record_choice

  def _out(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
    """Map of each group of heads to its latent vector, and of all to D."""
    groups = self.spec.groups
    grouped = x.reshape(*x.shape[:2], groups, -1, x.shape[-1])
    weight = self.o_down.weight[...]
    latent = jnp.einsum(
      "btgnh,nhgr->btgr", grouped, weight, preferred_element_type=x.dtype
    )
    return self.o(latent)


def _compress(
  weights: tuple[Pooling, ...],
  x: TokenInputs,
  before: Tail,
  axis: str | None,
  *,
  rate: int,
  eps: float,
) -> tuple[Entries, Tail]:
  """`compress` as a mixer of `over_tokens`."""
  return compress(weights, x, before, axis, rate=rate, eps=eps)


def _check(attend: Any, tokens: Tokens) -> None:
  """Refuse calls that have no compressed keys.

  Raises:
    OptionError: For trees of drafted tokens, documents that see earlier ones,
      and ways to attend that compute no partials.
  """
  takes = isinstance(attend, ContextParallel | CachedAttention)
  if not takes or not attend.takes_classes:
    raise OptionError(
      "attend",
      f"{type(attend).__name__}, for layers with compressed keys",
      "ContextParallel or CachedAttention",
      "leave the option out that chose it",
    )
  if tokens.tree is not None:
    raise OptionError(
      "parents",
      "a tree of drafted tokens, for layers with compressed keys",
      "one path of tokens",
      "draft one path, or none",
    )
  if tokens.segmented and attend.segments != SameSegment():
    raise OptionError(
      "segments",
      f"{attend.segments} for a model with compressed keys",
      "SameSegment(): an entry is of one document",
      "leave segments out",
    )
