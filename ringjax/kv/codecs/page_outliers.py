"""Outliers of a page: the farthest numbers of its vectors, any number in one.

Guarantees: of a page's numbers, those of P tokens of a head, the farthest are
kept as float16, wherever they are: all of one vector or none. Their number is
at least `SLACK` times the share that is asked for, and fixed.
Memory: three bytes an outlier, one for each 255 numbers of the page and a bit a
token, in equal parts after the codes of the page's tokens. Bytes that would be
left hold further outliers.
Ref: Hooper et al. 2024, KVQuant, arXiv 2401.18079: all numbers beyond a
threshold, 1 % of them, in a sparse matrix beside the codes.
"""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt8

from ringjax.checks import number
from ringjax.errors import OptionError
from ringjax.kv.codecs import code_bytes
from ringjax.kv.codecs.channel_groups import check_groups
from ringjax.ops.attention.cached.code_format import packed_bytes

# Pages differ in how many of their numbers are beyond the thresholds.
SLACK = 1.25
# Places are bytes in blocks of so many numbers; how many outliers a block has,
# at most all of them, is a byte as well.
_BLOCK = 255
_OUTLIER_BYTES = 3
_PERCENT = re.compile(r"(\d+(\.\d*)?|\.\d+)%")


def checked(outliers: int | float | str) -> int | float | str:
  """Check outliers: a share of each vector, or a text, that of a page.

  Returns:
    The share, or the text in one spelling: "1%" for "1.0%".

  Raises:
    OptionError: Another value.
  """
  if not isinstance(outliers, str):
    number("outliers", outliers, least=0, most=0.5)
    return outliers
  percent = _PERCENT.fullmatch(outliers)
  value = float(percent[1]) if percent else 0.0
  if not 0 < value <= 50:
    raise OptionError(
      "outliers",
      repr(outliers),
      "a share of each vector from 0 to 0.5, or of a page above 0% up to 50%",
      "write outliers=0.01, or outliers=1%",
    )
  return f"{value:g}%"


def share_of(outliers: int | float | str) -> float:
  """Return outliers that were checked as a share."""
  if isinstance(outliers, str):
    return round(float(outliers[:-1]) / 100, 12)
  return float(outliers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageOutliers:
  """Bytes of the outliers of pages.

  Attributes:
    share: Part of a page's numbers that is beyond thresholds.
    group: Tokens of a page, P.
    marks: Whether each token has a mark, one bit.
  """

  share: float
  group: int
  marks: bool

  def width(self, dim: int) -> int:
    """Bytes of a token: its part of those of the page."""
    min_count = max(1, int(np.ceil(SLACK * self.share * self.group * dim)))
    nbytes = min_count * _OUTLIER_BYTES + self._blocks(dim) + self._mark_bytes
    return -(-nbytes // self.group)

  def count(self, dim: int) -> int:
    """Number of a page's outliers."""
    room = self.width(dim) * self.group - self._blocks(dim) - self._mark_bytes
    return min(room // _OUTLIER_BYTES, self.group * dim)

  def farthest(
    self, distances: Float[Array, "B K T D"]
  ) -> Int[Array, "B K n outliers"]:
    """Return where the largest magnitudes of each page are, below P D.

    Places ascend. Magnitudes are compared in 13 bits, as those of a vector are.
    """
    count = self.count(distances.shape[-1])
    distances = lax.reduce_precision(jnp.abs(distances), 8, 12)
    _, places = lax.top_k(self._pages(distances), count)
    return jnp.sort(places, -1)

  def marked(
    self, index: Int[Array, "B K n outliers"], dim: int
  ) -> Bool[Array, "B K T D"]:
    """Return True at the places of `index`."""
    nowhere = jnp.zeros((*index.shape[:-1], self.group * dim), bool)
    return self._put(nowhere, index, True).reshape(*index.shape[:2], -1, dim)

  def encode(
    self,
    x: Float[Array, "B K T D"],
    index: Int[Array, "B K n outliers"],
    marks: Bool[Array, "B K T 1"] | None = None,
  ) -> UInt8[Array, "B K T x"]:
    """Return the bytes of outliers, and of marks if there are some."""
    outlier_values = jnp.take_along_axis(self._pages(x), index, -1)
    block = index // _BLOCK
    table = (*index.shape, self._blocks(x.shape[-1]))
    blocks = lax.broadcasted_iota(jnp.int32, table, index.ndim)
    counts = jnp.sum(block[..., None] == blocks, -2, dtype=jnp.int32)
    parts = [
      counts.astype(jnp.uint8),
      (index - block * _BLOCK).astype(jnp.uint8),
      code_bytes.half_bytes(outlier_values),
    ]
    if marks is not None:
      bits = marks.reshape(*index.shape[:-1], self.group).astype(jnp.uint8)
      parts.append(code_bytes.pack(bits, 1))
    data = jnp.concatenate(parts, -1)
    over = self.width(x.shape[-1]) * self.group - data.shape[-1]
    data = jnp.pad(data, [(0, 0)] * (data.ndim - 1) + [(0, over)])
    return data.reshape(*x.shape[:-1], -1)

  def marks_of(
    self, data: UInt8[Array, "B K T x"], dim: int
  ) -> Bool[Array, "B K T 1"]:
    """Return the marks in the bytes."""
    start = self._blocks(dim) + self.count(dim) * _OUTLIER_BYTES
    cut = self._pages(data)[..., start : start + self._mark_bytes]
    bits = code_bytes.unpack(cut, 1, self.group)
    return bits.reshape(*data.shape[:-1], 1) != 0

  def replace(
    self, x: Float[Array, "B K T D"], data: UInt8[Array, "B K T x"]
  ) -> Float[Array, "B K T D"]:
    """Return numbers with the outliers in the bytes at their places."""
    dim, pages = x.shape[-1], self._pages(data)
    blocks, count = self._blocks(dim), self.count(dim)
    ends = jnp.cumsum(pages[..., :blocks].astype(jnp.int32), -1)
    table = (*pages.shape[:-1], count, blocks)
    rank = lax.broadcasted_iota(jnp.int32, table, pages.ndim - 1)
    block = jnp.sum(ends[..., None, :] <= rank, -1, dtype=jnp.int32)
    within = pages[..., blocks : blocks + count].astype(jnp.int32)
    # Of pages that were never written all places are one beyond the last.
    index = jnp.minimum(block * _BLOCK + within, self.group * dim - 1)
    outlier_values = code_bytes.halves(pages, blocks + count, count)
    return self._put(self._pages(x), index, outlier_values).reshape(x.shape)

  @property
  def _mark_bytes(self) -> int:
    return packed_bytes(self.group, 1) if self.marks else 0

  def _blocks(self, dim: int) -> int:
    return -(-self.group * dim // _BLOCK)

  def _pages(self, x: Array) -> Array:
    """[B, K, n P, D] -> [B, K, n, P D]."""
    check_groups(x.shape[2], self.group)
    return x.reshape(*x.shape[:2], -1, self.group * x.shape[3])

  def _put(
    self, x: Array, index: Int[Array, "B K n outliers"], new: Array | bool
  ) -> Array:
    return jnp.put_along_axis(x, index, new, axis=-1, inplace=False)
