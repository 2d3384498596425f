"""Keys that are sampled by hashes, each with its probability (MagicPIG).

Guarantees: the attention of a query is an estimate of that over all keys whose
numerator and denominator have no bias: over seeds of the hashes their mean is
that of dense attention. A key's weight is divided by the probability that it
was read. The first tokens of a row, and those that are still on the devices,
are read for certain. With all keys sampled it is dense attention.
Cost: of each call, `tables` hashes of its queries, and a comparison of each of
them with those of all older keys; of each move, the hashes of its keys.
Memory: `tables` codes of each token of a KV head, of one byte for up to 8 bits,
of two for more; the mean of the first keys that moved.

A table has `bits` random planes through the mean of the keys; its code has the
side of each plane on which a vector is. A key is sampled if its code is that of
the query in two tables or more. Of vectors at the angle a two codes are equal
with the probability (1 - a / pi) ** bits, and planes are independent, so that
the probability to be sampled follows from the angle.

A group's queries read together what some of them sampled. Where that is more
than `budget`, a random part of it is read, the same for all queries, and the
part is another factor of the probability.

The mean is that of the row's first tokens that moved to host memory: with it
the sizes of chunks are a setting that changes the result.

Ref: Chen et al. 2024, MagicPIG, arXiv 2410.16179.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PyTree, Shaped, UInt

from ringjax.kv.offload.page_choice import ChosenUnits, PageChoice
from ringjax.ops.attention.blockwise import product
from ringjax.ops.attention.scores import mixed_bits
from ringjax.ops.mask import Coords
from ringjax.parallel import collectives
from ringjax.typing import ArrayLeaf, leaf

# Equal codes by which a key is sampled.
_LEAST = 2


@dataclasses.dataclass(frozen=True)
class Hashes(PageChoice):
  """Tokens that are sampled by hashes of queries and keys.

  Attributes:
    bits: Number of planes of a table, K of the paper, 1 to 16.
    tables: Number of tables, L of the paper, at least 2.
    sinks: Number of first tokens of a document that each query reads.
    seed: Seed of the planes.
  """

  bits: int
  tables: int
  sinks: int
  seed: int

  @property
  def centres(self) -> int:
    return 1

  def unit(self, page: int) -> int:
    del page
    return 1

  @property
  def samples(self) -> bool:
    return True

  def arrays(
    self, page: int, key: int, keys: DTypeLike
  ) -> Shaped[ArrayLeaf, "P L"]:
    del key, keys
    return leaf(jax.ShapeDtypeStruct((page, self.tables), self._dtype))

  @property
  def _dtype(self) -> DTypeLike:
    """Dtype of a code."""
    return jnp.uint8 if self.bits <= 8 else jnp.uint16

  def new_centres(
    self,
    keys: Float[Array, "B K M P H"],
    real: Bool[Array, "B 1 M P 1"],
    axis: str | None,
  ) -> Float[Array, "B K 1 H"]:
    float32_keys = jnp.where(real, keys, 0).astype(jnp.float32)
    sums = jnp.sum(float32_keys, (2, 3)), jnp.sum(real, (2, 3), jnp.float32)
    if axis is not None:
      sums = collectives.total(sums, axis)
    total, count = sums
    return (total / jnp.maximum(count, 1))[:, :, None].astype(keys.dtype)

  def landmarks(
    self,
    keys: Float[Array, "B K M P H"],
    real: Bool[Array, "B 1 M P 1"],
    centres: Float[Array, "B K C H"] | None = None,
    moments: Float[Array, "B K H H"] | None = None,
  ) -> UInt[Array, "B K M P L"]:
    del real, moments
    assert centres is not None
    centred = _centred(keys, centres[:, :, :, None])
    return self._codes(centred)

  def _codes(self, x: Float[Array, "*n H"]) -> UInt[Array, "*n L"]:
    """Codes of vectors, a table at a time."""
    planes = jnp.asarray(_planes(self, x.shape[-1]))
    place = jnp.arange(self.bits, dtype=jnp.int32)

    def of_table(planes: Float[Array, "H bits"]) -> UInt[Array, " ..."]:
      side = product("...h,hb->...b", x, planes) > 0
      code = jnp.sum(jnp.where(side, 1 << place, 0), -1, dtype=jnp.int32)
      return code.astype(self._dtype)

    return jnp.moveaxis(lax.map(of_table, planes), 0, -1)

  def chosen(
    self,
    q: Float[Array, "B K G T H"],
    landmarks: PyTree[Shaped[Array, "B K M ..."]],
    centres: Float[Array, "B K C H"] | None,
    at: Coords,
    units_read: tuple[int, ...],
  ) -> ChosenUnits:
    del centres
    b, heads, num_pages, page, _ = landmarks.shape
    codes = landmarks.reshape(b, heads, 1, 1, num_pages * page, -1)
    query_codes = self._codes(q.astype(jnp.float32))[..., None, :]
    equal = jnp.sum(codes == query_codes, -1, dtype=jnp.int32)
    per_query = lambda x: x[:, None, None, None]
    is_token, pos = per_query(at.seg > 0), per_query(at.pos)
    is_sink = is_token & (pos < self.sinks)
    samples = is_token & ~is_sink & (equal >= _LEAST)
    sampled = jnp.any(samples, 2)
    is_sink = jnp.broadcast_to(is_sink[:, :, 0], sampled.shape)

    # Numbers of tokens depend on the row alone, not on the width of the table.
    used = jnp.any(at.seg.reshape(at.seg.shape[0], num_pages, page) > 0, 2)
    limit = jnp.asarray(units_read, jnp.int32)[jnp.sum(used, 1)]
    limit = jnp.broadcast_to(limit[:, None, None], sampled.shape[:3])
    room = jnp.maximum(limit - jnp.sum(is_sink, 3, dtype=jnp.int32), 1)
    count = jnp.sum(sampled, 3, dtype=jnp.int32)
    room, count = room.astype(jnp.float32), count.astype(jnp.float32)
    log_share = -jnp.log(jnp.maximum(count / room, 1))

    # Of the same tokens always, so that they stay on the device.
    seed = mixed_bits(jnp.uint32(self.seed % 2**32))
    bits = mixed_bits(pos[:, :, 0].astype(jnp.uint32) + seed)
    priority = (bits >> 8).astype(jnp.float32) / (1 << 24)
    rank = jnp.where(is_sink, 2, jnp.where(sampled, priority, -1))
    best, units = lax.top_k(rank, max(units_read))
    order = lax.broadcasted_iota(jnp.int32, units.shape, 3)
    reads = (best >= 0) & (order < limit[..., None])
    pick = lambda x: jnp.take_along_axis(x, units, 3)
    by_sampling = pick(sampled)
    of_query = jnp.take_along_axis(samples, units[:, :, None], 4)
    shares = jnp.where(of_query, log_share[:, :, None, :, None], -jnp.inf)
    shares = jnp.where(by_sampling[:, :, None], shares, 0)
    return ChosenUnits(units.astype(jnp.int32), reads, shares, by_sampling)

  def log_probability(
    self,
    q: Float[Array, "B K G T H"],
    keys: Float[Array, "B K T n H"],
    centres: Float[Array, "B K C H"],
  ) -> Float[Array, "B K G T n"]:
    centred = _centred(keys, centres[:, :, :, None])
    float32_q = q.astype(jnp.float32)
    norm = lambda x: jnp.sqrt(jnp.sum(x * x, -1))
    dots = product("bkgth,bktnh->bkgtn", float32_q, centred)
    norms = norm(float32_q)[..., None] * norm(centred)[:, :, None]
    cosine = jnp.clip(dots / jnp.maximum(norms, 1e-30), -1, 1)
    plane = 1 - jnp.arccos(cosine) / math.pi
    return log_sampled(plane**self.bits, self.tables)


def log_sampled(equal: Float[Array, "*n"], tables: int) -> Float[Array, "*n"]:
  """Logarithm of the probability of two or more equal codes.

  Args:
    equal: Probability that the codes of one table are equal, float32.
    tables: Number of tables.
  """
  equal = jnp.clip(equal, 1e-12, 1 - 1e-6)
  log_other = jnp.log1p(-equal)
  once = tables * equal * jnp.exp((tables - 1) * log_other)
  least_two = -jnp.expm1(tables * log_other) - once
  # Two equal codes, and three as a part of that: a difference would round.
  log_few = (
    math.log(math.comb(tables, 2))
    + 2 * jnp.log(equal)
    + (tables - 2) * log_other
    + jnp.log1p((tables - 2) / 3 * equal / (1 - equal))
  )
  log_least_two = jnp.log(jnp.maximum(least_two, 1e-30))
  return jnp.where(tables * equal < 0.03, log_few, log_least_two)


def _centred(
  keys: Float[Array, "B K _ _ H"], centre: Float[Array, "B K 1 1 H"]
) -> Float[Array, "B K _ _ H"]:
  return keys.astype(jnp.float32) - centre.astype(jnp.float32)


@functools.cache
def _planes(hashes: Hashes, key: int) -> Float[np.ndarray, "L H bits"]:
  """Normal vectors of the planes of each table."""
  rng = np.random.default_rng(hashes.seed)
  shape = hashes.tables, key, hashes.bits
  return rng.standard_normal(shape).astype(np.float32)
