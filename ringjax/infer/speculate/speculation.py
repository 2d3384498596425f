"""Drafters by their names.

| name | drafts |
|---|---|
| `lookup` | what followed the last one to three tokens before |
| `suffix` | what followed the longest end of the text that occurred before |
| `model` | a small model of the same vocabulary |
| `early` | the target's first layers |
| `self` | the target with a smaller cache |
| `translated` | a small model with another tokenizer, through text |
| `longspec` | a block that reads the target's last keys |
"""

from __future__ import annotations

from ringjax.infer.speculate.draft_model import DraftModel, EarlyExit, SelfDraft
from ringjax.infer.speculate.drafter import Drafter
from ringjax.infer.speculate.longspec import LongSpec
from ringjax.infer.speculate.lookup import PromptLookup
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
  )
}


def drafter_of(how: Drafter | str, name: str = "speculate") -> Drafter:
  """A drafter: as it is, or by its name and options.

  Args:
    how: a `Drafter`, or a text such as "lookup:count=8,ngram=2".
    name: of the argument or flag, for errors.

  Raises:
    OptionError: no such drafter, or other options than it has.
  """
  return named(how, Drafter, DRAFTERS, name)
