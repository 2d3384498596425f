"""What codecs of caches do to models of every family, with random weights.

Guarantees: as `cache_kinds`; calibrated codecs are measured on other random
tokens than they are tried on.
Cost: that of `compare_caches` for each family, on models of a few layers. JAX
forgets its compiled programs after each family.

Random weights attend to everything about alike: the figures say that a codec
works in a family, and how families differ, not what it costs a trained model.
"""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ringjax.checks import integer, one_of
from ringjax.errors import OptionError
from ringjax.eval.cache_kinds import KindCost, compare_caches
from ringjax.infer.calibrate import calibrate
from ringjax.kv.cache_kind import CacheKind
from ringjax.kv.codecs import Calibrated
from ringjax.models.checkpoint import create

_TABLES = tomllib.loads(
  pathlib.Path(__file__).with_name("random_families.toml").read_text("utf-8")
)
RANDOM_FAMILIES = tuple(_TABLES["families"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyError:
  """What a kind of cache does to a model of a family.

  Attributes:
    family: a name of `RANDOM_FAMILIES`.
    name: of the kind.
    cost: what it costs; None if the family can't have it.
    refused: why not.
  """

  family: str
  name: str
  cost: KindCost | None = None
  refused: str | None = None

  def record(self) -> dict[str, Any]:
    """The fields as JSON."""
    return dataclasses.asdict(self)


def random_config(family: str) -> dict[str, Any]:
  """A small config.json of a family.

  Args:
    family: a name of `RANDOM_FAMILIES`.

  Raises:
    OptionError: another name.
  """
  one_of("family", family, RANDOM_FAMILIES)
  own = copy.deepcopy(_TABLES["families"][family])
  without = own.pop("without", ())
  found = {"model_type": family} | copy.deepcopy(_TABLES["common"]) | own
  return {key: x for key, x in found.items() if key not in without}


def family_errors(
  kinds: Mapping[str, CacheKind],
  families: Sequence[str] = RANDOM_FAMILIES,
  *,
  length: int = 512,
  seed: int = 0,
  on_kind: Callable[[FamilyError], Any] = lambda found: None,
) -> list[FamilyError]:
  """Errors of kinds of caches on one random text, for each family.

  Args:
    kinds: by the names that they are to have.
    families: names of `RANDOM_FAMILIES`.
    length: tokens of the text, and of the one for calibration.
    seed: of weights and texts.
    on_kind: called with each result.

  Raises:
    OptionError: no kinds, an unknown family, or a text of one token.
  """
  if not kinds:
    raise OptionError("kinds", "none", "one or more", "name some kinds")
  integer("length", length, least=8)
  found = []
  for family in families:
    model = create(random_config(family), seed=seed)
    rng = np.random.default_rng(seed)
    size = (2, length)
    text, other = rng.integers(1, model.config.vocab, size).astype(np.int32)
    # Those that were not measured yet.
    bare = {
      name
      for name, kind in kinds.items()
      if isinstance(kind.codec, Calibrated) and kind.codec.calibration is None
    }
    made = calibrate(model, other[None]) if bare else None
    for name, kind in kinds.items():
      if name in bare:
        kind = kind.with_options({"calibration": made})
      try:
        (cost,) = compare_caches(model, text[None], {name: kind})
        one = FamilyError(family=family, name=name, cost=cost)
      except OptionError as error:
        one = FamilyError(family=family, name=name, refused=str(error))
      found.append(one)
      on_kind(one)
    # No other family uses these programs, and a process on Linux that keeps
    # the CPU's of some fifteen families has no memory mappings left.
    jax.clear_caches()
  return found
