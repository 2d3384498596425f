"""A model run one layer at a time from the host, on one device or on a mesh.

Guarantees: the programs, one after another, are `Transformer.__call__`. They
are the same for every layer of a kind, every tile and every partition.

A layer is cut in two where its keys and values are ready: `project` ends there,
`attend` begins there. Both trace the layer's own code; the compiler drops what
belongs to the other half.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, Shaped

from ringjax.errors import ConfigError
from ringjax.kv.base import KV, NoCache
from ringjax.kv.cache import KVCache, LayerCacheSpec
from ringjax.kv.cache_kind import DENSE, CacheKind
from ringjax.kv.codecs import Codec
from ringjax.models.transformer import Transformer, logits_of
from ringjax.nn.attention import Attention
from ringjax.nn.block import Layer
from ringjax.nn.linear import part_dtype
from ringjax.nn.sharding_context import CachedAttention, Extras, ShardingContext
from ringjax.nn.stack import Stack
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.attend import empty_partial
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.views import KVView
from ringjax.ops.mask import Coords, Mask, SameSegment
from ringjax.ops.rope import Rotation
from ringjax.ops.softmax import Partial, add_sink, finalize, merge
from ringjax.parallel.place import CallSharding, device_of
from ringjax.typing import Index, Lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedLayer:
  """A layer of a model, and where its weights and its keys are stacked.

  Attributes:
    number: of the layer.
    kind: which of `model.kinds` it belongs to.
    index: which of that kind's layers it is.
    spec: its parts.
  """

  number: int
  kind: int
  index: int
  spec: Layer

  @property
  def numbers(self) -> int:
    """Numbers of a token's key and value."""
    spec: Any = self.spec.attention
    return 2 * spec.kv_heads * spec.head_dim

  def token_bytes(self, dtype: DTypeLike, codec: Codec | None = None) -> int:
    """Of a token's key and value, of a dtype or as a codec's codes."""
    if codec is None:
      return jnp.dtype(dtype).itemsize * self.numbers
    spec: Any = self.spec.attention
    heads, dim = spec.kv_heads, spec.head_dim
    return heads * (codec.keys.width(dim) + codec.values.width(dim))

  def first_needed(self, end: int) -> int:
    """The first of `end` keys that a query behind them may see."""
    reach = self.spec.attention.reach
    return 0 if reach is None else max(0, end - reach)


def stacked_layers(model: Transformer) -> tuple[StackedLayer, ...]:
  """The layers of a model, in order.

  Raises:
    ConfigError: a layer keeps something else than keys and values of one
      width, or positions are learned.
  """
  if model.config.positions is not None:
    raise ConfigError(
      "model",
      f"{model.config.family}, whose embeddings know their positions",
      "tokens that are embedded without them",
      "read it with rj.infer.generate",
    )
  found, kind = [], 0
  for run in model.stack.runs:
    for position, spec in enumerate(run.layers):
      if not isinstance(spec.attention, Attention):
        raise ConfigError(
          "model",
          f"{model.config.family}, whose layer "
          f"{run.number(position, 0)} is {type(spec.attention).__name__}",
          "keys and values in every layer",
          "read it with rj.infer.generate",
        )
      if spec.attention.reads or spec.inputs is not None:
        raise ConfigError(
          "model",
          f"{model.config.family}, whose layers read each other's keys, or "
          "tokens' ids",
          "layers that read what the one before them made",
          "read it with rj.infer.generate",
        )
      if spec.attention.value != spec.attention.head_dim:
        raise ConfigError(
          "model",
          f"{model.config.family}, whose values have {spec.attention.value} "
          f"numbers a head and keys {spec.attention.head_dim}",
          "keys and values of one width",
          "read it with rj.infer.generate",
        )
      for index in range(run.repeats):
        number = run.number(position, index)
        found.append(
          StackedLayer(number=number, kind=kind, index=index, spec=spec)
        )
      kind += 1
  return tuple(sorted(found, key=lambda layer: layer.number))


