"""Drafters by a model: a small model, early exit, or a small cache.

Ref: Leviathan et al. 2023 (arXiv 2211.17192); with a small cache of the
target's own weights: Sadhukhan et al. 2024 (MagicDec, arXiv 2408.11049) and Sun
et al. 2024 (TriForce, arXiv 2404.11912).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar

from jax.sharding import Mesh

from ringjax.checks import integer
from ringjax.errors import OptionError
from ringjax.infer.speculate.drafter import (
  OF_ONE_PATH,
  Drafting,
  Target,
  TreeDrafter,
)
from ringjax.infer.speculate.model_drafting import ModelDrafting
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.layer_spec import LayerCacheSpec
from ringjax.models import load
from ringjax.models.first_layers import first_layers
from ringjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDrafter(TreeDrafter):
  """Base class of drafters by a model that has a separate cache.

  Attributes:
    cache_kind: Storage format of the draft's cache, as in `generate`.
  """

  cache_kind: CacheConfig | str = "windowed"

  def drafts(self, target: Transformer) -> Transformer:
    """Returns the model that drafts for a target."""
    raise NotImplementedError

  @property
  def place(self) -> Mesh | None:
    """Mesh of separate devices; None: the devices of the target."""
    return None

  def begin(self, target: Target) -> Drafting:
    session = target.session
    previous = session.drafting
    if (
      type(previous) is ModelDrafting
      and previous.drafter == self
      and previous.resumed(target)
    ):
      return previous
    # The old cache is freed before the new one is allocated.
    session.drafting = None
    model = self.drafts(target.model)
    drafting = ModelDrafting(self, model, target, self.cache_kind, self.place)
    session.drafting = drafting
    return drafting

  def _check_layers(self, model: Transformer, layers: Sequence[Any]) -> None:
    if self.widths is not None:
      check_layers(model, layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel(ModelDrafter):
  """Drafts by a model with the target's vocabulary.

  Attributes:
    model: The draft model, or its Hugging Face folder.
    mesh: Mesh of separate devices for it; None: where the target decodes.
  """

  name: ClassVar[str] = "model"

  model: Transformer | str | os.PathLike[str] = ""
  mesh: Mesh | None = None
  # Models loaded from the folder, by mesh.
  _loaded: dict[Mesh | None, Transformer] = dataclasses.field(
    default_factory=dict, init=False, repr=False, compare=False
  )

  def check(self, target: Transformer) -> None:
    model = self.drafts(target)
    vocab, target_vocab = model.config.vocab, target.config.vocab
    if vocab != target_vocab:
      raise OptionError(
        "model",
        f"a draft model of {vocab:,} ids for a target of {target_vocab:,}",
        "the same vocabulary",
        "take a draft model of the target's family, or pass "
        "speculate.TranslatedDraft with both tokenizers",
      )
    self._check_layers(model, model.config.layers)

  @property
  def place(self) -> Mesh | None:
    return self.mesh

  def drafts(self, target: Transformer) -> Transformer:
    """Returns the model that drafts for a target, loaded once per mesh.

    Raises:
      OptionError: If `model` is neither a model nor a folder.
    """
    if isinstance(self.model, Transformer):
      return self.model
    if not isinstance(self.model, str | os.PathLike) or not str(self.model):
      raise OptionError(
        "model",
        repr(self.model),
        "an rj.models.Transformer that drafts, or its folder",
        "pass DraftModel(model=folder)",
      )
    mesh = self.mesh or target.mesh
    if mesh not in self._loaded:
      self._loaded[mesh] = load(self.model, mesh=mesh)
    return self._loaded[mesh]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyExit(ModelDrafter):
  """Drafts by the target's first layers, with its last norm and head.

  Attributes:
    layers: Number of first layers that draft.
  """

  name: ClassVar[str] = "early"

  layers: int = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    integer("layers", self.layers, least=1)

  def check(self, target: Transformer) -> None:
    layers = target.config.layers
    integer("layers", self.layers, least=1, most=len(layers))
    self._check_layers(target, layers[: self.layers])

  def drafts(self, target: Transformer) -> Transformer:
    return first_layers(target, self.layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfDraft(ModelDrafter):
  """Drafts by the target itself with a second, smaller cache.

  Attributes:
    cache_kind: Storage format of the draft's cache, with an eviction policy or
      a codec.
  """

  name: ClassVar[str] = "self"

  cache_kind: CacheConfig | str = "snapkv"

  def check(self, target: Transformer) -> None:
    self._check_layers(target, target.config.layers)

  def drafts(self, target: Transformer) -> Transformer:
    return target


def check_layers(model: Transformer, layers: Sequence[Any]) -> None:
  """Refuses layers whose states, summaries or positions are of a single text.

  Raises:
    OptionError: If the model has such layers.
  """
  mixers = [mixer for layer in layers for mixer in layer.mixers]
  of_one_path = any(isinstance(x.attention, OF_ONE_PATH) for x in layers)
  cached = all(isinstance(m.cache_shape(1), LayerCacheSpec) for m in mixers)
  if cached and not of_one_path:
    return
  raise OptionError(
    "speculate",
    f"a draft model of family {model.config.family}, with recurrent layers, "
    "summaries of keys or folded positions",
    "one whose cache can go back, or a chain in the target's tokens",
    "leave widths out, or take another draft model",
  )
