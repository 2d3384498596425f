"""A model run one layer at a time from the host, on one device or on a mesh.

Guarantees: the programs, run in order, compute `Transformer.__call__`. They are
the same for every layer of a kind, every tile and every partition.

A layer is cut in two where its keys and values are ready: `project` ends there,
`attend` begins there. Both trace the layer's own code; the compiler drops the
other half.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, Shaped

from ringjax.errors import ConfigError
from ringjax.kv.base import KV, NoCache
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import DENSE, CacheConfig
from ringjax.kv.codecs import Codec
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.models.transformer import (
  Transformer,
  TransformerConfig,
  logits_of,
)
from ringjax.nn.attention_layers.attention import Attention
from ringjax.nn.block import Layer
from ringjax.nn.linear import part_dtype
from ringjax.nn.sharding_context import CachedAttention, Extras, ShardingContext
from ringjax.nn.stack import Stack
from ringjax.nn.tokens import Tokens
from ringjax.ops.attention.attend import empty_partial
from ringjax.ops.attention.blockwise import Local
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.mask import Coords, Mask, SameSegment
from ringjax.ops.rope import Rotation
from ringjax.ops.softmax import Partial, add_sink, finalize, merge
from ringjax.parallel.call_sharding import CallSharding, device_of
from ringjax.typing import Index, Lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedLayer:
  """A layer of a model, and where its weights and its keys are stacked.

  Attributes:
    number: Number of the layer in the model.
    kind: Index of the layer's kind in `model.kinds`.
    index: Index of the layer among those of its kind.
    spec: Specification of the layer's parts.
  """

  number: int
  kind: int
  index: int
  spec: Layer

  @property
  def numbers(self) -> int:
    """Number of elements of a token's key and value together."""
    spec: Any = self.spec.attention
    return 2 * spec.kv_heads * spec.head_dim

  def token_bytes(self, dtype: DTypeLike, codec: Codec | None = None) -> int:
    """Bytes of a token's key and value, in a dtype or as a codec's codes."""
    if codec is None:
      return jnp.dtype(dtype).itemsize * self.numbers
    spec: Any = self.spec.attention
    heads, dim = spec.kv_heads, spec.head_dim
    return heads * (codec.keys.width(dim) + codec.values.width(dim))

  def first_needed(self, end: int) -> int:
    """Index of the first of `end` keys that a later query may see."""
    reach = self.spec.attention.reach
    return 0 if reach is None else max(0, end - reach)


def check_layers(config: TransformerConfig) -> None:
  """Refuses a model whose layers can't be run one at a time.

  Raises:
    ConfigError: If a layer keeps anything but keys and values of one width, or
      needs more than the output of the layer before, or positions are learned.
  """
  if config.positions is not None:
    raise ConfigError(
      "model",
      f"{config.family}, whose embeddings know their positions",
      "tokens that are embedded without them",
      "read it with rj.infer.generate",
    )
  for number, spec in enumerate(config.layers):
    if type(spec.attention) is not Attention:
      raise ConfigError(
        "model",
        f"{config.family}, whose layer {number} is "
        f"{type(spec.attention).__name__}",
        "keys and values in every layer",
        "read it with rj.infer.generate",
      )
    if spec.attention.reads or spec.inputs is not None:
      raise ConfigError(
        "model",
        f"{config.family}, whose layers read each other's keys, or tokens' ids",
        "layers that read what the one before them made",
        "read it with rj.infer.generate",
      )
    if spec.attention.value != spec.attention.head_dim:
      raise ConfigError(
        "model",
        f"{config.family}, whose values have {spec.attention.value} "
        f"numbers a head and keys {spec.attention.head_dim}",
        "keys and values of one width",
        "read it with rj.infer.generate",
      )