class TokenSpan(NamedTuple):
  """Consecutive tokens, filled up with padding to the size of a program.

  Fields:
    first: position of the first one.
    real: how many there are; what follows in an array is padding.
    length: tokens of the whole context, for rotations that depend on it.
  """

  first: Index
  real: Index
  length: Index

  def at(self, size: int) -> Coords:
    """Coordinates [1, size]; padding has segment 0."""
    index = jnp.arange(size, dtype=jnp.int32)[None]
    first, real = (jnp.asarray(n, jnp.int32) for n in self[:2])
    return Coords(first + index, (index < real).astype(jnp.int32))


class TokenRows(NamedTuple):
  """The next token of each row.

  Fields:
    pos: int32 [B], its position; -1 for a row that has none.
    length: tokens of each row's whole context, [B], or of all, for rotations
      that depend on it.
  """

  pos: Int[Array | np.ndarray, " B"]
  length: Lengths

  def at(self, size: int) -> Coords:
    """Coordinates [B, 1]; rows without a token have segment 0."""
    assert size == 1
    pos = jnp.asarray(self.pos, jnp.int32)[:, None]
    return Coords(jnp.maximum(pos, 0), (pos >= 0).astype(jnp.int32))


class TokensAt(NamedTuple):
  """Tokens of any requests, in any order, in one row.

  Fields:
    pos: int32 [T], their positions.
    seg: int32 [T], a number above 0 of each one's request; 0 for padding.
    length: tokens of the whole context, for rotations that depend on it.
  """

  pos: Int[Array | np.ndarray, " T"]
  seg: Int[Array | np.ndarray, " T"]
  length: Index

  def at(self, size: int) -> Coords:
    """Coordinates [1, T]."""
    assert size == self.pos.shape[0]
    pos, seg = (jnp.asarray(x, jnp.int32)[None] for x in self[:2])
    return Coords(pos, seg)


class StackedWeights(NamedTuple):
  """A layer's weights in their kind's stack: a program takes them out.

  Fields:
    stack: the weights of all layers of the kind.
    index: which of them.
  """

  stack: tuple[Shaped[Array, " ..."], ...]
  index: Index


class _Program:
  """A method that each instance compiles for itself, to count its programs."""

  def __init__(self, f: Callable[..., Any], options: dict[str, Any]):
    self.f, self.options = f, options

  def __set_name__(self, owner: type, name: str) -> None:
    self.name = name

  def __get__(self, instance: Any, owner: type | None = None) -> Any:
    made = jax.jit(functools.partial(self.f, instance), **self.options)
    # Found there from now on, and not here.
    instance.__dict__[self.name] = made
    instance.compiled.append(made)
    return made


def _program(**options: Any) -> Callable[[Callable[..., Any]], Any]:
  return lambda f: _Program(f, options)


