"""Exported tokens of a row, and the slots of a row's positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int, PyTree

from ringjax.errors import OptionError, PromptError
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.layer_spec import LayerKV
from ringjax.kv.storage.slots import REPLICATED
from ringjax.kv.storage.window import WindowSlots
from ringjax.kv.summaries.summary_spec import SummarySlots, SummarySpec
from ringjax.ops.attention.cached.code_format import as_stored, token_axis
from ringjax.ops.mask import Coords
from ringjax.parallel.programs import bounded

if TYPE_CHECKING:
  from ringjax.kv.cache import KVCache


class Blocks(NamedTuple):
  """Exported tokens of one row of a cache.

  Fields:
    at: Coordinates [n], in order of position.
    parts: For each kind of layer keys [L, K, n, H] and values [L, K, n, J];
      codes on a TPU are [L, K, X, n]. Of summaries those of the windows that
      end with the tokens.
    kind: Kind of the cache that exported them.

  Layers with a ring buffer export only the last `reach` tokens.
  """

  at: Coords
  parts: tuple[LayerKV | SummarySlots, ...]
  kind: CacheConfig


def located_slots(
  at: Coords, rings: Sequence[WindowSlots], row: int, start: int, stop: int
) -> tuple[Int[np.ndarray, " _"], list[Int[np.ndarray, " _"]]]:
  """Find the slots of a row's positions, by position.

  Args:
    at: Coordinates of the slots of layers that keep all tokens.
    rings: Slot tables of the ring buffers.
    row: Index of the row in the cache.
    start: First position.
    stop: Position after the last.

  Returns:
    Slots of the layers that keep all tokens, and slots of each ring buffer.

  Raises:
    PromptError: If the row lacks some of these positions; ring buffers need
      only the last `reach` of them.
  """
  token_slots, complete = _found(at, row, start, stop)
  if not complete:
    raise PromptError(
      "start, stop",
      f"{start} to {stop}, of which row {row} holds {token_slots.size}",
      f"positions from 0 to {_end(at, row)}",
      "name positions that the row has read",
    )
  ring_slots = []
  for ring in rings:
    first = max(start, stop - ring.reach)
    last, complete = _found(ring.at, row, first, stop)
    if not complete:
      raise PromptError(
        "stop",
        f"{stop}, where windowed layers of row {row} hold no longer all "
        f"positions from {first} on",
        f"a position among the last {ring.slack} of the row",
        "export sooner, or make the cache with kind='dense'",
      )
    ring_slots.append(last)
  return token_slots, ring_slots


def check_blocks(cache: KVCache, blocks: Blocks, at: Coords) -> None:
  """Check that a cache can load exported tokens.

  Args:
    cache: Cache that loads them.
    blocks: Exported tokens.
    at: Coordinates [n] that they get.

  Raises:
    OptionError: If kind or model differ, or rotated keys would move.
  """
  # Shape of one token: layers, heads, and head dim or bytes.
  token = lambda x: [n for i, n in enumerate(x.shape) if i != token_axis(x)]
  block_shapes = [token(x) for x in jax.tree.leaves(blocks.parts)]
  one_token = lambda n, x: cache.unfilled(n, jax.tree.map(lambda x: x[:, 0], x))
  row_of = lambda slots: [one_token(n, x) for n, x in enumerate(slots)]
  own_shapes = jax.tree.leaves(jax.eval_shape(row_of, cache.slots))
  own_shapes = [token(x) for x in own_shapes]
  if blocks.kind != cache.kind or block_shapes != own_shapes:
    raise OptionError(
      "blocks",
      f"of kind {blocks.kind}, {block_shapes}",
      f"kind {cache.kind}, {own_shapes}",
      "export them from a cache of this model and kind",
    )
  moved = not np.array_equal(np.asarray(at.pos), np.asarray(blocks.at.pos))
  if moved and not cache.kind.layout.unrotated:
    raise OptionError(
      "at",
      "other positions for keys that are stored rotated",
      "the positions at which they were read",
      "make both caches with kind='unrotated'",
    )
  if moved and any(isinstance(x, SummarySpec) for x in cache.shapes):
    raise OptionError(
      "at",
      "other positions for keys with summaries (means or compressed keys), "
      "which are of rotated keys",
      "the positions at which they were read",
      "leave at= out, or read the text as tokens",
    )


def appended_blocks(cache: KVCache, parts: PyTree, at: Coords) -> KVCache:
  """Append exported tokens to a cache of one row.

  Args:
    cache: Cache of one row.
    parts: Keys and values [L, K, n, ...], see `Blocks`.
    at: Coordinates of the tokens, [1, n].
  """
  return _appended(cache, parts, at)


@bounded
@jax.jit
def _appended(cache: KVCache, parts: PyTree, at: Coords) -> KVCache:
  """Append stored keys and values [L, K, n, ...] to a cache of one row."""
  # Windowed layers export only their last tokens.
  rings = tuple(
    ring.allocate(Coords(*(x[:, -ring.reach :] for x in at)), REPLICATED)
    for ring in cache.rings
  )
  slot_table = cache.held.allocate(at, REPLICATED)
  allocated = dataclasses.replace(cache, held=slot_table, rings=rings)

  def append_layer(kind: int, old: PyTree, new: PyTree) -> PyTree:
    if isinstance(old, SummarySlots):
      spec = cache.shapes[kind]
      assert isinstance(spec, SummarySpec)
      first = jnp.min(at.pos) // spec.sizes.stride
      put = lambda x, new: lax.dynamic_update_slice_in_dim(
        x, new[:, None], first, 3
      )
      return jax.tree.map(lambda x, y: put(x, y) if y.size else x, old, new)
    table = allocated.table(kind)

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
      if not old.size:
        return old
      new = as_stored(new, old)
      layer = lambda n, x: table.write(
        x, lax.dynamic_index_in_dim(new, n, 0), n
      )
      return lax.fori_loop(jnp.int32(0), jnp.int32(old.shape[0]), layer, old)

    return jax.tree.map(write, old, new)

  pairs = enumerate(zip(cache.slots, parts, strict=True))
  slots = tuple(append_layer(kind, old, new) for kind, (old, new) in pairs)
  return allocated.updated(slots)


def _found(at: Coords, row: int, start: int, stop: int) -> tuple[Any, bool]:
  """Find slots of a row's positions; tell if each occurs exactly once."""
  pos, seg = (np.asarray(x)[row] for x in at)
  slots = np.flatnonzero((seg > 0) & (pos >= start) & (pos < stop))
  slots = slots[np.argsort(pos[slots], kind="stable")]
  complete = stop > start and np.array_equal(pos[slots], np.arange(start, stop))
  return slots, complete


def _end(at: Coords, row: int) -> int:
  """Position after a row's last token."""
  pos, seg = (np.asarray(x)[row] for x in at)
  return int(np.max(np.where(seg > 0, pos + 1, 0), initial=0))
