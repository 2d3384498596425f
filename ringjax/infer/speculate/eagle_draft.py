"""Drafts by an EAGLE-3 head, which reads several layers of its target.

Guarantees, cost and memory: those of `predict_draft`, for the head is a layer
of the model. Drafted are ids of the head's draft vocabulary; with
verify="rejection" all others have the probability 0.
Ref: Li et al. 2025, arXiv 2503.01840.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ringjax.infer.speculate.predict_draft import HeadDraft
from ringjax.nn.draft_layers.eagle_layer import EagleLayer
from ringjax.nn.draft_layers.predict_layer import PredictLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3(HeadDraft):
  """Drafts by the EAGLE-3 head that a model has."""

  name: ClassVar[str] = "eagle3"
  title: ClassVar[str] = "an EAGLE-3 head"
  layer: ClassVar[type[PredictLayer]] = EagleLayer

  count: int = 4
