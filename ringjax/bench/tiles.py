"""Kernels of one device for `plan.compiler.cycles`: ours and JAX's, alike.

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
from jaxtyping import Array, PyTree, Shaped

from ringjax.checks import one_of, positive_int
from ringjax.errors import OptionError
from ringjax.kv.base import bytes_each
from ringjax.kv.cache import KVCache
from ringjax.kv.cache_kind import cache_kind
from ringjax.kv.codecs import CodeBook, Codec
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.ops.attention.api import dot_product_attention
from ringjax.ops.attention.blockwise import Blockwise
from ringjax.ops.attention.cached.cached_attention import ShardedDecode
from ringjax.ops.attention.cached.code_format import stored_codes
from ringjax.ops.attention.cached.paged import PagedView
from ringjax.ops.attention.cached.pooled import (
  PooledView,
  SharedTiles,
  pool_tile,
)
from ringjax.ops.attention.cached.views import (
  Decoder,
  EncodedView,
  KVView,
  tile_slots,
)
from ringjax.ops.attention.kernels.decode_codes_tpu import DecodeCodesTPU
from ringjax.ops.attention.kernels.decode_pages_tpu import DecodePagesTPU
from ringjax.ops.attention.kernels.decode_pool_tpu import DecodePoolTPU
from ringjax.ops.attention.kernels.decode_tpu import DecodeTPU
from ringjax.ops.attention.kernels.decoder_tpu import PoolDecoderTPU
from ringjax.ops.attention.kernels.flash_tpu import FlashTPU
from ringjax.ops.attention.kernels.prefill_pool_tpu import PrefillPoolTPU
from ringjax.ops.attention.scores import Context, ScoreArgs, Scores, Terms
from ringjax.ops.attention.strategies.gather import Gather
from ringjax.ops.block_product_tpu import BlockCodes, BlockProductTPU
from ringjax.ops.mask import Causal, Coords
from ringjax.ops.rope import Rope, Rotation
from ringjax.ops.softmax import Partial
from ringjax.parallel import chips
from ringjax.plan.compiler.aot import Built
from ringjax.plan.compiler.cycles import KernelTile
from ringjax.typing import Index

WHAT = ("forward", "backward")
_HEADS = 2
_LAYERS = 2


def _one_device_mesh(devices: Sequence[Any]) -> Mesh:
  return Mesh(np.array(devices[:1]), ("seq",), axis_types=(AxisType.Auto,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashShape:
  """A call of flash attention, a few tiles long.

  Attributes:
    what: "forward", or "backward" for both passes.
    q_block: Queries of a tile.
    kv_block: Keys of a tile.
    head_dim: Head dimension, H.
    dtype: Dtype of the operands.

  Raises:
    OptionError: If `what` is unknown.
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
    """Number of queries and of keys: a few tiles in either direction."""
    return 4 * max(self.q_block, self.kv_block)

  def built(
    self,
    attend: Callable[..., Any],
    mesh: Mesh,
    shape: tuple[int, ...],
    kernel: str,
  ) -> Built:
    """Builds `attend` for operands of `shape`, with gradients if backward."""
    like = jax.ShapeDtypeStruct(
      shape, jnp.dtype(self.dtype), sharding=NamedSharding(mesh, P())
    )

    def forward_and_backward(
      q: Shaped[Array, " ..."],
      k: Shaped[Array, " ..."],
      v: Shaped[Array, " ..."],
      do: Shaped[Array, " ..."],
    ) -> tuple[jax.Array, Any]:
      out, pullback = jax.vjp(attend, q, k, v)
      return out, pullback(do)

    backward = self.what == "backward"
    return Built(
      function=jax.jit(forward_and_backward if backward else attend),
      arguments=(like,) * (4 if backward else 3),
      mesh=mesh,
      facts={"what": self.what, "kernel": kernel, "shape": list(shape)},
    )


def ours(devices: Sequence[Any], **shape: Any) -> Built:
  """Builds causal attention by `FlashTPU`, some of whose tiles are full.

  Args:
    devices: Devices of the slice.
    shape: Fields of `FlashShape`.
  """
  mesh, dims = _one_device_mesh(devices), FlashShape(**shape)
  chip = chips.machine_name(devices[0].device_kind)
  attend = functools.partial(
    dot_product_attention,
    is_causal=True,
    mesh=mesh,
    axis="seq",
    strategy=Gather(FlashTPU(dims.q_block, dims.kv_block, chip=chip)),
  )
  return dims.built(
    attend, mesh, (1, dims.length, _HEADS, dims.head_dim), "FlashTPU"
  )


