"""Attention whose positions are folded, for contexts longer than trained.

Guarantees: no query and key are rotated by a distance that the model has not
been trained for. Pairs of tokens belong to classes by their distance; each
class has its own rotation of the query, and sees its keys by a mask. The
classes' results are partials over disjoint keys, which are merged: exact in
every layout, on shards, and in caches that hold keys rotated. Up to a chunk, or
a window, of tokens it is plain attention.

`DualChunk`, of An et al. 2024, arXiv 2402.17463, in the form of Qwen2.5-1M:
keys are rotated by their position modulo a chunk of L = chunk_size -
local_size. A query at r in its chunk is rotated by r for keys of its chunk, by
min(r + L, chunk_size) for the chunk before, and by min(2 L - 1, chunk_size) for
all earlier ones.

`SelfExtend`, of Jin et al. 2024, arXiv 2401.01325: keys less than `window`
positions away are seen at their distance, others at floor(p / group) for a key
and floor(p / group) + window - floor(window / group) for a query. A key is kept
in both rotations, so keys take twice their bytes.

Cost: a call of attention for each class, 3 or 2 of them; tiles without a pair
of the class are skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ringjax.checks import integer, positive_int
from ringjax.errors import OptionError
from ringjax.kv.base import LayerCache
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.nn.attention_layers.attention import Attention, GroupedQuery
from ringjax.nn.sharding_context import (
  Attend,
  CachedAttention,
  ContextParallel,
  Extras,
)
from ringjax.nn.tokens import Tokens
from ringjax.ops.mask import (
  Beyond,
  Causal,
  Chunked,
  ChunksBack,
  Mask,
  Window,
)
from ringjax.ops.rope import FoldedRope, LengthScaled, PositionFold, Rope
from ringjax.ops.softmax import Partial, add_sink, finalize, merge

# A rotation of the queries, and the mask of the keys that they see so rotated.
QueryClass = tuple[Rope, Mask]


def _folded(rope: Rope, **fold: int) -> FoldedRope:
  """The rotation of a model by folded positions."""
  fields = {f.name: getattr(rope, f.name) for f in dataclasses.fields(Rope)}
  return FoldedRope(**fields, fold=PositionFold(**fold))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DualChunk:
  """Positions of dual chunk attention.

  Attributes:
    chunk_size: Largest distance by which a query and a key are rotated.
    local_size: Number of tokens of it that queries at the begin of a chunk see
      at their distances in the chunk before.

  Raises:
    OptionError: If a size is out of its range.
  """

  chunk_size: int
  local_size: int

  def __post_init__(self) -> None:
    positive_int("chunk_size", self.chunk_size)
    integer("local_size", self.local_size, least=0, most=self.chunk_size - 2)

  @property
  def length(self) -> int:
    """Number of tokens of a chunk, L."""
    return self.chunk_size - self.local_size

  @property
  def plain_tokens(self) -> int:
    """Number of tokens up to which it is plain attention."""
    return self.length

  def key_ropes(self, rope: Rope) -> tuple[Rope, ...]:
    """Rotations in which a key is kept."""
    return (_folded(rope, modulo=self.length),)

  def query_classes(self, rope: Rope) -> tuple[QueryClass, ...]:
    """Rotations of the queries; the first is that of the nearest keys."""
    chunk, longest = self.length, self.chunk_size
    return (
      (_folded(rope, modulo=chunk), Chunked(chunk)),
      (
        _folded(rope, modulo=chunk, shift=chunk, largest=longest),
        ChunksBack(chunk, 1, 1),
      ),
      (
        _folded(rope, modulo=1, shift=min(2 * chunk - 1, longest)),
        ChunksBack(chunk, 2),
      ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfExtend:
  """Positions of Self-Extend.

  Attributes:
    group: Number of positions that distant tokens share.
    window: Number of nearest tokens, the query included, that are seen at their
      distances.

  Raises:
    OptionError: If a size is out of its range.
  """

  group: int
  window: int

  def __post_init__(self) -> None:
    positive_int("group", self.group)
    positive_int("window", self.window)

  @property
  def plain_tokens(self) -> int:
    """Number of tokens up to which it is plain attention."""
    return self.window

  def key_ropes(self, rope: Rope) -> tuple[Rope, ...]:
    """Rotations in which a key is kept."""
    return rope, _folded(rope, divisor=self.group)

  def query_classes(self, rope: Rope) -> tuple[QueryClass, ...]:
    """Rotations of the queries, in the order of the keys' rotations."""
    shift = self.window - self.window // self.group
    return (
      (rope, Window(self.window, 0)),
      (_folded(rope, divisor=self.group, shift=shift), Beyond(self.window)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldedAttention(Attention):
  """Grouped-query attention of one layer by folded positions.

  Attributes:
    positions: Rule by which positions are folded.
  """

  positions: DualChunk | SelfExtend

  @classmethod
  def of(
    cls, attention: object, positions: DualChunk | SelfExtend
  ) -> FoldedAttention:
    """Fold the positions of a layer.

    Raises:
      OptionError: If its queries do not see all keys before them by a rotation
        alone.
    """
    got = None
    if type(attention) is not Attention:
      got = f"a layer of {type(attention).__name__}"
    elif attention.rope is None:
      got = "a layer without a rotation"
    elif attention.mask != Causal():
      got = f"a layer whose queries see {attention.mask}"
    elif attention.alibi is not None:
      got = "a layer with ALiBi"
    elif attention.qk_norm_late and attention.qk_norm is not None:
      got = "a layer with a norm after its rotation"
    elif attention.group is not None:
      got = "a layer that shares its keys with others"
    if got is not None:
      raise OptionError(
        "positions",
        f"{positions} for {got}",
        "causal layers of plain attention with a rotation",
        "use another way to a longer context, such as yarn:factor=4",
      )
    fields = {
      f.name: getattr(attention, f.name) for f in dataclasses.fields(Attention)
    }
    return cls(**fields, positions=positions)

  @property
  def key_ropes(self) -> tuple[Rope, ...]:
    """Rotations in which a key is kept, one after another in a head."""
    assert self.rope is not None
    return self.positions.key_ropes(self.rope)

  @property
  def query_classes(self) -> tuple[QueryClass, ...]:
    """Rotations of the queries, and the masks of the keys that each sees."""
    assert self.rope is not None
    return self.positions.query_classes(self.rope)

  @property
  def ropes(self) -> tuple[Rope, ...]:
    classes = tuple(rope for rope, _ in self.query_classes)
    return tuple(dict.fromkeys((*self.key_ropes, *classes)))

  @property
  def pair_flops(self) -> int:
    return 2 * self.heads * (self.key_dim + self.value)

  @property
  def key_dim(self) -> int:
    """Size of a head of stored keys: all rotations of a key."""
    return len(self.key_ropes) * self.head_dim

  def cache_shape(self, layers: int) -> LayerCacheSpec:
    shape = super().cache_shape(layers)
    assert shape.reading is not None
    # Keys are stored rotated: no cache rotates them.
    reading = dataclasses.replace(shape.reading, rope=None)
    return dataclasses.replace(
      shape, key=self.key_dim, value=self.value, reading=reading
    )

  def build(self, rngs: nnx.Rngs, embed: int) -> FoldedQuery:
    return FoldedQuery(rngs, self, embed)


class FoldedQuery(GroupedQuery):
  """The module of `FoldedAttention`."""

  @property
  def folded(self) -> FoldedAttention:
    """Parameters of the layer."""
    assert isinstance(self.spec, FoldedAttention)
    return self.spec

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: LayerCache,
    attend: Attend,
  ) -> tuple[Float[Array, "B T D"], LayerCache]:
    """[B, T, D] and the layer's cache with this call's keys."""
    _check(attend, tokens)
    spec = self.folded
    q, k, v = attend.rows(self._maps, x)
    v = self.v_norm(v)
    if spec.value_scale != 1.0:
      v = v * jnp.asarray(spec.value_scale, v.dtype)
    q, k = self._clipped(self.q_norm(q)), self._clipped(self.k_norm(k))
    if spec.temperature is not None:
      q = spec.temperature(q, tokens.pos)
    if spec.rope is not None and isinstance(spec.rope.scaling, LengthScaled):
      factor = spec.rope.scaling.factor(tokens.length, tokens.pos)
      k = (k.astype(jnp.float32) * factor[:, :, None, None]).astype(k.dtype)
    keys = [tokens.rotate(rope, k) for rope in spec.key_ropes]
    cache = cache.append(
      jnp.swapaxes(jnp.concatenate(keys, -1), 1, 2),
      jnp.swapaxes(self._clipped(v), 1, 2),
      tokens.at,
      tokens.rotation(None),
    )
    out = self.out_norm(self._merged(q, tokens, cache, attend))
    if self.gate is not None:
      out = out * nnx.sigmoid(attend.rows(self.gate, x))
    return attend.summed(self.o, out), cache

  def _merged(
    self,
    q: Float[Array, "B T N H"],
    tokens: Tokens,
    cache: LayerCache,
    attend: Any,
  ) -> Float[Array, "B T N J"]:
    """Attention of all classes."""
    spec = self.folded
    extras = Extras(
      scale=spec.logit_scale, soft_cap=spec.soft_cap, residual=True
    )
    classes = spec.query_classes
    if self._within(attend, tokens, q.shape[1]):
      classes = classes[:1]
    total: Partial | None = None
    for number, (rope, mask) in enumerate(classes):
      rotated = _beside(tokens.rotate(rope, q), number, len(spec.key_ropes))
      partial = Partial.of(
        *attend(rotated, tokens, cache, spec.mask & mask, extras)
      )
      total = partial if total is None else merge(total, partial)
    assert total is not None
    if self.sinks is not None:
      total = add_sink(total, self.sinks[...])
    return finalize(total)[0].astype(q.dtype)

  def _within(self, attend: Any, tokens: Tokens, length: int) -> bool:
    """Whether no token of a call is beyond what plain attention sees.

    Positions that are data are unknown: all classes are computed.
    """
    sees_all = isinstance(attend, ContextParallel) and attend.around is None
    tokens_at_most = self.folded.positions.plain_tokens
    return sees_all and tokens.derived and length <= tokens_at_most


def _beside(
  q: Float[Array, "B T N H"], number: int, rotations: int
) -> Float[Array, "B T N _"]:
  """Queries that read one of the rotations of stored keys: zeros elsewhere."""
  if rotations == 1:
    return q
  h = q.shape[-1]
  widths = (number * h, (rotations - 1 - number) * h)
  return jnp.pad(q, ((0, 0), (0, 0), (0, 0), widths))


def _check(attend: Any, tokens: Tokens) -> None:
  """Refuses calls that do not compute partials of classes.

  Raises:
    OptionError: For these.
  """
  takes = isinstance(attend, ContextParallel | CachedAttention)
  if not takes or not attend.takes_classes:
    raise OptionError(
      "attend",
      f"{type(attend).__name__}, for layers with folded positions",
      "ContextParallel, ChainParallel or CachedAttention",
      "use another way to a longer context, such as yarn:factor=4",
    )
  if tokens.tree is not None:
    raise OptionError(
      "parents",
      "a tree of drafted tokens, for layers with folded positions",
      "one path of tokens",
      "draft one path, or none",
    )


def refuse_folded(
  layers: Sequence[Any], name: str, got: str, remedy: str
) -> None:
  """Refuses a model with folded positions for what does not support them.

  Args:
    layers: Layers of the model.
    name: Name of the argument, for the error.
    got: Description of what came.
    remedy: Advice, for the error.

  Raises:
    OptionError: If a layer has folded positions.
  """
  if any(isinstance(x.attention, FoldedAttention) for x in layers):
    raise OptionError(
      name,
      f"{got}, for a model with folded positions (dual chunk attention or "
      "Self-Extend)",
      "a model whose keys are rotated by their own positions",
      remedy,
    )
