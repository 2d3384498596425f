"""Exported tokens of a row, and the slots of a row's positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ringjax.errors import PromptError
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.layer_spec import LayerKV
from ringjax.kv.storage.window import WindowSlots
from ringjax.ops.mask import Coords


class Blocks(NamedTuple):
  """Exported tokens of one row of a cache.

  Fields:
    at: Coordinates [n], in order of position.
    parts: For each kind of layer keys [L, K, n, H] and values [L, K, n, J];
      codes on a TPU are [L, K, X, n].
    kind: Kind of the cache that exported them.

  Layers with a ring buffer export only the last `reach` tokens.
  """

  at: Coords
  parts: tuple[LayerKV, ...]
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
