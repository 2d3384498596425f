"""The contract of a choice of keys in host memory, by landmarks of them.

Landmarks are what stays on the devices of the keys of a page of a KV head: by
default two vectors of a key's size. A choice makes them of the page's keys,
once, and by them chooses units for each query, by their indices: whole pages,
or single tokens, which need not be adjacent.

Guarantees: with all pages read (`budget=1.0`) the result is dense attention,
unless the choice samples. A choice depends on its row's keys and on the query
alone.

A new choice is a file with a subclass of `PageChoice`, a name in `choices.py`
and a case of `tests/kv/test_page_choices.py`.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from ringjax.ops.attention.cached.paged import ranked_pages
from ringjax.ops.mask import Coords
from ringjax.typing import ArrayLeaf, leaf

if TYPE_CHECKING:
  from ringjax.kv.policies.policy import Policy


class ChosenUnits(NamedTuple):
  """Units that queries of a group choose.

  Fields:
    units: Indices of units of the head, int32 [B, K, T, n], distinct for each
      query.
    reads: Whether the query reads the unit.
    log_share: Logarithm of the part of a query's chosen units that is read,
      float32 [B, K, G, T, n]; -inf where only other queries of the group chose
      the unit. None: each reads what it chose.
    sampled: Whether the query reads the unit only with a probability; None: all
      are read for certain.
  """

  units: Int[Array, "B K T n"]
  reads: Bool[Array, "B K T n"]
  log_share: Float[Array, "B K G T n"] | None = None
  sampled: Bool[Array, "B K T n"] | None = None


class PageChoice(abc.ABC):
  """Base class of the choices: frozen dataclasses of numbers."""

  @property
  def extra_pages(self) -> int:
    """Number of pages that a query reads besides those of its budget."""
    return 0

  @property
  def centres(self) -> int:
    """Number of vectors of a KV head that stay on the devices, too."""
    return 0

  @property
  def samples(self) -> bool:
    """Whether keys are read with a probability, by which they are weighed."""
    return False

  @property
  def observes(self) -> bool:
    """Whether landmarks are made by queries of the row's prompts, too."""
    return False

  def unit(self, page: int) -> int:
    """Number of adjacent tokens that are chosen and copied together."""
    return page

  def units_read(self, policy: Policy, pages: int, page: int) -> int:
    """Number of units that a query reads of a head with `pages` pages."""
    read = max(1, min(pages, policy.pages(pages, page) + self.extra_pages))
    return read * (page // self.unit(page))

  def arrays(
    self, page: int, key: int, keys: DTypeLike
  ) -> PyTree[Shaped[ArrayLeaf, " ..."]]:
    """Shapes and dtypes of a page's landmarks.

    Args:
      page: Tokens of a page.
      key: Numbers of a key.
      keys: Dtype of the keys.
    """
    del page
    return leaf(jax.ShapeDtypeStruct((2, key), keys))

  def new_centres(
    self,
    keys: Float[Array, "B K M P H"],
    real: Bool[Array, "B 1 M P 1"],
    axis: str | None,
  ) -> Float[Array, "B K C H"]:
    """Make a head's vectors of the first keys that leave the devices.

    Args:
      keys: Keys of these pages, rotated.
      real: Whether each slot has such a key.
      axis: Manual mesh axis that shards the keys, or None.
    """
    del real, axis
    return keys[:, :, 0, :0]

  @abc.abstractmethod
  def landmarks(
    self,
    keys: Float[Array, "B K M P H"],
    real: Bool[Array, "B 1 M P 1"],
    centres: Float[Array, "B K C H"] | None = None,
    moments: Float[Array, "B K H H"] | None = None,
  ) -> PyTree[Shaped[Array, "B K M ..."]]:
    """Make the landmarks of pages.

    Args:
      keys: Keys of the pages, rotated.
      real: Whether each slot has a key.
      centres: Vectors of the heads, see `new_centres`.
      moments: Sums of outer products of the queries of each head's group, if
        the choice `observes`; 0 for a row without any.
    """

  def chosen(
    self,
    q: Float[Array, "B K G T H"],
    landmarks: PyTree[Shaped[Array, "B K M ..."]],
    centres: Float[Array, "B K C H"] | None,
    at: Coords,
    units_read: tuple[int, ...],
  ) -> ChosenUnits:
    """Choose units for queries, of whose groups each chooses together.

    Args:
      q: Queries.
      landmarks: Landmarks of the pages.
      centres: Vectors of the heads.
      at: Coordinates of the slots of the pages, [B or 1, M P].
      units_read: Number of units that a query reads of a head with 0, 1, ... M
        pages.
    """
    del centres
    has_page = has_pages(at, landmarks)
    pages, reads = self.ranked(q, landmarks, has_page, units_read)
    # Of an empty row a query would read a page, too.
    reads &= jnp.take_along_axis(has_page[:, :, None], pages, 3)
    return ChosenUnits(pages, reads)

  def ranked(
    self,
    q: Float[Array, "B K G T H"],
    landmarks: Shaped[Array, "B K M _ _"],
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
    raise NotImplementedError

  def log_probability(
    self,
    q: Float[Array, "B K G T H"],
    keys: Float[Array, "B K T n H"],
    centres: Float[Array, "B K C H"],
  ) -> Float[Array, "B K G T n"]:
    """Logarithm of the probability that a query chooses a key by sampling."""
    raise NotImplementedError


def has_pages(
  at: Coords, landmarks: Shaped[Array, "B K M *_"]
) -> Bool[Array, "B K M"]:
  """Whether each page has a token."""
  num_pages = landmarks.shape[2]
  is_slot = (at.seg > 0).reshape(at.seg.shape[0], 1, num_pages, -1)
  return jnp.broadcast_to(jnp.any(is_slot, 3), landmarks.shape[:3])


class Bounds(PageChoice):
  """Pages by bounds of the products of a query with their keys (Quest).

  Ref: Tang et al. 2024, Quest, arXiv 2406.10774.
  """

  def landmarks(
    self,
    keys: Float[Array, "B K M P H"],
    real: Bool[Array, "B 1 M P 1"],
    centres: Float[Array, "B K C H"] | None = None,
    moments: Float[Array, "B K H H"] | None = None,
  ) -> Float[Array, "B K M 2 H"]:
    del centres, moments
    low = jnp.min(jnp.where(real, keys, jnp.inf), 3)
    high = jnp.max(jnp.where(real, keys, -jnp.inf), 3)
    return jnp.stack([low, high], 3)

  def ranked(
    self,
    q: Float[Array, "B K G T H"],
    landmarks: Shaped[Array, "B K M _ _"],
    has_page: Bool[Array, "B K M"],
    pages_read: tuple[int, ...],
  ) -> tuple[Int[Array, "B K T n"], Bool[Array, "B K T n"]]:
    return ranked_pages(q, landmarks, has_page, pages_read)
