"""A model run layer by layer from the host, on one device or on all together.

Law: the pieces, put together, are `Transformer.__call__`. They are the same
programs for every layer of a kind, every place of a tile and every partition.

A layer is cut in two where keys and values are ready: `project` ends there,
`attend` begins there. Both trace the layer's own code; what belongs to the
other half has no use in it and is dropped by the compiler.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ringjax.errors import ConfigError
from ringjax.kv.base import KV, NoCache
from ringjax.models.transformer import Transformer, logits_of
from ringjax.nn.attention import Attention
from ringjax.nn.block import Layer
from ringjax.nn.sharding_context import CachedAttention, ShardingContext
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.views import ContiguousView, KVView
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Where a layer of a model is.

  Attributes:
    number: of the layer.
    kind: which of `model.kinds` it belongs to.
    index: which of that kind's layers it is.
    layer: its parts.
  """

  number: int
  kind: int
  index: int
  layer: Layer

  @property
  def behind(self) -> int | None:
    """How many keys before its own a query sees at most; None is all."""
    return self.layer.attention.mask.reach[0]


def places(model: Transformer) -> tuple[Place, ...]:
  """The layers of a model, in order.

  Raises:
    ConfigError: a layer keeps something else than keys and values.
  """
  found = []
  kind = 0
  for run in model.stack.runs:
    for position, layer in enumerate(run.layers):
      if not isinstance(layer.attention, Attention):
        raise ConfigError(
          "model",
          f"{model.config.family}, whose layer "
          f"{run.number(position, 0)} is {type(layer.attention).__name__}",
          "keys and values in every layer",
          "read it with rj.infer.generate",
        )
      for repeat in range(run.repeats):
        found.append(
          Place(
            number=run.number(position, repeat),
            kind=kind,
            index=repeat,
            layer=layer,
          )
        )
      kind += 1
  return tuple(sorted(found, key=lambda p: p.number))