def splash(devices: Sequence[Any], **shape: Any) -> Built:
  """Builds JAX's splash attention, all of whose tiles are full.

  Its backward pass is the fused one.

  Args:
    devices: Devices of the slice.
    shape: Fields of `FlashShape`.
  """
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
  )

  dims = FlashShape(**shape)
  sizes = kernels.BlockSizes(
    block_q=dims.q_block,
    block_kv=dims.kv_block,
    block_kv_compute=dims.kv_block,
    block_q_dkv=dims.q_block,
    block_kv_dkv=dims.kv_block,
    block_kv_dkv_compute=dims.kv_block,
    use_fused_bwd_kernel=True,
  )
  mask = masks.MultiHeadMask(
    [masks.FullMask((dims.length, dims.length))] * _HEADS
  )
  kernel = kernels.make_splash_mha(
    mask, block_sizes=sizes, head_shards=1, q_seq_shards=1
  )
  operands = (1, _HEADS, dims.length, dims.head_dim)
  return dims.built(
    jax.vmap(kernel), _one_device_mesh(devices), operands, "splash"
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShape:
  """Queries after a cache of keys, which see all of them.

  Attributes:
    heads: Number of query heads, N.
    kv_heads: Number of heads of keys and values, K.
    head_dim: Head dimension, H.
    keys: Number of slots of the cache, S.
    queries: Number of queries, T, all after the last key.
    dtype: Dtype of the queries, and of the decoded keys.
    cache: Kind of cache, of `kv.KINDS`.
  """

  heads: int = 32
  kv_heads: int = 8
  head_dim: int = 128
  keys: int = 65536
  queries: int = 1
  dtype: str = "bfloat16"
  cache: str = "dense"

  def operands(self, mesh: Mesh | None = None) -> tuple[Any, KVCache]:
    """Shapes of the queries and of the cache."""
    dtype = jnp.dtype(self.dtype)
    shape = LayerCacheSpec(
      layers=_LAYERS,
      heads=self.kv_heads,
      key=self.head_dim,
      value=self.head_dim,
    )
    kind = cache_kind(self.cache).replace(windowed=False)
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
    """The kernel that reads the cache."""
    coded = cache_kind(self.cache).codec is not None
    return (DecodeCodesTPU if coded else DecodeTPU)(chip=chip)

  def view(self, cache: KVCache, layer: Index) -> KVView:
    """View of a layer of the cache."""
    layer_cache = cache.layer(0, cache.slots[0], layer)
    return layer_cache.view(Rotation(rope=Rope(theta=5e5, dims=self.head_dim)))


def decode(
  devices: Sequence[Any],
  *,
  local: str = "kernel",
  trips: float | int = 1.0,
  **shape: Any,
) -> Built:
  """Builds attention of new queries over a cache.

  Args:
    devices: Devices of the slice.
    local: "kernel" for `DecodeTPU` or, with codes, `DecodeCodesTPU`; "loops"
      for XLA's loops.
    trips: Assumed trip count of each of XLA's loops.
    shape: Fields of `DecodeShape`.

  Raises:
    OptionError: If `local` is unknown.
  """
  mesh, dims = _one_device_mesh(devices), DecodeShape(**shape)
  algorithms = {
    "kernel": dims.kernel(chips.machine_name(devices[0].device_kind)),
    "loops": Blockwise(),
  }
  one_of("local", local, algorithms)
  resident = ShardedDecode(mesh=mesh, axis="seq", local=algorithms[local])
  over = NamedSharding(mesh, P())
  number = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=over)
  q, cache = dims.operands(mesh)

  def attend(
    q: Shaped[Array, " ..."], cache: KVCache, at: PyTree, layer: jax.Array
  ) -> jax.Array:
    return resident(
      Scores(scale=dims.head_dim**-0.5),
      q,
      (dims.view(cache, layer),),
      Terms(),
      Coords(*at),
      Causal(),
    )

  return Built(
    function=jax.jit(attend),
    arguments=(q, cache, (number(1, dims.queries),) * 2, number()),
    mesh=mesh,
    facts={"what": "decode", "kernel": local, "keys": dims.keys},
    data_trips=trips,
  )


