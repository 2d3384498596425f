"""Splits a model into parts of consecutive layers, which run in order.

Guarantees: no weight is copied, and a cache is that of the whole model.
Cost: a program for each part.
"""

from __future__ import annotations

import copy
import itertools

from ringjax.checks import integer
from ringjax.errors import OptionError
from ringjax.models.heads.added_layer import refuse_head
from ringjax.models.transformer import Transformer


def layer_parts(model: Transformer, count: int) -> tuple[Transformer, ...]:
  """Parts of a model of about equally many layers, for `forward_layers`.

  The last part is for `forward`, with the output of the others.

  Args:
    model: Model, whose layers the parts share.
    count: Number of parts, at least 1.

  Raises:
    OptionError: If the layers can't be cut into that many parts, or a head
      reads several of them.
  """
  integer("layer_parts", count, least=1)
  if count == 1:
    return (model,)
  refuse_head(model, "run its layers in parts")
  cuts, layers = model.stack.cuts, len(model.config.layers)
  if count > len(cuts) + 1:
    raise OptionError(
      "layer_parts",
      count,
      f"at most {len(cuts) + 1} for this {model.config.family} of {layers} "
      "layers, cut where their pattern repeats and none reads another's keys",
      "pass fewer",
    )
  chosen = [0]
  for n in range(1, count):
    # As many cuts must be left as parts follow.
    reachable = [c for c in cuts if c > chosen[-1]]
    reachable = reachable[: len(reachable) - (count - 1 - n)]
    ideal = n * layers / count
    chosen.append(min(reachable, key=lambda c: abs(c - ideal)))
  parts = []
  for within in itertools.pairwise([*chosen, layers]):
    part = copy.copy(model)
    part.stack = copy.copy(model.stack)
    part.stack.within = within
    parts.append(part)
  return tuple(parts)
