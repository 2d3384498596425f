"""Units that get a codec each, and the choice for all under a byte budget."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from ringjax.checks import number
from ringjax.errors import ConfigError, OptionError
from ringjax.kv.codecs import Codec
from ringjax.kv.codecs.codec import VectorCodec
from ringjax.kv.layer_spec import LayerCacheSpec, check_one_set_of_keys
from ringjax.ops.attention.cached.code_format import stored_codes

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Unit:
  """Unit that gets one codec: keys, values or both of heads of a layer."""

  layer: int
  heads: tuple[int, ...]
  parts: tuple[str, ...]


def attention_layers(model: Transformer) -> list[LayerCacheSpec]:
  """Kinds of layers that have keys.

  Raises:
    ConfigError: If the model has no keys and values.
    OptionError: If a layer keeps two sets of keys, or was made sparse.
  """
  specs = [x for x in model.kinds if isinstance(x, LayerCacheSpec)]
  if not specs:
    raise ConfigError(
      "model",
      f"{model.config.family}, without keys and values",
      "attention in some layer",
      "its states need no codec",
    )
  check_one_set_of_keys(specs, "codecs by layer")
  for spec in specs:
    reading = spec.reading
    if reading and reading.most is not None and reading.index is None:
      raise OptionError(
        "model",
        f"layers in which {reading.chooser} chooses keys (sparse_attention), "
        "for codecs by layer",
        "layers that read all keys",
        "leave it out: such a model's caches are dense, bfloat16, int8 or int4",
      )
  return specs


def units_of(shapes: Sequence[LayerCacheSpec], by: str) -> tuple[Unit, ...]:
  """List the units, in order of layers, heads and parts."""
  units = []
  for shape in shapes:
    all_parts = ("keys", "values") if shape.value else ("keys",)
    parts = [(part,) for part in all_parts] if by == "part" else [all_parts]
    heads = [(n,) for n in range(shape.heads)]
    if by == "layer":
      heads = [tuple(range(shape.heads))]
    for layer in shape.which:
      units += [Unit(layer, h, part) for h in heads for part in parts]
  return tuple(sorted(units, key=lambda u: (u.layer, u.heads, u.parts)))


def unit_bytes(
  unit: Unit, codec: Codec, shapes: Sequence[LayerCacheSpec]
) -> int:
  """Bytes of a unit's token, as stored on the default platform."""
  (shape,) = (s for s in shapes if unit.layer in s.which)

  def part_bytes(part: str) -> int:
    vectors: VectorCodec = getattr(codec, part)
    width = vectors.width(shape.key if part == "keys" else shape.value)
    lead, _ = stored_codes((), 1, width, jax.default_backend())
    return int(np.prod(lead)) * len(unit.heads)

  return sum(map(part_bytes, unit.parts))


def budget_bytes(
  bits: int | float | None,
  nbytes: int | float | None,
  shapes: Sequence[LayerCacheSpec],
  sizes: Sequence[Sequence[int]],
  names: Sequence[str],
) -> float:
  """Budget in bytes per token."""
  if (bits is None) == (nbytes is None):
    raise OptionError(
      "bits, bytes_per_token",
      f"{bits!r}, {nbytes!r}",
      "one of them",
      "pass bits=3.2, for instance",
    )
  numbers = sum(shape.numbers() for shape in shapes)
  if nbytes is None:
    budget = number("bits", bits, above=0) * numbers / 8
  else:
    budget = number("bytes_per_token", nbytes, above=0)
  floor = sum(map(min, sizes))
  if budget < floor:
    raise OptionError(
      "bits" if nbytes is None else "bytes_per_token",
      f"{bits if nbytes is None else nbytes}",
      f"at least {8 * floor / numbers:.3f} bits a number, {floor:,} bytes a "
      f"token, which the cheapest of {', '.join(names)} take",
      "allow more bytes, or add a cheaper candidate",
    )
  return budget


def choose(
  sizes: Sequence[Sequence[int]],
  losses: Sequence[Sequence[float]],
  budget: int | float,
) -> list[int]:
  """Choose a candidate for each unit, with the sum of sizes in the budget.

  Args:
    sizes: Bytes, [units][candidates].
    losses: Losses, [units][candidates].
    budget: Maximum sum of sizes, at least the sum of the smallest.

  Returns:
    Index of the candidate of each unit. Steps along the lower convex hulls are
    taken from the steepest on; those that do not fit are skipped. The remaining
    budget goes to single exchanges, also for candidates not on a hull.
  """
  hulls = [_hull(s, x) for s, x in zip(sizes, losses, strict=True)]
  chosen = [0] * len(hulls)
  remaining = budget - sum(
    size[hull[0]] for size, hull in zip(sizes, hulls, strict=True)
  )
  steps = []
  for unit, hull in enumerate(hulls):
    for n, (a, b) in enumerate(itertools.pairwise(hull), 1):
      extra_bytes = sizes[unit][b] - sizes[unit][a]
      saved = losses[unit][a] - losses[unit][b]
      steps.append((-saved / extra_bytes, unit, n, extra_bytes))
  for _, unit, n, extra_bytes in sorted(steps):
    if n == chosen[unit] + 1 and extra_bytes <= remaining:
      chosen[unit], remaining = n, remaining - extra_bytes
  choice = [hull[n] for hull, n in zip(hulls, chosen, strict=True)]
  while True:
    exchanges = [
      ((loss[n] - loss[old]) / max(1, size[n] - size[old]), unit, n)
      for unit, (old, size, loss) in enumerate(
        zip(choice, sizes, losses, strict=True)
      )
      for n in range(len(size))
      if loss[n] < loss[old] and size[n] - size[old] <= remaining
    ]
    if not exchanges:
      return choice
    _, unit, n = min(exchanges)
    remaining -= sizes[unit][n] - sizes[unit][choice[unit]]
    choice[unit] = n


def _hull(sizes: Sequence[int], losses: Sequence[float]) -> list[int]:
  """Candidates on the lower convex hull, by decreasing loss."""
  order = sorted(range(len(sizes)), key=lambda n: (sizes[n], losses[n]))
  hull: list[int] = []
  for n in order:
    if hull and losses[n] >= losses[hull[-1]]:
      continue
    while len(hull) > 1:
      a, b = hull[-2:]
      cross = (losses[a] - losses[b]) * (sizes[n] - sizes[b])
      if cross > (losses[b] - losses[n]) * (sizes[b] - sizes[a]):
        break
      hull.pop()
    hull.append(n)
  return hull