def plain_bytes(chip: str, **shape: Any) -> int:
  """Bytes of a kernel tile's keys and values if they were not coded.

  Args:
    chip: Chip of the tile.
    shape: Fields of `DecodeShape`.
  """
  dims = DecodeShape(**shape)
  coded_bytes = bytes_each(dims.operands()[1].slots)
  plain = bytes_each(
    dataclasses.replace(dims, cache="dense").operands()[1].slots
  )
  return decode_tile(chip, **shape) * plain // coded_bytes


def decode_tile(chip: str, *, local: str = "kernel", **shape: Any) -> int:
  """Bytes of keys and values of a tile of `decode`, on one core.

  Args:
    chip: Chip of the tile.
    local: "kernel" or "loops", see `decode`.
    shape: Fields of `DecodeShape`.
  """
  dims = DecodeShape(**shape)
  tile_shapes: list[tuple[int, int]] = []

  def record_tile(q: Shaped[Array, " ..."], cache: KVCache) -> None:
    stored = dims.view(cache, 0)
    kernel = dims.kernel(chip).tile(q, stored)
    loops = dims.kv_heads, tile_slots(stored, "tpu")
    tile_shapes.append(kernel if local == "kernel" else loops)

  q, cache = dims.operands()
  jax.eval_shape(record_tile, q, cache)
  ((heads, length),) = tile_shapes
  nbytes = bytes_each(cache.slots)
  return heads * length * nbytes // (_LAYERS * dims.kv_heads * dims.keys)


def code_book(
  devices: Sequence[Any],
  *,
  bits: int = 4,
  outliers: int | float = 0.01,
  keys: int = 65536,
) -> Built:
  """Builds `DecodeCodesTPU` with code books, a scale per token, heads of 128.

  Args:
    devices: Devices of the slice.
    bits: Bits of a code.
    outliers: Share of outliers, see `kv.CodeBook`.
    keys: Slots of the cache.
  """
  mesh, dim, heads, groups = _one_device_mesh(devices), 128, 8, 4
  kernel = DecodeCodesTPU(chip=chips.machine_name(devices[0].device_kind))
  codec = CodeBook(bits=bits, by="token", outliers=outliers)
  shape, stored = stored_codes(
    (_LAYERS, 1, heads), keys, codec.width(dim), "tpu"
  )
  over = NamedSharding(mesh, P())
  operand = lambda dtype, *shape: jax.ShapeDtypeStruct(
    shape, jnp.dtype(dtype), sharding=over
  )
  at = lambda n: (operand("int32", 1, n),) * 2
  decoders = (Decoder(codec, dim, jnp.dtype("bfloat16")),) * 2

  def attend(
    q: Shaped[Array, " ..."],
    k: jax.Array,
    v: jax.Array,
    levels: PyTree,
    at: PyTree,
    q_at: PyTree,
  ) -> Partial:
    view = EncodedView(
      k, v, Coords(*at), jnp.int32(0), (levels[:1], levels[1:]), decoders
    )
    view, queries, *_ = view.aligned(q)
    context = Context(Coords(*q_at), view.at, Causal())
    scores = Scores(scale=dim**-0.5)
    return kernel.decode(queries, view, ScoreArgs(scores, Terms(), context))

  codes = operand(stored, *shape)
  return Built(
    function=jax.jit(attend),
    arguments=(
      operand("bfloat16", 1, heads, groups, 1, dim),
      codes,
      codes,
      (operand("float32", heads, 2**bits),) * 2,
      at(keys),
      at(1),
    ),
    mesh=mesh,
    facts={"what": "decode", "kernel": "DecodeCodesTPU"},
  )


