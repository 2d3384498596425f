"""Base class of the Pallas TPU kernels for decode attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ringjax.ops.attention.blockwise import check_positive
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.attention.kernels import tile_ops
from ringjax.ops.attention.scores import ScoreArgs
from ringjax.parallel import chips

# Fewest keys of a tile when as many heads as fit share it.
_LEAST = 512
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