def stacked_layers(model: Transformer) -> tuple[StackedLayer, ...]:
  """List the layers of a model, in order.

  Raises:
    ConfigError: See `check_layers`.
  """
  check_layers(model.config)
  layers, kind = [], 0
  for run in model.stack.runs:
    for position, spec in enumerate(run.layers):
      for index in range(run.repeats):
        number = run.number(position, index)
        layers.append(
          StackedLayer(number=number, kind=kind, index=index, spec=spec)
        )
      kind += 1
  return tuple(sorted(layers, key=lambda layer: layer.number))


class TokenSpan(NamedTuple):
  """Consecutive tokens, padded to the size of a program.

  Fields:
    first: Position of the first token.
    real: Number of tokens; the rest of an array is padding.
    length: Tokens of the whole context, for rotations that depend on it.
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
    pos: Position of the token, int32 [B]; -1 for a row without one.
    length: Tokens of each row's whole context, [B], or of all rows, [], for
      rotations that depend on it.
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
    pos: Positions, int32 [T].
    seg: Number above 0 of each token's request, int32 [T]; 0 for padding.
    length: Tokens of the whole context, for rotations that depend on it.
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
  """A layer's weights in their kind's stack, sliced inside a program.

  Fields:
    stack: Weights of all layers of the kind, stacked.
    index: Index of the layer in the stack.
  """

  stack: tuple[Shaped[Array, " ..."], ...]
  index: Index


class _Program:
  """A method that each instance compiles for itself, to count its programs."""

  def __init__(self, f: Callable[..., Any], options: dict[str, Any]):
    self.f, self.options = f, options

  def __set_name__(self, owner: type, name: str) -> None:
    self.name = name

  def __get__(
    self, instance: Any, owner: type | None = None
  ) -> Callable[..., Any]:
    compiled = jax.jit(functools.partial(self.f, instance), **self.options)
    # Later look-ups get the instance's attribute and not this descriptor.
    instance.__dict__[self.name] = compiled
    instance.compiled.append(compiled)
    return compiled


def _program(**options: Any) -> Callable[[Callable[..., Any]], Any]:
  return lambda f: _Program(f, options)


class LayerPrograms:
  """The compiled programs of a model's layers.

  Attributes:
    layers: Layers of the model.
    kind: Kind of the caches that the programs write.
    compiled: Jitted functions so far.
  """

  def __init__(
    self,
    model: Transformer,
    attend: ShardingContext | None = None,
    kind: CacheConfig = DENSE,
  ):
    """Prepares; nothing is compiled yet.

    Args:
      model: Model whose layers to run.
      attend: Sharding of a call's tokens and their attention; default: one
        device, and a cache.
      kind: Kind of the caches.

    Raises:
      ConfigError: If a layer keeps anything but keys and values.
    """
    self.layers = stacked_layers(model)
    self.kind = kind
    self.compiled: list[Any] = []
    self._constants: dict[int, Any] = {}
    self._config, self._specs = model.config, model.kinds
    self._attend = CachedAttention() if attend is None else attend
    # A module is flattened once, not at every call.
    flat = [
      jax.tree.flatten(block)
      for blocks in model.stack.blocks
      for block in blocks
    ]
    self._stacks = [tuple(leaves) for leaves, _ in flat]
    placed = model.stack.placed or ()
    run_positions = [
      (run_index, position)
      for run_index, run in enumerate(model.stack.runs)
      for position in range(len(run.layers))
    ]
    # Layers of these kinds are fetched, by run and position.
    self._fetched = {
      kind: run_position
      for kind, run_position in enumerate(run_positions)
      if placed and placed[run_position[0]][run_position[1]] is not None
    }
    self._stack = model.stack if self._fetched else None
    self._trees = {layer.spec: flat[layer.kind][1] for layer in self.layers}
    outer = (model.embed, model.norm, model.head)
    leaves, self._outer_tree = jax.tree.flatten(outer)
    self._outer = tuple(leaves)

  def count(self) -> int:
    """Count the programs that have been compiled."""
    return sum(program._cache_size() for program in self.compiled)

  def weights(self, layer: StackedLayer) -> tuple[jax.Array, ...]:
    """Slice a layer's weights from its kind's stack, or fetch them."""
    if layer.kind in self._fetched:
      run_position = self._fetched[layer.kind]
      return self._fetch(*run_position, self._stack, layer.index)
    return self._pick(self._stacks[layer.kind], layer.index)

  def in_stack(self, layer: StackedLayer) -> StackedWeights:
    """Refer to a layer's weights in their stack, for `project` and `finish`.

    Layers whose weights are fetched are not in a stack.
    """
    return StackedWeights(self._stacks[layer.kind], np.int32(layer.index))

  # -------------------------------------------------------------------------
  # The walk over a model: embed, the layers in order, head
  # -------------------------------------------------------------------------

  def embed(
    self, tokens: Int[Array | np.ndarray, "B T"]
  ) -> Float[Array, "B T D"]:
    """Embed tokens, [B, T, D]."""
    return self._embed(self._outer, tokens)

  def walk(
    self,
    layers: Iterable[StackedLayer] | None = None,
    *,
    before: Callable[[int], object] = lambda number: None,
    stacked: bool = False,
  ) -> Iterator[tuple[StackedLayer, PyTree]]:
    """Yield layers in order, each with its weights.

    A layer's weights are taken when its turn comes, so that at most those of
    one layer are outside of their stack.

    Args:
      layers: Some of `layers`; default: all.
      before: Called with a layer's number before its weights are taken.
      stacked: Whether weights stay in their stack, see `in_stack`.
    """
    for layer in self.layers if layers is None else layers:
      before(layer.number)
      yield layer, self.in_stack(layer) if stacked else self.weights(layer)

  def head(self, x: Float[Array, "B T D"], row: Index) -> Float[Array, "B V"]:
    """Logits after token `row` of the T, float32 [B, V]."""
    return self._head(self._outer, x, row)

  def _block(self, spec: Layer, weights: PyTree) -> Any:
    """Rebuild a layer's module inside a program."""
    if isinstance(weights, StackedWeights):
      take = lambda x: lax.dynamic_index_in_dim(
        x, weights.index, 0, keepdims=False
      )
      weights = tuple(take(x) for x in weights.stack)
    return jax.tree.unflatten(self._trees[spec], weights)

  def mixing_weights(
    self, weights: tuple[Shaped[Array, " ..."], ...]
  ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Select the weights that attention alone needs: sinks, no projections.

    Returns:
      (shapes, weights): Shape of each weight; the weight itself, or None for a
        matrix.
    """
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in weights)
    return shapes, tuple(x if x.ndim < 2 else None for x in weights)

  def constants(self, layer: StackedLayer) -> PyTree:
    """Constants of the codec for one layer, [K, n]."""
    if layer.kind not in self._constants:
      assert isinstance(self.kind.codec, Codec)
      shape = self._specs[layer.kind]
      assert isinstance(shape, LayerCacheSpec)
      constants = self.kind.codec.constants(layer.kind, shape)
      self._constants[layer.kind] = jax.tree.map(jnp.asarray, constants)
    return jax.tree.map(lambda x: x[layer.index], self._constants[layer.kind])

  def cache_spec(self, layer: StackedLayer) -> LayerCacheSpec:
    """Specification of a cache of this layer alone."""
    spec: Any = self._specs[layer.kind]
    return dataclasses.replace(spec, layers=1)

  # -------------------------------------------------------------------------
  # Programs
  # -------------------------------------------------------------------------

  @_program()
  def _pick(self, stack: Any, index: Index) -> PyTree:
    take = lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
    return tuple(take(x) for x in stack)

  @_program(static_argnums=(0, 1))
  def _fetch(
    self, run: int, position: int, stack: Stack, index: Index
  ) -> PyTree:
    return tuple(jax.tree.leaves(stack.layer(run, position, index)))

  @_program()
  def _embed(
    self, outer: PyTree, tokens: Int[Array, "B T"]
  ) -> Float[Array, "B T D"]:
    embed, _, _ = jax.tree.unflatten(self._outer_tree, outer)
    return self._attend.constrain(embed(tokens))

  @_program()
  def _head(
    self, outer: PyTree, x: Float[Array, "B T D"], row: Index
  ) -> Float[Array, "B V"]:
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
  ) -> tuple[
    Float[Array, "B T N H"], Shaped[Array, "B K T H"], Shaped[Array, "B K T J"]
  ]:
    """Project a layer's input to queries, and to keys and values to store.

    Args:
      spec: Specification of the layer.
      weights: Weights of the layer.
      x: Input of the layer.
      span: Positions of the T tokens.
      dtype: Dtype of the cache.

    Returns:
      Queries [1, T, N, H], keys and values [1, K, T, H] as the kind of cache
      stores them: keys rotated, or before their rotation.
    """
    block = self._block(spec, weights)
    captured = _Queries(self._attend)
    tokens = tokens_of_call(spec, span.at(x.shape[1]), span.length)
    block(x, tokens, _StoredKeys(self.kind), captured)
    k, v, _ = captured.fresh
    return captured.q, k.astype(dtype), v.astype(dtype)

  @_program()
  def encode(
    self,
    constants: PyTree,
    k: Shaped[Array, "1 K T H"],
    v: Shaped[Array, "1 K T J"],
  ) -> tuple[Shaped[Array, "1 K T _"], Shaped[Array, "1 K T _"]]:
    """Encode keys and values with a layer's `constants`, [1, K, T, X] each."""
    codec = self.kind.codec
    assert isinstance(codec, Codec)
    key_constants, value_constants = constants
    return codec.keys.encode(k, key_constants), codec.values.encode(
      v, value_constants
    )

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
    """Replace a cache's contents by a block of stored keys, in one layer.

    Args:
      kind: Index of the layer's kind in the cache.
      cache: Cache to overwrite; donated.
      index: Index of the layer among those of its kind.
      first: Position of the first row.
      end: Position after the last real row.
      k: Keys as `project` returns them, or with `constants` as `encode` does.
      v: Values in the same form.
      constants: Constants of the layer's codec, if `k` and `v` are codes.
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
      key_constants, value_constants = constants
      k = codec.keys.decode(k, shape.key, cache.dtype, key_constants)
      v = codec.values.decode(v, shape.value, cache.dtype, value_constants)
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
  ) -> tuple[Float[Array, "1 T D"], KVCache]:
    """Compute a layer's output [1, T, D] and append its keys to the cache.

    Args:
      spec: Specification of the layer.
      kind: Index of the layer's kind in the cache.
      weights: Weights of the layer.
      x: Input of the layer.
      made: Queries, keys and values that `project` returned for `x`.
      span: Positions of the T tokens.
      cache: Cache with the keys of the tokens before; donated.
      index: Index of the layer among those of its kind.
    """
    block = self._block(spec, weights)
    out, cache, _ = self._from_queries(
      spec, kind, block, x, made, span, cache, index
    )
    return out, cache

  def _from_queries(
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
    """Run a layer from its queries on: output, cache, attention's output."""
    q, k, v = made
    at = span.at(x.shape[1])
    cache = cache.allocate(at, replicated=False, sees=True)
    part = cache.layer(kind, cache.slots[kind], index)
    stored = _StoredKeys(self.kind, (part, k, v))
    attend = _Queries(self._attend, q)
    out, part = block(x, tokens_of_call(spec, at, span.length), stored, attend)
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
  ) -> tuple[Float[Array, "B T N J"], KVCache]:
    """Compute attention alone: [1, T, N, J], and the cache with the keys.

    `shapes` and `weights` are those of `mixing_weights`, the others those of
    `attend`.
    """
    # All but attention is computed from zeros; the compiler drops it.
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)
    all_weights = [
      zeros(shape) if weight is None else weight
      for shape, weight in zip(shapes, weights, strict=True)
    ]
    block = self._block(spec, all_weights)
    x = jnp.zeros((*made[0].shape[:2], self._config.embed), made[0].dtype)
    _, cache, mixed = self._from_queries(
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
  ) -> Float[Array, "B T D"]:
    """Compute a layer's output [1, T, D] from its input and `mix`'s output."""
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
    """Partial attention of queries to some of the keys, added to `carry`.

    Args:
      spec: Specification of the layer.
      weights: Weights of the layer.
      q: Queries, as `project` returns them.
      k: Keys, as `project` returns them.
      v: Values of the keys.
      span: Positions of the T queries, which see keys of the same request only.
      keys: Positions of the S keys.
      carry: Partial of other keys, [1, K, G, T, J]; None for an empty one.
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
  ) -> Float[Array, "1 T D"]:
    """Compute a layer's output [1, T, D] from its input and all partials."""
    attend = _PartialQueries(self._attend, merged=partials)
    tokens = tokens_of_call(spec, span.at(x.shape[1]), span.length)
    block = self._block(spec, weights)
    return block(x, tokens, _StoredKeys(self.kind), attend)[0]

  @_program(static_argnums=(0,))
  def full_layer(
    self,
    spec: Layer,
    weights: PyTree,
    x: Float[Array, "1 T D"],
    pos: Int[Array, "1 T"],
    seg: Int[Array, "1 T"] | None,
    length: Index,
  ) -> tuple[Float[Array, "1 T D"], KV]:
    """Compute a layer's output [1, T, D] and keys, for all tokens at once.

    `pos` are those of the context's layout; without `seg` no token is padding.
    """
    block = self._block(spec, weights)
    at = Coords(pos, jnp.ones_like(pos) if seg is None else seg)
    tokens = tokens_of_call(
      spec, at, length, derived=True, segmented=seg is not None
    )
    out, part = block(x, tokens, NoCache(1).layer(0, (), 0), self._attend)
    return out, part.fresh