class LayerPrograms:
  """The compiled programs of a model's layers.

  Attributes:
    layers: the model's.
    kind: how the caches that they write store keys.
    outer: the weights before and behind the layers, which `embed` and `head`
      are called with.
    compiled: the programs.
  """

  def __init__(
    self,
    model: Transformer,
    attend: ShardingContext | None = None,
    kind: CacheKind = DENSE,
  ):
    """Prepares; nothing is compiled yet.

    Args:
      model: the model.
      attend: how the tokens of a call are sharded and find their keys;
        default: one device, and a cache.
      kind: of the caches.

    Raises:
      ConfigError: a layer keeps something else than keys and values.
    """
    self.layers = stacked_layers(model)
    self.kind = kind
    self.compiled: list[Any] = []
    self._constants: dict[int, Any] = {}
    self._config, self._specs = model.config, model.kinds
    self._attend = CachedAttention() if attend is None else attend
    # A module is flattened once, not at every call.
    flat = [
      jax.tree.flatten(b) for blocks in model.stack.blocks for b in blocks
    ]
    self._stacks = [tuple(leaves) for leaves, _ in flat]
    placed = model.stack.placed or ()
    where = [
      (g, p)
      for g, run in enumerate(model.stack.runs)
      for p in range(len(run.layers))
    ]
    # Layers of these kinds are fetched, by run and position.
    self._fetched = {
      kind: at
      for kind, at in enumerate(where)
      if placed and placed[at[0]][at[1]] is not None
    }
    self._stack = model.stack if self._fetched else None
    self._trees = {x.spec: flat[x.kind][1] for x in self.layers}
    outer = (model.embed, model.norm, model.head)
    leaves, self._outer_tree = jax.tree.flatten(outer)
    self.outer = tuple(leaves)

  def count(self) -> int:
    """How many programs have been compiled."""
    return sum(f._cache_size() for f in self.compiled)

  def weights(self, layer: StackedLayer) -> tuple[jax.Array, ...]:
    """A layer's weights, out of its kind's stack or from where they are."""
    if layer.kind in self._fetched:
      at = self._fetched[layer.kind]
      return self._fetch(*at, self._stack, layer.index)
    return self._pick(self._stacks[layer.kind], layer.index)

  def in_stack(self, layer: StackedLayer) -> StackedWeights:
    """A layer's weights where they are, for `project` and `finish`.

    Of layers that are fetched there are none.
    """
    return StackedWeights(self._stacks[layer.kind], np.int32(layer.index))

  def _block(self, spec: Layer, weights: PyTree) -> Any:
    """A layer's module, inside of a program."""
    if isinstance(weights, StackedWeights):
      take = lambda x: lax.dynamic_index_in_dim(
        x, weights.index, 0, keepdims=False
      )
      weights = tuple(take(x) for x in weights.stack)
    return jax.tree.unflatten(self._trees[spec], weights)

  def mixing_weights(
    self, weights: tuple[Shaped[Array, " ..."], ...]
  ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What attention alone needs of a layer's weights: sinks, and no maps.

    Returns:
      (shapes, weights): of each its shape, and itself or None.
    """
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in weights)
    return shapes, tuple(x if x.ndim < 2 else None for x in weights)

  def constants(self, layer: StackedLayer) -> Any:
    """Numbers of the codec of one layer, [K, n]."""
    if layer.kind not in self._constants:
      assert isinstance(self.kind.codec, Codec)
      shape = self._specs[layer.kind]
      assert isinstance(shape, LayerCacheSpec)
      made = self.kind.codec.constants(layer.kind, shape)
      self._constants[layer.kind] = jax.tree.map(jnp.asarray, made)
    return jax.tree.map(lambda x: x[layer.index], self._constants[layer.kind])

  def cache_spec(self, layer: StackedLayer) -> LayerCacheSpec:
    """What a cache of this layer alone keeps of a token."""
    spec: Any = self._specs[layer.kind]
    return dataclasses.replace(spec, layers=1)

  # -------------------------------------------------------------------------
  # Programs
  # -------------------------------------------------------------------------

  @_program()
  def _pick(self, stack: Any, index: Index) -> Any:
    take = lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
    return tuple(take(x) for x in stack)

  @_program(static_argnums=(0, 1))
  def _fetch(self, run: int, position: int, stack: Stack, index: Index) -> Any:
    return tuple(jax.tree.leaves(stack.layer(run, position, index)))

  @_program()
  def embed(self, outer: PyTree, tokens: Int[Array, "B T"]) -> jax.Array:
    """[B, T, D] of tokens."""
    embed, _, _ = jax.tree.unflatten(self._outer_tree, outer)
    return self._attend.constrain(embed(tokens))

  @_program()
  def head(
    self, outer: PyTree, x: Float[Array, "B T D"], row: Index
  ) -> jax.Array:
    """float32 [B, V], the logits behind token `row` of the T."""
    embed, norm, head = jax.tree.unflatten(self._outer_tree, outer)
    last = norm(lax.dynamic_slice_in_dim(x, row, 1, 1)[:, 0])
    head = embed if head is None else head
    last = last.astype(part_dtype(head, last.dtype))
    return self._attend.everywhere(logits_of(self._config, head, last))

  @_program(static_argnums=(0, 4))
  def project(
    self,
    spec: Layer,
    weights: PyTree,
    x: Float[Array, "B T D"],
    span: TokenSpan | TokenRows | TokensAt,
    dtype: DTypeLike,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries of some tokens, and what a cache stores of them.

    Args:
      spec: the layer's.
      weights: the layer's.
      x: its input.
      span: the T tokens.
      dtype: of the cache.

    Returns:
      queries [1, T, N, H], keys and values [1, K, T, H] as the kind of cache
      stores them: keys rotated, or before their rotation.
    """
    block = self._block(spec, weights)
    taken = _Queries(self._attend)
    tokens = tokens_of_call(spec, span.at(x.shape[1]), span.length)
    block(x, tokens, _StoredKeys(self.kind), taken)
    k, v, _ = taken.fresh
    return taken.q, k.astype(dtype), v.astype(dtype)

  @_program()
  def encode(
    self,
    constants: PyTree,
    k: Shaped[Array, "1 K T H"],
    v: Shaped[Array, "1 K T J"],
  ) -> tuple[jax.Array, jax.Array]:
    """The codes [1, K, T, X] of keys and of values; see `constants`."""
    codec = self.kind.codec
    assert isinstance(codec, Codec)
    of_k, of_v = constants
    return codec.keys.encode(k, of_k), codec.values.encode(v, of_v)

  @_program(static_argnums=(0,), donate_argnums=(1,))
  def load(
    self,
    kind: int,
    cache: KVCache,
    index: Index,
    first: Index,
    end: Index,
    k: Shaped[Array, "1 K S H"],
    v: Shaped[Array, "1 K S J"],
    constants: PyTree = None,
  ) -> KVCache:
    """A cache that holds nothing but a block of stored keys, in one layer.

    Args:
      kind: of the layer, among the cache's.
      cache: what it held before is gone; donated.
      index: of the layer, among those of its kind.
      first: position of the first row.
      end: position behind the last real row.
      k: keys as `project` returns them, or with `constants` as `encode` does.
      v: values.
      constants: of the layer's codec.
    """
    at = TokenSpan(first, end - first, end).at(k.shape[2])
    cache = cache.allocate(at, replicated=False, sees=False)
    part = cache.layer(kind, cache.slots[kind], index)
    if constants is not None and cache.kind.codec is not None:
      return _updated(cache, kind, part.load(k, v))
    if constants is not None:
      codec, shape = self.kind.codec, cache.shapes[kind]
      assert isinstance(codec, Codec) and isinstance(shape, LayerCacheSpec)
      assert cache.dtype is not None
      of_k, of_v = constants
      k = codec.keys.decode(k, shape.key, cache.dtype, of_k)
      v = codec.values.decode(v, shape.value, cache.dtype, of_v)
    return _updated(cache, kind, part.append(k, v, at, Rotation()))

  @_program(static_argnums=(0, 1), donate_argnums=(6,))
  def attend(
    self,
    spec: Layer,
    kind: int,
    weights: PyTree,
    x: Float[Array, "1 T D"],
    made: tuple[
      Float[Array, "1 T N H"],
      Shaped[Array, "1 K T H"],
      Shaped[Array, "1 K T J"],
    ],
    span: TokenSpan,
    cache: KVCache,
    index: Index,
  ) -> tuple[jax.Array, KVCache]:
    """The layer's output [1, T, D], and the cache with the tokens' keys.

    Args:
      spec: the layer's.
      kind: of the layer, among the cache's.
      weights: the layer's.
      x: its input.
      made: what `project` returned for it.
      span: the T tokens.
      cache: holds the keys of the tokens before; donated.
      index: of the layer, among those of its kind.
    """
    block = self._block(spec, weights)
    out, cache, _ = self._behind(spec, kind, block, x, made, span, cache, index)
    return out, cache

  def _behind(
    self,
    spec: Layer,
    kind: int,
    block: Any,
    x: Float[Array, "B T D"],
    made: tuple[jax.Array, ...],
    span: TokenSpan | TokenRows,
    cache: KVCache,
    index: Index,
  ) -> tuple[jax.Array, KVCache, jax.Array]:
    """A layer from its queries on: output, cache, and what attention made."""
    q, k, v = made
    at = span.at(x.shape[1])
    cache = cache.allocate(at, replicated=False, sees=True)
    part = cache.layer(kind, cache.slots[kind], index)
    given = _StoredKeys(self.kind, (part, k, v))
    attend = _Queries(self._attend, q)
    out, part = block(x, tokens_of_call(spec, at, span.length), given, attend)
    return out, _updated(cache, kind, part), attend.mixed

  @_program(static_argnums=(0, 1, 2), donate_argnums=(6,))
  def mix(
    self,
    spec: Layer,
    kind: int,
    shapes: tuple[Any, ...],
    weights: PyTree,
    made: tuple[
      Float[Array, "B T N H"],
      Shaped[Array, "B K T H"],
      Shaped[Array, "B K T J"],
    ],
    span: TokenSpan | TokenRows,
    cache: KVCache,
    index: Index,
  ) -> tuple[jax.Array, KVCache]:
    """Attention alone: [1, T, N, J], and the cache; see `attend`.

    `shapes` and `weights` are those of `mixing_weights`.
    """
    # What is not attention is computed of zeros, and dropped.
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)
    every = [
      zeros(a) if b is None else b for a, b in zip(shapes, weights, strict=True)
    ]
    block = self._block(spec, every)
    x = jnp.zeros((*made[0].shape[:2], self._config.embed), made[0].dtype)
    _, cache, mixed = self._behind(
      spec, kind, block, x, made, span, cache, index
    )
    return mixed, cache

  @_program(static_argnums=(0,))
  def finish(
    self,
    spec: Layer,
    weights: PyTree,
    x: Float[Array, "B T D"],
    mixed: Float[Array, "B T N J"],
    span: TokenSpan | TokenRows,
  ) -> jax.Array:
    """The layer's output [1, T, D], of its input and of what `mix` made."""
    block = self._block(spec, weights)
    at = span.at(x.shape[1])
    attend = _Queries(self._attend, mixed=mixed)
    tokens = tokens_of_call(spec, at, span.length)
    return block(x, tokens, _StoredKeys(self.kind), attend)[0]

  @_program(static_argnums=(0,), donate_argnums=(7,))
  def partial(
    self,
    spec: Layer,
    weights: PyTree,
    q: Float[Array, "1 T N H"],
    k: Shaped[Array, "1 K S H"],
    v: Shaped[Array, "1 K S J"],
    span: TokensAt,
    keys: TokensAt,
    carry: Partial | None,
  ) -> Partial:
    """Attention of queries to some keys alone, added to what others made.

    Args:
      spec: the layer's.
      weights: the layer's.
      q: queries, as `project` returns them.
      k: keys, as `project` returns them.
      v: their values.
      span: the T queries; they see keys of their own request.
      keys: the S keys.
      carry: of other keys, [1, K, G, T, J]; None: of none.
    """
    attend = _PartialQueries(self._attend, (q, k, v, keys, carry))
    x = jnp.zeros((*q.shape[:2], self._config.embed), q.dtype)
    tokens = tokens_of_call(spec, span.at(q.shape[1]), span.length)
    self._block(spec, weights)(x, tokens, _StoredKeys(self.kind), attend)
    assert attend.partial is not None
    return attend.partial

  @_program(static_argnums=(0,))
  def finish_partial(
    self,
    spec: Layer,
    weights: PyTree,
    x: Float[Array, "1 T D"],
    partials: tuple[Partial, ...],
    span: TokensAt,
  ) -> jax.Array:
    """The layer's output [1, T, D], of its input and partials of all keys."""
    attend = _PartialQueries(self._attend, merged=partials)
    tokens = tokens_of_call(spec, span.at(x.shape[1]), span.length)
    block = self._block(spec, weights)
    return block(x, tokens, _StoredKeys(self.kind), attend)[0]

  @_program(static_argnums=(0,))
  def whole(
    self,
    spec: Layer,
    weights: PyTree,
    x: Float[Array, "1 T D"],
    pos: Int[Array, "1 T"],
    seg: Int[Array, "1 T"] | None,
    length: Index,
  ) -> tuple[jax.Array, KV]:
    """The layer's output [1, T, D] and its keys, for all tokens at once.

    `pos` are those of the context's layout; without `seg` none is padding.
    """
    block = self._block(spec, weights)
    at = Coords(pos, jnp.ones_like(pos) if seg is None else seg)
    tokens = tokens_of_call(
      spec, at, length, derived=True, segmented=seg is not None
    )
    out, part = block(x, tokens, NoCache(1).layer(0, (), 0), self._attend)
    return out, part.fresh


