"""Base class of the Pallas TPU kernels for decode attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from ringjax.ops.attention.blockwise import check_positive
from ringjax.ops.attention.cached.pooled import PooledView, pool_tile
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.attention.kernels import tile_ops
from ringjax.ops.attention.kernels.tile_ops import Ref
from ringjax.ops.attention.scores import ScoreArgs
from ringjax.parallel import chips
from ringjax.typing import Index

# Fewest keys of a tile when as many heads as fit share it.
_LEAST = 512
# Rows of a register of bfloat16.
_SUBLANES = 16
# Rows of a register of codes, which are int8.
_CODE_ROWS = 32
# Most pages of a tile, each of which is an operand or two.
MOST_PAGES = 16
# Most scores of a tile.
_SCORES = 1 << 19
# Vector memory that the compiler grants unless a kernel asks for more.
_VMEM = 16 << 20


@dataclasses.dataclass(frozen=True)
class DecoderTPU:
  """Base class of decode kernels for TPU.

  Attributes:
    kv_block: Keys of a tile, a multiple of 128; None: by their bytes.
    chip: Machine of `chips.MACHINES` whose rates give the kernel's cost
      estimate; None: `tile_ops.SOME`.
    interpret: Whether to run without a TPU, slowly, for tests.
  """

  kv_block: int | None = None
  chip: str | None = None
  interpret: bool = False

  def __post_init__(self) -> None:
    check_positive(self, "kv_block")

  def most_heads(self, kv: int, fits: Callable[[int], bool]) -> int:
    """Largest number of heads that divides `kv` and fits a tile, at least 1."""
    # Where a device has two cores, each takes a part of the heads.
    max_heads = max(1, kv // tile_ops.core(self.chip).cores)
    divisors = (n for n in range(1, max_heads + 1) if kv % n == 0 and fits(n))
    return max(divisors, default=1)

  def tile_of(
    self,
    q: Float[Array, "B K G T H"],
    length: int,
    row: int,
    tile_bytes: int,
    most: int,
  ) -> tuple[int, int]:
    """Choose (heads, keys) of a tile.

    Args:
      q: Queries.
      length: Keys of a shard.
      row: Bytes of a key and its value of one head.
      tile_bytes: Most bytes of a tile.
      most: Most keys of a tile.
    """
    min_keys = min(_LEAST, length)
    heads = self.most_heads(
      q.shape[1], lambda n: n * row * min_keys <= tile_bytes
    )
    if self.kv_block is not None:
      return heads, self.kv_block
    rows = q.shape[2] * q.shape[3]
    max_keys = min(tile_bytes // (heads * row), _SCORES // rows, most)
    block = max_keys // tile_ops.LANES * tile_ops.LANES
    return heads, max(tile_ops.LANES, min(block, tile_ops.lanes(length)))

  def unserved(
    self,
    q: Float[Array, "B K G T H"],
    keys: KVView,
    args: ScoreArgs,
    *,
    length: int,
    block: int,
    need: int,
    numbers: tuple[Array, ...] = (),
  ) -> str | None:
    """Reason why all of these kernels decline a call, or None.

    Args:
      q: Queries.
      keys: View of the keys and values.
      args: Score function and its arrays.
      length: Keys of a shard.
      block: Keys of a tile.
      need: Bytes of vector memory that a step takes.
      numbers: Keys and values, if they are stored as numbers.
    """
    if block % tile_ops.LANES and not self.interpret:
      return f"tiles of {block} keys: no multiples of {tile_ops.LANES}"
    if -(-length // block) >= 1 << tile_ops.COLUMN_BITS:
      return f"{length} keys a shard: more than its list holds"
    vmem_bytes = tile_ops.core(self.chip).vmem_bytes
    if need > vmem_bytes // 4 * 3:
      return (
        f"{need >> 20} MB of tiles for {vmem_bytes >> 20} MB of vector memory"
      )
    return tile_ops.undecoded(
      q,
      keys,
      args,
      dtypes=("bfloat16", "float32"),
      widest=1024,
      numbers=numbers,
    )

  def params(self, need: int, *semantics: Any) -> pltpu.CompilerParams:
    """Compiler parameters for a step that takes `need` bytes of VMEM."""
    return pltpu.CompilerParams(
      dimension_semantics=semantics,
      # Half as much again, for the compiler's own use.
      vmem_limit_bytes=max(_VMEM, need // 2 * 3),
    )

  def cost(
    self, nbytes: int, exponentials: int, cycles: int | float = 0
  ) -> pl.CostEstimate:
    """Cost estimate for XLA's scheduler that gives the time of reading.

    The scheduler divides FLOPs by the chip's peak; memory is the bottleneck.

    Args:
      nbytes: Bytes read.
      exponentials: Exponentials computed.
      cycles: Cycles of all cores, if they may take longer than reading.
    """
    core = tile_ops.core(self.chip)
    chip = chips.MACHINES[self.chip or tile_ops.SOME].chip
    seconds = max(
      nbytes / float(chip.hbm_bandwidth), cycles / core.clock_hz / core.cores
    )
    return pl.CostEstimate(
      flops=int(seconds * core.flops),
      transcendentals=exponentials,
      bytes_accessed=nbytes,
    )


class PoolDecoderTPU(DecoderTPU):
  """Base class of the kernels that read pages of a pool in place.

  Each page of a tile is a separate operand, so that the pipeline loads all of
  them at once. Tiles are of `pool_tile` slots unless `kv_block` says otherwise.
  """

  def slots(self, keys: PooledView) -> int:
    """Number of slots of a tile."""
    return self.kv_block or pool_tile(keys.page, "tpu")

  def unserved_pages(self, keys: KVView, args: ScoreArgs) -> str | None:
    """Reason why all of these kernels decline a view or its mask, or None."""
    if not isinstance(keys, PooledView):
      return f"{type(keys).__name__}: it reads PooledView"
    block = self.slots(keys)
    # Tokens of codes are in the lanes.
    page_multiple = _SUBLANES if keys.decoders is None else tile_ops.LANES
    page_multiple = page_multiple if not self.interpret else 1
    if block % keys.page or keys.page % page_multiple:
      return f"pages of {keys.page} slots: no multiples of {page_multiple}"
    if block // keys.page > MOST_PAGES:
      return f"{block // keys.page} pages a tile: at most {MOST_PAGES}"
    if args.terms.slopes is not None:
      return "ALiBi"
    if any(jnp.size(x) > 1 for x in jax.tree.leaves(args.context.mask)):
      return "a mask with numbers of each row"
    return None


def page_arrays(keys: PooledView) -> list[Shaped[Array, "L N K _ _"]]:
  """Arrays of keys and of values; one array if they are the same."""
  return [keys.k] if keys.v is keys.k else [keys.k, keys.v]


def slot_bytes(keys: PooledView) -> int:
  """Bytes in VMEM of a head's key and value, padded to whole registers."""
  if keys.decoders is not None:
    return sum(
      -(-x.shape[3] // _CODE_ROWS) * _CODE_ROWS for x in page_arrays(keys)
    )
  return sum(
    tile_ops.lanes(x.shape[4]) * x.dtype.itemsize for x in page_arrays(keys)
  )


def page_operands(
  keys: PooledView,
  heads: int,
  block: int,
  index: Callable[..., tuple[Index, Index, Index]],
) -> tuple[list[pl.BlockSpec], list[Shaped[Array, "L N K _ _"]]]:
  """BlockSpecs and arrays of the pages of a tile.

  Args:
    keys: View of the pages.
    heads: Heads of a tile.
    block: Slots of a tile.
    index: Function of the number of a page in its tile and of the arguments of
      an index map; it returns the layer, the page and the number of the group
      of heads.
  """
  specs, arrays = [], []
  for x in page_arrays(keys):
    for n in range(block // keys.page):
      page_index = lambda *at, n=n: (*index(n, *at), 0, 0)
      specs.append(pl.BlockSpec((1, 1, heads, *x.shape[3:]), page_index))
      arrays.append(x)
  return specs, arrays


def join_pages(
  pages: Sequence[Ref], count: int, head: int, dtype: DTypeLike
) -> tuple[Shaped[Array, "S H"], Shaped[Array, "S J"]]:
  """Keys and values [slots, ...] of a head, from references to its pages.

  Args:
    pages: References to the pages of keys, and of values if they differ.
    count: Number of pages of a tile.
    head: Index of the head in the tile.
    dtype: Dtype of the result.
  """
  join = lambda refs: jnp.concatenate([ref[0, 0, head] for ref in refs], 0)
  k_pages, v_pages = pages[:count], pages[count:] or pages[:count]
  return join(k_pages).astype(dtype), join(v_pages).astype(dtype)


def no_distances() -> jax.Array:
  """Stand-in for distances, which are for slopes alone."""
  raise AssertionError("distances are for slopes, which are declined")
