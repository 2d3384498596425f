"""Copies of fields of a cache, to go back to the state before a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ringjax.kv.state import State

if TYPE_CHECKING:
  from ringjax.kv.model_cache import ModelCache


class Snapshot(NamedTuple):
  """Copies of fields of a cache.

  Fields:
    fields: Copies by name; of slots only those of layers that calls overwrite,
      and None for the others, whose keys and values are not copied.
  """

  fields: dict[str, PyTree]


def saved_fields(
  cache: ModelCache, names: Iterable[str], *, rings: bool
) -> Snapshot:
  """Copy fields of a cache.

  Args:
    cache: Cache that has them.
    names: Names of the fields.
    rings: Whether to copy the slots of ring buffers, besides those of recurrent
      layers.
  """
  fields = {name: getattr(cache, name) for name in names}
  if "slots" in fields:
    ring_of = getattr(cache, "ring_of", ()) if rings else ()
    ring_of = ring_of or (None,) * len(fields["slots"])
    fields["slots"] = tuple(
      slots if isinstance(slots, State) or ring is not None else None
      for slots, ring in zip(fields["slots"], ring_of, strict=True)
    )
  return Snapshot(jax.tree.map(jnp.copy, fields))


def with_saved(cache: ModelCache, saved: Snapshot) -> Any:
  """Put copies of saved fields back into a cache."""
  fields = jax.tree.map(jnp.copy, saved.fields)
  if "slots" in fields:
    fields["slots"] = tuple(
      old if new is None else new
      for old, new in zip(cache.slots, fields["slots"], strict=True)
    )
  changed: Any = cache
  return dataclasses.replace(changed, **fields)
