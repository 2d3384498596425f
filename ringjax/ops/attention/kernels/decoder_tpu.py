"""What the kernels for TPU that read a cache for few queries have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ringjax.ops.attention.blockwise import check_positive
from ringjax.ops.attention.kernels import tile_ops
from ringjax.ops.attention.scores import ScoreArgs
from ringjax.ops.attention.views import KVView
from ringjax.parallel import chips

# Keys that are read at a time if as many heads as fit are.
_LEAST = 512
# Numbers of a tile of scores.
_SCORES = 1 << 19
# What a kernel may take unless it says more.
_VMEM = 16 << 20


@dataclasses.dataclass(frozen=True)
class DecoderTPU:
  """A base class of kernels.

  Attributes:
    kv_block: keys of a tile, a multiple of 128; None: by their bytes.
    chip: the machine, of `chips.MACHINES`, by whose rates the compiler is told
      the kernel's cost; None: as `tile_ops.SOME`.
    interpret: runs it without a TPU, slowly, for tests.
  """

  kv_block: int | None = None
  chip: str | None = None
  interpret: bool = False

  def __post_init__(self) -> None:
    check_positive(self, "kv_block")

  def most_heads(self, kv: int, fits: Callable[[int], bool]) -> int:
    """How many of `kv` heads a tile has: as many as fit, but one at least."""
    # Where a device is two cores, each takes a part of the heads.
    most = max(1, kv // tile_ops.core(self.chip).cores)
    found = (n for n in range(1, most + 1) if kv % n == 0 and fits(n))
    return max(found, default=1)

  def tile_of(
    self,
    q: Float[Array, "B K G T H"],
    length: int,
    row: int,
    tile_bytes: int,
    most: int,
  ) -> tuple[int, int]:
    """(heads, keys) of a tile.

    Args:
      q: queries.
      length: keys of a shard.
      row: bytes of a key and its value of one head.
      tile_bytes: of a tile at most.
      most: keys of a tile at most.
    """
    least = min(_LEAST, length)
    heads = self.most_heads(q.shape[1], lambda n: n * row * least <= tile_bytes)
    if self.kv_block is not None:
      return heads, self.kv_block
    rows = q.shape[2] * q.shape[3]
    many = min(tile_bytes // (heads * row), _SCORES // rows, most)
    whole = many // tile_ops.LANES * tile_ops.LANES
    return heads, max(tile_ops.LANES, min(whole, tile_ops.lanes(length)))

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
    """Why a call is declined by any of these kernels, or None.

    Args:
      q: queries.
      keys: the view.
      args: of the scores.
      length: keys of a shard.
      block: keys of a tile.
      need: bytes of vector memory that a step takes.
      numbers: keys and values, if they are stored as numbers.
    """
    if block % tile_ops.LANES and not self.interpret:
      return f"tiles of {block} keys: no multiples of {tile_ops.LANES}"
    if -(-length // block) >= 1 << tile_ops.COLUMN_BITS:
      return f"{length} keys a shard: more than its list holds"
    room = tile_ops.core(self.chip).vmem_bytes
    if need > room // 4 * 3:
      return f"{need >> 20} MB of tiles for {room >> 20} MB of vector memory"
    return tile_ops.undecoded(
      q,
      keys,
      args,
      dtypes=("bfloat16", "float32"),
      widest=1024,
      numbers=numbers,
    )

  def params(self, need: int, *semantics: Any) -> pltpu.CompilerParams:
    """The compiler's, for a step that takes so much vector memory."""
    return pltpu.CompilerParams(
      dimension_semantics=semantics,
      # Half as much again, of which the compiler says what it is for.
      vmem_limit_bytes=max(_VMEM, need // 2 * 3),
    )

  def cost(
    self, nbytes: int, exponentials: int, cycles: int | float = 0
  ) -> pl.CostEstimate:
    """What XLA's scheduler is told: the time that reading takes.

    It divides FLOPs by the chip's peak; the memory is what it waits for.

    Args:
      nbytes: that are read.
      exponentials: that are computed.
      cycles: of all cores together, if they may take longer than reading.
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
