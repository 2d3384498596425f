"""Kernels of one device, ours and JAX's, for `rj.plan.cycles`: same shapes.

Builders for `rj.plan.aot`: each is called with the devices of a slice, of
which it takes the first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax.checks import one_of
from ringjax.kv.base import bytes_each
from ringjax.kv.cache import KVCache, LayerCacheSpec
from ringjax.kv.cache_kind import cache_kind
from ringjax.kv.codecs import CodeBook
from ringjax.ops.attention.api import dot_product_attention
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.cached import ShardedDecode
from ringjax.ops.attention.code_format import stored_codes
from ringjax.ops.attention.gather import Gather
from ringjax.ops.attention.kernels.decode_codes_tpu import DecodeCodesTPU
from ringjax.ops.attention.kernels.decode_pool_tpu import DecodePoolTPU
from ringjax.ops.attention.kernels.decode_tpu import DecodeTPU
from ringjax.ops.attention.kernels.flash_tpu import FlashTPU
from ringjax.ops.attention.pooled import PooledView, SharedTiles, pool_tile
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.views import (
  Decoder,
  EncodedView,
  KVView,
  tile_slots,
)
from ringjax.ops.mask import Causal, Coords
from ringjax.ops.rope import Rope, Rotation
from ringjax.parallel import chips
from ringjax.plan.aot import Built
from ringjax.typing import Index

WHAT = ("forward", "backward")
_HEADS = 2
_LAYERS = 2


def _one(devices: Sequence[Any]) -> Mesh:
  return Mesh(np.array(devices[:1]), ("seq",), axis_types=(AxisType.Auto,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashShape:
  """A call of flash attention, a few tiles long.

  Attributes:
    what: "forward", or "backward" for both passes.
    q_block: queries of a tile.
    kv_block: keys of a tile.
    head_dim: H.
    dtype: of the operands.

  Raises:
    OptionError: an unknown `what`.
  """

  what: str = "forward"
  q_block: int = 1024
  kv_block: int = 1024
  head_dim: int = 128
  dtype: str = "bfloat16"

  def __post_init__(self) -> None:
    one_of("what", self.what, WHAT)

  @property
  def length(self) -> int:
    """Queries and keys: some tiles in either direction."""
    return 4 * max(self.q_block, self.kv_block)

  def built(
    self,
    attend: Callable[..., Any],
    mesh: Mesh,
    shape: tuple[int, ...],
    kernel: str,
  ) -> Built:
    """`attend`, or that and its gradients, of operands of `shape`."""
    like = jax.ShapeDtypeStruct(
      shape, jnp.dtype(self.dtype), sharding=NamedSharding(mesh, P())
    )

    def both(q: Any, k: Any, v: Any, do: Any) -> tuple[jax.Array, Any]:
      out, pullback = jax.vjp(attend, q, k, v)
      return out, pullback(do)

    backward = self.what == "backward"
    return Built(
      function=jax.jit(both if backward else attend),
      arguments=(like,) * (4 if backward else 3),
      mesh=mesh,
      facts={"what": self.what, "kernel": kernel, "shape": list(shape)},
    )


def ours(devices: Sequence[Any], **shape: Any) -> Built:
  """`FlashTPU`, causal: by its positions some tiles are full.

  Args:
    devices: of the slice.
    shape: of `FlashShape`.
  """
  mesh, of = _one(devices), FlashShape(**shape)
  chip = chips.known(devices[0].device_kind)
  attend = functools.partial(
    dot_product_attention,
    is_causal=True,
    mesh=mesh,
    axis="seq",
    strategy=Gather(FlashTPU(of.q_block, of.kv_block, chip=chip)),
  )
  return of.built(attend, mesh, (1, of.length, _HEADS, of.head_dim), "FlashTPU")


def splash(devices: Sequence[Any], **shape: Any) -> Built:
  """JAX's splash attention, all of whose tiles are full.

  Its backward pass is the fused one.

  Args:
    devices: of the slice.
    shape: of `FlashShape`.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
  )

  of = FlashShape(**shape)
  sizes = kernels.BlockSizes(
    block_q=of.q_block,
    block_kv=of.kv_block,
    block_kv_compute=of.kv_block,
    block_q_dkv=of.q_block,
    block_kv_dkv=of.kv_block,
    block_kv_dkv_compute=of.kv_block,
    use_fused_bwd_kernel=True,
  )
  mask = masks.MultiHeadMask([masks.FullMask((of.length, of.length))] * _HEADS)
  kernel: Any = kernels.make_splash_mha(
    mask, block_sizes=sizes, head_shards=1, q_seq_shards=1
  )
  operands = (1, _HEADS, of.length, of.head_dim)
  return of.built(jax.vmap(kernel), _one(devices), operands, "splash")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShape:
  """Queries behind a cache of keys, which see all of them.

  Attributes:
    heads: N.
    kv_heads: K.
    head_dim: H.
    keys: S, slots of the cache.
    queries: T, none of them before the last key.
    dtype: of the queries, and of the keys once decoded.
    cache: the kind of cache, of `kv.KINDS`.
  """

  heads: int = 32
  kv_heads: int = 8
  head_dim: int = 128
  keys: int = 65536
  queries: int = 1
  dtype: str = "bfloat16"
  cache: str = "dense"

  def operands(self, mesh: Mesh | None = None) -> tuple[Any, KVCache]:
    """The shapes of the queries and of the cache."""
    dtype = jnp.dtype(self.dtype)
    shape = LayerCacheSpec(
      layers=_LAYERS,
      heads=self.kv_heads,
      key=self.head_dim,
      value=self.head_dim,
    )
    kind = dataclasses.replace(cache_kind(self.cache), windowed=False)
    cache = KVCache.spec(
      (shape,), 1, self.keys, dtype, kind=kind, mesh=mesh, platform="tpu"
    )
    groups = self.heads // self.kv_heads
    q = jax.ShapeDtypeStruct(
      (1, self.kv_heads, groups, self.queries, self.head_dim),
      dtype,
      sharding=None if mesh is None else NamedSharding(mesh, P()),
    )
    return q, cache

  def kernel(self, chip: str | None) -> Any:
    """The kernel that reads it."""
    coded = cache_kind(self.cache).codec is not None
    return (DecodeCodesTPU if coded else DecodeTPU)(chip=chip)

  def view(self, cache: KVCache, layer: Index) -> KVView:
    """A layer of the cache."""
    found = cache.layer(0, cache.slots[0], layer)
    return found.view(Rotation(rope=Rope(theta=5e5, dims=self.head_dim)))


