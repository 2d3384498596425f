"""View of a layer whose heads are stored by different codecs.

Guarantees: each head is read like a view of that head alone, in the basis of
its codec; forward only.
Cost: each head's bytes are read once. The heads are a loop, and for each group
of heads one of a few branches runs: a program has a branch for each way of
storage, not for each head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from ringjax import tree
from ringjax.errors import OptionError
from ringjax.ops.attention.cached.code_format import token_axis
from ringjax.ops.attention.cached.views import (
  Aligned,
  Decoder,
  EncodedView,
  KVView,
  StoredView,
  UnrotatedView,
  coords_specs,
)
from ringjax.ops.attention.scores import Terms
from ringjax.ops.mask import Coords
from ringjax.ops.rope import Rotation
from ringjax.ops.softmax import Partial
from ringjax.parallel.call_sharding import MeshAxes
from ringjax.typing import Index


@dataclasses.dataclass(frozen=True)
class PerHeadView(StoredView):
  """One layer of arrays of slots, an array for each way to store a head.

  Fields:
    k: Codes of n groups of g heads, for each way, [n, B, g, S, X], or int8
      [n, B, g, X, S].
    v: Codes like `k`; empty where values are parts of keys.
    at: Coordinates [B or 1, S]; segment 0 is an empty slot.
    way: Index of the way of each group of heads, int32 [K / g].
    row: Index of each group in its way's array, int32 [K / g].
    constants: Arrays [n, g, x] of the codecs of keys and of values, per way.
    rotation: Rotation on reading, for keys stored unrotated; or None.
    decoders: Decoders of keys and of values, per way.
  """

  k: tuple[Any, ...]
  v: tuple[Any, ...]
  at: Coords
  way: Int[Array, " groups"]
  row: Int[Array, " groups"]
  constants: tuple[Any, ...]
  rotation: Rotation | None
  decoders: tuple[tuple[Decoder, Decoder], ...]

  @property
  def shape(self) -> tuple[int, int, int, int, int]:
    k, (k_decoder, v_decoder) = self.k[0], self.decoders[0]
    value = v_decoder.dim if self.v else k_decoder.dim
    heads = k.shape[2] * self.way.shape[0]
    return k.shape[1], heads, k.shape[token_axis(k)], k_decoder.dim, value

  @property
  def slot_bytes(self) -> int:
    b, heads, _, dim, _ = self.shape
    return b * heads * dim * jnp.dtype(self.decoders[0][0].dtype).itemsize

  def specs(
    self, batch: MeshAxes, heads: MeshAxes, tokens: MeshAxes
  ) -> PerHeadView:
    if heads:
      raise OptionError(
        "mesh",
        f"heads sharded over {heads}, with a codec for each head",
        "a mesh that shards the sequence and the batch alone",
        "make the mesh without that axis, or take one codec for all heads",
      )

    def array_specs(parts: tuple[Any, ...]) -> tuple[Any, ...]:
      return tuple(
        P(None, batch, None, *(None,) * (token_axis(x) - 3), tokens)
        for x in parts
      )

    replicated = lambda x: jax.tree.map(lambda _: P(), x)
    return tree.with_leaves(
      self,
      k=array_specs(self.k),
      v=array_specs(self.v),
      at=coords_specs(self.at, self.k[0].shape[1], batch, tokens),
      way=P(),
      row=P(),
      constants=replicated(self.constants),
      rotation=self.rotation and self.rotation.specs(batch),
    )

  def keys_alone(self) -> PerHeadView:
    return dataclasses.replace(self, v=())

  def aligned(
    self, q: Float[Array, "B K G T H"], *, keys: bool = True
  ) -> Aligned:
    # Each head has a different basis, see `partial`.
    del keys
    return Aligned(self, q)

  def tile(
    self, start: Index, size: int
  ) -> tuple[Float[Array, "B K n H"], Float[Array, "B K n J"]]:
    read_tile = lambda view: view.tile(start, size)
    k, v = self._of_groups(
      lambda view, _: read_tile(view), jnp.int32(0) * self.way
    )
    join_heads = lambda x: _merge_groups(x, 1)
    return join_heads(k), join_heads(v)

  def partial(
    self,
    q: Float[Array, "B K G T H"],
    terms: Terms,
    read: Callable[..., Partial],
  ) -> Partial:
    """Partial of queries over these keys, a group of heads at a time.

    Args:
      q: Queries.
      terms: Arrays of the score function.
      read: Function that gives the partial for a view, queries and terms of
        some of the heads.
    """
    groups = self.way.shape[0]
    split_heads = lambda axis: lambda x: _split_groups(x, groups, axis)
    # Heads are the third dimension from the end of slopes for each example.
    slopes = terms.slopes
    if slopes is not None:
      slopes = _split_groups(slopes, groups, slopes.ndim - 2)
    operands = split_heads(1)(q), terms._replace(slopes=slopes)
    partials = self._of_groups(
      lambda view, operands: read(view, *operands), operands
    )
    return jax.tree.map(lambda x: _merge_groups(x, 1), partials)

  def _of_groups(
    self, f: Callable[[KVView, Any], Any], given: PyTree
  ) -> PyTree:
    """Stack f of each group's view and its part of `given`."""

    def branch(way: int) -> Callable[..., Any]:
      return lambda row, given: f(self._group(way, row), given)

    branches = [branch(way) for way in range(len(self.k))]

    def apply(operands: PyTree) -> PyTree:
      way, row, group_given = operands
      if len(branches) == 1:
        return branches[0](row, group_given)
      return lax.switch(way, branches, row, group_given)

    operands = self.way, self.row, given
    if self.way.shape[0] == 1:
      first = apply(jax.tree.map(lambda x: x[0], operands))
      return jax.tree.map(lambda x: x[None], first)
    return lax.map(apply, operands)

  def _group(self, way: int, row: Index) -> KVView:
    """View of one group of heads, which is stored in this way."""
    take = lambda x: lax.dynamic_index_in_dim(x, row, 0, keepdims=False)
    k = self.k[way]
    view = EncodedView(
      k,
      self.v[way] if self.v else k,
      self.at,
      row,
      jax.tree.map(take, self.constants[way]),
      self.decoders[way],
    )
    if self.rotation is None:
      return view
    return UnrotatedView(view, self.rotation)


tree.register(
  PerHeadView,
  ("k", "v", "at", "way", "row", "constants", "rotation"),
  ("decoders",),
)


def _split_groups(x: jax.Array, groups: int, axis: int) -> jax.Array:
  """Split an axis into groups, as the first axis."""
  shape = (*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])
  return jnp.moveaxis(x.reshape(shape), axis, 0)


def _merge_groups(x: jax.Array, axis: int) -> jax.Array:
  """Merge the first axis, groups, into `axis`."""
  x = jnp.moveaxis(x, 0, axis)
  shape = (*x.shape[:axis], -1, *x.shape[axis + 2 :])
  return x.reshape(shape)
