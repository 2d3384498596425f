"""The drafters of the benchmark of speculation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.infer import speculate
from ringjax.kv import kind_text

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer

# Tokens of a tree at each depth: checked in "tree", drafted in "best".
_WIDTHS, _MORE = (3, 3, 3, 3, 2, 2), (4,) * 8


def drafter(
  name: str,
  target: Transformer,
  draft: Transformer | None,
  count: int,
  adapt: bool,
  cache: str = "int4",
  tokenizers: tuple[Any, Any] | None = None,
  folder: str | None = None,
) -> Any:
  """Creates a drafter by its name, one of `speculating.DRAFTERS` or "best".

  Args:
    name: Name of the drafter.
    target: Target model, of whose layers "early" runs half.
    draft: Draft model of "model", "tree" and "best"; None for the target's
      first layer.
    count: Number of tokens of a draft.
    adapt: Whether drafts get shorter when that pays off.
    cache: Kind of cache of "self".
    tokenizers: Tokenizers of the draft model of "model" and of the target, if
      they differ.
    folder: Folder of the draft of "longspec".

  Raises:
    OptionError: If there is no such drafter.
  """
  options: dict[str, Any] = dict(count=count, adapt=adapt)
  if name == "lookup":
    return speculate.PromptLookup(**options)
  if name == "suffix":
    return speculate.Suffixes(**options)
  if name == "mtp":
    return speculate.PredictDraft(**options)
  if name == "eagle3":
    return speculate.Eagle3(**options)
  if name == "longspec":
    trained = rj.models.longspec.load(folder or "", target)
    return speculate.LongSpec(model=trained, **options)
  if name == "early":
    half = max(1, len(target.config.layers) // 2)
    return speculate.EarlyExit(layers=half, **options)
  if name == "self":
    return speculate.SelfDraft(cache_kind=kind_text.parse(cache), **options)
  if name not in ("model", "tree", "best"):
    raise OptionError(
      "contestants",
      repr(name),
      "lookup, suffix, early, self, mtp, eagle3, longspec, model, tree or best",
      "add it here",
    )
  if name in ("tree", "best"):
    options["widths"] = _WIDTHS[:count]
  if name == "best":
    # As many tokens are checked as in "tree", chosen from more drafted ones.
    options |= dict(widths=_MORE[:count], best=sum(_WIDTHS[:count]))
  if draft is None:
    return speculate.EarlyExit(layers=1, **options)
  if tokenizers is not None:
    draft_tokenizer, target_tokenizer = tokenizers
    return speculate.TranslatedDraft(
      model=draft,
      tokenizer=draft_tokenizer,
      target_tokenizer=target_tokenizer,
      **options,
    )
  return speculate.DraftModel(model=draft, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClockedDrafter(speculate.Drafter):
  """Wrapper of a drafter that times its `begin`.

  Attributes:
    inner: Wrapped drafter.
    seconds: Seconds of each call of `begin`.
  """

  inner: Any
  seconds: list[float] = dataclasses.field(default_factory=list, compare=False)

  @classmethod
  def around(cls, inner: Any) -> ClockedDrafter:
    """Wraps `inner` with its options."""
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
  """Drafter whose tokens are never accepted.

  Attributes:
    answer: Ids of the right answer, int32 [n].
  """

  answer: np.ndarray

  def begin(self, target: speculate.Target) -> speculate.Drafting:
    del target
    return _Wrong(self.answer, self.count)


class _Wrong:
  """Drafting of wrong tokens for one row."""

  def __init__(self, answer: np.ndarray, count: int):
    self._answer, self._count, self._at = answer, count, 0

  def draft(
    self, new: Sequence[np.ndarray], state: Any, most: np.ndarray
  ) -> speculate.Draft:
    del state
    self._at += len(new[0])
    right = self._answer[self._at : self._at + self._count]
    tokens = np.zeros((1, self._count), np.int32)
    # A wrong id that every vocabulary has: 0, or 1 where 0 is right.
    tokens[0, : right.size] = np.where(right == 0, 1, 0)
    count = np.minimum(most, right.size).astype(np.int32)
    return speculate.Draft(tokens, count)