# Codes of a weight: group, levels, dtypes of steps and of least numbers.
CODES: dict[str, tuple[int, tuple[int, ...] | None, str, str | None]] = {
  "4 bits": (64, tuple(range(16)), "float32", "float32"),
  "Q4_0": (32, tuple(range(-8, 8)), "float16", None),
  "Q4_1": (32, tuple(range(16)), "float16", "float16"),
  "Q8_0": (32, None, "float16", None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductShape:
  """A product of a few rows with a weight of block codes.

  Attributes:
    codes: Codes of the weight, of `CODES`.
    rows: Number of rows, N.
    inputs: Number of inputs, I.
    outputs: Number of outputs, O.

  Raises:
    OptionError: If the codes are unknown.
  """

  codes: str = "4 bits"
  rows: int = 1
  inputs: int = 4096
  outputs: int = 14336

  def __post_init__(self) -> None:
    one_of("codes", self.codes, CODES)

  def operands(self, make: Callable[..., Any]) -> tuple[Any, BlockCodes]:
    """x and the weight of a layer of a stack.

    Args:
      make: Function of a shape and a dtype that makes an operand.
    """
    group, levels, step, minimum = CODES[self.codes]
    groups = self.inputs // group
    rows = group if levels is None else group // 2
    scales = (_LAYERS, groups, self.outputs)
    return make((self.rows, self.inputs), "bfloat16"), BlockCodes(
      codes=make(
        (_LAYERS, groups, rows, self.outputs),
        "int8" if levels is None else "uint8",
      ),
      step=make(scales, step),
      least=None if minimum is None else make(scales, minimum),
      index=(make((), "int32"),),
      levels=levels,
    )

  def block_bytes(self, chip: str) -> int:
    """Bytes of codes, steps and least numbers of a block."""
    spec = lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    _, weight = self.operands(spec)
    groups, columns = BlockProductTPU(chip=chip).block(self.rows, weight)
    scales = (weight.step, weight.least)
    group_bytes = weight.codes.shape[-2] + sum(
      x.dtype.itemsize for x in scales if x is not None
    )
    return groups * columns * group_bytes


def product(devices: Sequence[Any], **shape: Any) -> Built:
  """Builds a product with a weight of block codes.

  Args:
    devices: Devices of the slice.
    shape: Fields of `ProductShape`.
  """
  mesh, dims = _one_device_mesh(devices), ProductShape(**shape)
  over = NamedSharding(mesh, P())
  x, weight = dims.operands(
    lambda shape, dtype: jax.ShapeDtypeStruct(
      shape, jnp.dtype(dtype), sharding=over
    )
  )
  kernel = BlockProductTPU(chip=chips.machine_name(devices[0].device_kind))
  names = ("codes", "step", "least", "index")

  def multiply(x: jax.Array, arrays: Mapping[str, Any]) -> jax.Array:
    return kernel.product(x, dataclasses.replace(weight, **arrays))

  return Built(
    function=jax.jit(multiply),
    arguments=(x, {name: getattr(weight, name) for name in names}),
    mesh=mesh,
    facts={"what": "product", "kernel": "BlockProductTPU"},
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolShape:
  """A query of each row after pages, some of which all rows share.

  Attributes:
    heads: Number of query heads, N.
    kv_heads: Number of heads of keys and values, K.
    head_dim: Head dimension, H.
    rows: Number of rows, B.
    shared: Number of keys that all rows share.
    own: Further keys of each row.
    page: Slots of a page.
    dtype: Dtype of queries, keys and values.
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
    """Number of tiles of a row."""
    return -(-(self.shared + self.own) // pool_tile(self.page, "tpu"))

  @property
  def page_bytes(self) -> int:
    """Bytes of the keys and values of a page."""
    numbers = 2 * self.page * self.kv_heads * self.head_dim
    return numbers * jnp.dtype(self.dtype).itemsize

  @property
  def pages(self) -> int:
    """Number of pages of a row."""
    return -(-(self.shared + self.own) // self.page)


def pool(devices: Sequence[Any], *, queries: int = 1, **shape: Any) -> Built:
  """Builds attention over shared pages by `DecodePoolTPU`.

  Args:
    devices: Devices of the slice.
    queries: Queries of each row, T: 1, or those of a call that checks drafts.
    shape: Fields of `PoolShape`.
  """
  queries = positive_int("queries", queries)
  dims, number = PoolShape(**shape), _operands(devices, "int32")
  cover: Any = _operands(devices, "bool")(1, dims.columns, dims.rows)
  plan = SharedTiles(
    number(1, dims.columns),
    number(1, dims.columns),
    cover,
    number(1),
    number(1, dims.rows),
  )
  return _over_pages(devices, DecodePoolTPU, dims, queries, plan)


def prompts(
  devices: Sequence[Any],
  *,
  queries: int = 512,
  cache: str = "dense",
  **shape: Any,
) -> Built:
  """Builds attention of pieces of prompts over pages by `PrefillPoolTPU`.

  Args:
    devices: Devices of the slice.
    queries: Queries of each row, T.
    cache: Kind of cache, of `kv.KINDS`, without constants.
    shape: Fields of `PoolShape`.

  Raises:
    OptionError: If the cache has several codecs.
  """
  queries = positive_int("queries", queries)
  dims = PoolShape(**shape)
  return _over_pages(devices, PrefillPoolTPU, dims, queries, None, cache)


def head_pages(
  devices: Sequence[Any],
  *,
  heads: int = 8,
  groups: int = 4,
  head_dim: int = 128,
  pages: int = 128,
  page: int = 32,
  dtype: str = "bfloat16",
) -> Built:
  """Builds attention over the pages of single heads by `DecodePagesTPU`.

  Args:
    devices: Devices of the slice.
    heads: Heads of keys and values of all rows.
    groups: Query heads of each.
    head_dim: Head dimension, H.
    pages: Pages that each head reads.
    page: Slots of a page.
    dtype: Dtype of queries, keys and values.
  """
  mesh = _one_device_mesh(devices)
  kernel = DecodePagesTPU(chip=chips.machine_name(devices[0].device_kind))
  number, operand = (_operands(devices, name) for name in ("int32", dtype))
  keys = operand(2 * heads * pages, page, head_dim)

  def attend(
    q: Shaped[Array, " ..."],
    k: jax.Array,
    v: jax.Array,
    pos: jax.Array,
    table: jax.Array,
    last: jax.Array,
  ) -> Partial:
    view = PagedView(k, v, pos, None, table)
    at = Coords(last, jnp.ones_like(last))
    context = Context(at, view.at, Causal())
    scores = Scores(scale=head_dim**-0.5)
    return kernel.decode(q, view, ScoreArgs(scores, Terms(), context))

  alone = jax.shard_map(
    attend, mesh=mesh, in_specs=(P(),) * 6, out_specs=P(), check_vma=False
  )
  return Built(
    function=jax.jit(alone),
    arguments=(
      operand(heads, 1, groups, 1, head_dim),
      keys,
      keys,
      number(*keys.shape[:2]),
      number(1, heads, pages),
      number(1, 1),
    ),
    mesh=mesh,
    facts={"what": "decode", "kernel": "DecodePagesTPU"},
  )


def _operands(devices: Sequence[Any], dtype: str) -> Callable[..., Any]:
  """Function of a shape that gives an operand of one device."""
  over = NamedSharding(_one_device_mesh(devices), P())
  return lambda *shape: jax.ShapeDtypeStruct(
    shape, jnp.dtype(dtype), sharding=over
  )


def _over_pages(
  devices: Sequence[Any],
  kind: type[PoolDecoderTPU],
  dims: PoolShape,
  queries: int,
  plan: SharedTiles | None,
  cache: str = "dense",
) -> Built:
  """Builds attention of `queries` of each row by a kernel over pages."""
  mesh = _one_device_mesh(devices)
  kernel: Any = kind(chip=chips.machine_name(devices[0].device_kind))
  number, operand = (
    _operands(devices, dtype) for dtype in ("int32", dims.dtype)
  )
  slots = dims.columns * pool_tile(dims.page, "tpu")
  pages, width = slots // dims.page, dims.head_dim
  lead = _LAYERS, dims.rows * pages, dims.kv_heads
  stored: Any = ((*lead, dims.page, width), dims.dtype)
  decoders: tuple[Decoder, Decoder] | None = None
  codec = cache_kind(cache).codec
  if codec is not None:
    if not isinstance(codec, Codec):
      raise OptionError(
        "cache",
        cache,
        "a kind with one codec for all heads",
        'pass one, e.g. "int4"',
      )
    stored = stored_codes(lead, dims.page, codec.keys.width(width), "tpu")
    decoder_of = lambda x: Decoder(x, width, jnp.dtype(dims.dtype)).in_basis()
    decoders = decoder_of(codec.keys), decoder_of(codec.values)
  keys = _operands(devices, jnp.dtype(stored[1]).name)(*stored[0])

  def attend(
    q: Shaped[Array, " ..."],
    k: jax.Array,
    v: jax.Array,
    at: PyTree,
    q_at: PyTree,
    table: Shaped[Array, " ..."],
    layer: jax.Array,
    plan: SharedTiles | None,
  ) -> Partial:
    view = PooledView(
      k, v, Coords(*at), table, layer, decoders=decoders, shared=plan
    )
    context = Context(Coords(*q_at), view.at, Causal())
    scores = Scores(scale=dims.head_dim**-0.5)
    return kernel.decode(q, view, ScoreArgs(scores, Terms(), context))

  # A kernel's lowering reads the kind of the devices from the mesh.
  alone = jax.shard_map(
    attend, mesh=mesh, in_specs=(P(),) * 8, out_specs=P(), check_vma=False
  )
  groups = dims.heads // dims.kv_heads
  return Built(
    function=jax.jit(alone),
    arguments=(
      operand(dims.rows, dims.kv_heads, groups, queries, width),
      keys,
      keys,
      (number(dims.rows, slots),) * 2,
      (number(dims.rows, queries),) * 2,
      number(dims.rows, pages),
      number(),
      plan,
    ),
    mesh=mesh,
    facts={
      "what": "decode" if queries == 1 else "prefill",
      "kernel": kind.__name__,
    },
  )


def pool_cycles(
  chip: str, of: PoolShape, kernels: Sequence[KernelTile]
) -> dict[str, int | float]:
  """Predicts cycles of a core to decode a step of all rows.

  A step of a kernel takes the larger of its instructions and of reading its
  pages. JAX's kernel is assumed to read as many keys at a time, and no missing
  page.

  Args:
    chip: Name of a chip for `chips.core`.
    of: Rows and pages that are read.
    kernels: Tiles of the kernels of `pool` and of `ragged`.

  Returns:
    Cycles as "together", "apart" and "ragged", and the cycles of their steps,
    those of a row's own pages for full tiles and for its last one.
  """
  core = chips.core(chip)
  bandwidth = chips.MACHINES[core.name].chip.hbm_bandwidth
  # Bytes a cycle of the chip: a core has its part of heads and of the rate.
  rate = float(bandwidth) / core.clock_hz
  tile = pool_tile(of.page, "tpu")
  common = of.shared // tile
  own_pages = of.pages - common * (tile // of.page)
  # Full tiles of a row's own pages, and pages of its last tile.
  full, last = divmod(own_pages, tile // of.page)
  reading = tile // of.page * of.page_bytes / rate
  ending = last * of.page_bytes / rate
  by_name = {tile.kernel.partition(".")[0]: tile for tile in kernels}
  all_blocks = lambda name: sum(x.cycles for x in by_name[name].blocks)
  shared_step = all_blocks("ringjax_decode_shared")
  ragged_step = all_blocks("ragged_paged_attention_kernel")
  own_step, last_own_step = by_name["ringjax_decode_own"].step_cycles

  def rows(step: int, last_step: int, whole: int) -> float:
    end = max(last_step, ending) if last else 0.0
    return float(of.rows * (whole * max(step, reading) + end))

  return {
    "reading": reading,
    "shared_step": shared_step,
    "own_step": own_step,
    "last_own_step": last_own_step,
    "ragged_step": ragged_step,
    "together": common * max(shared_step, reading)
    + rows(own_step, last_own_step, full),
    "apart": rows(own_step, last_own_step, common + full),
    "ragged": rows(ragged_step, ragged_step, common + full),
  }


def ragged(
  devices: Sequence[Any],
  *,
  pages_per_block: int = 8,
  queries_per_block: int = 32,
  **shape: Any,
) -> Built:
  """Builds JAX's ragged paged attention, which reads each row separately.

  Args:
    devices: Devices of the slice.
    pages_per_block: Pages of a step of the kernel's loop.
    queries_per_block: Queries of a step of the kernel's loop.
    shape: Fields of `PoolShape`.
  """
  from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    ragged_paged_attention,
  )

  mesh, dims = _one_device_mesh(devices), PoolShape(**shape)
  over = NamedSharding(mesh, P())
  operand = lambda dtype, *shape: jax.ShapeDtypeStruct(
    shape, jnp.dtype(dtype), sharding=over
  )
  attend = functools.partial(
    ragged_paged_attention,
    sm_scale=dims.head_dim**-0.5,
    num_kv_pages_per_block=pages_per_block,
    num_queries_per_block=queries_per_block,
    vmem_limit_bytes=64 << 20,
  )
  # Its lowering reads the kind of the devices from the mesh.
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
      operand(dims.dtype, dims.rows, dims.heads, dims.head_dim),
      operand(
        dims.dtype,
        dims.rows * dims.pages,
        dims.page,
        2 * dims.kv_heads,
        dims.head_dim,
      ),
      operand("int32", dims.rows),
      operand("int32", dims.rows, dims.pages),
      operand("int32", dims.rows + 1),
      operand("int32", 1),
    ),
    mesh=mesh,
    facts={"what": "decode", "kernel": "ragged_paged_attention"},
  )