def decode(
  devices: Sequence[Any],
  *,
  local: str = "kernel",
  trips: float | int = 1.0,
  **shape: Any,
) -> Built:
  """Attention of new queries over a cache.

  Args:
    devices: of the slice.
    local: "kernel", `DecodeTPU` or, of codes, `DecodeCodesTPU`; or "loops",
      XLA's.
    trips: the trip count that each of XLA's loops is taken to have.
    shape: of `DecodeShape`.

  Raises:
    OptionError: an unknown `local`.
  """
  mesh, of = _one(devices), DecodeShape(**shape)
  made = {
    "kernel": of.kernel(chips.known(devices[0].device_kind)),
    "loops": Blockwise(),
  }
  one_of("local", local, made)
  resident = ShardedDecode(mesh=mesh, axis="seq", whole=True, local=made[local])
  over = NamedSharding(mesh, P())
  number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=over)
  q, cache = of.operands(mesh)

  def attend(q: Any, cache: KVCache, at: Any, layer: Any) -> jax.Array:
    return resident(
      Scores(scale=of.head_dim**-0.5),
      q,
      (of.view(cache, layer),),
      Terms(),
      Coords(*at),
      Causal(),
    )

  return Built(
    function=jax.jit(attend),
    arguments=(q, cache, (number(1, of.queries),) * 2, number()),
    mesh=mesh,
    facts={"what": "decode", "kernel": local, "keys": of.keys},
    data_trips=trips,
  )


def plain_bytes(chip: str, **shape: Any) -> int:
  """Bytes of as many keys and values as a kernel's tile has, without a codec.

  Args:
    chip: as of `decode_tile`.
    shape: as of `decode_tile`.
  """
  of = DecodeShape(**shape)
  each = bytes_each(of.operands()[1].slots)
  plain = bytes_each(dataclasses.replace(of, cache="dense").operands()[1].slots)
  return decode_tile(chip, **shape) * plain // each


