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
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer, PyTree, Shaped, UInt8

from ringjax import tree
from ringjax.ops.attention.blockwise import (
  Carry,
  cut_coords,
  finite_flag,
  fold_tile,
  loop,
  product,
  tile_kinds,
  tile_lists,
)
from ringjax.ops.attention.code_format import (
  CodeFormat,
  as_bytes,
  row_major,
  token_axis,
)
from ringjax.ops.attention.scores import (
  FORWARD,
  ScoreArgs,
  ScoreTile,
)
from ringjax.ops.mask import Coords, Mask
from ringjax.ops.rope import Rotation
from ringjax.ops.softmax import Partial, wide_dtype
from ringjax.parallel.place import MeshAxes
from ringjax.typing import ArrayLeaf, Index

if TYPE_CHECKING:
  from ringjax.ops.attention.cached import CacheVisit
  from ringjax.ops.attention.paged import PagedView
  from ringjax.ops.attention.pooled import PooledView
  from ringjax.ops.attention.streamed import HostView

# Of the keys of a tile. On a CPU they and the values stay in a core's cache
# between being cut out and being multiplied; elsewhere a step of a loop costs
# as much as reading some megabytes.
TILE_BYTES = {"cpu": 1 << 20, "tpu": 1 << 25, "gpu": 1 << 25}
_LEAST = 128


