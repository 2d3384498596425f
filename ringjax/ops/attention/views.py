"""Views of a cache: the keys of one layer, and a few queries that read them.

Guarantees: `decode_attention` equals `reference`; forward only.
Cost: it reads the tiles that count, once: a tile is cut out of the stack at
(layer, tile), and nothing else that is as long as the keys is made. Scores
are computed keys first, so that no key is transposed.
Memory: one tile of keys and one of values.

A layer's keys may come in several views (what the cache held before a call
and what the call adds, a shared prefix and a private tail): their partials
merge, see `cached`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, UInt8

from ringjax import tree
from ringjax.ops.attention.blockwise import (
  cut_coords,
  finite_flag,
  fold_tile,
  loop,
  product,
  tile_kinds,
  tile_lists,
)
from ringjax.ops.attention.scores import (
  FORWARD,
  ScoreArgs,
  ScoreTile,
)
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.rope import Rotation
from ringjax.ops.softmax import Partial, wide_dtype

# Of the keys of a tile. On a CPU they and the values stay in a core's cache
# between being cut out and being multiplied; elsewhere a step of a loop costs
# as much as reading some megabytes.
TILE_BYTES = {"cpu": 1 << 20, "tpu": 1 << 25, "gpu": 1 << 25}
_LEAST = 128


@runtime_checkable
class KVView(Protocol):
  """Keys and values of one layer, read tile by tile; a pytree.

  Attributes:
    at: coordinates [B or 1, S] of its slots; segment 0 is an empty slot.
    mask: a mask in place of the layer's, or None.
    queries: coordinates of the queries in place of the call's, or None.
  """

  @property
  def at(self) -> Coords: ...

  @property
  def queries(self) -> Coords | None: ...

  @property
  def mask(self) -> Mask | None: ...

  @property
  def shape(self) -> tuple[int, int, int, int, int]:
    """(B, K, S, H, J)."""
    ...

  @property
  def slot_bytes(self) -> int:
    """Bytes of the keys of one slot, all heads of all examples."""
    ...

  def specs(self, batch: Any, heads: Any, tokens: Any) -> Any:
    """The same tree, of PartitionSpecs of these mesh axes."""
    ...

  def keys_alone(self) -> Any:
    """The same view with its keys as values too."""
    ...

  def tile(self, start: Any, size: int) -> tuple[jax.Array, jax.Array]:
    """Rotated keys and values [B, K, size, ...] of the slots from `start`."""
    ...

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    """The same in the basis in which tiles are made with the least work.

    Without `keys` only its values are in another basis.
    """
    ...


class Aligned(NamedTuple):
  """A view in another basis of its keys and values.

  Fields:
    view: the view.
    q: queries [B, K, G, T, H] that go with it.
    back: what makes sums of values [B, K, G, T, J] of those of its values.
  """

  view: Any
  q: jax.Array
  back: Callable[[Array], Array] = lambda x: x


class Decoder(NamedTuple):
  """What makes vectors of `dim` numbers of a codec's bytes.

  Fields:
    codec: the codec.
    dim: numbers of a vector.
    dtype: of the numbers.
    transformed: whether vectors stay in the basis in which they were encoded.
  """

  codec: Any
  dim: int
  dtype: Any
  transformed: bool = False

  def __call__(
    self, data: UInt8[Array, "B K T X"], constants: Sequence[Any]
  ) -> Float[Array, "B K T D"]:
    decode = self.codec.decode
    if self.transformed:
      decode = self.codec.decode_transformed
    return decode(data, self.dim, self.dtype, constants)

  def in_basis(self) -> Decoder:
    """In the basis of the codec, if it has one of its own."""
    return self._replace(transformed=hasattr(self.codec, "decode_transformed"))


class ContiguousView(NamedTuple):
  """One layer of a stack of arrays of slots; keys are rotated already.

  Fields:
    k: [L, B, K, S, H].
    v: [L, B, K, S, J]; the same array as `k` where values are parts of keys.
    at: coordinates [B or 1, S]; segment 0 is an empty slot.
    layer: int32 [], which of the L.
    mask: a mask in place of the layer's, or None.
    queries: coordinates [B, T] of the queries in place of the call's, or None.
  """

  k: jax.Array
  v: jax.Array
  at: Coords
  layer: Any
  mask: Mask | None = None
  queries: Coords | None = None

  @property
  def shape(self) -> tuple[int, int, int, int, int]:
    b, heads, slots, dim = self.k.shape[1:]
    return b, heads, slots, dim, self.v.shape[-1]

  @property
  def slot_bytes(self) -> int:
    _, b, heads, _, dim = self.k.shape
    return b * heads * dim * self.k.dtype.itemsize

  def specs(self, batch: Any, heads: Any, tokens: Any) -> ContiguousView:
    arrays: Any = P(None, batch, heads, tokens)
    return ContiguousView(
      arrays,
      arrays,
      coords_specs(self.at, self.k.shape[1], batch, tokens),
      P(),
      jax.tree.map(lambda _: P(), self.mask),
      None
      if self.queries is None
      else coords_specs(self.queries, self.k.shape[1], batch, None),
    )

  def keys_alone(self) -> ContiguousView:
    return self._replace(v=self.k)

  def tile(self, start: Any, size: int) -> tuple[jax.Array, jax.Array]:
    zero = jnp.int32(0)
    corner = (jnp.asarray(self.layer, jnp.int32), zero, zero, start, zero)

    def one(x: jax.Array) -> jax.Array:
      _, b, heads, _, dim = x.shape
      return lax.dynamic_slice(x, corner, (1, b, heads, size, dim))[0]

    k = one(self.k)
    return k, k if self.v is self.k else one(self.v)

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    del keys
    return Aligned(self, q)


@dataclasses.dataclass(frozen=True)
class EncodedView:
  """One layer of a stack of arrays of slots whose vectors are bytes.

  Fields:
    k: uint8 [L, B, K, S, X].
    v: uint8 [L, B, K, S, Y]; the same array as `k` where values are parts of
      keys.
    at: coordinates [B or 1, S]; segment 0 is an empty slot.
    layer: int32 [], which of the L.
    constants: of the layer's codecs, arrays [K, n]: those of the keys and
      those of the values.
    decoders: what makes numbers of the bytes of keys and of values.
  """

  k: Any
  v: Any
  at: Coords
  layer: Any
  constants: tuple[tuple[Any, ...], tuple[Any, ...]]
  decoders: tuple[Decoder, Decoder]

  @property
  def mask(self) -> Mask | None:
    return None

  @property
  def queries(self) -> Coords | None:
    return None

  @property
  def shape(self) -> tuple[int, int, int, int, int]:
    b, heads, slots = self.k.shape[1:4]
    k, v = self.decoders
    return b, heads, slots, k.dim, (k if self.v is self.k else v).dim

  @property
  def slot_bytes(self) -> int:
    b, heads, _, dim, _ = self.shape
    return b * heads * dim * jnp.dtype(self.decoders[0].dtype).itemsize

  def specs(self, batch: Any, heads: Any, tokens: Any) -> EncodedView:
    arrays: Any = P(None, batch, heads, tokens)
    return EncodedView(
      arrays,
      arrays,
      coords_specs(self.at, self.k.shape[1], batch, tokens),
      P(),
      jax.tree.map(lambda _: P(heads), self.constants),
      self.decoders,
    )

  def keys_alone(self) -> EncodedView:
    return dataclasses.replace(self, v=self.k)

  def tile(self, start: Any, size: int) -> tuple[jax.Array, jax.Array]:
    zero = jnp.int32(0)
    corner = (jnp.asarray(self.layer, jnp.int32), zero, zero, start, zero)

    def one(x: jax.Array, n: int) -> jax.Array:
      _, b, heads, _, width = x.shape
      data = lax.dynamic_slice(x, corner, (1, b, heads, size, width))[0]
      return self.decoders[n](data, self.constants[n])

    k = one(self.k, 0)
    return k, k if self.v is self.k else one(self.v, 1)

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    of_k, of_v = self.decoders
    if keys:
      of_k = of_k.in_basis()
    if self.v is not self.k:
      of_v = of_v.in_basis()
    view = dataclasses.replace(self, decoders=(of_k, of_v))
    wide = wide_dtype(q.dtype)
    if of_k.transformed:
      q = of_k.codec.transform(q.astype(wide)).astype(q.dtype)
    seen = of_k if self.v is self.k else of_v
    if not seen.transformed:
      return Aligned(view, q)
    return Aligned(view, q, lambda x: seen.codec.transform(x, back=True))


tree.register(
  EncodedView, ("k", "v", "at", "layer", "constants"), ("decoders",)
)


class UnrotatedView(NamedTuple):
  """As the view inside, with keys as they were before their rotation.

  Fields:
    stored: the keys and values.
    rotation: what rotates a key to its position.
  """

  stored: ContiguousView | EncodedView
  rotation: Rotation

  @property
  def at(self) -> Coords:
    return self.stored.at

  @property
  def mask(self) -> Mask | None:
    return self.stored.mask

  @property
  def queries(self) -> Coords | None:
    return self.stored.queries

  @property
  def shape(self) -> tuple[int, int, int, int, int]:
    return self.stored.shape

  @property
  def slot_bytes(self) -> int:
    return self.stored.slot_bytes

  def specs(self, batch: Any, heads: Any, tokens: Any) -> UnrotatedView:
    whole = jax.tree.map(lambda _: P(), self.rotation)
    return UnrotatedView(self.stored.specs(batch, heads, tokens), whole)

  def keys_alone(self) -> UnrotatedView:
    return self._replace(stored=self.stored.keys_alone())

  def tile(self, start: Any, size: int) -> tuple[jax.Array, jax.Array]:
    k, v = self.stored.tile(start, size)
    at = cut_coords(self.at, start, size)
    return self.rotation.anywhere(k, at.pos), v

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    # Keys are rotated in the basis in which they were made.
    del keys
    found = self.stored.aligned(q, keys=False)
    return found._replace(view=self._replace(stored=found.view))


def coords_specs(at: Coords, batch: int, names: Any, tokens: Any) -> Coords:
  """PartitionSpecs of coordinates [B or 1, S]."""
  each: Any = lambda x: P(names if x.shape[0] == batch > 1 else None, tokens)
  return Coords(each(at.pos), each(at.seg))


def tile_slots(view: KVView, platform: str = "cpu") -> int:
  """Slots of a tile."""
  many = TILE_BYTES.get(platform, TILE_BYTES["cpu"]) // view.slot_bytes
  return min(view.shape[2], max(_LEAST, many // _LEAST * _LEAST))


def decode_attention(
  q: Float[Array, "B K G T H"],
  keys: KVView,
  args: ScoreArgs,
  platform: str = "cpu",
) -> Partial:
  """The partial of a few queries over the keys of a view."""
  rows, length, block = q.shape[3], keys.shape[2], tile_slots(keys, platform)
  args = args.of_keys(tiled(args.context.k, block), 0)
  context = args.context
  kinds = tile_kinds(context.mask, context.q, context.k, rows, block)
  lists = tile_lists(kinds, masked=False)

  def step(masked: bool, tiles: jax.Array, n: Any, one: Partial) -> Partial:
    first = tiles[0, n] * block
    k, v = keys.tile(jnp.minimum(first, length - block), block)
    s = product("bkth,bkgqh->bktgq", k.astype(q.dtype), q)
    k_at = cut_coords(context.k, first, block)
    return fold_tile(
      ScoreTile(args, FORWARD, 0, first, context.q, k_at),
      jnp.transpose(s, (0, 1, 3, 4, 2)),
      v,
      finite_flag(v, s.dtype) if masked else None,
      one,
    )

  wide = wide_dtype(q.dtype)
  start = Partial.empty(q.shape[:4], keys.shape[4], wide, (q, keys))
  some = loop(
    lists.full_count[0], lambda n, c: step(False, lists.full, n, c), start
  )
  return loop(
    lists.masked_count[0], lambda n, c: step(True, lists.masked, n, c), some
  )


def tiled(at: Coords, block: int) -> Coords:
  """Coordinates of full tiles, one behind another.

  The last tile ends with the last slot; the slots that it shares with the one
  before are marked empty in it.
  """
  length = at.pos.shape[1]
  over = -length % block
  if not over:
    return at
  cut = length // block * block
  both = lambda x, last: jnp.concatenate([x[:, :cut], last], 1)
  seg = at.seg[:, length - block :].at[:, :over].set(0)
  return Coords(both(at.pos, at.pos[:, length - block :]), both(at.seg, seg))