def tokens_of_call(
  spec: Layer, at: Coords, length: Lengths, **flags: bool
) -> Tokens:
  """Return the tokens of a call of one layer.

  Args:
    spec: The layer.
    at: Coordinates [B, T].
    length: Tokens of the whole context, for rotations that depend on it.
    **flags: `derived` and `segmented` of `Tokens`; False where left out.
  """
  flags = {"derived": False, "segmented": False} | flags
  return Tokens(*at, ropes=spec.attention.ropes, length=length, **flags)  # pyrefly: ignore


def _updated(cache: KVCache, kind: int, part: Any) -> KVCache:
  slots = list(cache.slots)
  slots[kind] = part.slots
  return cache.updated(tuple(slots))


class _Queries:
  """Sharding context that captures a layer's queries, or replaces them.

  Attributes:
    q: Captured queries, or the ones to attend with in place of the layer's.
    fresh: Captured keys and values of the call.
    mixed: Output of attention, or the one to return in its place.
  """

  # Captured keys are those of all heads.
  takes_rows = False

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
  """Sharding context that computes a partial of keys, or merges partials.

  Attributes:
    partial: Partial of the queries and keys passed to the constructor.
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
  """Layer cache that captures a call's keys, or appends others to a cache.

  Fields:
    kind: Kind of cache, which says whether keys are stored rotated.
    appended: (layer's cache, keys, values) to append in place of the call's.
    fresh: Captured keys and values of the call, as they would be stored.
    slots: Empty.
  """

  kind: CacheConfig
  appended: Any = None
  fresh: Any = None
  slots: Any = ()

  def append(
    self, k: jax.Array, v: jax.Array, at: Coords, rotation: Rotation
  ) -> Any:
    unrotated = self.kind.layout.unrotated
    if self.appended is None:
      stored = k if unrotated else rotation.own(k)
      return self._replace(fresh=KV(stored, v, at))
    part, k, v = self.appended
    return part.append(k, v, at, rotation if unrotated else Rotation())

  def observe(
    self, rotated: Callable[..., Any], plain: Callable[..., Any]
  ) -> _StoredKeys:
    del rotated, plain
    return self

  def views(self) -> tuple[KVView, ...]:
    return ()
