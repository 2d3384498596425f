"""Pages by their mean keys, and pages that have no good mean (ShadowKV).

Guarantees: a query reads the pages whose mean keys get the most of a softmax
over all pages, the largest of the queries of a group; and besides them the
`outliers` pages of a head in which some key is the least like the mean.

Ref: Sun et al. 2024, ShadowKV, arXiv 2410.21465, algorithms 1 and 2.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from ringjax.kv.offload.page_choice import PageChoice
from ringjax.ops.attention.blockwise import product


@dataclasses.dataclass(frozen=True)
class Means(PageChoice):
  """Pages by their mean keys.

  The first vector of a landmark is the mean; all numbers of the second are the
  least cosine of a key with the mean.

  Attributes:
    outliers: Number of pages of a head that are read by each query because
      their keys are the least like their mean.
  """

  outliers: int = 0

  @property
  def extra_pages(self) -> int:
    return self.outliers

  def landmarks(
    self,
    keys: Float[Array, "B K M P H"],
    real: Bool[Array, "B 1 M P 1"],
    centres: Float[Array, "B K C H"] | None = None,
    moments: Float[Array, "B K H H"] | None = None,
  ) -> Float[Array, "B K M 2 H"]:
    del centres, moments
    float32_keys = jnp.where(real, keys, 0).astype(jnp.float32)
    count = jnp.maximum(jnp.sum(real, 3, dtype=jnp.int32), 1)
    mean = jnp.sum(float32_keys, 3) / count.astype(float32_keys.dtype)
    norm = lambda x: jnp.sqrt(jnp.sum(x * x, -1))
    dots = jnp.sum(float32_keys * mean[:, :, :, None], -1)
    cosine = dots / jnp.maximum(
      norm(float32_keys) * norm(mean)[..., None], 1e-30
    )
    min_cosine = jnp.min(jnp.where(real[..., 0], cosine, 1), 3)
    min_cosine = jnp.broadcast_to(min_cosine[..., None], mean.shape)
    return jnp.stack([mean, min_cosine], 3).astype(keys.dtype)

  def ranked(
    self,
    q: Float[Array, "B K G T H"],
    landmarks: Shaped[Array, "B K M _ _"],
    has_page: Bool[Array, "B K M"],
    pages_read: tuple[int, ...],
  ) -> tuple[Int[Array, "B K T n"], Bool[Array, "B K T n"]]:
    means = landmarks[..., 0, :].astype(q.dtype)
    s = product("bkgth,bkmh->bkgtm", q, means) / math.sqrt(q.shape[-1])
    s = jnp.where(has_page[:, :, None, None], s, -jnp.inf)
    # Of a head without pages nothing is read.
    weights = jnp.nan_to_num(jax.nn.softmax(s, -1))
    best = jnp.max(weights, 2)
    if self.outliers:
      likeness = landmarks[..., 1, 0].astype(jnp.float32)
      likeness = jnp.where(has_page, likeness, jnp.inf)
      rank = jnp.argsort(jnp.argsort(likeness, 2), 2)
      best = jnp.where((rank < self.outliers)[:, :, None], jnp.inf, best)
    best = jnp.where(has_page[:, :, None], best, -1)
    places = lax.top_k(best, max(pages_read))[1].astype(jnp.int32)
    num_read = jnp.asarray(pages_read, jnp.int32)[
      jnp.sum(has_page, 2, dtype=jnp.int32)
    ]
    order = lax.broadcasted_iota(jnp.int32, places.shape, 3)
    return places, order < num_read[:, :, None, None]
