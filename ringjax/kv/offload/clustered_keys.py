"""Single keys by clusters of a page's keys, whose best ones are read whole.

Guarantees: a query reads the clusters whose centres get the most of a softmax
over all keys, as if each key were its centre, summed over the queries of a
group, until the budget is full; the last one in part. Clusters are of the keys
of one page alone, so that they do not change when tokens come: these stay on
the devices until their page is full, whose keys are then clustered. Clusters do
not depend on other rows, chunks or drafts.
Cost: of each call, a product of its queries with the centres, and an order of
them; of each move, `_ROUNDS` rounds of k-means in each page that moves.
Memory: of each page of a KV head its centres, and a byte for each token and for
each centre; of each KV head the moments of queries, float32 [H, H].

Queries are unlike keys: the direction in which keys differ most is not the one
in which products with queries do. k-means therefore measures distances by the
mean square of the products of the difference with recorded queries of the row:
those of its prompts at positions from `_FIRST` to `device` + `page`, which each
prompt has read before its first page moves, whatever its chunks. A row without
any measures them as they are. The queries of a group are counted together.

Ref: Liu et al. 2024, RetrievalAttention, arXiv 2409.10516. It walks a graph of
keys that is built by the prompt's queries, on the hosts' processors; here the
queries only give the distance, the index is of inverted lists (IVF), and keys
are copied to the devices. Clusters in segments of the text: Chen et al. 2025,
RetroInfer, arXiv 2505.02922.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped, UInt

from ringjax.kv.offload.page_choice import ChosenUnits, PageChoice, has_pages
from ringjax.ops.attention.blockwise import loop, product
from ringjax.ops.mask import Coords
from ringjax.typing import ArrayLeaf, Index, leaf

if TYPE_CHECKING:
  from ringjax.kv.policies.policy import Policy

# Rounds of k-means.
_ROUNDS = 8
# Queries of a row's first tokens differ from the others.
_FIRST = 4


class ClusterLandmarks(NamedTuple):
  """Clusters of the keys of pages.

  Fields:
    centres: Mean keys of the clusters, [..., C, H].
    members: Slots of a page, cluster after cluster, uint8 [..., P]; slots
      without a key are last.
    sizes: Number of keys of each cluster, uint8 [..., C].
  """

  centres: Float[ArrayLeaf, "*page C H"]
  members: UInt[ArrayLeaf, "*page P"]
  sizes: UInt[ArrayLeaf, "*page C"]


@dataclasses.dataclass(frozen=True)
class Clusters(PageChoice):
  """Single tokens, by clusters of the keys of each page.

  Attributes:
    tokens: Mean number of tokens of a cluster.
  """

  tokens: int

  @property
  def observes(self) -> bool:
    return True

  def unit(self, page: int) -> int:
    del page
    return 1

  def units_read(self, policy: Policy, pages: int, page: int) -> int:
    tokens = pages * page
    return max(1, min(tokens, policy.pages(tokens, 1)))

  def arrays(self, page: int, key: int, keys: DTypeLike) -> ClusterLandmarks:
    count = max(1, page // self.tokens)
    like = lambda shape, dtype: leaf(jax.ShapeDtypeStruct(shape, dtype))
    return ClusterLandmarks(
      centres=like((count, key), keys),
      members=like((page,), jnp.uint8),
      sizes=like((count,), jnp.uint8),
    )

  def landmarks(
    self,
    keys: Float[Array, "B K M P H"],
    real: Bool[Array, "B 1 M P 1"],
    centres: Float[Array, "B K C H"] | None = None,
    moments: Float[Array, "B K H H"] | None = None,
  ) -> ClusterLandmarks:
    del centres
    page = keys.shape[3]
    count = max(1, page // self.tokens)
    float32_keys = jnp.where(real, keys, 0).astype(jnp.float32)
    metric = _metric(moments, keys.shape)
    is_key = real[..., 0].astype(jnp.float32)
    num_keys = jnp.maximum(jnp.sum(is_key, 3, keepdims=True), 1)
    # Distances do not change; differences of large numbers round.
    mean = jnp.sum(float32_keys, 3, keepdims=True) / num_keys[..., None]
    x = jnp.where(real, float32_keys - mean, 0)

    def clusters_of(
      means: Float[Array, "B K M C H"],
    ) -> Int[Array, "B K M P"]:
      products = product("bkhj,bkmcj->bkmch", metric, means)
      norms = jnp.sum(means * products, -1)
      distance = norms[..., None, :] - 2 * product(
        "bkmph,bkmch->bkmpc", x, products
      )
      return jnp.argmin(distance, -1).astype(jnp.int32)

    def members_of(cluster: Int[Array, "B K M P"]) -> Float[Array, " ..."]:
      return (
        jax.nn.one_hot(cluster, count, dtype=jnp.float32) * is_key[..., None]
      )

    def step(
      _: jax.Array, means: Float[Array, "B K M C H"]
    ) -> Float[Array, "B K M C H"]:
      member = members_of(clusters_of(means))
      sizes = jnp.sum(member, 3)[..., None]
      sums = product("bkmpc,bkmph->bkmch", member, x)
      return jnp.where(sizes > 0, sums / jnp.maximum(sizes, 1), means)

    # Tokens at equal distances, of which the first of a row is one.
    first = x[:, :, :, jnp.arange(count, dtype=jnp.int32) * page // count]
    cluster = clusters_of(loop(_ROUNDS, step, first))
    member = members_of(cluster)
    sizes = jnp.sum(member, 3)
    sums = product("bkmpc,bkmph->bkmch", member, float32_keys)
    order = jnp.argsort(jnp.where(real[..., 0], cluster, count), 3, stable=True)
    return ClusterLandmarks(
      centres=(sums / jnp.maximum(sizes, 1)[..., None]).astype(keys.dtype),
      members=order.astype(jnp.uint8),
      sizes=sizes.astype(jnp.uint8),
    )

  def chosen(
    self,
    q: Float[Array, "B K G T H"],
    landmarks: PyTree[Shaped[Array, "B K M ..."]],
    centres: Float[Array, "B K C H"] | None,
    at: Coords,
    units_read: tuple[int, ...],
  ) -> ChosenUnits:
    del centres
    assert isinstance(landmarks, ClusterLandmarks)
    b, heads, num_pages, page = landmarks.members.shape
    has_page = has_pages(at, landmarks.members)
    sizes = landmarks.sizes.astype(jnp.int32)
    sizes = jnp.where(has_page[..., None], sizes, 0)
    score = _scores(q, landmarks.centres, sizes)
    per_page = sizes.shape[-1]
    max_units = max(units_read)
    best, cluster = lax.top_k(score, min(max_units, score.shape[-1]))

    def of_cluster(x: Int[Array, "B K M C"]) -> Int[Array, "B K T n"]:
      flat = x.reshape(b, heads, 1, -1)
      return jnp.take_along_axis(flat, cluster, 3)

    chosen_sizes = jnp.where(best > -jnp.inf, of_cluster(sizes), 0)
    ends = jnp.cumsum(chosen_sizes, 3, dtype=jnp.int32)
    nth = jnp.arange(max_units, dtype=jnp.int32)
    # The cluster that has the n-th token that is read.
    search = lambda ends: jnp.searchsorted(ends, nth, side="right")
    rank = jax.vmap(search)(ends.reshape(-1, ends.shape[3]))
    rank = jnp.minimum(rank, ends.shape[3] - 1).astype(jnp.int32)
    rank = rank.reshape(*ends.shape[:3], max_units)
    nth = nth[None, None, None]
    pick = lambda x: jnp.take_along_axis(x, rank, 3)
    offsets = jnp.cumsum(sizes, 3, dtype=jnp.int32) - sizes
    index = nth - pick(ends - chosen_sizes) + pick(of_cluster(offsets))
    index = jnp.clip(index, 0, page - 1)
    first = pick(cluster.astype(jnp.int32) // per_page) * page
    members = landmarks.members.reshape(b, heads, 1, -1)
    slot = jnp.take_along_axis(members, first + index, 3)
    units = first + slot.astype(jnp.int32)

    # Numbers of tokens depend on the row alone, not on the width of the table.
    limit = jnp.asarray(units_read, jnp.int32)[
      jnp.sum(has_page, 2, dtype=jnp.int32)
    ]
    limit = jnp.minimum(limit[:, :, None], ends[..., -1])
    is_token = jnp.broadcast_to(
      (at.seg > 0)[:, None, None], (b, heads, 1, num_pages * page)
    )
    reads = (nth < limit[..., None]) & jnp.take_along_axis(is_token, units, 3)
    return ChosenUnits(units, reads)


def noted_queries(
  moments: Float[Array, "L B K H H"],
  layer: Index,
  rotated: Callable[[], Float[Array, "B T N H"]],
  at: Coords,
  stop: int,
) -> Float[Array, "L B K H H"]:
  """Moments of a layer with those of a prompt's queries.

  Args:
    moments: Sums of outer products of queries, of the groups of all layers.
    layer: Index of the layer in the L, int32 [].
    rotated: Function that gives the queries, rotated.
    at: Coordinates of the queries, [B or 1, T].
    stop: Position from which on queries do not count.
  """
  counts = (at.seg > 0) & (at.pos >= _FIRST) & (at.pos < stop)
  heads = moments.shape[2]

  def add(moments: jax.Array) -> jax.Array:
    q = rotated().astype(jnp.float32)
    b, t, n, h = q.shape
    q = jnp.where(counts[:, :, None, None], q, 0)
    q = q.reshape(b, t, heads, n // heads, h)
    new = product("btkgh,btkgj->bkhj", q, q)
    old = lax.dynamic_index_in_dim(moments, layer, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(moments, old + new, layer, 0)

  return lax.cond(jnp.any(counts), add, lambda x: x, moments)


def _metric(
  moments: Float[Array, "B K H H"] | None, shape: tuple[int, ...]
) -> Float[Array, "B K H H"]:
  """Matrix of the distances: that of the moments, of a mean square of 1."""
  b, heads, key = shape[0], shape[1], shape[-1]
  plain = jnp.broadcast_to(
    jnp.eye(key, dtype=jnp.float32), (b, heads, key, key)
  )
  if moments is None:
    return plain
  trace = jnp.trace(moments, axis1=2, axis2=3)[..., None, None]
  scaled = moments * (key / jnp.where(trace > 0, trace, 1))
  return jnp.where(trace > 0, scaled, plain)


def _scores(
  q: Float[Array, "B K G T H"],
  centres: Float[Array, "B K M C H"],
  sizes: Int[Array, "B K M C"],
) -> Float[Array, "B K T _"]:
  """Logarithm of the part of the attention that a key of a cluster gets.

  Summed over the group; -inf for a cluster without keys.
  """
  b, heads, groups, count, key = q.shape
  s = product("bkgth,bkmch->bkgtmc", q, centres.astype(q.dtype))
  s = s.reshape(b, heads, groups, count, -1) / math.sqrt(key)
  sizes = sizes.reshape(b, heads, 1, 1, -1)
  log_size = jnp.log(jnp.maximum(sizes, 1).astype(jnp.float32))
  is_cluster = sizes > 0
  total = jax.nn.logsumexp(
    jnp.where(is_cluster, s + log_size, -jnp.inf), -1, keepdims=True
  )
  # Of a head without pages there is no sum.
  share = s - jnp.where(total > -jnp.inf, total, 0)
  score = jax.nn.logsumexp(share, 2)
  return jnp.where(is_cluster[:, :, 0], score, -jnp.inf)
