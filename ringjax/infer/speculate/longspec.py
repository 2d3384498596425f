"""Drafts by a block that reads the target's own cache (LongSpec).

Guarantees: as with all drafters no token changes, but where rounding decides. A
draft's program depends on the context only by the shapes of the target's cache.
Cost: at the start, keys of a window of the text; then for each drafted token of
a chain one block, which reads its window and one layer of the target's cache.
Memory: keys and values of a window for each row, whatever the context's length.
Ref: Yang et al. 2025, arXiv 2502.17421.

The target's cache has the tokens before the last chosen one. Drafted tokens see
that cache, and later tokens through the block's own window.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ringjax.errors import CheckpointMismatchError, OptionError
from ringjax.infer.speculate.drafter import Drafting, Target, TreeDrafter
from ringjax.infer.speculate.model_drafting import ModelDrafting
from ringjax.kv.base import CallCache
from ringjax.kv.storage.pages import few_sizes
from ringjax.models import longspec
from ringjax.models.longspec import DraftTransformer
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.sharding_context import CachedAttention
from ringjax.parallel.programs import bounded

# Tokens that a draft may take back in addition to those that it drafts.
SLACK = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongSpec(TreeDrafter):
  """Drafts by a one-block model that was trained for the target.

  Attributes:
    model: Draft model by `rj.models.longspec`, or the folder in which it was
      saved.
  """

  name: ClassVar[str] = "longspec"

  model: DraftTransformer | str = ""

  def check(self, target: Transformer) -> None:
    if isinstance(self.model, str) and self.model:
      longspec.checked(self.model, target)
      return
    if not isinstance(self.model, DraftTransformer):
      raise OptionError(
        "model",
        repr(self.model),
        "a draft of the target, or its folder",
        "pass LongSpec(model=rj.models.longspec.load(folder, target)), or "
        "longspec:model=FOLDER",
      )
    draft_target = self.model.target
    if draft_target is not target and draft_target.digest != target.digest:
      raise CheckpointMismatchError(
        "model",
        f"a draft of another target, of digest {draft_target.digest}",
        f"one of this target, {target.digest}",
        "train one: configs/drafts/longspec.py",
      )

  def drafts(self, target: Transformer) -> DraftTransformer:
    """Returns the draft model for a target."""
    if isinstance(self.model, str):
      return longspec.load(self.model, target)
    return self.model

  def begin(self, target: Target) -> Drafting:
    draft = self.drafts(target.session.model)
    return _BlockDrafting(self, draft, target)


class _Ring:
  """Ring-buffer cache of the draft, in place of a session."""

  def __init__(self, cache: Any):
    self.cache, self.shards = cache, 1

  @contextlib.contextmanager
  def running(self, doing: str) -> Iterator[None]:
    """Does nothing: after an interruption the next call makes a new cache."""
    del doing
    yield


class _BlockDrafting(ModelDrafting):
  """Drafting by a block that reads the target's cache in each round."""

  def __init__(
    self, drafter: LongSpec, draft: DraftTransformer, target: Target
  ):
    session, texts = target.session, target.texts
    self._drafter, self._target = drafter, target
    # On the devices on which the target decodes: maybe one of its mesh.
    self._draft: Any = session.weights(draft)
    self._attend = CachedAttention(mesh=session.mesh, axis=None)
    self._length = jnp.int32(session.capacity)
    # Positions at which the target has the last token of each text.
    self._at = np.asarray(session.lengths)
    self._behind: list[list[int]] = [[] for _ in texts]
    self._last = None
    self._took = np.zeros(len(texts), bool)
    self._known = [[] for _ in texts]
    ring = draft.init_ring(len(texts), drafter.drafted + SLACK, self._attend)
    self._session: Any = _Ring(ring)
    self._begin()

  def _drafts(self) -> DraftTransformer:
    """The draft model joined with the target's current cache."""
    return self._draft.beside(self._target.model, self._target.session.cache)

  def _begin(self) -> None:
    """Fills the window with the ends of the texts."""
    window = self._draft.draft_config.window
    ends = [text[-window:] for text in self._target.texts]
    width = min(window, few_sizes(max(1, *map(len, ends))))
    tokens = np.zeros((len(ends), width), np.int32)
    seg, pos = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, (end, stop) in enumerate(zip(ends, self._at, strict=True)):
      tokens[row, : len(end)], seg[row, : len(end)] = end, 1
      pos[row] = stop - len(end) + np.arange(width)
    self._session.cache = filled(
      self._drafts(),
      self._attend,
      self._session.cache,
      tokens,
      np.maximum(pos, 0),
      seg,
      self._length,
    )


@bounded
@functools.partial(jax.jit, static_argnums=1, donate_argnums=2)
def filled(
  draft: DraftTransformer,
  attend: CachedAttention,
  cache: CallCache,
  tokens: Int[Array, "B n"],
  pos: Int[Array, "B n"],
  seg: Int[Array, "B n"],
  length: Int[Array, ""],
) -> Any:
  """Fills the draft's own cache with keys and values of tokens."""
  # Only keys and values are needed: the logits are those of any one index.
  first_index = jnp.zeros((tokens.shape[0], 1), jnp.int32)
  return forward(draft, attend, tokens, pos, seg, cache, first_index, length)[1]
