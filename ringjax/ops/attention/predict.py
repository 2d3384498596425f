"""What a strategy costs, by name, or why it is not for a call.

The model is in `costs`, its terms in `setting`.
"""

from __future__ import annotations

from ringjax.errors import OptionError
from ringjax.ops.attention.call_shape import (
  WIRES,
  CallShape,
  Prediction,
  Refusal,
)
from ringjax.ops.attention.cost_terms import CostTerms, tile_blocks
from ringjax.ops.attention.registry import GROUPED, STRATEGIES, WIRED
from ringjax.parallel.chips import Machine
from ringjax.parallel.layout import Layout

__all__ = [
  "GROUPED",
  "STRATEGIES",
  "WIRED",
  "WIRES",
  "CallShape",
  "Prediction",
  "Refusal",
  "predict",
  "tile_blocks",
]


def predict(
  strategy: str,
  call: CallShape,
  machine: Machine,
  layout: Layout,
  *,
  inner: int | None = None,
  wire: str | None = None,
) -> Prediction | Refusal:
  """What one strategy costs, or why it is not for this call.

  Args:
    strategy: of `STRATEGIES`.
    call: what is to be computed.
    machine: on what.
    layout: how tokens lie on the shards.
    inner: devices of a group, for hybrid and two_level.
    wire: of `WIRES`, or None to send K and V as they are.

  Raises:
    OptionError: there is no such strategy, or it takes no such option.
  """
  found = STRATEGIES.get(strategy)
  if found is None:
    raise OptionError(
      "strategy",
      repr(strategy),
      f"one of {', '.join(STRATEGIES)}",
      "choose one",
    )
  if found.grouped != (inner is not None):
    raise OptionError(
      "inner",
      f"{inner!r} for {strategy}",
      f"an int for {' and '.join(GROUPED)} alone",
      "add it or leave it out",
    )
  if wire is not None and not found.wired:
    raise OptionError(
      "wire",
      f"{wire!r} for {strategy}",
      f"it for {', '.join(WIRED)} alone",
      "leave it out",
    )
  at = CostTerms(call, machine, layout, wire)
  if inner is None:
    return found.cost(at)
  if call.shards % inner or not 1 < inner < call.shards:
    return Refusal(
      strategy=strategy,
      reason=f"groups of {inner} do not divide {call.shards} shards",
      options={"inner": inner},
    )
  return found.cost(at, inner)
