"""Drafts for the rows of an engine, from their own texts or by a model.

Guarantees: a row's drafts depend on its text, and with `remember` on texts that
were served before; its tokens depend on neither, see `check_drafts`.
Memory: a `TextReader` for each row, or see `ModelRowDrafts`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ringjax.errors import OptionError
from ringjax.infer.speculate.draft_model import ModelDrafter
from ringjax.infer.speculate.drafter import (
  Drafter,
  TextDrafter,
  TextReader,
  TreeDrafter,
)
from ringjax.infer.speculate.longspec import LongSpec
from ringjax.infer.speculate.predict_draft import PredictDraft
from ringjax.infer.speculate.speculation import DRAFTERS, drafter_of
from ringjax.infer.speculate.translated import TranslatedDraft
from ringjax.kv.cache_kind import cache_kind
from ringjax.kv.state import StateShape
from ringjax.kv.storage.pooled_cache import PooledRows
from ringjax.models.transformer import Transformer
from ringjax.serve.calls import RowBoard
from ringjax.serve.drafts.model_drafts import (
  BlockRowDrafts,
  ModelRowDrafts,
  PredictRowDrafts,
)
from ringjax.serve.drafts.step_paces import StepPaces
from ringjax.serve.row_sampler import RowNumbers
from ringjax.serve.scheduler import RowDraft

if TYPE_CHECKING:
  from ringjax.serve.scheduler import ServedRow

# Classes of drafters that an engine can use, but for `TranslatedDraft`.
_TAKEN = (TextDrafter, ModelDrafter, LongSpec, PredictDraft)
ENGINE_DRAFTERS = tuple(
  name
  for name, kind in DRAFTERS.items()
  if issubclass(kind, _TAKEN) and not issubclass(kind, TranslatedDraft)
)


class RowDrafts:
  """Drafter for the rows of an engine, from text or by a model.

  Attributes:
    count: Maximum number of tokens of a draft.
    trees: Whether drafts are trees.
    adapts: Whether steps have no drafts where these cost more than they save.
  """

  def __init__(self, how: Drafter | str, name: str = "speculate"):
    """Make a drafter without rows.

    Args:
      how: Drafter, or its name and options.
      name: Name of the argument or flag, for errors.

    Raises:
      OptionError: If there is no such drafter, or an engine can't use it: a
        model with another tokenizer, on other devices or with a cache that
        evicts, or a `verify` rule that changes tokens.
    """
    drafter = drafter_of(how, name)
    self._name = name
    if (
      not isinstance(drafter, _TAKEN)
      or isinstance(drafter, TranslatedDraft)
      or (isinstance(drafter, ModelDrafter) and drafter.place is not None)
    ):
      raise OptionError(
        name,
        f"{drafter.name!r} for an engine",
        f"{', '.join(ENGINE_DRAFTERS)}, with the target's tokenizer and on the "
        "engine's devices",
        f"pass {name}=lookup, or draft with rj.infer.generate",
      )
    if isinstance(drafter, ModelDrafter):
      kind = cache_kind(drafter.cache_kind)
      if kind.evicting or kind.tier.device is not None:
        raise OptionError(
          name,
          f"{drafter.name!r} with the cache {str(drafter.cache_kind)!r}, for "
          "an engine",
          "a cache of the draft that keeps all tokens: an eviction decides "
          "its shapes, and rows come and go",
          f"pass {name}={drafter.name}:cache_kind=int4, for instance",
        )
    if drafter.verify != "match":
      raise OptionError(
        "verify",
        f"{drafter.verify!r}, for an engine",
        "'match', with which a request has the tokens that it has alone",
        "leave verify out",
      )
    self._drafter = drafter
    self.count, self.trees = drafter.nodes, drafter.tree
    self.adapts = drafter.adapt
    self._model: ModelRowDrafts | None = None
    # Reader of each row's text, and its number of answer tokens read.
    self._readers: weakref.WeakKeyDictionary[
      ServedRow, tuple[TextReader, int]
    ] = weakref.WeakKeyDictionary()

  def check(self, model: Transformer) -> None:
    """Checks that the drafter supports a model.

    Raises:
      OptionError: If the model has recurrent layers, or the drafter refuses it.
    """
    self._drafter.check(model)
    if isinstance(self._drafter, TreeDrafter):
      self._drafter.check_tree(model)
    models = [model]
    if isinstance(self._drafter, ModelDrafter):
      models.append(self._drafter.drafts(model))
    for checked in models:
      if any(isinstance(shape, StateShape) for shape in checked.kinds):
        raise OptionError(
          self._name,
          f"drafts {'for' if checked is model else 'by'} a model of family "
          f"{checked.config.family}, with recurrent layers, in an engine",
          "layers whose tokens can be taken back",
          "leave speculate out, or draft with rj.infer.generate",
        )

  def begin(self, model: Transformer, **place: Any) -> None:
    """Makes the cache of a draft model; see `ModelRowDrafts`."""
    if isinstance(self._drafter, ModelDrafter):
      self._model = ModelRowDrafts(self._drafter, model, **place)
    elif isinstance(self._drafter, LongSpec):
      self._model = BlockRowDrafts(self._drafter, model, **place)
    elif isinstance(self._drafter, PredictDraft):
      self._model = PredictRowDrafts(self._drafter, model, **place)

  def paces(
    self,
    rows: int,
    clock: Callable[[], float],
    choose: Callable[[list[int]], list[int]],
  ) -> StepPaces:
    """Make the chooser of steps with drafts; see `StepPaces`."""
    return StepPaces(self._drafter, rows, clock, choose)

  @property
  def undrafted(self) -> int:
    """Number of rows without drafts; see `ModelRowDrafts`."""
    return 0 if self._model is None else self._model.undrafted

  def warm_up(
    self, how: RowNumbers, board: RowBoard, held: Callable[[], PooledRows]
  ) -> None:
    """Compiles the programs of a draft model; see `ModelRowDrafts.warm_up`."""
    if self._model is not None:
      self._model.warm_up(how, board, held)

  def prepare(
    self,
    rows: Sequence[ServedRow],
    how: RowNumbers,
    board: RowBoard,
    held: Callable[[], PooledRows],
  ) -> None:
    """Drafts by a model, before a step; see `ModelRowDrafts.prepare`."""
    if self._model is None:
      return
    self._model.prepare(
      [
        row
        for row in rows
        if self.drafts_for(row)
        and row.answer
        and not (row.ended or row.reading)
        and row.most > row.chosen + 1
        and row.computed + 1 == row.known
      ],
      how,
      board,
      held,
    )

  def drafts_for(self, row: ServedRow) -> bool:
    """Whether a row has drafts; masks and beam searches prevent them."""
    return row.owner.handle.request.mask is None and not row.team

  def unread(self, rows: Sequence[ServedRow]) -> int:
    """Maximum tokens of one of these rows that a draft model has to read."""
    if self._model is None:
      return 0
    return self._model.unread([row for row in rows if self.drafts_for(row)])

  def draft(self, row: ServedRow, most: int) -> RowDraft:
    """Draft of a row whose tokens are all known to the host.

    Args:
      row: Row to draft for.
      most: Maximum length of a path.
    """
    if not self.drafts_for(row):
      return RowDraft()
    if self._model is not None:
      return self._model.draft(row, most)
    reader, num_read = self._readers.get(row, (None, 0))
    if reader is None:
      assert isinstance(self._drafter, TextDrafter)
      reader = self._drafter.reader(row.prompt.tolist())
    reader.add(row.answer[num_read:])
    self._readers[row] = reader, len(row.answer)
    return RowDraft(tuple(reader.guess(min(most, self.count))))
