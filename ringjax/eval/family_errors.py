"""Errors of cache codecs on models of every family, with random weights.

Guarantees: as `cache_kinds`; calibrated codecs are calibrated on other random
tokens than they are tested on.
Cost: that of `compare_caches` for each family, on models of a few layers. The
compiled programs of JAX are dropped after each family.

Random weights attend to all tokens about equally: the figures show that a codec
works in a family, and how families differ, not its cost in a trained model.
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
from ringjax.kv.cache_kind import CacheConfig
from ringjax.kv.codecs import Calibrated
from ringjax.models.checkpoint import create

_TABLES = tomllib.loads(
  pathlib.Path(__file__).with_name("random_families.toml").read_text("utf-8")
)
RANDOM_FAMILIES = tuple(_TABLES["families"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyError:
  """Error of a kind of cache on a model of a family.

  Attributes:
    family: Name of `RANDOM_FAMILIES`.
    name: Name of the kind.
    cost: Cost of the kind; None if the family does not support it.
    refused: Reason why not, or None.
  """

  family: str
  name: str
  cost: KindCost | None = None
  refused: str | None = None

  def record(self) -> dict[str, Any]:
    """Fields as JSON."""
    return dataclasses.asdict(self)


def random_config(family: str) -> dict[str, Any]:
  """Creates a small config.json of a family.

  Args:
    family: Name of `RANDOM_FAMILIES`.

  Raises:
    OptionError: If the name is unknown.
  """
  one_of("family", family, RANDOM_FAMILIES)
  family_table = copy.deepcopy(_TABLES["families"][family])
  without = family_table.pop("without", ())
  config = (
    {"model_type": family} | copy.deepcopy(_TABLES["common"]) | family_table
  )
  return {key: x for key, x in config.items() if key not in without}


def family_errors(
  kinds: Mapping[str, CacheConfig],
  families: Sequence[str] = RANDOM_FAMILIES,
  *,
  length: int = 512,
  seed: int = 0,
  on_kind: Callable[[FamilyError], Any] = lambda found: None,
) -> list[FamilyError]:
  """Measures errors of kinds of caches on a random text, for each family.

  Args:
    kinds: Kinds of caches by name.
    families: Names of `RANDOM_FAMILIES`.
    length: Tokens of the text, and of the text for calibration, 8 or more.
    seed: Random seed of weights and texts.
    on_kind: Function of each result.

  Raises:
    OptionError: If there are no kinds, a family is unknown, or the text is too
      short.
  """
  if not kinds:
    raise OptionError("kinds", "none", "one or more", "name some kinds")
  integer("length", length, least=8)
  results = []
  for family in families:
    model = create(random_config(family), seed=seed)
    rng = np.random.default_rng(seed)
    size = (2, length)
    text, calibration_text = rng.integers(1, model.config.vocab, size).astype(
      np.int32
    )
    # Kinds that have no calibration yet.
    bare = {
      name
      for name, kind in kinds.items()
      if isinstance(kind.codec, Calibrated) and kind.codec.calibration is None
    }
    calibration = calibrate(model, calibration_text[None]) if bare else None
    for name, kind in kinds.items():
      if name in bare:
        kind = kind.with_options({"calibration": calibration})
      try:
        (cost,) = compare_caches(model, text[None], {name: kind})
        result = FamilyError(family=family, name=name, cost=cost)
      except OptionError as error:
        result = FamilyError(family=family, name=name, refused=str(error))
      results.append(result)
      on_kind(result)
    # No other family uses these programs, and a process on Linux that keeps
    # the CPU programs of some fifteen families runs out of memory mappings.
    jax.clear_caches()
  return results
