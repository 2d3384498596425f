"""Drafts by a block that reads the target's own cache (LongSpec).

Guarantees: as of all drafters no token changes. A draft's program depends on
the context by the shapes of the target's cache alone.
Cost: to begin, keys of a window of the text; then for each drafted token of a
chain the block, which reads its window and one layer of the target's cache.
Memory: a window's keys and values a row, whatever the context's length.
Ref: Yang et al. 2025, arXiv 2502.17421.

The target's cache has the tokens before the last chosen one. What is drafted
sees that cache, and what came since by the block's own window.
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
from ringjax.kv.pages import few_sizes
from ringjax.models import longspec
from ringjax.models.longspec import DraftTransformer
from ringjax.models.transformer import Transformer, forward
from ringjax.nn.sharding_context import CachedAttention
from ringjax.parallel.programs import bounded

# Tokens that a draft may take back beside those that it drafts.
SLACK = 32


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LongSpec(TreeDrafter):
  """A draft of one block, made for the target, drafts.

  Attributes:
    model: the draft, by `rj.models.longspec`, or the folder in which it was
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
    mine = self.model.target
    if mine is not target and mine.digest != target.digest:
      raise CheckpointMismatchError(
        "model",
        f"a draft of another target, of digest {mine.digest}",
        f"one of this target, {target.digest}",
        "train one: configs/train/longspec.py",
      )

  def drafts(self, target: Transformer) -> DraftTransformer:
    """The draft, beside a target."""
    if isinstance(self.model, str):
      return longspec.load(self.model, target)
    return self.model

  def begin(self, target: Target) -> Drafting:
    draft = self.drafts(target.session.model)
    return _BlockDrafting(self, draft, target)


class _Ring:
  """The draft's own cache, in place of a session."""

  def __init__(self, cache: Any):
    self.cache, self.shards = cache, 1

  @contextlib.contextmanager
  def running(self, doing: str) -> Iterator[None]:
    """What an interruption leaves is of no use: the next call begins anew."""
    del doing
    yield


class _BlockDrafting(ModelDrafting):
  """A block at work, beside the target's cache of each round."""

  def __init__(
    self, drafter: LongSpec, draft: DraftTransformer, target: Target
  ):
    session, texts = target.session, target.texts
    self._drafter, self._target = drafter, target
    # Where the target decodes, which may be one device of its mesh.
    self._draft: Any = session.weights(draft)
    self._attend = CachedAttention(mesh=session.mesh, axis=None)
    self._length = jnp.int32(session.capacity)
    # Where the target has the last token of each text.
    self._at = np.asarray(session.lengths)
    self._behind: list[list[int]] = [[] for _ in texts]
    self._last: Any = None
    self._took = np.zeros(len(texts), bool)
    self._known = [[] for _ in texts]
    ring = draft.init_ring(len(texts), drafter.drafted + SLACK, self._attend)
    self._session: Any = _Ring(ring)
    self._begin()

  def _drafts(self) -> DraftTransformer:
    """The draft with the target's cache of now."""
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
  """The draft's own cache with keys and values of tokens."""
  # Of these neither what they see nor what follows is needed.
  one = jnp.zeros((tokens.shape[0], 1), jnp.int32)
  return forward(draft, attend, tokens, pos, seg, cache, one, length)[1]
