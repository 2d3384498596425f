"""Drafting by a model with a session next to the target's.

Memory: a cache for the draft model, as long as the target's session.
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
from ringjax.kv.cache_kind import CacheConfig
from ringjax.models.transformer import Transformer
from ringjax.nn.sharding_context import CachedAttention

# Tokens that a draft reads at most before its first one: those that an accepted
# draft leaves, the last drafted token and the target's own.
_LEFT = 2


class ModelDrafting:
  """Drafting by a model that has a separate session.

  The target's session keeps this object, and its next call continues with it.
  """

  _drafter: TreeDrafter
  # Whether the draft model has separate devices.
  _apart = False

  def __init__(
    self,
    drafter: TreeDrafter,
    model: Transformer,
    target: Target,
    cache_kind: CacheConfig | str,
    mesh: Mesh | None = None,
  ):
    """Makes the draft's session and reads the texts into it.

    Args:
      drafter: Drafter with the number of tokens to draft.
      model: Draft model.
      target: Target, with the texts of its rows.
      cache_kind: Storage format of the draft's cache.
      mesh: Mesh of separate devices; None: where the target decodes.
    """
    texts, width = target.texts, drafter.drafted
    session, axis = target.session, None
    self._apart = mesh is not None
    if mesh is None:
      # On the devices on which the target decodes: maybe one of its mesh.
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
    # For each row: tokens after the verified part of the cache, and its end.
    self._behind: list[list[int]] = [[] for _ in texts]
    self._at = np.array([len(text) for text in texts])
    # From the round before: drafted tokens, and the rows that took part.
    self._last = None
    self._took = np.zeros(len(texts), bool)
    # Token ids of each text so far.
    self._known = [text.tolist() for text in texts]

  @property
  def drafter(self) -> TreeDrafter:
    """Drafter that made this object."""
    return self._drafter

  def nbytes(self) -> int:
    """Bytes of the draft's cache, all shards together."""
    return self._session.cache.nbytes()

  def resumed(self, target: Target) -> bool:
    """Continues with a later call whose texts begin with the cached ones.

    Returns:
      Whether this is possible; if not, nothing has changed.
    """
    texts, cache = target.texts, self._session.cache
    if cache.lost or len(texts) != len(self._known):
      return False
    extra = target.count + 2 * self._drafter.drafted + 2 + self._session.shards
    if max(map(len, texts)) + extra > cache.capacity:
      return False
    # The new texts must begin with the verified part of the cache.
    for text, known_text, at in zip(texts, self._known, self._at, strict=True):
      if len(text) < at or text[:at].tolist() != known_text[:at]:
        return False
    self._target, self._last = target, None
    self._known = [text.tolist() for text in texts]
    self._behind = [
      known_text[at:]
      for known_text, at in zip(self._known, self._at, strict=True)
    ]
    self._took[:] = False
    return True

  def _drafts(self) -> Transformer:
    """Model that drafts in this round."""
    return self._model

  def draft(
    self, new: Sequence[np.ndarray], state: DecodeState, most: np.ndarray
  ) -> Draft:
    self._settle(new)
    for known_text, new_tokens in zip(self._known, new, strict=True):
      known_text.extend(new_tokens.tolist())
    drafter, session = self._drafter, self._session
    if self._apart:
      # The state is on the target's devices, the draft on others.
      state = jax.device_get(state)
    read = self._read(most)
    cache = self._with_room(read)
    shape = drafter.shape(width_of(most, drafter.count))
    with session.running("drafting"):
      draft, session.cache = drafted(
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
      # These tokens are now in the verified part of the cache.
      self._at[row] += len(self._behind[row])
      self._behind[row].clear()
    if self._apart:
      draft = jax.device_get(draft)
    tokens, probs, parents = draft
    count = np.where(most > 0, drafter.nodes, 0)
    if isinstance(shape, int):
      count = np.minimum(most, shape)
      if not session.cache.recurrent:
        self._last = jax.device_get(tokens)
    return Draft(tokens, count.astype(np.int32), parents, probs)

  def _settle(self, new: Sequence[np.ndarray]) -> None:
    """Counts the drafted tokens that were right as read."""
    for row, new_tokens in enumerate(new):
      if new_tokens.size and self._took[row] and self._last is not None:
        # The cache has the keys of all drafted tokens but the last.
        drafted = self._last[row, :-1]
        is_equal = (
          drafted[: new_tokens.size - 1] == new_tokens[:-1][: drafted.size]
        )
        right = int(np.argmin(np.append(is_equal, False)))
        self._at[row] += right
        new_tokens = new_tokens[right:]
      if new_tokens.size:
        self._took[row] = False
      self._behind[row].extend(new_tokens.tolist())
    self._last = None

  def _read(self, most: np.ndarray) -> Missing:
    """Reads missing tokens until rows to draft have at most two; returns those.

    A draft has one program for each length, however long the pause was.
    """
    missing = np.array(list(map(len, self._behind)))
    drafting = most > 0
    while missing.max(where=drafting, initial=0) > _LEFT or (
      missing.max() > WINDOW
    ):
      # After steps without drafts; the last token is left to the draft.
      count = np.minimum(np.maximum(missing - 1, 0), WINDOW)
      read = self._part(count, WINDOW)
      self._session.cache = read_more(
        self._drafts(),
        self._attend,
        self._with_room(read),
        read,
        self._length,
      )
      for pending, n in zip(self._behind, count, strict=True):
        del pending[:n]
      self._at += count
      missing = missing - count
    return self._part(np.where(drafting, missing, 0), _LEFT)

  def _part(self, count: np.ndarray, width: int) -> Missing:
    """The first `count` [B] missing tokens, padded to `width`."""
    tokens: Any = np.zeros((len(self._behind), width), np.int32)
    for row, (pending, n) in enumerate(zip(self._behind, count, strict=True)):
      tokens[row, :n] = pending[:n]
    counts: Any = count.astype(np.int32)
    at: Any = self._at.astype(np.int32)
    return Missing(tokens, counts, at)

  def _with_room(self, read: Missing) -> Any:
    """The cache without the tokens drafted before, with room for a call."""
    cache, session = self._session.cache, self._session
    if not (cache.kind.evicting or cache.kind.tier.device is not None):
      return cache
    slots = read.tokens.shape[1] + self._drafter.drafted
    cache = without(cache, read.pos, slots)
    if cache.steps() < slots:
      cache = cache.flush()
      room = np.full((len(self._behind), session.shards), slots)
      cache = cache.with_room(room)
    return cache
