"""What a codec does to a model, at the speed of a call without a cache.

Guarantees: each key and value is what decoding its code gives, so that the
logits are those of a cache of that kind into which the tokens go one by one.
Where the newest or the first tokens stay exact (`CacheKind.recent`, `first`), a
query sees those exact that were so behind the token before it; a codec of
groups counts them from the first token that it encodes.
Memory: that of a call without a cache; nothing is stored. With exact tokens
keys and values are there twice.

For measuring what a codec costs in loss: a text is read in one call, on any
mesh and with any strategy of attention. With exact tokens, of which each query
has others, by `attend=CachedAttention()` alone, and each text has a row of its
own, from position 0 on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree, Shaped

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import KV, FreshLayer, NoCache
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.codecs import Allocated, Codec, PerHead
from ringjax.kv.codecs.codec import VectorCodec, through
from ringjax.kv.head_storage import HeadStorage
from ringjax.kv.state import StateShape
from ringjax.ops.attention.views import KVView
from ringjax.ops.mask import Causal, Coords, Extent, Mask, moved
from ringjax.ops.rope import Rotation
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class SimulatedCache(NoCache):
  """A cache of some kind that keeps nothing, as `cache=` of a model's call.

  Attributes:
    constants: for each kind of layer the numbers of its codecs, [L, K, n].
    kind: of the cache.
    shapes: what each kind of layer keeps of a token.
  """

  constants: tuple[Any, ...]
  kind: CacheKind
  shapes: tuple[Any, ...]

  @classmethod
  def create(cls, model: Transformer, kind: CacheKind | str) -> SimulatedCache:
    """For the calls of a `Transformer`.

    Raises:
      OptionError: a kind without a codec, or with a policy.
    """
    found: CacheKind = model.cache_kind(kind)
    if found.policy is not None:
      found.keeping_all("one call")
    codec = found.codec
    if codec is None:
      raise OptionError(
        "kind", str(found), "one with a codec", "call the model without a cache"
      )
    assert not isinstance(codec, Allocated)
    constants = tuple(
      ((), ()) if isinstance(shape, StateShape) else codec.constants(n, shape)
      for n, shape in enumerate(model.kinds)
    )
    return cls(jax.tree.map(jnp.asarray, constants), found, model.kinds)

  @property
  def slots(self) -> tuple[Any, ...]:
    return ((),) * len(self.constants)

  @property
  def length(self) -> Any:
    return jnp.zeros(1, jnp.int32)

  def layer(self, kind: int, slots: PyTree, index: Index) -> Any:
    del slots
    shape = self.shapes[kind]
    if isinstance(shape, StateShape):
      return FreshLayer()
    if self.kind.exact and self.kind.windowed and shape.reach is not None:
      # Ring buffers hold what is exact.
      return FreshLayer()
    codec, unrotated = self.kind.codec, self.kind.unrotated
    constants = self.constants[kind]

    def coded(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
      if isinstance(codec, PerHead):
        by_head = HeadStorage(codec, self.shapes[kind])
        return by_head.through(k, v, index, constants)
      assert isinstance(codec, Codec)
      one = lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
      of_k, of_v = jax.tree.map(one, constants)
      return (
        self._through(codec.keys, k, of_k),
        self._through(codec.values, v, of_v),
      )

    def change(k: jax.Array, v: jax.Array, rotation: Rotation) -> PyTree:
      k, v = coded(k if unrotated else rotation.own(k), v)
      return rotation.own(k) if unrotated else k, v, ()

    if not self.kind.exact:
      return FreshLayer(change=change)
    reading = shape.reading
    mask = Causal() if reading is None else reading.mask
    return _PartlyExact(self.kind, mask, change)

  def _through(
    self, vectors: VectorCodec, x: jax.Array, constants: PyTree
  ) -> jax.Array:
    """Vectors [B, K, T, D] once they were encoded, group by group."""
    first, count = self.kind.first, x.shape[2]
    group = getattr(vectors, "page", None)
    if group is None or not x.shape[-1]:
      return through(vectors, x, constants)
    if count <= first:
      return x
    pad = [(0, 0), (0, 0), (0, -(count - first) % group), (0, 0)]
    whole = through(
      vectors, jnp.pad(x[:, :, first:], pad, mode="edge"), constants
    )
    return jnp.concatenate([x[:, :, :first], whole[:, :, : count - first]], 2)


tree.register(SimulatedCache, ("constants",), ("kind", "shapes"))


@dataclasses.dataclass(frozen=True)
class _NoKeys:
  """In place of keys that are the same for all queries."""

  kind: CacheKind

  def __iter__(self) -> Any:
    raise OptionError(
      "attend",
      f"keys that travel, with a cache of kind {self.kind} that is simulated",
      "CachedAttention(): each query has other exact tokens",
      "pass attend=rj.models.CachedAttention()",
    )

  @property
  def k(self) -> Any:
    return iter(self)


class _PartlyExact(NamedTuple):
  """One layer: a query sees some keys exact and the others decoded.

  Fields:
    kind: says which.
    mask: the layer's.
    change: see `FreshLayer`.
    own: the call's keys and values.
    decoded: the same once they were encoded.
    slots: nothing.
  """

  kind: CacheKind
  mask: Mask
  change: Callable[..., Any]
  own: Any = None
  decoded: Any = None
  slots: PyTree = ()

  @property
  def fresh(self) -> Any:
    return _NoKeys(self.kind)

  def append(
    self,
    k: Shaped[Array, "B K T H"],
    v: Shaped[Array, "B K T J"],
    at: Coords,
    rotation: Rotation,
  ) -> _PartlyExact:
    of_k, of_v, _ = self.change(k, v, rotation)
    own = KV(rotation.own(k), v, at)
    return self._replace(own=own, decoded=KV(of_k, of_v, at))

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> _PartlyExact:
    del rotated, plain
    return self

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    if apart:
      raise OptionError(
        "parents",
        f"drafts with a cache of kind {self.kind} that is simulated",
        "none",
        "read them into a cache, model.init_cache",
      )
    kind = self.kind
    if kind.residual is not None:
      return self._residual_views(kind.residual)
    group = kind.page if kind.grouped else 1
    seen = lambda coded: (
      self.mask & Encoded(kind.recent, kind.first, group, coded)
    )
    return (
      dataclasses.replace(self.decoded.view(), mask=seen(True)),
      dataclasses.replace(self.own.view(), mask=seen(False)),
    )

  def _residual_views(self, size: int) -> tuple[KVView, ...]:
    """What is decoded, keys decoded with exact values, and what is exact."""
    keys = lambda coded: Encoded(0, 0, size, coded)
    values = lambda coded: Encoded(size, 0, 1, coded)
    between = self.decoded._replace(v=self.own.v)
    parts = (
      (self.decoded, values(True)),
      (between, keys(True) & values(False)),
      (self.own, keys(False)),
    )
    return tuple(
      dataclasses.replace(kv.view(), mask=self.mask & mask)
      for kv, mask in parts
    )


@dataclasses.dataclass(frozen=True)
class Encoded(Mask):
  """A query sees keys that were encoded before it came; or the others.

  Attributes:
    recent: tokens before it that were not.
    first: tokens at the beginning that never are.
    group: tokens that are encoded together.
    coded: which of the two.
  """

  recent: int
  first: int
  group: int
  coded: bool

  def _before(self, last: jax.Array, key: jax.Array) -> jax.Array:
    """Whether a key was encoded before a query at position `last`."""
    # Groups are compared: where one ends may be beyond int32.
    newest = moved(last, -self.recent - self.first) // self.group
    gone = moved(key, -self.first) // self.group < newest
    return gone & (key >= self.first)

  def allows(self, q: Coords, k: Coords) -> jax.Array:
    return self._before(q.pos, k.pos) == self.coded

  def bound(self, q: Extent, k: Extent) -> tuple[jax.Array, jax.Array]:
    early = jnp.maximum(k.first, self.first)
    some = self._before(q.last, early) & (k.last >= self.first)
    all_ = self._before(q.first, k.last) & (k.first >= self.first)
    return (some, all_) if self.coded else (~all_, ~some)


tree.register(Encoded, (), ("recent", "first", "group", "coded"))
