"""Drafters by their names.

| name | drafts by |
|---|---|
| `lookup` | tokens that followed an earlier use of the last 1 to 3 tokens |
| `suffix` | tokens that followed the longest suffix that occurred before |
| `model` | a small model of the same vocabulary |
| `early` | the target's first layers |
| `self` | the target with a smaller cache |
| `translated` | a small model with another tokenizer, through text |
| `mtp` | the model's layer that predicts one token further |
| `eagle3` | the model's EAGLE-3 head, which reads several of its layers |
| `dflash` | the model's DFlash head, which drafts a block in one pass |
| `longspec` | a block that reads the target's last keys |
"""

from __future__ import annotations

from ringjax.infer.speculate.dflash_draft import DFlash
from ringjax.infer.speculate.draft_model import DraftModel, EarlyExit, SelfDraft
from ringjax.infer.speculate.drafter import Drafter
from ringjax.infer.speculate.eagle_draft import Eagle3
from ringjax.infer.speculate.longspec import LongSpec
from ringjax.infer.speculate.lookup import PromptLookup
from ringjax.infer.speculate.predict_draft import PredictDraft
from ringjax.infer.speculate.suffixes import Suffixes
from ringjax.infer.speculate.translated import TranslatedDraft
from ringjax.option_text import named

DRAFTERS: dict[str, type[Drafter]] = {
  kind.name: kind
  for kind in (
    PromptLookup,
    Suffixes,
    DraftModel,
    EarlyExit,
    SelfDraft,
    TranslatedDraft,
    LongSpec,
    PredictDraft,
    Eagle3,
    DFlash,
  )
}


def drafter_of(how: Drafter | str, name: str = "speculate") -> Drafter:
  """Parses a drafter by its name and options; a `Drafter` is returned as is.

  Args:
    how: A `Drafter`, or a text such as "lookup:count=8,ngram=2".
    name: Name of the argument or flag, for error messages.

  Raises:
    OptionError: If the name or one of its options is unknown.
  """
  return named(how, Drafter, DRAFTERS, name)