def tokens_of_call(
  spec: Layer, at: Coords, length: Lengths, **how: bool
) -> Tokens:
  """Return the tokens of a call of one layer.

  Args:
    spec: The layer.
    at: Coordinates [B, T].
    length: Tokens of the whole context, for rotations that depend on it.
    how: `derived` and `segmented` of `Tokens`; False where left out.
  """
  how = {"derived": False, "segmented": False} | how
  return Tokens(*at, ropes=spec.attention.ropes, length=length, **how)  # pyrefly: ignore


def _updated(cache: KVCache, kind: int, part: Any) -> KVCache:
  slots = list(cache.slots)
  slots[kind] = part.slots
  return cache.updated(tuple(slots))


class _Queries:
  """A sharding context that notes a layer's queries and keys, or has others.

  Attributes:
    q: the queries; those that are given attend in place of the layer's own.
    fresh: the keys of the call.
    mixed: what attention makes; one that is given is taken for it.
  """

  q: Any
  fresh: Any
  mixed: Any
  _attend: Any

  def __init__(
    self,
    attend: ShardingContext,
    q: jax.Array | None = None,
    mixed: jax.Array | None = None,
  ):
    self.q, self.fresh, self.mixed, self._attend = q, None, mixed, attend

  def __getattr__(self, name: str) -> Any:
    return getattr(self._attend, name)

  def __call__(
    self, q: jax.Array, tokens: Tokens, cache: Any, mask: Mask, extras: Extras
  ) -> jax.Array:
    if self.mixed is not None:
      return self.mixed
    if self.q is not None:
      self.mixed = self._attend(self.q, tokens, cache, mask, extras)
      return self.mixed
    self.q, self.fresh = q, cache.fresh
    return jnp.zeros_like(q)


