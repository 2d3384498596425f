"""Drafts by a model that has another tokenizer: through text.

Guarantees: as of any draft, the target's tokens stay what they are. What the
draft model reads is the text of the target's tokens in its own.
Cost: on the host each round encodes the last few dozen tokens again; what their
end is made of may change as the text goes on, and then is read again.

Ref: Timor et al. 2025 (arXiv 2502.05202), lossless drafts for heterogeneous
vocabularies, string-level exact match.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

import jax
import numpy as np

from ringjax.checks import positive_int
from ringjax.data.stream import UNKNOWN, Decodes
from ringjax.errors import OptionError
from ringjax.infer.decode import DecodeState
from ringjax.infer.finite import NOT_FINITE
from ringjax.infer.sampling import Greedy
from ringjax.infer.speculate.draft_model import DraftModel, check_layers
from ringjax.infer.speculate.drafter import Draft, Drafting, Target
from ringjax.infer.speculate.model_drafting import ModelDrafting
from ringjax.kv.kind_text import parse
from ringjax.models.transformer import Transformer

# Tokens of the target at the end of a text that are encoded again, and how many
# there may be until the first of them are taken for settled.
_TAIL, _LONG = 16, 48


@runtime_checkable
class Translates(Decodes, Protocol):
  """A tokenizer, such as `rj.data.Tokenizer`."""

  # The id that begins a text, and whether models expect it.
  bos_id: int | None
  adds_bos: bool

  def encode(self, text: str, *, bos: bool = False) -> np.ndarray:
    """The ids of a text, int32 [T]."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TranslatedDraft(DraftModel):
  """A model with another tokenizer drafts.

  Attributes:
    tokenizer: of the draft model.
    target_tokenizer: of the target.
    steps: tokens of the draft model's for a draft; `count` is how many of the
      target's they give at most.
  """

  name: ClassVar[str] = "translated"

  count: int = 8
  tokenizer: Translates | None = None
  target_tokenizer: Translates | None = None
  steps: int = 8

  def __post_init__(self) -> None:
    super().__post_init__()
    positive_int("steps", self.steps)
    for name in ("tokenizer", "target_tokenizer"):
      if not isinstance(getattr(self, name), Translates):
        raise OptionError(
          name,
          type(getattr(self, name)).__name__,
          "a tokenizer: both tokenizers are needed",
          "pass tokenizer=rj.data.Tokenizer.load(folder), and "
          "target_tokenizer= likewise; launch scripts take model:model=FOLDER "
          "and both tokenizers from the folders",
        )
    if self.widths is not None:
      raise OptionError(
        "widths",
        f"{self.widths}, through text",
        "a chain",
        "leave widths out",
      )

  def check(self, target: Transformer) -> None:
    model = self.drafts(target)
    check_layers(model, model.config.layers)

  def begin(self, target: Target) -> Drafting:
    return _Translated(self, self.drafts(target.model), target)


class _Line:
  """One text in both vocabularies.

  Attributes:
    tail: the target's last tokens.
    settled: the draft model's ids of what is before them.
    ids: those of the whole text.
    cached: ids that its cache has.
  """

  def __init__(self, settled: list[int], tail: list[int], ids: list[int]):
    self.settled, self.tail, self.ids = settled, tail, ids
    self.cached = ids


class _Translated(ModelDrafting):
  """At work, with a cache in the draft model's vocabulary."""

  def __init__(
    self, drafter: TranslatedDraft, model: Transformer, target: Target
  ):
    mine, theirs = drafter.tokenizer, drafter.target_tokenizer
    assert mine is not None and theirs is not None
    self._mine, self._theirs = mine, theirs
    self._offered = drafter.count
    self._lines: list[_Line] = []
    texts, most = [], 1.0
    for text in target.texts:
      ids = text.tolist()
      settled = self._ids(ids[:-_TAIL], first=True)
      # Something has to be read.
      whole = settled + self._ids(ids[-_TAIL:]) or [0]
      most = max(most, len(whole) / len(ids))
      self._lines.append(_Line(settled, ids[-_TAIL:], whole))
      texts.append(np.asarray(whole, np.int32))
    kind = drafter.cache_kind
    kind = parse(kind) if isinstance(kind, str) else kind
    super().__init__(
      dataclasses.replace(drafter, count=drafter.steps),
      model,
      target._replace(
        texts=texts,
        drawn=False,
        sampler=Greedy(),
        count=int(2 * most * target.count) + 4 * _LONG,
      ),
      # Ring buffers could not go back as far as texts are encoded again.
      dataclasses.replace(kind, windowed=False),
      drafter.mesh,
    )

  def _ids(self, tokens: Sequence[int], *, first: bool = False) -> list[int]:
    """The draft model's ids of the target's tokens."""
    text = self._theirs.window(tokens)
    bos = first and self._mine.adds_bos and self._mine.bos_id is not None
    return self._mine.encode(text.rstrip(UNKNOWN), bos=bos).tolist()

  def draft(
    self, new: Sequence[np.ndarray], state: DecodeState, most: np.ndarray
  ) -> Draft:
    self._settle(new)
    steps = np.where(most > 0, self._drafter.count, 0)
    longest = max(len(line.ids) for line in self._lines)
    if longest + 2 * self._drafter.count > self._session.cache.capacity:
      # The text has become longer in these ids than was to be expected.
      steps = steps * 0
    if not steps.any():
      none = np.zeros(len(most), np.int32)
      return Draft(np.zeros((len(most), 0), np.int32), none)
    nothing = [x[:0] for x in new]
    found = jax.device_get(super().draft(nothing, state, steps).tokens)
    guesses: list[list[int]] = []
    for line, drafted, top in zip(
      self._lines, found.tolist(), most, strict=True
    ):
      guesses.append([])
      if top:
        sound = NOT_FINITE not in drafted
        line.cached = line.ids + drafted[:-1] if sound else line.ids
        most_now = min(int(top), self._offered)
        guesses[-1] = [NOT_FINITE]
        if sound:
          guesses[-1] = self._guess(line, drafted)[:most_now]
    count = np.asarray(list(map(len, guesses)), np.int32)
    tokens = np.zeros((len(count), self._offered), np.int32)
    for row, guess in zip(tokens, guesses, strict=True):
      row[: len(guess)] = guess
    return Draft(tokens, count)

  def _guess(self, line: _Line, drafted: list[int]) -> list[int]:
    """The target's tokens of what was drafted."""
    known, more = self._theirs.window(line.tail), self._mine.window(drafted)
    if known.endswith(UNKNOWN):
      # Within a character.
      return []
    ids = self._theirs.encode(known + more.rstrip(UNKNOWN)).tolist()
    size = len(line.tail)
    if ids[:size] == line.tail:
      return ids[size:]
    return self._theirs.encode(more.rstrip(UNKNOWN)).tolist()

  def _settle(self, new: Sequence[np.ndarray]) -> None:
    """Finds from where on the cache's ids are not those of the texts."""
    for row, (line, came) in enumerate(zip(self._lines, new, strict=True)):
      if not came.size:
        continue
      line.tail.extend(came.tolist())
      if len(line.tail) > _LONG:
        line.settled += self._ids(line.tail[:-_TAIL])
        del line.tail[:-_TAIL]
      line.ids = ids = line.settled + self._ids(line.tail) or [0]
      most = min(len(ids) - 1, len(line.cached))
      same = next((n for n in range(most) if ids[n] != line.cached[n]), most)
      self._at[row], self._behind[row][:] = same, ids[same:]
      line.cached = line.cached[:same]