def decode_tile(chip: str, *, local: str = "kernel", **shape: Any) -> int:
  """Bytes of keys and values of a tile of `decode`, of one core.

  Args:
    chip: whose tile it is.
    local: as of `decode`.
    shape: of `DecodeShape`.
  """
  of = DecodeShape(**shape)
  found: list[tuple[int, int]] = []

  def look(q: Any, cache: KVCache) -> None:
    stored = of.view(cache, 0)
    kernel = of.kernel(chip).tile(q, stored)
    loops = of.kv_heads, tile_slots(stored, "tpu")
    found.append(kernel if local == "kernel" else loops)

  q, cache = of.operands()
  jax.eval_shape(look, q, cache)
  ((many, length),) = found
  nbytes = bytes_each(cache.slots)
  return many * length * nbytes // (_LAYERS * of.kv_heads * of.keys)


def code_book(
  devices: Sequence[Any],
  *,
  bits: int = 4,
  outliers: int | float = 0.01,
  keys: int = 65536,
) -> Built:
  """`DecodeCodesTPU` of code books with a scale a token, heads of 128.

  Args:
    devices: of the slice.
    bits: of a code.
    outliers: as of `kv.CodeBook`.
    keys: slots of the cache.
  """
  mesh, dim, heads, groups = _one(devices), 128, 8, 4
  kernel = DecodeCodesTPU(chip=chips.known(devices[0].device_kind))
  codec = CodeBook(bits=bits, by="token", outliers=outliers)
  shape, stored = stored_codes(
    (_LAYERS, 1, heads), keys, codec.width(dim), "tpu"
  )
  over = NamedSharding(mesh, P())
  like = lambda dtype, *shape: jax.ShapeDtypeStruct(
    shape, jnp.dtype(dtype), sharding=over
  )
  at = lambda n: (like("int32", 1, n),) * 2
  decoders = (Decoder(codec, dim, jnp.dtype("bfloat16")),) * 2

  def attend(q: Any, k: Any, v: Any, levels: Any, at: Any, q_at: Any) -> Any:
    view = EncodedView(
      k, v, Coords(*at), jnp.int32(0), (levels[:1], levels[1:]), decoders
    )
    view, mine, *_ = view.aligned(q)
    context = Context(Coords(*q_at), view.at, Causal())
    scores = Scores(scale=dim**-0.5)
    return kernel.decode(mine, view, ScoreArgs(scores, Terms(), context))

  codes = like(stored, *shape)
  return Built(
    function=jax.jit(attend),
    arguments=(
      like("bfloat16", 1, heads, groups, 1, dim),
      codes,
      codes,
      (like("float32", heads, 2**bits),) * 2,
      at(keys),
      at(1),
    ),
    mesh=mesh,
    facts={"what": "decode", "kernel": "DecodeCodesTPU"},
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolShape:
  """A query of each row behind pages, some of which all rows share.

  Attributes:
    heads: N.
    kv_heads: K.
    head_dim: H.
    rows: B.
    shared: keys that all rows have.
    own: further keys of each row.
    page: slots of a page.
    dtype: of queries, keys and values.
  """

  heads: int = 32
  kv_heads: int = 8
  head_dim: int = 128
  rows: int = 32
  shared: int = 2048
  own: int = 64
  page: int = 64
  dtype: str = "bfloat16"

  @property
  def columns(self) -> int:
    """Tiles of a row."""
    return -(-(self.shared + self.own) // pool_tile(self.page, "tpu"))

  @property
  def page_bytes(self) -> int:
    """Of the keys and values of a page."""
    numbers = 2 * self.page * self.kv_heads * self.head_dim
    return numbers * jnp.dtype(self.dtype).itemsize

  @property
  def pages(self) -> int:
    """Of a row."""
    return -(-(self.shared + self.own) // self.page)


def pool(devices: Sequence[Any], **shape: Any) -> Built:
  """`DecodePoolTPU`.

  Args:
    devices: of the slice.
    shape: of `PoolShape`.
  """
  mesh, of = _one(devices), PoolShape(**shape)
  kernel = DecodePoolTPU(chip=chips.known(devices[0].device_kind))
  over = NamedSharding(mesh, P())
  like = lambda dtype, *shape: jax.ShapeDtypeStruct(
    shape, jnp.dtype(dtype), sharding=over
  )
  slots = of.columns * pool_tile(of.page, "tpu")
  number: Any = functools.partial(like, "int32")
  cover: Any = like("bool", 1, of.columns, of.rows)
  keys = like(
    of.dtype,
    _LAYERS,
    of.rows * slots // of.page,
    of.kv_heads,
    of.page,
    of.head_dim,
  )
  plan = SharedTiles(
    number(1, of.columns),
    number(1, of.columns),
    cover,
    number(1),
    number(1, of.rows),
  )

  def attend(
    q: Any,
    k: Any,
    v: Any,
    at: Any,
    q_at: Any,
    table: Any,
    layer: Any,
    plan: Any,
  ) -> Any:
    view = PooledView(k, v, Coords(*at), table, layer, shared=plan)
    context = Context(Coords(*q_at), view.at, Causal())
    scores = Scores(scale=of.head_dim**-0.5)
    return kernel.decode(q, view, ScoreArgs(scores, Terms(), context))

  groups = of.heads // of.kv_heads
  return Built(
    function=jax.jit(attend),
    arguments=(
      like(of.dtype, of.rows, of.kv_heads, groups, 1, of.head_dim),
      keys,
      keys,
      (number(of.rows, slots),) * 2,
      (number(of.rows, 1),) * 2,
      number(of.rows, slots // of.page),
      number(),
      plan,
    ),
    mesh=mesh,
    facts={"what": "decode", "kernel": "DecodePoolTPU"},
  )


def pool_cycles(
  chip: str, of: PoolShape, instructions: Mapping[str, int]
) -> dict[str, int | float]:
  """Cycles of a core for all rows.

  A step takes the larger of its instructions and of reading its pages. JAX's
  kernel is taken to read as many keys at a time, and no page that is missing.

  Args:
    chip: a name that `chips.core` knows.
    of: what is read.
    instructions: of a step of each kernel, by its name.

  Returns:
    "together", "apart" and "ragged"; and the steps they are made of.
  """
  core = chips.core(chip)
  bandwidth = chips.MACHINES[core.name].chip.hbm_bandwidth
  # Of the chip, a cycle: a core has its part of the heads and of the rate.
  rate = float(bandwidth) / core.clock_hz
  tile = pool_tile(of.page, "tpu")
  common = of.shared // tile
  own = of.pages - common * (tile // of.page)
  # Whole tiles of a row's own, and its last.
  full, last = divmod(own, tile // of.page)
  reading = tile // of.page * of.page_bytes / rate
  ending = last * of.page_bytes / rate
  shared, alone, theirs = (
    instructions[name]
    for name in (
      "ringjax_decode_shared",
      "ringjax_decode_own",
      "ragged_paged_attention_kernel",
    )
  )

  def rows(step: int, whole: int) -> float:
    more = max(step, ending) if last else 0.0
    return float(of.rows * (whole * max(step, reading) + more))

  return {
    "reading": reading,
    "shared_step": shared,
    "own_step": alone,
    "ragged_step": theirs,
    "together": common * max(shared, reading) + rows(alone, full),
    "apart": rows(alone, common + full),
    "ragged": rows(theirs, common + full),
  }


def ragged(
  devices: Sequence[Any],
  *,
  pages_per_block: int = 8,
  queries_per_block: int = 32,
  **shape: Any,
) -> Built:
  """JAX's ragged paged attention, which shares nothing.

  Args:
    devices: of the slice.
    pages_per_block: pages of one step of its loop.
    shape: of `PoolShape`.
  """
  from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    ragged_paged_attention,
  )

  mesh, of = _one(devices), PoolShape(**shape)
  over = NamedSharding(mesh, P())
  like = lambda dtype, *shape: jax.ShapeDtypeStruct(
    shape, jnp.dtype(dtype), sharding=over
  )
  attend = functools.partial(
    ragged_paged_attention,
    sm_scale=of.head_dim**-0.5,
    num_kv_pages_per_block=pages_per_block,
    num_queries_per_block=queries_per_block,
    vmem_limit_bytes=64 << 20,
  )
  # Its lowering asks a mesh's devices what they are.
  alone = jax.shard_map(
    attend,
    mesh=mesh,
    in_specs=(P(),) * 6,
    out_specs=P(),
    check_vma=False,
  )
  return Built(
    function=jax.jit(alone),
    arguments=(
      like(of.dtype, of.rows, of.heads, of.head_dim),
      like(
        of.dtype,
        of.rows * of.pages,
        of.page,
        2 * of.kv_heads,
        of.head_dim,
      ),
      like("int32", of.rows),
      like("int32", of.rows, of.pages),
      like("int32", of.rows + 1),
      like("int32", 1),
    ),
    mesh=mesh,
    facts={"what": "decode", "kernel": "ragged_paged_attention"},
  )