class _PartialQueries(_Queries):
  """A sharding context that makes partials of keys, or takes those of all.

  Attributes:
    partial: of the queries and keys that were given.
  """

  def __init__(
    self,
    attend: ShardingContext,
    given: tuple[Any, ...] = (),
    merged: tuple[Partial, ...] = (),
  ):
    super().__init__(attend)
    self.partial: Partial | None = None
    self._given, self._merged = given, merged

  def __call__(
    self, q: jax.Array, tokens: Tokens, cache: Any, mask: Mask, extras: Extras
  ) -> jax.Array:
    b, t, n, h = q.shape
    if self._merged:
      partial = functools.reduce(merge, self._merged)
      if extras.sinks is not None:
        sinks = extras.sinks.reshape(partial.m.shape[1], -1)
        partial = add_sink(partial, sinks[None, :, :, None])
      out = finalize(partial)[0].astype(q.dtype)
      return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(b, t, n, -1)
    q, k, v, keys, carry = self._given
    heads = k.shape[1]
    q = jnp.transpose(q.reshape(b, t, heads, -1, h), (0, 2, 3, 1, 4))
    x = Local(q, k, v)
    slopes = extras.slopes
    args = ScoreArgs(
      Scores(scale=extras.scale, soft_cap=extras.soft_cap),
      Terms(slopes=None if slopes is None else slopes.reshape(heads, -1)),
      Context(tokens.at, keys.at(k.shape[2]), mask & SameSegment()),
    )
    local = AutoKernel().on_device(*device_of(CallSharding(), x))
    carry = empty_partial(x) if carry is None else carry
    self.partial = local.forward(x, args, carry)
    return jnp.zeros((b, t, n, v.shape[-1]), q.dtype)


class _StoredKeys(NamedTuple):
  """A layer's cache that notes a call's keys, or appends others to a cache.

  Fields:
    kind: how keys are stored.
    given: the cache, and keys and values as they are stored there.
    fresh: the call's keys and values as they would be stored.
    slots: nothing.
  """

  kind: CacheKind
  given: Any = None
  fresh: Any = None
  slots: Any = ()

  def append(
    self, k: jax.Array, v: jax.Array, at: Coords, rotation: Rotation
  ) -> Any:
    unrotated = self.kind.unrotated
    if self.given is None:
      stored = k if unrotated else rotation.own(k)
      return self._replace(fresh=KV(stored, v, at))
    part, k, v = self.given
    return part.append(k, v, at, rotation if unrotated else Rotation())

  def observe(
    self, rotated: Callable[..., Any], plain: Callable[..., Any]
  ) -> _StoredKeys:
    del rotated, plain
    return self

  def views(self) -> tuple[KVView, ...]:
    return ()
