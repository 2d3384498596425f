"""A model at work as a drafter, beside the target's session.

Memory: a cache of the draft model's own, as long as the target's session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ringjax.infer.decode import DecodeState
from ringjax.infer.prompt_reading import read_context
from ringjax.infer.session import Session
from ringjax.infer.speculate.draft_programs import (
  WINDOW,
  Missing,
  TreeShape,
  drafted,
  read_more,
  without,
)
from ringjax.infer.speculate.drafter import (
  Draft,
  Target,
  TreeDrafter,
  width_of,
)
from ringjax.kv.cache_kind import CacheKind
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention


class ModelDrafting:
  """A model at work, with a session of its own.

  The target's session keeps it, and its next call goes on with it.
  """

  _drafter: TreeDrafter
  # Whether it has devices of its own.
  _apart = False

  def __init__(
    self,
    drafter: TreeDrafter,
    model: Transformer,
    target: Target,
    cache_kind: CacheKind | str,
    mesh: Mesh | None = None,
  ):
    """Reads the texts.

    Args:
      drafter: says how much is drafted.
      model: which drafts.
      target: for what.
      cache_kind: of the draft's cache.
      mesh: of devices of its own; None: where the target decodes.
    """
    texts, width = target.texts, drafter.drafted
    session, axis = target.session, None
    self._apart = mesh is not None
    if mesh is None:
      # Where the target decodes, which may be one device of its mesh.
      model, mesh, axis = session.weights(model), session.mesh, session.axis
    self._drafter, self._target, self._model = drafter, target, model
    room = max(map(len, texts)) + target.count
    self._session = Session(
      model,
      max(room, session.cache.capacity) + 2 * width + 2 + session.shards,
      batch=len(texts),
      mesh=mesh,
      axis=axis,
      dtype=session.cache.dtype,
      cache_kind=cache_kind,
    )
    read_context(model, list(texts), cache=self._session)
    self._attend = CachedAttention(
      mesh=self._session.mesh, axis=self._session.axis
    )
    # For rotations that depend on the context's length.
    self._length = jnp.int32(self._session.capacity)
    # Of each row: what comes behind what the cache has for good, and where.
    self._behind: list[list[int]] = [[] for _ in texts]
    self._at = np.array([len(text) for text in texts])
    # Of the round before: the drafted tokens, and the rows that took part.
    self._last: Any = None
    self._took = np.zeros(len(texts), bool)
    # The texts so far.
    self._known = [text.tolist() for text in texts]

  @property
  def drafter(self) -> TreeDrafter:
    """Which drafter it is at work for."""
    return self._drafter

  def nbytes(self) -> int:
    """Bytes of its cache, of all shards together."""
    return self._session.cache.nbytes()

  def resumed(self, target: Target) -> bool:
    """Goes on with a later call, whose texts begin as those before did.

    Returns:
      whether it can; else nothing has changed.
    """
    texts, cache = target.texts, self._session.cache
    if cache.lost or len(texts) != len(self._known):
      return False
    most = target.count + 2 * self._drafter.drafted + 2 + self._session.shards
    if max(map(len, texts)) + most > cache.capacity:
      return False
    # What is in the cache for good has been asked for before.
    for text, known, at in zip(texts, self._known, self._at, strict=True):
      if len(text) < at or text[:at].tolist() != known[:at]:
        return False
    self._target, self._last = target, None
    self._known = [text.tolist() for text in texts]
    self._behind = [
      known[at:] for known, at in zip(self._known, self._at, strict=True)
    ]
    self._took[:] = False
    return True

  def _drafts(self) -> Transformer:
    """What drafts in this round."""
    return self._model

  def draft(
    self, new: Sequence[np.ndarray], state: DecodeState, most: np.ndarray
  ) -> Draft:
    self._settle(new)
    for known, came in zip(self._known, new, strict=True):
      known.extend(came.tolist())
    drafter, session = self._drafter, self._session
    if self._apart:
      # On other devices than the target's.
      state = jax.device_get(state)
    read = self._read(most)
    cache = self._with_room(read)
    shape: int | TreeShape = width_of(most, drafter.count)
    if drafter.widths is not None:
      shape = TreeShape(drafter.widths, drafter.nodes)
    with session.running("drafting"):
      found, session.cache = drafted(
        self._drafts(),
        self._attend,
        shape,
        self._target.drawn,
        self._target.sampler,
        cache,
        read,
        state.pos + 1,
        state.seen,
        self._length,
      )
    self._took |= most > 0
    for row in np.flatnonzero(most > 0):
      # These are in the cache for good.
      self._at[row] += len(self._behind[row])
      self._behind[row].clear()
    if self._apart:
      found = jax.device_get(found)
    tokens, probs, parents = found
    count = np.where(most > 0, drafter.nodes, 0)
    if isinstance(shape, int):
      count = np.minimum(most, shape)
      if not session.cache.recurrent:
        self._last = jax.device_get(tokens)
    return Draft(tokens, count.astype(np.int32), parents, probs)

  def _settle(self, new: Sequence[np.ndarray]) -> None:
    """Counts as read what was drafted and is right."""
    for row, came in enumerate(new):
      if came.size and self._took[row] and self._last is not None:
        # The cache has of a chain what the draft itself went on to.
        drafted = self._last[row, :-1]
        same = drafted[: came.size - 1] == came[:-1][: drafted.size]
        right = int(np.argmin(np.append(same, False)))
        self._at[row] += right
        came = came[right:]
      if came.size:
        self._took[row] = False
      self._behind[row].extend(came.tolist())
    self._last = None

  def _read(self, most: np.ndarray) -> Missing:
    """What is missing, after all of it but the last tokens has been read."""
    missing = np.array(list(map(len, self._behind)))
    while missing.max() > WINDOW:
      # Behind steps without drafts; the last token is left to the draft.
      count = np.minimum(np.maximum(missing - 1, 0), WINDOW)
      read = self._part(count, WINDOW)
      self._session.cache = read_more(
        self._drafts(),
        self._attend,
        self._with_room(read),
        read,
        self._length,
      )
      for behind, n in zip(self._behind, count, strict=True):
        del behind[:n]
      self._at += count
      missing = missing - count
    width = 2 if missing.max() <= 2 else WINDOW
    return self._part(np.where(most > 0, missing, 0), width)

  def _part(self, count: np.ndarray, width: int) -> Missing:
    """The first `count` [B] of the missing tokens."""
    tokens: Any = np.zeros((len(self._behind), width), np.int32)
    for row, (behind, n) in enumerate(zip(self._behind, count, strict=True)):
      tokens[row, :n] = behind[:n]
    counts: Any = count.astype(np.int32)
    at: Any = self._at.astype(np.int32)
    return Missing(tokens, counts, at)

  def _with_room(self, read: Missing) -> Any:
    """The cache without what was drafted before, with room for a call."""
    cache, session = self._session.cache, self._session
    if not (cache.kind.evicting or cache.kind.device is not None):
      return cache
    taken = read.tokens.shape[1] + self._drafter.drafted
    cache = without(cache, read.pos, taken)
    if cache.steps() < taken:
      cache = cache.flush()
      room = np.full((len(self._behind), session.shards), taken)
      cache = cache.with_room(room)
    return cache
