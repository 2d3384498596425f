"""Keys of pages in host memory, kept on the devices in a basis of few vectors.

Guarantees: the keys of a chosen page are rebuilt on the device from
coefficients, before their rotation, and only its values are copied. With as
many vectors as a key has numbers the keys are exact, but for rounding. Rows and
heads have a basis each: the leading singular vectors of the first tokens of the
row that moved to host memory, which later tokens are projected onto.
Memory: `rank` numbers of each token of a KV head, and its basis. Host memory
has the exact keys, which prompts read.

In the paper the basis is of a layer's heads together, and of the whole prompt.

Ref: Sun et al. 2024, ShadowKV, arXiv 2410.21465.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.kv.base import CacheSpec
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.kv.storage.pages import Places
from ringjax.ops.attention.blockwise import product
from ringjax.typing import ArrayLeaf, Index


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankKeys:
  """Coefficients of the keys of one kind of layer, and their bases.

  Attributes:
    coefficients: Coefficients of each token of each page, [L, B, K, M, P, r].
    basis: Orthonormal vectors of each head, [L, B, K, r, H].
  """

  coefficients: Float[ArrayLeaf, "L B K M P r"]
  basis: Float[ArrayLeaf, "L B K r H"]

  @classmethod
  def spec(
    cls, shape: LayerCacheSpec, room: CacheSpec, kind: CacheConfig
  ) -> LowRankKeys:
    """Shapes, dtypes and shardings.

    Raises:
      OptionError: If the rank does not fit the layer or the mesh.
    """
    rank, page = kind.tier.rank, kind.tier.block
    assert rank is not None
    if rank > shape.key:
      raise OptionError(
        "rank",
        rank,
        f"at most {shape.key}, the numbers of a key",
        f"pass rank={shape.key // 2}, for instance",
      )
    if not shape.value:
      raise OptionError(
        "rank",
        f"{rank} for a layer whose values are parts of its keys",
        "keys and values apart: latents are of low rank themselves",
        "leave rank out",
      )
    if room.shards > 1:
      raise OptionError(
        "rank",
        f"{rank} on {room.shards} shards of the sequence",
        "one shard with all of a row's keys, of which the basis is",
        "leave rank out, or shard heads or rows",
      )
    pages = room.capacity // page
    heads = (shape.layers, room.batch, shape.heads)
    names = (None, "batch", "heads")
    like = lambda dims, more: room.like(
      (*heads, *dims), room.dtype, (*names, *more)
    )
    return cls(
      coefficients=like((pages, page, rank), ("tokens", None, None)),
      basis=like((rank, shape.key), (None, None)),
    )

  def of_unit(
    self, layer: Index, head: Index, unit: Index, size: int
  ) -> Float[Array, "1 n H"]:
    """Rebuild the keys of a page or of a part of one, before their rotation.

    Args:
      layer: Index of the layer in the L.
      head: Index of the head in the rows' heads, B K.
      unit: Index of the unit among those of the head.
      size: Tokens of a unit, which divide a page.
    """
    _, b, heads, pages, slots, rank = self.coefficients.shape
    at = jnp.asarray(layer, jnp.int32) * (b * heads) + head
    take = lambda x, index: jax.lax.dynamic_index_in_dim(
      x, index, 0, keepdims=False
    )
    coefficients = self.coefficients.reshape(-1, size, rank)
    units = pages * (slots // size)
    basis = self.basis.reshape(-1, rank, self.basis.shape[-1])
    keys = product(
      "pr,rh->ph", take(coefficients, at * units + unit), take(basis, at)
    )
    return keys.astype(self.basis.dtype)[None]

  def with_pages(
    self,
    layer: Index,
    keys: Float[Array, "B K m P H"],
    real: Bool[Array, "B 1 m P 1"],
    older: Int[Array, " B"],
    target: Int[Array, "B m"],
  ) -> LowRankKeys:
    """Add pages of one layer; a row without older pages gets a new basis.

    Args:
      layer: Index of the layer in the L.
      keys: Keys of the pages, before their rotation.
      real: Whether each slot has a key of a page that is added.
      older: Number of slots of each row's older pages.
      target: Page that each becomes, M for none.
    """
    b, heads = keys.shape[:2]
    rank = self.basis.shape[3]
    float32_keys = jnp.where(real, keys, 0).astype(jnp.float32)
    gram = product("bkmph,bkmpg->bkhg", float32_keys, float32_keys)
    vectors = jnp.linalg.eigh(gram)[1][..., -rank:]
    new = jnp.swapaxes(vectors, 2, 3).astype(self.basis.dtype)
    old = jax.lax.dynamic_index_in_dim(self.basis, layer, 0, keepdims=False)
    basis = jnp.where((older > 0)[:, None, None, None], old, new)
    added = product(
      "bkmph,bkrh->bkmpr", float32_keys, basis.astype(jnp.float32)
    )
    row = jnp.arange(b)[:, None, None]
    head = jnp.arange(heads)[None, :, None]
    return LowRankKeys(
      coefficients=self.coefficients.at[layer, row, head, target[:, None]].set(
        added.astype(self.coefficients.dtype), mode="drop"
      ),
      basis=jax.lax.dynamic_update_index_in_dim(self.basis, basis, layer, 0),
    )


def low_rank_specs(
  keys: LowRankKeys | None, places: Places
) -> LowRankKeys | None:
  """PartitionSpecs of the arrays, as the same tree; None without them."""
  if keys is None:
    return None
  heads = P(None, places.batch or None, places.heads or None)
  return tree.with_leaves(keys, coefficients=places.by_head, basis=heads)


tree.register(LowRankKeys, ("coefficients", "basis"), ())
