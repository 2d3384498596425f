"""Strategies by name, and the mesh axis of each of their levels.

Guarantees: shards are numbered with the last mesh axis moving fastest, and a
level of a strategy gets the axis, or the part of one axis, inside which it
sends:

  Ring(), Gather(), ...    all shards
  Ulysses(Ring())          neighbours exchange heads, a ring of their groups
  Ring(Ring())             a ring of neighbours for each block of a ring of
                           their groups
  Ring(Gather())           neighbours gather each such block

On one mesh axis `inner` is the number of neighbours in a group. A window cuts
every level to the distances that it needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringjax.errors import OptionError
from ringjax.ops.attention.kernels.auto_kernel import AutoKernel
from ringjax.ops.attention.strategies.registry import STRATEGIES
from ringjax.ops.attention.strategies.strategy import Strategy
from ringjax.ops.attention.strategies.ulysses import Ulysses
from ringjax.ops.attention.strategies.wire_format import WireLike
from ringjax.ops.mask import Mask
from ringjax.parallel import collectives
from ringjax.parallel.call_sharding import MeshAxes
from ringjax.parallel.collectives import Axis, Part
from ringjax.parallel.layout import Layout


def named(name: object) -> Strategy:
  """Find a strategy by name; "hybrid:4" and "two_level:4" have 4 as `inner`.

  Raises:
    OptionError: If no strategy has the name.
  """
  base_name, colon, inner = (name if isinstance(name, str) else "").partition(
    ":"
  )
  entry = STRATEGIES.get(base_name)
  grouped = entry is not None and entry.grouped
  if entry is None or (colon and not (grouped and inner.isdecimal())):
    raise OptionError(
      "strategy",
      repr(name),
      f"'auto', {', '.join(map(repr, STRATEGIES))} or an object like Ring()",
      "leave it out for 'auto'; 'hybrid:4' and 'two_level:4' set inner=4",
    )
  strategy: Any = entry.strategy
  return dataclasses.replace(strategy, inner=int(inner)) if inner else strategy


def built(name: str, options: Mapping[str, Any], *, levels: int) -> Strategy:
  """Build the strategy of a name with the options that `Auto` chose.

  `levels`: mesh axes of the sequence; two of them are the groups.
  """
  strategy = named(name)
  tiles = AutoKernel(options.get("q_block"), options.get("kv_block"))
  strategy = around(strategy, tiles)
  if "wire" in options:
    strategy = coded(strategy, options["wire"])
  if "inner" in options and levels == 1:
    strategy = dataclasses.replace(strategy, inner=options["inner"])
  return strategy


def coded(strategy: Strategy, wire: WireLike) -> Any:
  """Set the wire format of all levels that move keys."""
  if is_strategy(strategy.local):
    local = coded(strategy.local, wire)
    strategy = dataclasses.replace(strategy, local=local)
  if isinstance(strategy, Ulysses):
    return strategy
  with_wire: Any = strategy
  return dataclasses.replace(with_wire, wire=wire)


def around(strategy: Strategy, local: Any) -> Any:
  """Replace the innermost algorithm by `local`."""
  inside = strategy.local
  if is_strategy(inside):
    local = around(inside, local)
  return dataclasses.replace(strategy, local=local)


def on_device(
  strategy: Strategy, platform: str, kind: str, alone: bool = True
) -> Strategy:
  """Specialize the local algorithm to this kind of device."""
  local = innermost(strategy)
  if not hasattr(local, "on_device"):
    return strategy
  return around(strategy, local.on_device(platform, kind, alone))


def is_strategy(x: object) -> bool:
  """Whether `x` is a strategy, not a local algorithm."""
  return isinstance(x, Strategy)


def innermost(strategy: object) -> Any:
  """Return the local algorithm within all levels."""
  if isinstance(strategy, Strategy):
    return innermost(strategy.local)
  return strategy


def check(strategy: Strategy) -> None:
  """Raise OptionError for a strategy around an algorithm it does not fit."""
  local = strategy.local
  if is_strategy(local):
    if type(local).__name__ not in strategy.inside:
      names = strategy.inside or ("Blockwise", "Dense")
      raise OptionError(
        "strategy",
        f"{type(strategy).__name__} around {type(local).__name__}",
        f"{type(strategy).__name__} around {' or '.join(names)}",
        "pass e.g. Ulysses(Ring()) or Ring(Ring())",
      )
    check(local)
  elif isinstance(local, type) or not hasattr(local, "forward"):
    raise OptionError(
      "strategy",
      f"a local algorithm {local!r}",
      "Blockwise() or Dense()",
      "pass e.g. Ring(Blockwise())",
    )


def fitted(
  strategy: Strategy, mask: Mask, layout: Layout, derived: bool
) -> Strategy:
  """Adapt the strategy to a mask.

  `derived`: whether queries and keys are the same tokens, at the same places.

  Raises:
    OptionError: If the strategy does not serve the mask.
  """
  if is_strategy(strategy.local):
    local = fitted(strategy.local, mask, layout, derived)
    return dataclasses.replace(strategy, local=local)
  return strategy.over(mask, layout, derived)


def bind(
  strategy: Strategy,
  axis: str | tuple[str, ...],
  needed: np.ndarray | None,
  kv_heads: int,
) -> Strategy:
  """Bind the strategy to its axes, cut to the `needed` ring distances.

  Raises:
    OptionError: If its levels do not fit the axes.
  """
  return _bind(strategy, _levels(strategy, axis, kv_heads), needed)


def _depth(strategy: Any) -> int:
  return 1 + _depth(strategy.local) if is_strategy(strategy) else 0


def _levels(strategy: Strategy, axis: MeshAxes, kv_heads: int) -> list[Axis]:
  """Choose an axis for each level, the slowest first."""
  depth = _depth(strategy)
  names = collectives.names(axis)
  inner = getattr(strategy, "inner", None)
  if depth == 1 or len(names) == depth:
    size = 1 if depth == 1 else collectives.axis_size(names[-1])
    if inner not in (None, size):
      raise OptionError(
        "inner",
        f"{inner!r} in {strategy!r} over {axis!r}",
        "two levels on one mesh axis, which it cuts",
        "leave it out: a level has all of its mesh axis",
      )
    return [axis] if depth == 1 and axis is not None else list(names)
  if len(names) > 1 or depth > 2:
    raise OptionError(
      "axis",
      f"{axis!r} for the {depth} levels of {strategy!r}",
      "a mesh axis for each level",
      "shard the sequence over as many axes, the slowest first",
    )
  size = collectives.axis_size(names[0])
  inner = group_of(strategy, size, kv_heads)
  return [Part(names[0], size // inner, inner), Part(names[0], inner)]


def group_of(strategy: Strategy, size: int, kv_heads: int) -> int:
  """Size of the groups of a strategy with two levels on `size` shards.

  Without `inner`, for exchanged heads it is the largest group that shares them
  evenly; for a ring of rings the smallest group that is no smaller than the
  number of groups: 2 of 4 shards, 4 of 8.

  Raises:
    OptionError: If there are no such groups, or `inner` does not divide `size`.
  """
  inner = getattr(strategy, "inner", None)
  divisors = [n for n in range(2, size) if size % n == 0]
  if inner is None and size == 1:
    return 1
  if inner is None:
    shares_heads = isinstance(strategy, Ulysses)
    if shares_heads:
      group = max((n for n in divisors if kv_heads % n == 0), default=None)
    else:
      group = min((n for n in divisors if n * n >= size), default=None)
    if group is not None:
      return group
    heads = f" and the {kv_heads} heads of keys" if shares_heads else ""
    raise OptionError(
      "inner",
      f"None for {size} shards{heads}",
      "shards of which groups of two or more, but not all, "
      + ("share the heads evenly" if shares_heads else "can be made"),
      _group_remedy(shares_heads, divisors),
    )
  is_int = isinstance(inner, int) and not isinstance(inner, bool)
  if not is_int or inner < 1 or size % inner:
    sizes = ", ".join(map(str, divisors))
    raise OptionError(
      "inner",
      f"{inner!r} for {size} shards",
      "how many neighbours are a group, a divisor of the shards",
      f"pass one of {sizes}, or leave it out"
      if divisors
      else _group_remedy(False, divisors),
    )
  return inner


def _group_remedy(trades: bool, fit: list[int]) -> str:
  """Remedy of the error that shards have no groups for a strategy."""
  if trades and fit:
    return "pass strategy='two_level' or 'ring', which share no heads"
  return "pass strategy='ring', or shard the sequence over other devices"


def _bind(
  strategy: Any, levels: list[Axis], needed: np.ndarray | None
) -> Strategy:
  if len(levels) == 1:
    return strategy.on(levels[0], needed)
  if isinstance(strategy, Ulysses):
    group = collectives.axis_size(levels[-1])
    inside = _bind(strategy.local, levels[:-1], _group_distances(needed, group))
    return dataclasses.replace(strategy.on(levels[-1], None), local=inside)
  groups = collectives.axis_size(levels[0])
  group = 1 if needed is None else needed.size // groups
  inside = _bind(strategy.local, levels[1:], _distances_in_group(needed, group))
  outer = dataclasses.replace(strategy, local=inside)
  return outer.on(levels[0], _group_distances(needed, group))


def _group_distances(
  needed: np.ndarray | None, group: int
) -> np.ndarray | None:
  """Distances of groups that cover the `needed` distances of shards."""
  if needed is None:
    return None
  groups = needed.size // group
  group_needed = np.zeros(groups, bool)
  for d in np.flatnonzero(needed):
    # A distance of shards spans one of two distances of groups.
    group_needed[[d // group % groups, -(-d // group) % groups]] = True
  return group_needed


def _distances_in_group(
  needed: np.ndarray | None, group: int
) -> np.ndarray | None:
  """Distances within a group that cover the `needed` distances of shards."""
  if needed is None:
    return None
  distances = np.zeros(group, bool)
  distances[np.flatnonzero(needed) % group] = True
  return distances
