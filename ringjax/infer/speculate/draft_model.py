"""Drafts by a model: a small one, the target's first layers, a small cache.

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
  Drafting,
  Target,
  TreeDrafter,
  alike,
)
from ringjax.infer.speculate.model_drafting import ModelDrafting
from ringjax.kv.cache import LayerCacheSpec
from ringjax.kv.cache_kind import CacheKind
from ringjax.models import load
from ringjax.models.first_layers import first_layers
from ringjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ModelDrafter(TreeDrafter):
  """A base class of drafters by a model, with a cache of its own.

  Attributes:
    cache_kind: of that cache, as of `generate`.
  """

  cache_kind: CacheKind | str = "windowed"

  def drafts(self, target: Transformer) -> Transformer:
    """The model that drafts for a target."""
    raise NotImplementedError

  @property
  def place(self) -> Mesh | None:
    """Devices of its own, or None: where the target decodes."""
    return None

  def begin(self, target: Target) -> Drafting:
    session = target.session
    before = session.drafting
    if (
      type(before) is ModelDrafting
      and alike(before.drafter, self)
      and before.resumed(target)
    ):
      return before
    # The old cache goes first.
    session.drafting = None
    model = self.drafts(target.model)
    made = ModelDrafting(self, model, target, self.cache_kind, self.place)
    session.drafting = made
    return made

  def _check_layers(self, model: Transformer, layers: Sequence[Any]) -> None:
    if self.widths is not None:
      check_layers(model, layers)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DraftModel(ModelDrafter):
  """A model that has the target's vocabulary drafts.

  Attributes:
    model: the draft model, or its Hugging Face folder.
    mesh: of its own devices; None: it is put where the target decodes.
  """

  name: ClassVar[str] = "model"

  model: Transformer | str | os.PathLike[str] = ""
  mesh: Mesh | None = None
  # Of a folder what was loaded, by mesh.
  _loaded: dict[Mesh | None, Transformer] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )

  def check(self, target: Transformer) -> None:
    model = self.drafts(target)
    mine, theirs = model.config.vocab, target.config.vocab
    if mine != theirs:
      raise OptionError(
        "model",
        f"a draft model of {mine:,} ids for a target of {theirs:,}",
        "the same vocabulary",
        "take a draft model of the target's family, or pass "
        "speculate.TranslatedDraft with both tokenizers",
      )
    self._check_layers(model, model.config.layers)

  @property
  def place(self) -> Mesh | None:
    return self.mesh

  def drafts(self, target: Transformer) -> Transformer:
    """The model that drafts for a target.

    Raises:
      OptionError: `model` is neither a model nor a folder.
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EarlyExit(ModelDrafter):
  """The target's first layers draft, with its last norm and head.

  Attributes:
    layers: how many.
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SelfDraft(ModelDrafter):
  """The target itself drafts, with a smaller cache than its own.

  Attributes:
    cache_kind: with a policy of eviction or a codec.
  """

  name: ClassVar[str] = "self"

  cache_kind: CacheKind | str = "snapkv"

  def check(self, target: Transformer) -> None:
    self._check_layers(target, target.config.layers)

  def drafts(self, target: Transformer) -> Transformer:
    return target


def check_layers(model: Transformer, layers: Sequence[Any]) -> None:
  """Refuses recurrent layers, whose states are of one text.

  Raises:
    OptionError: the model has some.
  """
  mixers = [mixer for layer in layers for mixer in layer.mixers]
  if all(isinstance(m.cache_shape(1), LayerCacheSpec) for m in mixers):
    return
  raise OptionError(
    "speculate",
    f"a draft model of family {model.config.family}, with recurrent layers",
    "one whose cache can go back, or a chain in the target's tokens",
    "leave widths out, or take another draft model",
  )
