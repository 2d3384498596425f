"""Views of a cache: the keys and values of one layer, for few queries.

Guarantees: `decode_attention` equals `reference`; forward only.
Cost: it reads the tiles that count, once: a tile is sliced from the stack at
(layer, tile), and no other array as long as the keys is made. Scores are
computed keys first, so that no key is transposed.
Memory: one tile of keys and one of values.

A layer's keys may be in several views (what the cache held before a call and
what the call adds, a shared prefix and a private tail): their partials are
merged, see `cached`.
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
from ringjax.ops.attention.cached.code_format import (
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
from ringjax.parallel.call_sharding import MeshAxes
from ringjax.typing import ArrayLeaf, Index

if TYPE_CHECKING:
  from ringjax.ops.attention.cached.cached_attention import CacheVisit
  from ringjax.ops.attention.cached.paged import PagedView
  from ringjax.ops.attention.cached.pooled import PooledView
  from ringjax.ops.attention.cached.streamed import HostView

# Most bytes of a tile's keys. On a CPU they and the values stay in a core's
# cache between slicing and multiplication; elsewhere a step of a loop costs as
# much as reading some megabytes.
TILE_BYTES = {"cpu": 1 << 20, "tpu": 1 << 25, "gpu": 1 << 25}
_LEAST = 128


@runtime_checkable
class KVView(Protocol):
  """Keys and values of one layer, read tile by tile; a pytree.

  Attributes:
    at: Coordinates [B or 1, S] of its slots; segment 0 is an empty slot. [B K,
      S] where each head has different tokens, and `shape` is (B K, 1, ...).
    mask: Mask in place of the layer's, or None.
    queries: Coordinates of the queries in place of the call's, or None.
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
    """Return the same tree of PartitionSpecs for these mesh axes."""
    ...

  def keys_alone(self) -> Any:
    """Use the keys as the values, too."""
    ...

  def tile(
    self, start: Index, size: int
  ) -> tuple[Float[Array, "B K n H"], Float[Array, "B K n J"]]:
    """Read rotated keys and values [B, K, size, ...] of slots from `start`."""
    ...

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    """Choose the basis in which tiles are decoded with the least work.

    Without `keys` only the values are in another basis.
    """
    ...


@runtime_checkable
class StreamedView(KVView, Protocol):
  """A view whose tiles are fetched from another memory, see `fold_tiles`.

  Attributes:
    block: Slots of each tile.
  """

  @property
  def block(self) -> int: ...

  def fetch(self, start: Index) -> PyTree:
    """Fetch the stored bytes of the tile from `start` to the device."""
    ...

  def opened(
    self, stored: PyTree, start: Index
  ) -> tuple[Float[Array, "B K n H"], Float[Array, "B K n J"]]:
    """Decode what `fetch` returned into the keys and values of `tile`."""
    ...


@runtime_checkable
class ApartView(KVView, Protocol):
  """A view whose weight depends on all of its keys, see `apart`."""

  def joined(self, rest: Partial, visit: CacheVisit) -> Partial:
    """Merge the partial of its keys into `rest`, that of the other views."""
    ...


class Aligned(NamedTuple):
  """A view in another basis of its keys and values.

  Fields:
    view: The view.
    q: Queries in the keys' basis, [B, K, G, T, H].
    back: Function that maps sums of values [B, K, G, T, J] to the basis of the
      caller.
    by_head: Whether its heads are examples, see `paged`.
  """

  view: KVView
  q: jax.Array
  back: Callable[[Array], Array] = lambda x: x
  by_head: bool = False


