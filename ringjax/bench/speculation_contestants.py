"""The drafters of the benchmark of speculation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringjax.infer import speculate
from ringjax.kv import kind_text

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer

# Tokens of a tree by depth.
_WIDTHS, _MORE = (3, 3, 3, 3, 2, 2), (4,) * 8


def drafter(
  name: str,
  target: Transformer,
  draft: Transformer | None,
  count: int,
  adapt: bool,
  cache: str = "int4",
) -> Any:
  """A drafter by its name, one of `speculating.DRAFTERS`.

  Args:
    name: of the drafter.
    target: whose layers "early" counts.
    draft: the draft model of "model", "tree" and "best"; None: the first layer.
    count: tokens of a draft.
    adapt: whether drafts get shorter.
    cache: of "self".
  """
  how: dict[str, Any] = dict(count=count, adapt=adapt)
  if name == "lookup":
    return speculate.PromptLookup(**how)
  if name == "suffix":
    return speculate.Suffixes(**how)
  if name == "early":
    half = max(1, len(target.config.layers) // 2)
    return speculate.EarlyExit(layers=half, **how)
  if name == "self":
    return speculate.SelfDraft(cache_kind=kind_text.parse(cache), **how)
  if name in ("tree", "best"):
    how["widths"] = _WIDTHS[:count]
  if name == "best":
    # As many are checked, of more.
    how |= dict(widths=_MORE[:count], best=sum(_WIDTHS[:count]))
  if draft is None:
    return speculate.EarlyExit(layers=1, **how)
  return speculate.DraftModel(model=draft, **how)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ClockedDrafter(speculate.Drafter):
  """A drafter whose beginning is timed.

  Attributes:
    inner: the drafter.
    seconds: of its beginning, once it has begun.
  """

  inner: Any
  seconds: list[float] = dataclasses.field(default_factory=list)

  @classmethod
  def around(cls, inner: Any) -> ClockedDrafter:
    """With the options of `inner`."""
    return cls(
      inner=inner,
      count=inner.count,
      verify=inner.verify,
      adapt=inner.adapt,
    )

  @property
  def depth(self) -> int:
    return self.inner.depth

  @property
  def nodes(self) -> int:
    return self.inner.nodes

  def begin(self, target: speculate.Target) -> speculate.Drafting:
    start = time.perf_counter()
    drafting = self.inner.begin(target)
    self.seconds.append(time.perf_counter() - start)
    return drafting


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Never(speculate.Drafter):
  """Drafts what is never right.

  Attributes:
    answer: int32 [n], which is right.
  """

  answer: np.ndarray

  def begin(self, target: speculate.Target) -> speculate.Drafting:
    del target
    return _Wrong(self.answer, self.count)


class _Wrong:
  """At work for one row."""

  def __init__(self, answer: np.ndarray, count: int):
    self._answer, self._count, self._at = answer, count, 0

  def draft(
    self, new: Sequence[np.ndarray], state: Any, most: np.ndarray
  ) -> speculate.Draft:
    del state
    self._at += len(new[0])
    right = self._answer[self._at : self._at + self._count]
    tokens = np.zeros((1, self._count), np.int32)
    # Another id than the right one, of those that any vocabulary has.
    tokens[0, : right.size] = np.where(right == 0, 1, 0)
    count = np.minimum(most, right.size).astype(np.int32)
    return speculate.Draft(tokens, count)
