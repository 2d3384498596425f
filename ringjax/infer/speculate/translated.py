"""Drafts by a model that has another tokenizer: through text.

Guarantees: as with any draft, the target's tokens do not change. The draft
model reads the text of the target's tokens, encoded by its own tokenizer.
Cost: on the host each round encodes the last few dozen tokens again; ids at
their end may change as the text grows, and then are read again.

Ref: Timor et al. 2025 (arXiv 2502.05202), lossless drafts for heterogeneous
vocabularies, string-level exact match.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int

from ringjax.checks import positive_int
from ringjax.data.text.stream import UNKNOWN, Decodes
from ringjax.errors import OptionError
from ringjax.infer.decode import DecodeState
from ringjax.infer.finite import NOT_FINITE
from ringjax.infer.sampling import Greedy
from ringjax.infer.speculate.draft_model import DraftModel, check_layers
from ringjax.infer.speculate.drafter import Draft, Drafting, Target
from ringjax.infer.speculate.model_drafting import ModelDrafting
from ringjax.kv.kind_text import parse
from ringjax.models.transformer import Transformer

# Target tokens at the end of a text that are encoded again in each round, and
# the number of them above which all but the last `_TAIL` become settled.
_TAIL, _LONG = 16, 48


@runtime_checkable
class Translates(Decodes, Protocol):
  """Protocol of a tokenizer, such as `rj.data.Tokenizer`."""

  # The id that begins a text, and whether models expect it.
  bos_id: int | None
  adds_bos: bool

  def encode(self, text: str, *, bos: bool = False) -> Int[np.ndarray, " T"]:
    """Encodes a text to token ids, int32 [T]."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslatedDraft(DraftModel):
  """Drafts by a model with another tokenizer.

  Attributes:
    tokenizer: Tokenizer of the draft model.
    target_tokenizer: Tokenizer of the target.
    steps: Number of draft-model tokens in a draft; `count` is the maximum
      number of target tokens made of them.
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
  """A row's text in both vocabularies.

  Attributes:
    tail: The target's ids of the last tokens.
    settled: The draft model's ids of the text before them.
    ids: The draft model's ids of the whole text.
    cached: The draft model's ids that its cache has.
  """

  def __init__(self, settled: list[int], tail: list[int], ids: list[int]):
    self.settled, self.tail, self.ids = settled, tail, ids
    self.cached = ids


class _Translated(ModelDrafting):
  """Drafting through text, with a cache of the draft model's ids."""

  def __init__(
    self, drafter: TranslatedDraft, model: Transformer, target: Target
  ):
    draft_tokenizer, target_tokenizer = (
      drafter.tokenizer,
      drafter.target_tokenizer,
    )
    assert draft_tokenizer is not None and target_tokenizer is not None
    self._draft_tokenizer, self._target_tokenizer = (
      draft_tokenizer,
      target_tokenizer,
    )
    self._offered = drafter.count
    self._lines: list[_Line] = []
    texts, ratio = [], 1.0
    for text in target.texts:
      ids = text.tolist()
      settled = self._ids(ids[:-_TAIL], first=True)
      # An empty text is replaced by a token: a prompt can't be empty.
      draft_ids = settled + self._ids(ids[-_TAIL:]) or [0]
      ratio = max(ratio, len(draft_ids) / len(ids))
      self._lines.append(_Line(settled, ids[-_TAIL:], draft_ids))
      texts.append(np.asarray(draft_ids, np.int32))
    kind = drafter.cache_kind
    kind = parse(kind) if isinstance(kind, str) else kind
    super().__init__(
      dataclasses.replace(drafter, count=drafter.steps),
      model,
      target._replace(
        texts=texts,
        drawn=False,
        sampler=Greedy(),
        count=int(2 * ratio * target.count) + 4 * _LONG,
      ),
      # Not windowed: ring buffers can't take back all re-encoded tokens.
      kind.replace(windowed=False),
      drafter.mesh,
    )

  def _ids(self, tokens: Sequence[int], *, first: bool = False) -> list[int]:
    """Re-encodes target tokens with the draft model's tokenizer."""
    text = self._target_tokenizer.window(tokens)
    bos = (
      first
      and self._draft_tokenizer.adds_bos
      and self._draft_tokenizer.bos_id is not None
    )
    return self._draft_tokenizer.encode(text.rstrip(UNKNOWN), bos=bos).tolist()

  def draft(
    self, new: Sequence[np.ndarray], state: DecodeState, most: np.ndarray
  ) -> Draft:
    self._settle(new)
    steps = np.where(most > 0, self._drafter.count, 0)
    longest = max(len(line.ids) for line in self._lines)
    if longest + 2 * self._drafter.count > self._session.cache.capacity:
      # The text has more draft-model ids than the capacity was planned for.
      steps = steps * 0
    if not steps.any():
      no_tokens = np.zeros(len(most), np.int32)
      return Draft(np.zeros((len(most), 0), np.int32), no_tokens)
    nothing = [x[:0] for x in new]
    draft_tokens = jax.device_get(super().draft(nothing, state, steps).tokens)
    guesses: list[list[int]] = []
    for line, drafted, limit in zip(
      self._lines, draft_tokens.tolist(), most, strict=True
    ):
      guesses.append([])
      if limit:
        finite = NOT_FINITE not in drafted
        line.cached = line.ids + drafted[:-1] if finite else line.ids
        size = min(int(limit), self._offered)
        guesses[-1] = [NOT_FINITE]
        if finite:
          guesses[-1] = self._guess(line, drafted)[:size]
    count = np.asarray(list(map(len, guesses)), np.int32)
    tokens = np.zeros((len(count), self._offered), np.int32)
    for row, guess in zip(tokens, guesses, strict=True):
      row[: len(guess)] = guess
    return Draft(tokens, count)

  def _guess(self, line: _Line, drafted: list[int]) -> list[int]:
    """Re-encodes drafted tokens with the target's tokenizer."""
    tail_text, drafted_text = (
      self._target_tokenizer.window(line.tail),
      self._draft_tokenizer.window(drafted),
    )
    if tail_text.endswith(UNKNOWN):
      # The target's text ends within a character.
      return []
    ids = self._target_tokenizer.encode(
      tail_text + drafted_text.rstrip(UNKNOWN)
    ).tolist()
    size = len(line.tail)
    if ids[:size] == line.tail:
      return ids[size:]
    return self._target_tokenizer.encode(drafted_text.rstrip(UNKNOWN)).tolist()

  def _settle(self, new: Sequence[np.ndarray]) -> None:
    """Finds the first id of each row where cache and text differ."""
    for row, (line, new_tokens) in enumerate(
      zip(self._lines, new, strict=True)
    ):
      if not new_tokens.size:
        continue
      line.tail.extend(new_tokens.tolist())
      if len(line.tail) > _LONG:
        line.settled += self._ids(line.tail[:-_TAIL])
        del line.tail[:-_TAIL]
      line.ids = ids = line.settled + self._ids(line.tail) or [0]
      limit = min(len(ids) - 1, len(line.cached))
      num_equal = next(
        (n for n in range(limit) if ids[n] != line.cached[n]), limit
      )
      self._at[row], self._behind[row][:] = num_equal, ids[num_equal:]
      line.cached = line.cached[:num_equal]
