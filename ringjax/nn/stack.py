"""A stack of layers: equal groups of layers are one loop over their weights.

Guarantees: the stack is its layers, one after another, whatever is grouped.
Cost: the program holds one body for each group, not for each layer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from ringjax.kv.base import CallCache
from ringjax.nn.block import Block, Layer
from ringjax.nn.sharding_context import Attend
from ringjax.nn.tokens import Tokens

# Longer periods than any model's pattern of layers.
_LONGEST = 12


@dataclasses.dataclass(frozen=True)
class Run:
  """`repeats` times the same `layers`, the first of which is number `first`."""

  first: int
  layers: tuple[Layer, ...]
  repeats: int

  def number(self, position: int, repeat: int) -> int:
    """Which layer of the model is at `position` of a repeat."""
    return self.first + repeat * len(self.layers) + position


def runs(layers: Sequence[Layer], *, scan: bool = True) -> tuple[Run, ...]:
  """Cuts layers into runs: at each place the one that covers the most."""
  found, at = [], 0
  while at < len(layers):
    period, repeats = 1, 1
    for p in range(1, _LONGEST + 1 if scan else 0):
      r = 1
      unit = tuple(layers[at : at + p])
      while tuple(layers[at + r * p : at + (r + 1) * p]) == unit:
        r += 1
      if r > 1 and r * p > period * repeats:
        period, repeats = p, r
    found.append(Run(at, tuple(layers[at : at + period]), repeats))
    at += period * repeats
  return tuple(found)


class Stack(nnx.Module):
  """The layers of a model, each run's weights stacked on a leading axis."""

  def __init__(
    self, rngs: nnx.Rngs, layers: Sequence[Layer], embed: int, *, scan: bool
  ):
    self.runs = runs(layers, scan=scan)

    def build(run: Run) -> Any:
      def one(layer: Layer) -> Block:
        keys = jax.random.split(rngs.params(), run.repeats)
        return jax.vmap(lambda key: layer.build(nnx.Rngs(key), embed))(keys)

      return nnx.List([one(layer) for layer in run.layers])

    self.blocks = nnx.List([build(run) for run in self.runs])

  def __call__(
    self,
    x: Float[Array, "B T D"],
    tokens: Tokens,
    cache: CallCache,
    attend: Attend,
  ) -> tuple[jax.Array, Any]:
    """[B, T, D] -> [B, T, D], and the cache with this call's tokens."""
    slots, done = list(cache.slots), []
    number = itertools.count()
    for run, blocks in zip(self.runs, self.blocks, strict=True):
      mine, slots = slots[: len(blocks)], slots[len(blocks) :]
      blocks = tuple(blocks)
      kinds = [next(number) for _ in blocks]

      def body(
        carry: tuple, layer: tuple, kinds: list[int] = kinds
      ) -> tuple[tuple, None]:
        x, slots = carry
        index, blocks = layer
        after = []
        for kind, block, held in zip(kinds, blocks, slots, strict=True):
          layer_cache = cache.layer(kind, held, index)
          x, part = block(x, tokens, layer_cache, attend, cache.states)
          after.append(part.slots)
        return (x, tuple(after)), None

      start = (x, tuple(mine))
      body = attend.keeping(body, looped=run.repeats > 1)
      if run.repeats == 1:
        first = jax.tree.map(lambda a: a[0], blocks)
        (x, after), _ = body(start, (jnp.int32(0), first))
      else:
        numbers = jnp.arange(run.repeats, dtype=jnp.int32)
        (x, after), _ = lax.scan(body, start, (numbers, blocks))
      done.extend(after)
    return x, cache.updated(tuple(done))
