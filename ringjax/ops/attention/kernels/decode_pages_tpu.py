"""Pallas TPU kernel for decode attention over the pages of each head.

Guarantees: equals `views.decode_attention` wherever it serves (`decline` says
where it does not), up to rounding; forward only.
Cost: each page in a head's table is read once, in place, by its number; of a
query that chose its pages these alone.
Memory: VMEM only: two tiles of pages, and the sums of one row.
Ref: Kwon et al. 2023, PagedAttention, arXiv 2309.06180; Tang et al. 2024,
Quest, arXiv 2406.10774.

To the kernel of a pool, each head is a row of one head that shares no tile.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from ringjax.ops.attention.cached.paged import PagedView
from ringjax.ops.attention.cached.pooled import (
  PooledView,
  SharedTiles,
  pool_tile,
)
from ringjax.ops.attention.cached.views import KVView
from ringjax.ops.attention.kernels.decode_pool_tpu import DecodePoolTPU
from ringjax.ops.attention.kernels.decoder_tpu import MOST_PAGES, DecoderTPU
from ringjax.ops.attention.scores import ScoreArgs
from ringjax.ops.kernel_choice import check_serves
from ringjax.ops.softmax import Partial


class DecodePagesTPU(DecoderTPU):
  """A Pallas kernel for TPU for decode attention over pages of single heads."""

  def decline(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> str | None:
    """Return the reason not to serve this call, or None."""
    if not isinstance(keys, PagedView):
      return f"{type(keys).__name__}: it reads PagedView"
    if keys.selects:
      return "queries that have yet to choose their pages"
    return self._of_pool(keys).decline(q, _as_pool(keys), args)

  def decode(
    self, q: Float[Array, "B K G T H"], keys: KVView, args: ScoreArgs
  ) -> Partial:
    """Attention partial of q [B K, 1, G, T, H], whose rows are heads."""
    check_serves(self, q, keys, args)
    assert isinstance(keys, PagedView)
    return self._of_pool(keys).decode(q, _as_pool(keys), args)

  def _of_pool(self, keys: PagedView) -> DecodePoolTPU:
    """Kernel of a pool with tiles of as many pages as it takes."""
    page = keys.k.shape[1]
    block = self.kv_block or min(pool_tile(page, "tpu"), MOST_PAGES * page)
    return DecodePoolTPU(block, self.chip, self.interpret)


def _as_pool(keys: PagedView) -> PooledView:
  """Pages of heads as pages of rows with one head, none of them shared."""
  row_of_head = lambda x: x[None, :, None]
  k = row_of_head(keys.k)
  table = keys.table.reshape(-1, keys.table.shape[2])
  none = jnp.zeros((1, 0), jnp.int32)
  rows = table.shape[0]
  return PooledView(
    k,
    k if keys.v is keys.k else row_of_head(keys.v),
    keys.at,
    table,
    jnp.int32(0),
    keys.constants,
    keys.decoders,
    SharedTiles(
      none,
      none,
      jnp.zeros((1, 0, rows), bool),
      jnp.zeros((1,), jnp.int32),
      jnp.zeros((1, rows), jnp.int32),
    ),
  )
