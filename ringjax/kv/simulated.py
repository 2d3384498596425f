"""Simulate a cache's codec in one call of a model without a cache.

Guarantees: each key and value is encoded and decoded, so that the logits are
those of a cache of that kind to which the tokens are appended one by one. If
the newest or the first tokens stay exact (`ExactConfig`), a query
sees those exact that were exact after the previous token; a codec of groups
counts groups from the first token that it encodes.
Memory: that of a call without a cache; nothing is stored. With exact tokens,
keys and values are held twice.

For measuring how much loss a codec costs: a text is read in one call, on any
mesh and with any strategy of attention. With exact tokens, which differ from
query to query, only `attend=CachedAttention()` works, and each row must be one
text that begins at position 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import KV, CallCoords, FreshLayer, NoCache
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.codecs import Allocated, Codec, PerHead
from ringjax.kv.codecs.codec import VectorCodec, through
from ringjax.kv.layer_spec import LayerCacheSpec, of_layer
from ringjax.kv.storage.head_storage import HeadStorage
from ringjax.kv.storage.refusals import refuse_documents
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.mask import Causal, Coords, Extent, Mask, moved
from ringjax.ops.rope import Rotation
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class SimulatedCache(NoCache):
  """A cache for one call of a model that applies a codec and stores nothing.

  Attributes:
    constants: Constants of the codecs for each kind of layer, [L, K, n].
    kind: Kind of cache to simulate.
    shapes: `LayerCacheSpec` or `StateShape` of each kind of layer.
  """

  constants: tuple[Any, ...]
  kind: CacheConfig
  shapes: tuple[Any, ...]

  @classmethod
  def create(
    cls, model: Transformer, kind: CacheConfig | str
  ) -> SimulatedCache:
    """Create a simulated cache for the calls of a `Transformer`.

    Raises:
      OptionError: If the kind has no codec, or has a policy.
    """
    resolved: CacheConfig = model.cache_kind(kind)
    if resolved.policy is not None:
      resolved.reading_all("one call")
    codec = resolved.codec
    if codec is None:
      raise OptionError(
        "kind",
        str(resolved),
        "one with a codec",
        "call the model without a cache",
      )
    assert not isinstance(codec, Allocated)
    constants = tuple(
      codec.constants(n, shape)
      if isinstance(shape, LayerCacheSpec)
      else ((), ())
      for n, shape in enumerate(model.kinds)
    )
    return cls(jax.tree.map(jnp.asarray, constants), resolved, model.kinds)

  @property
  def slots(self) -> tuple[Any, ...]:
    return ((),) * len(self.constants)

  @property
  def length(self) -> Int[Array, " B"]:
    return jnp.zeros(1, jnp.int32)

  def check_coords(self, coords: CallCoords) -> None:
    refuse_documents(self.kind, self.shapes, coords)

  def layer(
    self, kind: int, slots: PyTree, index: Index
  ) -> FreshLayer | _PartlyExact:
    del slots
    shape = self.shapes[kind]
    if not isinstance(shape, LayerCacheSpec):
      return FreshLayer()
    if (
      self.kind.exact and self.kind.layout.windowed and shape.reach is not None
    ):
      # Ring buffers hold exact keys and values.
      return FreshLayer()
    codec, unrotated = self.kind.codec, self.kind.layout.unrotated
    constants = self.constants[kind]

    def encode_and_decode(
      k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
      if isinstance(codec, PerHead):
        by_head = HeadStorage(codec, self.shapes[kind])
        return by_head.through(k, v, index, constants)
      assert isinstance(codec, Codec)
      k_constants, v_constants = of_layer(constants, index)
      return (
        self._through(codec.keys, k, k_constants),
        self._through(codec.values, v, v_constants),
      )

    def change(k: jax.Array, v: jax.Array, rotation: Rotation) -> PyTree:
      k, v = encode_and_decode(k if unrotated else rotation.own(k), v)
      return rotation.own(k) if unrotated else k, v, ()

    if not self.kind.exact:
      return FreshLayer(change=change)
    reading = shape.reading
    mask = Causal() if reading is None else reading.mask
    return _PartlyExact(self.kind, mask, change)

  def _through(
    self, vectors: VectorCodec, x: jax.Array, constants: PyTree
  ) -> jax.Array:
    """Encode and decode vectors [B, K, T, D], group by group."""
    first, count = self.kind.exact.first, x.shape[2]
    group = getattr(vectors, "page", None)
    if group is None or not x.shape[-1]:
      return through(vectors, x, constants)
    if count <= first:
      return x
    pad = [(0, 0), (0, 0), (0, -(count - first) % group), (0, 0)]
    decoded = through(
      vectors, jnp.pad(x[:, :, first:], pad, mode="edge"), constants
    )
    return jnp.concatenate([x[:, :, :first], decoded[:, :, : count - first]], 2)


tree.register(SimulatedCache, ("constants",), ("kind", "shapes"))


@dataclasses.dataclass(frozen=True)
class _NoKeys:
  """Placeholder for `fresh`, whose keys would be the same for all queries."""

  kind: CacheConfig

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
  """One layer, in which a query sees some keys exact and the others decoded.

  Fields:
    kind: Kind of cache, whose `first` and `recent` tokens are exact.
    mask: Attention mask of the layer.
    change: Function that encodes and decodes, see `FreshLayer`.
    own: Exact keys and values of the call.
    decoded: Keys and values after encoding and decoding.
    slots: Always empty.
  """

  kind: CacheConfig
  mask: Mask
  change: Callable[..., Any]
  own: Any = None
  decoded: Any = None
  slots: PyTree = ()

  @property
  def fresh(self) -> _NoKeys:
    return _NoKeys(self.kind)

  def append(
    self,
    k: Shaped[Array, "B K T H"],
    v: Shaped[Array, "B K T J"],
    at: Coords,
    rotation: Rotation,
  ) -> _PartlyExact:
    decoded_k, decoded_v, _ = self.change(k, v, rotation)
    exact = KV(rotation.own(k), v, at)
    return self._replace(own=exact, decoded=KV(decoded_k, decoded_v, at))

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
    if kind.exact.residual is not None:
      return self._residual_views(kind.exact.residual)
    group = kind.layout.page if kind.grouped else 1
    visible = lambda coded: (
      self.mask & Encoded(kind.exact.recent, kind.exact.first, group, coded)
    )
    return (
      dataclasses.replace(self.decoded.view(), mask=visible(True)),
      dataclasses.replace(self.own.view(), mask=visible(False)),
    )

  def _residual_views(self, size: int) -> tuple[KVView, ...]:
    """Views of decoded tokens, decoded keys with exact values, exact tokens."""
    keys = lambda coded: Encoded(0, 0, size, coded)
    values = lambda coded: Encoded(size, 0, 1, coded)
    keys_decoded = self.decoded._replace(v=self.own.v)
    parts = (
      (self.decoded, values(True)),
      (keys_decoded, keys(True) & values(False)),
      (self.own, keys(False)),
    )
    return tuple(
      dataclasses.replace(kv.view(), mask=self.mask & mask)
      for kv, mask in parts
    )


@dataclasses.dataclass(frozen=True)
class Encoded(Mask):
  """Mask of the keys that were encoded when a query came, or of the others.

  Attributes:
    recent: Number of tokens before a query that are not encoded yet.
    first: Number of tokens at the start that are never encoded.
    group: Number of tokens that are encoded together.
    coded: Whether queries see the encoded keys, or the others.
  """

  recent: int
  first: int
  group: int
  coded: bool

  def _before(self, last: jax.Array, key: jax.Array) -> jax.Array:
    """Whether a key was encoded before a query at position `last`."""
    # Compare group numbers: the end of a group may exceed int32.
    newest = moved(last, -self.recent - self.first) // self.group
    encoded = moved(key, -self.first) // self.group < newest
    return encoded & (key >= self.first)

  def allows(self, q: Coords, k: Coords) -> Bool[Array, " ..."]:
    return self._before(q.pos, k.pos) == self.coded

  def bound(
    self, q: Extent, k: Extent
  ) -> tuple[Bool[Array, " ..."], Bool[Array, " ..."]]:
    first_key = jnp.maximum(k.first, self.first)
    any_encoded = self._before(q.last, first_key) & (k.last >= self.first)
    all_encoded = self._before(q.first, k.last) & (k.first >= self.first)
    return (
      (any_encoded, all_encoded) if self.coded else (~all_encoded, ~any_encoded)
    )


tree.register(Encoded, (), ("recent", "first", "group", "coded"))
