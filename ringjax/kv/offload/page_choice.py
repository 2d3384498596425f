"""The contract of a choice of pages in host memory, by landmarks of their keys.

A landmark is what stays on the devices of a page of a KV head: two vectors of a
key's size. A choice makes them of the page's keys, once, and ranks the pages of
a head for each query by them.

Guarantees: with all pages read (`budget=1.0`) the result is dense attention. A
choice depends on its row's keys and on the query alone.

A new choice is a file with a subclass of `PageChoice`, a name in `choices.py`
and a case of `tests/kv/test_page_choices.py`.
"""

from __future__ import annotations

import abc

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ringjax.ops.attention.cached.paged import ranked_pages


class PageChoice(abc.ABC):
  """Base class of the choices: frozen dataclasses of numbers."""

  @property
  def extra_pages(self) -> int:
    """Number of pages that a query reads besides those of its budget."""
    return 0

  @abc.abstractmethod
  def landmarks(
    self, keys: Float[Array, "B K M P H"], real: Bool[Array, "B 1 M P 1"]
  ) -> Float[Array, "B K M 2 H"]:
    """Make the landmarks of pages.

    Args:
      keys: Keys of the pages, rotated.
      real: Whether each slot has a key.
    """

  @abc.abstractmethod
  def ranked(
    self,
    q: Float[Array, "B K G T H"],
    landmarks: Float[Array, "B K M 2 H"],
    has_page: Bool[Array, "B K M"],
    pages_read: tuple[int, ...],
  ) -> tuple[Int[Array, "B K T n"], Bool[Array, "B K T n"]]:
    """Rank pages for queries, of whose groups each chooses together.

    Args:
      q: Queries.
      landmarks: Landmarks of the pages.
      has_page: Whether there is a page at a place.
      pages_read: Number of pages that a query reads of a head with 0, 1, ... M.

    Returns:
      The best places, best first, and whether the query reads them.
    """


class Bounds(PageChoice):
  """Pages by bounds of the products of a query with their keys (Quest).

  Ref: Tang et al. 2024, Quest, arXiv 2406.10774.
  """

  def landmarks(
    self, keys: Float[Array, "B K M P H"], real: Bool[Array, "B 1 M P 1"]
  ) -> Float[Array, "B K M 2 H"]:
    low = jnp.min(jnp.where(real, keys, jnp.inf), 3)
    high = jnp.max(jnp.where(real, keys, -jnp.inf), 3)
    return jnp.stack([low, high], 3)

  def ranked(
    self,
    q: Float[Array, "B K G T H"],
    landmarks: Float[Array, "B K M 2 H"],
    has_page: Bool[Array, "B K M"],
    pages_read: tuple[int, ...],
  ) -> tuple[Int[Array, "B K T n"], Bool[Array, "B K T n"]]:
    return ranked_pages(q, landmarks, has_page, pages_read)
