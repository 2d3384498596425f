"""One layer of an evicting cache during a call: its pages and open keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ringjax.kv.composed.open_cache import WithOpenLayer
from ringjax.kv.eviction.eviction import page_view, summed
from ringjax.kv.eviction.recorded_queries import Noted
from ringjax.kv.storage.pages import Pages
from ringjax.kv.storage.slots import FILL, REPLICATED
from ringjax.ops.attention.cached.views import KVView
from ringjax.typing import Index

if TYPE_CHECKING:
  from ringjax.kv.eviction.evicting import EvictingCache


@dataclasses.dataclass(frozen=True)
class EvictingLayer(WithOpenLayer):
  """One layer's part of an `EvictingCache` during one call."""

  cache: EvictingCache
  noted: Noted
  index: Index
  kind: int

  @property
  def slots(self) -> tuple[Any, Noted]:
    return self.inner.slots, self.noted

  def observe(
    self, rotated: Callable[[], Array], plain: Callable[[], Array]
  ) -> EvictingLayer:
    cache, mode = self.cache, self.cache.open.held.mode
    if self.noted.paged is not None and mode != REPLICATED:
      noted = summed(
        cache, self.kind, self.index, self.inner.slots, self.noted, rotated()
      )
    else:
      noted = cache.watch.note(
        self.noted, self.index, rotated, plain, mode == FILL
      )
    return dataclasses.replace(self, noted=noted)

  def views(self, *, apart: bool = False) -> tuple[KVView, ...]:
    views = self.inner.views(apart=apart)
    pages = self.cache.pages[self.kind]
    if pages is None:
      return views
    constants = self.cache.constants[self.kind]
    if self.cache.kind.policy is not None and self.cache.kind.policy.moves:
      pages = _with_moved_positions(self.cache, pages)
    view = page_view(
      self.cache,
      self.kind,
      self.index,
      self.inner.rotation,
      pages,
      constants,
      # Prompt tokens read all pages, so that chunking does not matter.
      selects=self.cache.open.held.mode == REPLICATED,
    )
    return (view, *views)

  def recall(self, empty: PyTree) -> PyTree:
    return self.inner.recall(empty)

  def keep(self, state: PyTree) -> EvictingLayer:
    return dataclasses.replace(self, inner=self.inner.keep(state))


def with_paged_sums(noted: Noted, pages: Pages | None) -> Noted:
  """Add zero sums for the slots of pages, unless present."""
  if noted.score is None or noted.paged is not None or pages is None:
    return noted
  *lead, table = pages.table.shape
  shape = (*lead, table * pages.slots)
  return noted._replace(paged=jnp.zeros(shape, jnp.float32))


def _with_moved_positions(cache: EvictingCache, pages: Pages) -> Pages:
  """Pages with the first tokens moved next to the others, see `Policy.moves`.

  Relative attention gives the same result whether all tokens move to their
  cache index or only the first ones move up to the others.
  """
  policy = cache.kind.policy
  assert policy is not None
  # All heads of all layers keep the same tokens.
  pos, table = pages.pos[0], pages.table[0, :, 0]
  by_page = pos.reshape(*table.shape, pages.slots) >= 0
  num_kept = jnp.sum(by_page & (table >= 0)[..., None], (1, 2), dtype=jnp.int32)
  gone = cache.ends - num_kept - cache.stayed
  first = (pos >= 0) & (pos < policy.moves)
  moved = jnp.where(first, pos + gone[:, None], pos)
  return dataclasses.replace(pages, pos=moved[None])