class Pieces:
  """The compiled pieces of a model.

  Attributes:
    places: its layers.
    attend: how the tokens of a call lie.
  """

  def __init__(self, model: Transformer, attend: ShardingContext | None = None):
    self.places = places(model)
    self.how = CachedAttention() if attend is None else attend
    self.model = model
    blocks = [b for run in model.stack.blocks for b in run]
    flat = [jax.tree.flatten(block) for block in blocks]
    self._stacks = [tuple(leaves) for leaves, _ in flat]
    # A module is flattened once, not at every call.
    self._trees = {
      self._layer(kind): tree for kind, (_, tree) in enumerate(flat)
    }
    outer = (model.embed, model.norm, model.head)
    leaves, self._outer_tree = jax.tree.flatten(outer)
    self._outer = tuple(leaves)
    # Wrapped anew, so that each model's programs are counted alone.
    own = lambda f, **how: jax.jit(functools.partial(f), **how)
    self._pick = own(_pick)
    self._embed = own(self._embed_of)
    self._head = own(self._head_of)
    self._write = own(_write, donate_argnums=(0, 1))
    self._join = own(_write)
    self._keep = own(_keep, donate_argnums=(0, 1))
    self._blank = own(_blank, static_argnums=(0, 1))
    per_kind = lambda f, **how: {
      layer: jax.jit(functools.partial(f, layer), **how)
      for layer in self._trees
    }
    self._project = per_kind(self._project_of)
    self._attend = per_kind(self._attend_of)
    self._whole = per_kind(self._whole_of)

  def _layer(self, kind: int) -> Layer:
    return next(p.layer for p in self.places if p.kind == kind)

  def programs(self) -> int:
    """How many have been compiled."""
    fixed = (self._pick, self._embed, self._head, self._write, self._join,
             self._keep, self._blank)  # fmt: skip
    kinds = (self._project, self._attend, self._whole)
    all_: list[Any] = [*fixed, *(f for table in kinds for f in table.values())]
    return sum(f._cache_size() for f in all_)

  # -------------------------------------------------------------------------
  # Called
  # -------------------------------------------------------------------------

  def weights(self, place: Place) -> tuple[jax.Array, ...]:
    """A layer's weights, out of the stack of its kind."""
    return self._pick(self._stacks[place.kind], place.index)

  def embed(self, tokens: Any) -> jax.Array:
    """[B, T, D] of tokens [B, T]."""
    return self._embed(self._outer, tokens)

  def project(
    self, place: Place, weights: Any, x: jax.Array, first: int, length: int
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, N, H], keys and values [B, K, T, H] of consecutive tokens.

    `first` is the position of the first of them, `length` that of the whole
    context's end.
    """
    return self._project[place.layer](weights, x, first, length)

  def attend(
    self,
    place: Place,
    weights: Any,
    x: jax.Array,
    q: jax.Array,
    keys: tuple[jax.Array, jax.Array],
    span: tuple[int, int, int],
    length: int,
  ) -> jax.Array:
    """The layer's output [B, T, D] for tokens whose queries are `q`.

    Args:
      place: the layer.
      weights: its own.
      x: its input.
      q: of `project`.
      keys: [B, K, S, H] twice, by position.
      span: position of the first token, how many of the T are real, and how
        many of the keys are.
      length: of the whole context.
    """
    return self._attend[place.layer](weights, x, q, *keys, span, length)

  def whole(
    self, place: Place, weights: Any, x: jax.Array, at: Any, length: int
  ) -> tuple[jax.Array, KV]:
    """The layer's output and its keys, for all tokens at once."""
    return self._whole[place.layer](weights, x, at, length)

  def blank(
    self, place: Place, batch: int, capacity: int, dtype: Any
  ) -> tuple[jax.Array, jax.Array]:
    """Room for a layer's keys and values."""
    a = place.layer.attention
    shape = (batch, a.kv_heads, capacity, a.head_dim)
    return self._blank(shape, dtype)

  def write(
    self, keys: tuple[jax.Array, jax.Array], k: Any, v: Any, first: int
  ) -> tuple[jax.Array, jax.Array]:
    """Keys with more behind position `first`; the old ones are given away."""
    return self._write(*keys, k, v, first)

  def join(
    self, keys: tuple[jax.Array, jax.Array], k: Any, v: Any, first: int
  ) -> tuple[jax.Array, jax.Array]:
    """As `write`, and the old keys stay as they are."""
    return self._join(*keys, k, v, first)

  def keep(
    self, slots: tuple[jax.Array, jax.Array], keys: Any, place: Place
  ) -> tuple[jax.Array, jax.Array]:
    """A kind's slots with a layer's keys; the old ones are given away."""
    return self._keep(*slots, *keys, place.index)

  def head(self, x: jax.Array, row: int) -> jax.Array:
    """float32 [B, V], the logits behind a row of [B, T, D]."""
    return self._head(self._outer, x, row)

  # -------------------------------------------------------------------------
  # Traced
  # -------------------------------------------------------------------------

  def _embed_of(self, outer: Any, tokens: jax.Array) -> jax.Array:
    embed, _, _ = jax.tree.unflatten(self._outer_tree, outer)
    x = embed(tokens)
    scale = self.model.config.embed_scale
    if scale != 1.0:
      x = x * jnp.asarray(scale, x.dtype)
    return self.how.constrain(x)

  def _head_of(self, outer: Any, x: jax.Array, row: Any) -> jax.Array:
    embed, norm, head = jax.tree.unflatten(self._outer_tree, outer)
    last = norm(lax.dynamic_slice_in_dim(x, row, 1, 1)[:, 0])
    head = embed if head is None else head
    return self.how.everywhere(logits_of(self.model.config, head, last))

  def _project_of(
    self, layer: Layer, weights: Any, x: jax.Array, first: Any, length: Any
  ) -> Any:
    block = jax.tree.unflatten(self._trees[layer], weights)
    count = x.shape[1]
    first = jnp.asarray(first, jnp.int32)
    pos = (first + jnp.arange(count, dtype=jnp.int32))[None]
    tokens = _tokens(layer, pos, jnp.ones_like(pos), length)
    seen = _Taken(self.how)
    block(x, tokens, _Fresh(), seen)
    k, v, _ = seen.fresh
    return seen.q, k, v

  def _attend_of(
    self,
    layer: Layer,
    weights: Any,
    x: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    span: Any,
    length: Any,
  ) -> jax.Array:
    block = jax.tree.unflatten(self._trees[layer], weights)
    first, real, filled = (jnp.asarray(n, jnp.int32) for n in span)
    index = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    seg = (index < real).astype(jnp.int32)
    tokens = _tokens(layer, first + index, seg, length)
    slots = jnp.arange(k.shape[2], dtype=jnp.int32)[None]
    at = Coords(slots, (slots < filled).astype(jnp.int32))
    stored = ContiguousView(k[None], v[None], at, jnp.int32(0))
    given = _Given(self.how, q)
    out, _ = block(x, tokens, _Full(stored), given)
    return out

  def _whole_of(
    self, layer: Layer, weights: Any, x: jax.Array, at: Any, length: Any
  ) -> tuple[jax.Array, Any]:
    block = jax.tree.unflatten(self._trees[layer], weights)
    pos, seg = at
    tokens = Tokens(
      pos,
      jnp.ones_like(pos) if seg is None else seg,
      derived=True,
      segmented=seg is not None,
      ropes=layer.attention.ropes,
      length=length,
    )
    out, cache = block(x, tokens, NoCache(1).layer(0, (), 0), self.how)
    return out, cache.fresh