@runtime_checkable
class KVView(Protocol):
  """Keys and values of one layer, read tile by tile; a pytree.

  Attributes:
    at: coordinates [B or 1, S] of its slots; segment 0 is an empty slot. [B K,
      S] where heads have tokens of their own, and `shape` is (B K, 1, ...).
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

  def specs(self, batch: MeshAxes, heads: MeshAxes, tokens: MeshAxes) -> Any:
    """The same tree, of PartitionSpecs of these mesh axes."""
    ...

  def keys_alone(self) -> Any:
    """The same view with its keys as values too."""
    ...

  def tile(self, start: Index, size: int) -> tuple[jax.Array, jax.Array]:
    """Rotated keys and values [B, K, size, ...] of the slots from `start`."""
    ...

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    """The same in the basis in which tiles are made with the least work.

    Without `keys` only its values are in another basis.
    """
    ...


@runtime_checkable
class StreamedView(KVView, Protocol):
  """A view whose tiles come from another memory, see `fold_tiles`.

  Attributes:
    block: slots of each tile.
  """

  @property
  def block(self) -> int: ...

  def fetch(self, start: Index) -> PyTree:
    """What is stored in the slots of the tile from `start`, on the device."""
    ...

  def opened(self, stored: PyTree, start: Index) -> tuple[jax.Array, jax.Array]:
    """What `tile` returns, of what `fetch` returned."""
    ...


@runtime_checkable
class ApartView(KVView, Protocol):
  """A view whose weight depends on all of its keys, see `apart`."""

  def joined(self, rest: Partial, visit: CacheVisit) -> Partial:
    """The partial of all keys, with that of the other views."""
    ...


class Aligned(NamedTuple):
  """A view in another basis of its keys and values.

  Fields:
    view: the view.
    q: queries [B, K, G, T, H] that go with it.
    back: what makes sums of values [B, K, G, T, J] of those of its values.
    by_head: whether its heads are examples, see `paged`.
  """

  view: KVView
  q: jax.Array
  back: Callable[[Array], Array] = lambda x: x
  by_head: bool = False


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
  dtype: DTypeLike
  transformed: bool = False

  def __call__(
    self, data: UInt8[Array, "B K T X"], constants: Sequence[Any]
  ) -> Float[Array, "B K T D"]:
    decode = self.codec.decode
    if self.transformed:
      decode = self.codec.decode_transformed
    return decode(data, self.dim, self.dtype, constants)

  @property
  def format(self) -> CodeFormat | None:
    """How the bytes hold the numbers, if the codec says it."""
    made = getattr(self.codec, "code_format", None)
    return None if made is None else made(self.dim)

  def in_basis(self) -> Decoder:
    """In the basis of the codec, if it has one of its own."""
    return self._replace(transformed=hasattr(self.codec, "decode_transformed"))


@dataclasses.dataclass(frozen=True)
class ContiguousView:
  """One layer of a stack of arrays of slots; keys are rotated already.

  Fields:
    k: [L, B, K, S, H].
    v: [L, B, K, S, J]; the same array as `k` where values are parts of keys.
    at: coordinates [B or 1, S]; segment 0 is an empty slot.
    layer: int32 [], which of the L.
    mask: a mask in place of the layer's, or None.
    queries: coordinates [B, T] of the queries in place of the call's, or None.
    widths: numbers of a key and of a value, where the arrays have zeros behind
      them; else None.
  """

  k: Shaped[ArrayLeaf, "L B K S _"]
  v: Shaped[ArrayLeaf, "L B K S _"]
  at: Coords
  layer: Index
  mask: Mask | None = None
  queries: Coords | None = None
  widths: tuple[int, int] | None = None

  @property
  def dims(self) -> tuple[int, int]:
    """Of a key and of a value."""
    return self.widths or (self.k.shape[-1], self.v.shape[-1])

  @property
  def shape(self) -> tuple[int, int, int, int, int]:
    b, heads, slots, _ = self.k.shape[1:]
    return b, heads, slots, *self.dims

  @property
  def slot_bytes(self) -> int:
    _, b, heads, _, dim = self.k.shape
    return b * heads * dim * self.k.dtype.itemsize

  def specs(
    self, batch: MeshAxes, heads: MeshAxes, tokens: MeshAxes
  ) -> ContiguousView:
    arrays, queries = P(None, batch, heads, tokens), self.queries
    return tree.with_leaves(
      self,
      k=arrays,
      v=arrays,
      at=coords_specs(self.at, self.k.shape[1], batch, tokens),
      layer=P(),
      mask=jax.tree.map(lambda _: P(), self.mask),
      queries=None
      if queries is None
      else coords_specs(queries, self.k.shape[1], batch, None),
    )

  def keys_alone(self) -> ContiguousView:
    widths = self.widths and (self.widths[0],) * 2
    return dataclasses.replace(self, v=self.k, widths=widths)

  def of_tree(self, drafted: Coords, mask: Mask) -> ContiguousView:
    """Of a call's own tokens, which form a tree.

    Args:
      drafted: coordinates [B, T] of the tokens among themselves; the slots
        behind them are empty.
      mask: over these.
    """
    wide = [(0, 0), (0, self.shape[2] - drafted.pos.shape[1])]
    return dataclasses.replace(
      self,
      at=Coords(*(jnp.pad(x, wide) for x in drafted)),
      mask=mask,
      # One array would be one argument, with one sharding.
      queries=Coords(*(x + 0 for x in drafted)),
    )

  def tile(self, start: Index, size: int) -> tuple[jax.Array, jax.Array]:
    zero = jnp.int32(0)
    corner = (jnp.asarray(self.layer, jnp.int32), zero, zero, start, zero)

    def one(x: jax.Array, n: int) -> jax.Array:
      _, b, heads, _, dim = x.shape
      found = lax.dynamic_slice(x, corner, (1, b, heads, size, dim))
      if self.widths is None:
        return found[0]
      return row_major(found)[0, ..., : self.widths[n]]

    k = one(self.k, 0)
    return k, k if self.v is self.k else one(self.v, 1)

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    del keys
    return Aligned(self, q)


tree.register(
  ContiguousView, ("k", "v", "at", "layer", "mask", "queries"), ("widths",)
)


def in_basis(
  view: EncodedView | PooledView | PagedView | HostView,
  q: Float[Array, "B K G T H"],
  keys: bool,
) -> Aligned:
  """A view with `decoders`, in the basis of its codecs.

  Without `keys` only its values are.
  """
  assert view.decoders is not None
  of_k, of_v = view.decoders
  if keys:
    of_k = of_k.in_basis()
  if view.v is not view.k:
    of_v = of_v.in_basis()
  made = dataclasses.replace(view, decoders=(of_k, of_v))
  if of_k.transformed:
    wide = q.astype(wide_dtype(q.dtype))
    q = of_k.codec.transform(wide).astype(q.dtype)
  seen = of_k if view.v is view.k else of_v
  if not seen.transformed:
    return Aligned(made, q)
  return Aligned(made, q, lambda x: seen.codec.transform(x, back=True))


class StoredView:
  """What views of stored keys have in common: no mask, no queries of their own.

  Fields of those that inherit it are k, v, and `decoders`, what makes numbers
  of the bytes of keys and of values, or None.
  """

  @property
  def mask(self) -> Mask | None:
    return None

  @property
  def queries(self) -> Coords | None:
    return None

  @property
  def dims(
    self: EncodedView | PooledView | PagedView | HostView,
  ) -> tuple[int, int]:
    """Of a key and of a value."""
    if self.decoders is None:
      return self.k.shape[-1], self.v.shape[-1]
    of_k, of_v = self.decoders
    return of_k.dim, (of_k if self.v is self.k else of_v).dim

  @property
  def slot_bytes(self: EncodedView | PooledView | PagedView | HostView) -> int:
    rows, heads, _, dim, _ = self.shape
    stored = self.k.dtype
    dtype = stored if self.decoders is None else self.decoders[0].dtype
    return rows * heads * dim * jnp.dtype(dtype).itemsize

  def keys_alone(self: Any) -> Any:
    return dataclasses.replace(self, v=self.k)


@dataclasses.dataclass(frozen=True)
class EncodedView(StoredView):
  """One layer of a stack of arrays of slots whose vectors are bytes.

  Fields:
    k: codes, see `stored_codes`: uint8 [L, B, K, S, X], or int8 [L, B, K, X,
      S].
    v: the same; the same array as `k` where values are parts of keys.
    at: coordinates [B or 1, S]; segment 0 is an empty slot.
    layer: int32 [], which of the L.
    constants: of the layer's codecs, arrays [K, n]: those of the keys and
      those of the values.
    decoders: what makes numbers of the bytes of keys and of values.
  """

  k: Integer[Array, "L B K _ _"]
  v: Shaped[Array, "L B K _ _"]
  at: Coords
  layer: Index
  constants: tuple[tuple[Any, ...], tuple[Any, ...]]
  decoders: tuple[Decoder, Decoder]

  @property
  def shape(self) -> tuple[int, int, int, int, int]:
    _, b, heads, *_ = self.k.shape
    return b, heads, self.k.shape[token_axis(self.k)], *self.dims

  def specs(
    self, batch: MeshAxes, heads: MeshAxes, tokens: MeshAxes
  ) -> EncodedView:
    last = (None,) * (token_axis(self.k) - 3)
    arrays = P(None, batch, heads, *last, tokens)
    return tree.with_leaves(
      self,
      k=arrays,
      v=arrays,
      at=coords_specs(self.at, self.k.shape[1], batch, tokens),
      layer=P(),
      constants=jax.tree.map(lambda _: P(heads), self.constants),
    )

  def tile(self, start: Index, size: int) -> tuple[jax.Array, jax.Array]:
    zero, layer = jnp.int32(0), jnp.asarray(self.layer, jnp.int32)

    def one(x: jax.Array, n: int) -> jax.Array:
      axis, shape = token_axis(x), [1, *x.shape[1:]]
      corner = [layer, *(zero,) * 4]
      corner[axis], shape[axis] = start, size
      stored = lax.dynamic_slice(x, corner, shape)
      data = as_bytes(row_major(stored)[0])
      return self.decoders[n](data, self.constants[n])

    k = one(self.k, 0)
    return k, k if self.v is self.k else one(self.v, 1)

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    return in_basis(self, q, keys)


tree.register(
  EncodedView, ("k", "v", "at", "layer", "constants"), ("decoders",)
)


class UnrotatedView(NamedTuple):
  """As the view inside, with keys as they were before their rotation.

  Fields:
    stored: the keys and values.
    rotation: what rotates a key to its position.
  """

  stored: KVView
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

  @property
  def in_order(self) -> bool:
    return in_order(self.stored)

  @property
  def shared(self) -> Any:
    # A key that rows share is not the same key for rows of other lengths.
    shared = getattr(self.stored, "shared", None)
    return None if self.rotation.by_row else shared

  def of_tree(self, drafted: Coords, mask: Mask) -> UnrotatedView:
    stored: Any = self.stored
    return self._replace(stored=stored.of_tree(drafted, mask))

  def of_row(self, row: Index) -> UnrotatedView:
    stored: Any = self.stored
    rotation = self.rotation.of_row(row)
    return self._replace(stored=stored.of_row(row), rotation=rotation)

  def specs(
    self, batch: MeshAxes, heads: MeshAxes, tokens: MeshAxes
  ) -> UnrotatedView:
    rotation = self.rotation.specs(batch)
    return UnrotatedView(self.stored.specs(batch, heads, tokens), rotation)

  def keys_alone(self) -> UnrotatedView:
    return self._replace(stored=self.stored.keys_alone())

  def tile(self, start: Index, size: int) -> tuple[jax.Array, jax.Array]:
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


def coords_specs(
  at: Coords, batch: int, names: MeshAxes, tokens: MeshAxes
) -> Coords:
  """PartitionSpecs of coordinates [B or 1, S]."""
  each: Any = lambda x: P(names if x.shape[0] == batch > 1 else None, tokens)
  return Coords(each(at.pos), each(at.seg))


def in_order(view: KVView) -> bool:
  """Whether its tiles are folded in the order of slots, whatever they hold.

  Otherwise those that need no mask come first, which is faster.
  """
  return isinstance(view, StreamedView) or getattr(view, "in_order", False)


def tile_slots(view: KVView, platform: str = "cpu") -> int:
  """Slots of a tile."""
  if isinstance(view, StreamedView):
    return view.block
  many = TILE_BYTES.get(platform, TILE_BYTES["cpu"]) // view.slot_bytes
  return min(view.shape[2], max(_LEAST, many // _LEAST * _LEAST))


def decode_attention(
  q: Float[Array, "B K G T H"],
  keys: KVView,
  args: ScoreArgs,
  platform: str = "cpu",
) -> Partial:
  """The partial of a few queries over the keys of a view.

  Pairs of `args.context.allow` are of keys in whole tiles, see `tiled`.
  """
  rows, block = q.shape[3], tile_slots(keys, platform)
  args = args.of_keys(tiled(args.context.k, block), 0)
  context = args.context
  kinds = tile_kinds(context.mask, context.q, context.k, rows, block)
  # The tiles of a view that streams are read in one loop.
  ordered = in_order(keys) or context.allow is not None
  lists = tile_lists(kinds, masked=ordered)

  def step(
    masked: bool, first: Index, k: jax.Array, v: jax.Array, one: Partial
  ) -> Partial:
    s = product("bkth,bkgqh->bktgq", k.astype(q.dtype), q)
    k_at = cut_coords(context.k, first, block)
    return fold_tile(
      ScoreTile(args, FORWARD, 0, first, context.q, k_at),
      jnp.transpose(s, (0, 1, 3, 4, 2)),
      v,
      finite_flag(v, s.dtype) if masked else None,
      one,
    )

  def fold(
    masked: bool, tiles: jax.Array, count: jax.Array, one: Partial
  ) -> Partial:
    return fold_tiles(
      keys, block, tiles[0], count[0], functools.partial(step, masked), one
    )

  wide = wide_dtype(q.dtype)
  found = Partial.empty(q.shape[:4], keys.shape[4], wide, (q, keys))
  if not ordered:
    found = fold(False, lists.full, lists.full_count, found)
  return fold(True, lists.masked, lists.masked_count, found)


def fold_tiles(
  keys: KVView,
  size: int,
  tiles: Int[Array, " n"],
  count: Int[Array, ""],
  step: Callable[..., Any],
  carry: Carry,
) -> Carry:
  """step(first slot, k, v, carry) of the first `count` of some tiles.

  Of a view that streams a tile is fetched while the one before it is read,
  and the first one beside what else the program does. The last is read even
  if `count` is 0: `step` must then find nothing in the tile `tiles[0]`.

  Args:
    keys: the view.
    size: slots of a tile.
    tiles: numbers of tiles.
    count: how many of them count.
    step: folds a tile.
    carry: what is folded into.
  """
  first = lambda n: tiles[n] * size
  start = lambda n: jnp.minimum(first(n), keys.shape[2] - size)

  def read(n: Index, carry: PyTree) -> PyTree:
    return step(first(n), *keys.tile(start(n), size), carry)

  if not isinstance(keys, StreamedView):
    return loop(count, read, carry)

  def apart(n: Index, stored: PyTree, carry: PyTree) -> PyTree:
    return step(first(n), *keys.opened(stored, start(n)), carry)

  def pair(n: Index, both: PyTree) -> PyTree:
    # Two buffers: one of a loop's carry could be filled only when it is read.
    stored, carry = both
    other = keys.fetch(start(2 * n + 1))
    carry = apart(2 * n, stored, carry)
    after = keys.fetch(start(2 * n + 2))
    return after, apart(2 * n + 1, other, carry)

  last = jnp.maximum(count - 1, 0)
  stored = keys.fetch(start(jnp.zeros_like(last)))
  stored, carry = loop(last // 2, pair, (stored, carry))
  carry = apart(last // 2 * 2, stored, carry)
  # By its number, or the compiler fetches it before the loop, needed or not.
  return loop(last % 2, lambda n, carry: read(last + n, carry), carry)


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


def in_tiles(x: Shaped[Array, "*rows S"], block: int) -> jax.Array:
  """What goes with slots [..., S], of full tiles as in `tiled`."""
  length = x.shape[-1]
  if not length % block:
    return x
  cut = length // block * block
  return jnp.concatenate([x[..., :cut], x[..., length - block :]], -1)
