"""Describe a model in a few lines, for `repr` and notebooks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

if TYPE_CHECKING:
  from ringjax.models.transformer import Transformer

# Largest number of different layers that are shown; the others are counted.
_MOST_LAYERS = 10
_MOST_CHARACTERS = 400


def describe(model: Transformer) -> str:
  """Family, size, dtype, mesh and the different layers of a model.

  Args:
    model: A `Transformer`.

  Returns:
    At most twenty lines.
  """
  config = model.config
  arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
  arrays = [x for x in arrays if hasattr(x, "dtype")]
  count = sum(x.size for x in arrays)
  nbytes = sum(x.size * x.dtype.itemsize for x in arrays)
  dtypes = sorted({x.dtype.name for x in arrays})
  head = "tied head" if config.tied else "head of its own"
  lines = [
    f"Transformer({config.family},",
    f"  {count:,} parameters on the devices ({_bytes(nbytes)}, "
    f"{', '.join(dtypes)}),",
    f"  vocabulary {config.vocab:,}, width {config.embed:,}, {head}, "
    f"context {config.longest or 'unknown'},",
  ]
  if (mesh := model.mesh) is not None:
    axes = ", ".join(f"{k}={v}" for k, v in mesh.shape.items())
    lines.append(f"  mesh {axes},")
  kinds: dict[Any, list[int]] = {}
  for number, layer in enumerate(config.layers):
    kinds.setdefault(layer, []).append(number)
  for layer, numbers in itertools.islice(kinds.items(), _MOST_LAYERS):
    text = _text(layer)
    if len(text) > _MOST_CHARACTERS:
      text = text[: _MOST_CHARACTERS - 3] + "..."
    lines.append(f"  {_ranges(numbers)}: {text},")
  if len(kinds) > _MOST_LAYERS:
    lines.append(f"  and {len(kinds) - _MOST_LAYERS} more kinds of layers,")
  return "\n".join(lines) + "\n)"


def _text(value: object) -> str:
  """A dataclass with the fields that differ from their defaults."""
  if not dataclasses.is_dataclass(value) or isinstance(value, type):
    return repr(value)
  fields = [
    f"{field.name}={_text(getattr(value, field.name))}"
    for field in dataclasses.fields(value)
    if field.repr and getattr(value, field.name) != field.default
  ]
  return f"{type(value).__name__}({', '.join(fields)})"


def _ranges(numbers: Sequence[int]) -> str:
  """[0, 1, 2, 5] as "layers 0-2, 5"; many of them as a count."""
  runs = list(_runs(numbers))
  if len(runs) > 6:
    return f"{len(numbers)} layers: {runs[0]}, {runs[1]}, ..., {runs[-1]}"
  return f"layer{'s' * (len(numbers) > 1)} {', '.join(runs)}"


def _runs(numbers: Sequence[int]) -> Iterator[str]:
  for _, group in itertools.groupby(
    enumerate(numbers), lambda pair: pair[1] - pair[0]
  ):
    members = [number for _, number in group]
    first, last = members[0], members[-1]
    yield f"{first}" if first == last else f"{first}-{last}"


def _bytes(count: int) -> str:
  value, unit = float(count), "B"
  for unit in ("B", "kB", "MB", "GB", "TB"):
    if value < 1000 or unit == "TB":
      break
    value /= 1000
  return f"{value:.4g} {unit}"