def _tokens(layer: Layer, pos: Any, seg: Any, length: Any) -> Tokens:
  return Tokens(
    pos,
    seg,
    derived=False,
    segmented=False,
    ropes=layer.attention.ropes,
    length=length,
  )


class _Through:
  """A attend of which one half of a layer is of interest."""

  def __init__(self, attend: ShardingContext):
    self._spread = attend

  def __getattr__(self, name: str) -> Any:
    return getattr(self._spread, name)


class _Taken(_Through):
  """Takes queries and keys, and lets nothing pass."""

  q: Any = None
  fresh: Any = None

  def __call__(
    self, q: jax.Array, tokens: Any, cache: Any, mask: Any, extras: Any
  ) -> jax.Array:
    self.q, self.fresh = q, cache.fresh
    return jnp.zeros_like(q)


class _Given(_Through):
  """Has queries from elsewhere visit the keys."""

  def __init__(self, attend: ShardingContext, q: jax.Array):
    super().__init__(attend)
    self._q = q

  def __call__(
    self, q: jax.Array, tokens: Any, cache: Any, mask: Any, extras: Any
  ) -> jax.Array:
    attend: Any = self._spread
    return attend(self._q, tokens, cache, mask, extras)


@dataclasses.dataclass(frozen=True)
class _Fresh:
  """The cache of a layer whose keys are taken."""

  fresh: Any = None
  slots: Any = ()

  def append(
    self, k: jax.Array, v: jax.Array, at: Coords, rotation: Rotation
  ) -> _Fresh:
    return dataclasses.replace(self, fresh=KV(rotation.own(k), v, at))

  def views(self) -> tuple[KVView, ...]:
    return (self.fresh.view(),)


@dataclasses.dataclass(frozen=True)
class _Full:
  """The cache of a layer that has got all its keys."""

  stored: ContiguousView
  fresh: Any = None
  slots: Any = ()

  def append(
    self, k: jax.Array, v: jax.Array, at: Coords, rotation: Rotation
  ) -> _Full:
    del k, v, at, rotation
    return self

  def views(self) -> tuple[KVView, ...]:
    return (self.stored,)


def _pick(stack: Any, index: Any) -> Any:
  take: Callable[[Any], Any] = lambda x: lax.dynamic_index_in_dim(
    x, index, 0, keepdims=False
  )
  return tuple(take(x) for x in stack)


def _blank(shape: tuple[int, ...], dtype: Any) -> tuple[jax.Array, jax.Array]:
  return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


def _write(k_all: Any, v_all: Any, k: Any, v: Any, first: Any) -> Any:
  first = jnp.asarray(first, jnp.int32)
  put = lambda all_, new: lax.dynamic_update_slice_in_dim(
    all_, new.astype(all_.dtype), first, 2
  )
  return put(k_all, k), put(v_all, v)


def _keep(slots_k: Any, slots_v: Any, k: Any, v: Any, index: Any) -> Any:
  zero = jnp.int32(0)
  corner = (jnp.asarray(index, jnp.int32), zero, zero, zero, zero)
  put = lambda slots, new: lax.dynamic_update_slice(slots, new[None], corner)
  return put(slots_k, k), put(slots_v, v)