class Decoder(NamedTuple):
  """Decoder of a codec's bytes into vectors of `dim` elements.

  Fields:
    codec: The codec.
    dim: Elements of a vector.
    dtype: Dtype of the elements.
    transformed: Whether vectors stay in the basis in which they were encoded.
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
    """Layout of the bytes, if the codec states it."""
    code_format = getattr(self.codec, "code_format", None)
    return None if code_format is None else code_format(self.dim)

  def in_basis(self) -> Decoder:
    """Decode into the basis of the codec, if it has one."""
    return self._replace(transformed=hasattr(self.codec, "decode_transformed"))


@dataclasses.dataclass(frozen=True)
class ContiguousView:
  """One layer of a stack of arrays of slots; keys are rotated already.

  Fields:
    k: Keys, [L, B, K, S, H].
    v: Values, [L, B, K, S, J]; the same array as `k` where values are parts of
      keys.
    at: Coordinates [B or 1, S]; segment 0 is an empty slot.
    layer: Index of the layer in the L, int32 [].
    mask: Mask in place of the layer's, or None.
    queries: Coordinates [B, T] of queries in place of the call's, or None.
    widths: Elements of a key and of a value, where the arrays are padded with
      zeros; else None.
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
    """Elements of a key and of a value."""
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
    """View of a call's own tokens, which form a tree.

    Args:
      drafted: Coordinates [B, T] of the tokens within the tree; later slots are
        empty.
      mask: Mask over these coordinates.
    """
    padding = [(0, 0), (0, self.shape[2] - drafted.pos.shape[1])]
    return dataclasses.replace(
      self,
      at=Coords(*(jnp.pad(x, padding) for x in drafted)),
      mask=mask,
      # A copy: one array would be one argument, with one sharding.
      queries=Coords(*(x + 0 for x in drafted)),
    )

  def tile(
    self, start: Index, size: int
  ) -> tuple[Float[Array, "B K n H"], Float[Array, "B K n J"]]:
    zero = jnp.int32(0)
    corner = (jnp.asarray(self.layer, jnp.int32), zero, zero, start, zero)

    def slice_tile(x: jax.Array, n: int) -> jax.Array:
      _, b, heads, _, dim = x.shape
      stored = lax.dynamic_slice(x, corner, (1, b, heads, size, dim))
      if self.widths is None:
        return stored[0]
      return row_major(stored)[0, ..., : self.widths[n]]

    k = slice_tile(self.k, 0)
    return k, k if self.v is self.k else slice_tile(self.v, 1)

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
  k_decoder, v_decoder = view.decoders
  if keys:
    k_decoder = k_decoder.in_basis()
  if view.v is not view.k:
    v_decoder = v_decoder.in_basis()
  view_in_basis = dataclasses.replace(view, decoders=(k_decoder, v_decoder))
  if k_decoder.transformed:
    float_q = q.astype(wide_dtype(q.dtype))
    q = k_decoder.codec.transform(float_q).astype(q.dtype)
  value_decoder = k_decoder if view.v is view.k else v_decoder
  if not value_decoder.transformed:
    return Aligned(view_in_basis, q)
  return Aligned(
    view_in_basis, q, lambda x: value_decoder.codec.transform(x, back=True)
  )


class StoredView:
  """Base class of views of stored keys, without masks and query coordinates.

  Subclasses have the fields k, v, and `decoders`: the decoders of keys and of
  values, or None.
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
    """Elements of a key and of a value."""
    if self.decoders is None:
      return self.k.shape[-1], self.v.shape[-1]
    k_decoder, v_decoder = self.decoders
    return k_decoder.dim, (k_decoder if self.v is self.k else v_decoder).dim

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
    k: Codes, see `stored_codes`: uint8 [L, B, K, S, X], or int8 [L, B, K, X,
      S].
    v: Codes like `k`; the same array as `k` where values are parts of keys.
    at: Coordinates [B or 1, S]; segment 0 is an empty slot.
    layer: Index of the layer in the L, int32 [].
    constants: Arrays [K, n] of the layer's codecs: those of the keys and those
      of the values.
    decoders: Decoders of the keys and of the values.
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

  def tile(
    self, start: Index, size: int
  ) -> tuple[Float[Array, "B K n H"], Float[Array, "B K n J"]]:
    zero, layer = jnp.int32(0), jnp.asarray(self.layer, jnp.int32)

    def decode_tile(x: jax.Array, n: int) -> jax.Array:
      axis, shape = token_axis(x), [1, *x.shape[1:]]
      corner = [layer, *(zero,) * 4]
      corner[axis], shape[axis] = start, size
      stored = lax.dynamic_slice(x, corner, shape)
      data = as_bytes(row_major(stored)[0])
      return self.decoders[n](data, self.constants[n])

    k = decode_tile(self.k, 0)
    return k, k if self.v is self.k else decode_tile(self.v, 1)

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    return in_basis(self, q, keys)


tree.register(
  EncodedView, ("k", "v", "at", "layer", "constants"), ("decoders",)
)


class UnrotatedView(NamedTuple):
  """A view whose stored keys are not rotated; they are rotated on reading.

  Fields:
    stored: View of the stored keys and values.
    rotation: Rotation of a key to its position.
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
    # With a rotation by row, a key that rows share differs between them.
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

  def tile(
    self, start: Index, size: int
  ) -> tuple[Float[Array, "B K n H"], Float[Array, "B K n J"]]:
    k, v = self.stored.tile(start, size)
    at = cut_coords(self.at, start, size)
    return self.rotation.anywhere(k, at.pos), v

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    # Keys are rotated in the basis in which they were made.
    del keys
    aligned = self.stored.aligned(q, keys=False)
    return aligned._replace(view=self._replace(stored=aligned.view))


