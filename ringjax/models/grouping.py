"""Arrays by a parameter's path, whichever way layers are grouped.

Layers that are one loop share arrays, [repeats, ...]; others have their own.
Files and digests have the arrays of loops, whichever way the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ringjax.nn.stack import Run, runs

STACK = "stack.blocks."


def regrouped(
  arrays: Mapping[str, Any],
  source: Sequence[Run],
  target: Sequence[Run],
  *,
  most: int | None = None,
) -> dict[str, Any]:
  """Arrays of the layers of a stack, by the paths of another grouping.

  Args:
    arrays: Arrays by path; those of layers, "stack.blocks.0.0...", are
      [repeats, ...]. Some layers and parameters may be missing.
    source: Groups of layers of `arrays`.
    target: Groups of the same layers of the result.
    most: Number of repeats of each group of the result; default: all.

  Returns:
    The arrays by path. Parameters that are different in layers of one group,
    such as codes of several types, are listed by layer, in place of stacked.
  """
  if tuple(source) == tuple(target):
    return dict(arrays)
  places = {
    run.number(p, n): (f"{STACK}{g}.{p}.", n)
    for g, run in enumerate(source)
    for p in range(len(run.layers))
    for n in range(run.repeats)
  }
  by_prefix: dict[str, dict[str, Any]] = {}
  for path, x in arrays.items():
    if path.startswith(STACK):
      g, p, name = path.removeprefix(STACK).split(".", 2)
      by_prefix.setdefault(f"{STACK}{g}.{p}.", {})[name] = x
  layer = lambda n: {
    name: x[places[n][1]] for name, x in by_prefix.get(places[n][0], {}).items()
  }
  result: dict[str, Any] = {}
  stacked = False
  for path, x in arrays.items():
    if not path.startswith(STACK):
      result[path] = x
    elif not stacked:
      # In the place of all layers' arrays.
      stacked = True
      result |= _stacked(layer, target, most)
  return result


def _stacked(
  layer: Callable[[int], dict[str, Any]],
  target: Sequence[Run],
  most: int | None,
) -> dict[str, Any]:
  """Arrays of layers, by path; `layer` returns those of a layer's number."""
  result: dict[str, Any] = {}
  for g, run in enumerate(target):
    for p in range(len(run.layers)):
      numbers = [run.number(p, n) for n in range(run.repeats)][:most]
      layers = [layer(n) for n in numbers]
      form = lambda x: {k: (v.shape, v.dtype) for k, v in x.items()}
      if any(form(x) != form(layers[0]) for x in layers):
        result |= {
          f"{STACK}{g}.{p}.{n}.{name}": x
          for n, arrays in enumerate(layers)
          for name, x in arrays.items()
        }
        continue
      for name, x in layers[0].items():
        on_host = isinstance(x, np.ndarray | np.generic)
        stack = np.stack if on_host else jax.numpy.stack
        result[f"{STACK}{g}.{p}.{name}"] = stack([y[name] for y in layers])
  return result


def kind_rows(source: Sequence[Run]) -> tuple[tuple[tuple[int, int], ...], ...]:
  """(kind, index in it) in a looped cache of each layer of a cache's kinds."""

  def kinds(groups: Sequence[Run]) -> list[list[tuple[int, int]]]:
    # A layer with several mixers is in several kinds.
    return [
      [(run.number(p, n), mixer) for n in range(run.repeats)]
      for run in groups
      for p, layer in enumerate(run.layers)
      for mixer in range(len(layer.mixers))
    ]

  places = {
    layer: (kind, index)
    for kind, layers in enumerate(kinds(looped(source)))
    for index, layer in enumerate(layers)
  }
  return tuple(tuple(places[x] for x in layers) for layers in kinds(source))


def looped(source: Sequence[Run]) -> tuple[Run, ...]:
  """Groups of the same layers of which equal ones are loops."""
  layers = {
    run.number(p, n): layer
    for run in source
    for p, layer in enumerate(run.layers)
    for n in range(run.repeats)
  }
  return runs([layers[n] for n in sorted(layers)])
