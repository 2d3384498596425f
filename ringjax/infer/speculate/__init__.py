"""Speculation: tokens are drafted, and one call of the model checks several."""

from ringjax.infer.speculate.dflash_draft import DFlash
from ringjax.infer.speculate.draft_model import DraftModel, EarlyExit, SelfDraft
from ringjax.infer.speculate.drafter import (
  Draft,
  Drafter,
  Drafting,
  Target,
  TextDrafter,
  TextReader,
)
from ringjax.infer.speculate.eagle_draft import Eagle3
from ringjax.infer.speculate.longspec import LongSpec
from ringjax.infer.speculate.lookup import PromptLookup
from ringjax.infer.speculate.predict_draft import PredictDraft
from ringjax.infer.speculate.rounds import SpeculationReport
from ringjax.infer.speculate.speculation import DRAFTERS, drafter_of
from ringjax.infer.speculate.suffixes import Suffixes
from ringjax.infer.speculate.translated import TranslatedDraft, Translates
from ringjax.infer.speculate.verifiers import VERIFIERS

__all__ = [
  "DRAFTERS",
  "VERIFIERS",
  "DFlash",
  "Draft",
  "DraftModel",
  "Drafter",
  "Drafting",
  "Eagle3",
  "EarlyExit",
  "LongSpec",
  "PredictDraft",
  "PromptLookup",
  "SelfDraft",
  "SpeculationReport",
  "Suffixes",
  "Target",
  "TextDrafter",
  "TextReader",
  "TranslatedDraft",
  "Translates",
  "drafter_of",
]
