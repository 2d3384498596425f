"""Arrays of a pool by the layers of the model, and pages of some of them."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from ringjax.typing import ArrayLeaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageGroup:
  """Layers that share page tables.

  Attributes:
    reach: Number of earlier tokens that a query attends to; None for all.
    kinds: Indices of the kinds of layers in the group.
    pages: Number of pages on all devices, N.
    token_bytes: Bytes of one token in all layers of the group.
  """

  reach: int | None
  kinds: tuple[int, ...]
  pages: int
  token_bytes: int


class PageWrites(NamedTuple):
  """Destination of a call's tokens in the pages of a group of layers.

  Fields:
    pages: Pages of each shard to write, distinct, int32 [R, W]; those out of
      range are skipped.
    source: Index of the call's token for each slot, int32 [R, W, P]; -1 keeps
      the slot.
  """

  pages: Int[ArrayLeaf, "R W"]
  source: Int[ArrayLeaf, "R W P"]


class LayerPages(NamedTuple):
  """Pages of one kind of layer.

  Fields:
    pages: The pages, [L, ...].
    part: Index of the array in its kind; 2 and 3 for summaries of keys and of
      values.
    layers: Numbers of the layers.
  """

  pages: Shaped[ArrayLeaf, "L ..."]
  part: int
  layers: tuple[int, ...]


def merged_arrays(arrays: tuple[LayerPages, ...]) -> list[list[int]]:
  """Indices of arrays that differ only in their layers, in order."""
  by_form: dict[Any, list[int]] = {}
  for n, x in enumerate(arrays):
    form = x.part, x.pages.shape[1:], jnp.dtype(x.pages.dtype)
    by_form.setdefault(form, []).append(n)
  return list(by_form.values())


def layer_range(
  numbers: Sequence[int], layers: tuple[int, int] | None
) -> range:
  """Indices of the layers from the first to the end; None for all."""
  if layers is None:
    return range(len(numbers))
  return range(*(bisect.bisect_left(numbers, n) for n in layers))


def chosen_layers(
  x: Shaped[Array, "L ..."], ranks: Int[np.ndarray, " n"]
) -> Shaped[Array, "n ..."]:
  """Layers of these indices: one slice if they are adjacent."""
  first = int(ranks[0])
  if np.array_equal(ranks, first + np.arange(ranks.size)):
    return x[first : first + ranks.size]
  return x[ranks]


def taken_pages(
  cuts: tuple[range, ...], arrays: tuple[Any, ...], pages: Int[Array, "1 k"]
) -> tuple[Any, ...]:
  """Pages of some layers of each array, without arrays of none."""

  def take_layers(x: jax.Array, cut: range) -> jax.Array:
    if len(cut) == x.shape[0]:
      return jnp.take(x, pages[0], 1, mode="clip")
    # One gather: slicing the layers first would copy part of the pool.
    layer = np.arange(cut.start, cut.stop, dtype=np.int32)[:, None]
    return x.at[layer, pages[0][None]].get(mode="clip")

  return tuple(
    take_layers(x, cut) for x, cut in zip(arrays, cuts, strict=True) if cut
  )


def written_pages(
  arrays: tuple[Any, ...], pages: Int[Array, "1 k"], held: tuple[Any, ...]
) -> tuple[Any, ...]:
  """Arrays with other contents of some pages."""
  return tuple(
    x.at[:, pages[0]].set(new, mode="drop")
    for x, new in zip(arrays, held, strict=True)
  )