def coords_specs(
  at: Coords, batch: int, names: MeshAxes, tokens: MeshAxes
) -> Coords:
  """PartitionSpecs of coordinates [B or 1, S]."""
  spec: Any = lambda x: P(names if x.shape[0] == batch > 1 else None, tokens)
  return Coords(spec(at.pos), spec(at.seg))


def in_order(view: KVView) -> bool:
  """Whether its tiles are folded in the order of slots, always.

  Otherwise tiles that need no mask come first, which is faster.
  """
  return isinstance(view, StreamedView) or getattr(view, "in_order", False)


# Queries of a row that are many on a CPU, and the slots of a tile for them.
_MANY, _KEYS_OF_MANY = 16, 256


def tile_slots(view: KVView, platform: str = "cpu") -> int:
  """Number of slots of a tile."""
  if isinstance(view, StreamedView):
    return view.block
  slots = TILE_BYTES.get(platform, TILE_BYTES["cpu"]) // view.slot_bytes
  return min(view.shape[2], max(_LEAST, slots // _LEAST * _LEAST))


def decode_attention(
  q: Float[Array, "B K G T H"],
  keys: KVView,
  args: ScoreArgs,
  platform: str = "cpu",
) -> Partial:
  """Partial of a few queries over the keys of a view.

  `args.context.allow` has keys in whole tiles, see `tiled`; a bias has all
  slots of the view.
  """
  rows, block = q.shape[3], tile_slots(keys, platform)
  many = platform == "cpu" and rows >= _MANY and in_order(keys)
  # `allow` and streamed views have tiles of their own.
  if many and args.context.allow is None and not isinstance(keys, StreamedView):
    # A tile of queries computes the scores of whole tiles of keys.
    block = min(block, _KEYS_OF_MANY)
  args = args.of_keys(tiled(args.context.k, block), 0)
  if args.terms.bias is not None:
    bias = in_tiles(args.terms.bias, block)
    args = args._replace(terms=args.terms._replace(bias=bias))
  context = args.context
  kinds = tile_kinds(context.mask, context.q, context.k, rows, block)
  # All tiles of a streamed view are read in one loop.
  ordered = in_order(keys) or context.allow is not None
  lists = tile_lists(kinds, masked=ordered)

  def step(
    masked: bool, first: Index, k: jax.Array, v: jax.Array, carry: Partial
  ) -> Partial:
    k = k.astype(q.dtype)
    if many:
      # Rows of many scores are read faster in the order of keys.
      s = product("bkgqh,bkth->bkgqt", q, k)
    else:
      s = product("bkth,bkgqh->bktgq", k, q)
      s = jnp.transpose(s, (0, 1, 3, 4, 2))
    k_at = cut_coords(context.k, first, block)
    return fold_tile(
      ScoreTile(args, FORWARD, 0, first, context.q, k_at),
      s,
      v,
      finite_flag(v, s.dtype) if masked else None,
      carry,
    )

  def fold(
    masked: bool, tiles: jax.Array, count: jax.Array, carry: Partial
  ) -> Partial:
    return fold_tiles(
      keys, block, tiles[0], count[0], functools.partial(step, masked), carry
    )

  dtype = wide_dtype(q.dtype)
  partial = Partial.empty(q.shape[:4], keys.shape[4], dtype, (q, keys))
  if not ordered:
    partial = fold(False, lists.full, lists.full_count, partial)
  return fold(True, lists.masked, lists.masked_count, partial)


def fold_tiles(
  keys: KVView,
  size: int,
  tiles: Int[Array, " n"],
  count: Int[Array, ""],
  step: Callable[..., Any],
  carry: Carry,
) -> Carry:
  """Fold tiles: step(first slot, k, v, carry) for the first `count` tiles.

  A streamed view fetches a tile while the one before it is read, and the first
  tile during other work of the program. The last tile is read even if `count`
  is 0: `step` must then find no visible key in the tile `tiles[0]`.

  Args:
    keys: View of the keys.
    size: Slots of a tile.
    tiles: Indices of tiles.
    count: Number of `tiles` to fold.
    step: Function that folds a tile.
    carry: Initial carry.
  """
  first = lambda n: tiles[n] * size
  start = lambda n: jnp.minimum(first(n), keys.shape[2] - size)

  def read(n: Index, carry: PyTree) -> PyTree:
    view = _in_loop(keys, n) if keys.shape[2] <= size else keys
    return step(first(n), *view.tile(start(n), size), carry)

  if not isinstance(keys, StreamedView):
    return loop(count, read, carry)

  def fold_fetched(n: Index, stored: PyTree, carry: PyTree) -> PyTree:
    return step(first(n), *keys.opened(stored, start(n)), carry)

  def pair(n: Index, state: PyTree) -> PyTree:
    # Two buffers: that of a loop's carry could be filled only after it is read.
    stored, carry = state
    second = keys.fetch(start(2 * n + 1))
    carry = fold_fetched(2 * n, stored, carry)
    next_stored = keys.fetch(start(2 * n + 2))
    return next_stored, fold_fetched(2 * n + 1, second, carry)

  last = jnp.maximum(count - 1, 0)
  stored = keys.fetch(start(jnp.zeros_like(last)))
  stored, carry = loop(last // 2, pair, (stored, carry))
  carry = fold_fetched(last // 2 * 2, stored, carry)
  # Read by index, or the compiler fetches it before the loop, needed or not.
  return loop(last % 2, lambda n, carry: read(last + n, carry), carry)


def _in_loop(keys: KVView, n: Index) -> KVView:
  """Tie the layer to the step n >= 0 of the loop that reads its tiles.

  XLA's CPU compiler would take the only tile of a short cache out of the loop
  and fuse its slice with the write of the call's token. The slots before the
  write are then needed after it: every layer copies the slots of all layers.
  """
  if isinstance(keys, UnrotatedView):
    return keys._replace(stored=_in_loop(keys.stored, n))
  if not isinstance(keys, ContiguousView | EncodedView):
    return keys
  # The compiler does not know that the minimum is 0.
  layer = jnp.asarray(keys.layer, jnp.int32) + jnp.minimum(n, 0)
  return dataclasses.replace(keys, layer=layer)


def tiled(at: Coords, block: int) -> Coords:
  """Coordinates of full tiles, one after another.

  The last tile ends with the last slot; the slots that it shares with the tile
  before are marked empty in it.
  """
  length = at.pos.shape[1]
  excess = -length % block
  if not excess:
    return at
  full_length = length // block * block
  concat = lambda x, last: jnp.concatenate([x[:, :full_length], last], 1)
  seg = at.seg[:, length - block :].at[:, :excess].set(0)
  return Coords(
    concat(at.pos, at.pos[:, length - block :]), concat(at.seg, seg)
  )


def in_tiles(
  x: Shaped[Array, "*rows S"], block: int
) -> Shaped[Array, "*rows _"]:
  """Rearrange slots [..., S] into full tiles as in `tiled`."""
  length = x.shape[-1]
  if not length % block:
    return x
  full_length = length // block * block
  return jnp.concatenate([x[..., :full_length], x[..., length - block :]], -1)
