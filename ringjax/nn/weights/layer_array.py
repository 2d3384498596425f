"""An array of one layer that is read in part: all layers' array and a number.

Guarantees: an entry is that of the layer's own array.
Cost: only the entries that are read leave memory. A loop over layers that
slices the array out of the stack copies all of it first: of 128 experts the
copy is sixteen times what a token reads.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from ringjax import tree

if TYPE_CHECKING:
  # At run time benchmarks of attention alone do not import flax.
  from flax import nnx


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerArray:
  """One layer of an array of layers, to be read by index.

  Attributes:
    stacked: Array of all layers, [L, n, ...].
    layer: Number of the layer, int32 [].
  """

  stacked: Shaped[Array, "L n ..."]
  layer: Int[Array, ""]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the layer's array, [n, ...]."""
    return self.stacked.shape[1:]

  @property
  def dtype(self) -> jnp.dtype:
    """Dtype of the array."""
    return self.stacked.dtype

  def array(self) -> Shaped[Array, "n ..."]:
    """The layer's own array."""
    return lax.dynamic_index_in_dim(self.stacked, self.layer, keepdims=False)

  def __getitem__(self, entries: Int[Array, "*n"]) -> Shaped[Array, "*n ..."]:
    """Entries of the layer's array, [*n, ...]."""
    if entries.ndim:
      return self.stacked[self.layer, entries]
    # Compilers make one slice of both. If the entries are sharded, they gather
    # those of one layer; of a single slice along both axes they would gather
    # the array of all layers.
    return lax.dynamic_index_in_dim(self.array(), entries, keepdims=False)


tree.register(LayerArray, data=("stacked", "layer"), meta=())


def read_by_index(leaf: object) -> bool:
  """Whether a parameter is marked as one of which a call reads some entries.

  The mark is `by_index=True` of `param`, or in a parameter's metadata.
  """
  # Without flax, which benchmarks of attention alone do not import.
  metadata = getattr(leaf, "get_metadata", None)
  return metadata is not None and bool(metadata().get("by_index"))


def read_by_rows(leaf: object) -> bool:
  """Whether a parameter is the weight of a product, see `nn.row_tiles`.

  The mark is `by_rows=True` of `param`.
  """
  metadata = getattr(leaf, "get_metadata", None)
  return metadata is not None and bool(metadata().get("by_rows"))


def read_in_place(leaf: object) -> bool:
  """Whether a parameter is one that a call reads in place in a stack.

  The mark is `in_place=True` in a parameter's metadata. Its module takes the
  arrays by `stacked_entry`.
  """
  metadata = getattr(leaf, "get_metadata", None)
  return metadata is not None and bool(metadata().get("in_place"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedEntry:
  """An entry of a stacked array, which is copied out only where it is needed.

  Attributes:
    stacked: Array of all layers, and experts, or the entry itself.
    index: Position in each leading axis, int32 [] each.
  """

  stacked: Shaped[Array, " ..."]
  index: tuple[Int[Array, ""], ...] = ()

  def array(self) -> Shaped[Array, " ..."]:
    """The entry's own array."""
    entry = self.stacked
    for n in self.index:
      entry = lax.dynamic_index_in_dim(entry, n, keepdims=False)
    return entry


tree.register(StackedEntry, data=("stacked", "index"), meta=())


def stacked_entry(parameter: nnx.Variable) -> StackedEntry:
  """Entry that a parameter holds: an array, or where it is in a stack."""
  value = parameter.get_value()
  if isinstance(value, StackedEntry):
    return value
  if isinstance(value, LayerArray):
    return StackedEntry(stacked=value.stacked, index=(value.layer,))
  return StackedEntry(stacked=value)


def entry_of(weights: object, entry: Int[Array, ""]) -> object:
  """Index all arrays of a tree along their first axis, read in part or not."""

  def indexed(leaf: Any) -> Any:
    if not read_in_place(leaf):
      return leaf[entry]
    stack = stacked_entry(leaf)
    index = (*stack.index, jnp.int32(entry))
    return leaf.replace(StackedEntry(stacked=stack.stacked, index=index))

  return jax.tree.map(
    indexed,
    weights,
    is_leaf=lambda x: isinstance(x, LayerArray) or read_in_place(x),
  )
